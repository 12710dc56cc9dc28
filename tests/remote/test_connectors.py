"""Connectors and a package's own stages and transports, between processes: what a user sets is what each of them has.

The package is installed as any other: a module and its entry points in a folder of PYTHONPATH.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from examples.custom_stage import MosaicStage
from support import paths
from support.checkpoint_files import checkpoint
from support.lender import ready
from support.pipeline_driver import ONE, TEXT, all_tokens, good_ones, serving
from trinity.connector import Connector
from trinity.errors import ConfigError, IntegrityError, MigrationError, TransferTimeout, UnknownName
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import kept_launcher
from trinity.request import Output
from trinity.transport.shm import ShmTransport

MODULE = """
from support.wrapped_transports import WrappedTransport
from trinity.transport.shm import ShmTransport

def tagged(tag="none", delay_s=0.0):
    made = WrappedTransport(ShmTransport(), delay_s=delay_s)
    made.scheme = f"tagged {tag}"
    return made
"""
ENTRIES = """
[trinity.transports]
tagged = yours:tagged
forged = support.forgery:forging_network

[trinity.stages]
mosaic = examples.custom_stage:MosaicStage
"""
MOSAIC = (Instance("E", stages=["mosaic"]), Instance("P"), Instance("D"))


@pytest.fixture(scope="module", autouse=True)
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    all_tokens()
    folder = tmp_path_factory.mktemp("installed")
    (folder / "yours.py").write_text(MODULE)
    about = folder / "yours-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: yours\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRIES)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{paths.ROOT}:{paths.PYTHON_PATH}")
        with kept_launcher():
            yield
    sys.modules.pop("yours", None)


async def served(connector: Any, placement: Any = "E+P+D", **settings: Any) -> list[dict[str, Any]]:
    """Serve exactly with this connector; the records of all that moved."""
    async with serving(placement, connector=connector, prefix_cache=False, image_cache=False, **settings) as pipe:
        await good_ones(pipe)
        output = await pipe.complete(ONE.request())
    assert output.token_ids == ONE.tokens
    return output.transfers


def schemes(records: list[dict[str, Any]]) -> dict[str, str]:
    return {record["kind"]: record["scheme"] for record in records}


# ---------------------------------------------------------------- connectors


@pytest.mark.parametrize("hosting", ["process", "thread"])
async def test_one_connector_for_each_kind_of_block(hosting: str) -> None:
    ready("nixl")
    records = await served({"image": "shm", "kv": "nixl"}, hosting=hosting)
    assert schemes(records) == {"image": "shm", "kv": "nixl"}
    assert {record["kind"] for record in records if "digest_s" in record} == {"kv"}, "each is verified by its own rule"


@pytest.mark.parametrize("hosting", ["process", "thread"])
@pytest.mark.parametrize("connector", ["shm", "object"])
async def test_shm_works_wherever_the_instances_are(hosting: str, connector: str) -> None:
    chosen = Connector("shm", verify="always") if connector == "object" else "shm"
    records = await served(chosen, hosting=hosting)
    assert schemes(records) == {"image": "shm", "kv": "shm"}
    assert all(("digest_s" in record) == (connector == "object") for record in records)


async def test_a_transport_object_of_ones_own_works_in_threads() -> None:
    assert schemes(await served(ShmTransport())) == {"image": "shm", "kv": "shm"}


async def test_options_of_a_registered_transport_travel() -> None:
    kinds = {"image": Connector("tagged", options={"tag": "seven"}), "kv": "tagged"}
    assert schemes(await served(kinds, hosting="process")) == {"image": "tagged seven", "kv": "tagged none"}


async def test_blocks_of_both_kinds_are_compared_under_the_pipelines_key() -> None:
    ready("nixl")
    records = await served(Connector("nixl", verify="always"), hosting="process")
    assert schemes(records) == {"image": "nixl", "kv": "nixl"}
    assert all(record["digest_s"] > 0 for record in records)


async def test_forged_blocks_are_served_to_nobody() -> None:
    """On a network somebody rewrites KV blocks so that their plain digests stay: instances of a pipeline have a key."""
    kinds = {"image": "shm", "kv": "forged"}
    async with serving("EP+D", connector=kinds, hosting="process") as pipe:
        with pytest.raises(MigrationError, match="kv blocks are not what EP0 sent") as caught:
            await pipe.complete(TEXT.request())
        assert isinstance(caught.value.__cause__, IntegrityError)


async def test_the_timeout_travels() -> None:
    connector = Connector("tagged", timeout_s=0.2, options={"delay_s": 60.0})
    async with serving("EP+D", connector=connector, hosting="process") as pipe:
        with pytest.raises(MigrationError) as caught:
            await pipe.complete(TEXT.request())
        assert isinstance(caught.value.__cause__, TransferTimeout)


@pytest.mark.parametrize(
    ("connector", "said"),
    [
        (Connector("inproc"), "use connector='shm'"),
        ({"image": "shm", "kv": "inproc"}, "use connector='shm'"),
        (Connector(ShmTransport()), "by name"),
        (ShmTransport(), "by name"),
    ],
    ids=["inproc", "inproc for one kind", "a connector's own transport", "a transport"],
)
def test_what_cannot_travel_says_what_to_give_instead(connector: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Pipeline(checkpoint("llava"), "EP+D", hosting="process", connector=connector)


WRONG: dict[str, tuple[Any, dict[str, Any]]] = {
    "a number": (42, {}),
    "a class": (ShmTransport, {}),
    "nothing": ("", {}),
    "no kind": ({}, {}),
    "one kind": ({"image": "shm"}, {}),
    "an unknown kind": ({"image": "shm", "kv": "shm", "audio": "shm"}, {}),
    "a kind of a wrong type": ({"image": 3, "kv": "shm"}, {}),
    "a kind without a name": ({"image": "pigeon", "kv": "shm"}, {}),
    "no time": ("shm", {"timeout_s": 0}),
    "no number": ("shm", {"timeout_s": "soon"}),
    "endless": ("shm", {"timeout_s": float("inf")}),
    "unknown verify": ("shm", {"verify": "sometimes"}),
    "unknown options": ("shm", {"options": {"speed": 9}}),
    "options that are none": ("shm", {"options": 9}),
    "options that cannot travel": ("nixl", {"options": {"timeout_s": object()}}),
    "options of an object": (ShmTransport(), {"options": {"speed": 9}}),
    "options of kinds": ({"image": "shm", "kv": "shm"}, {"options": {"speed": 9}}),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_connector_of_a_wrong_type_or_value_is_refused_by_name(wrong: str) -> None:
    transport, settings = WRONG[wrong]
    with pytest.raises(ConfigError):
        Connector(transport, **settings)


@pytest.mark.parametrize("hosting", ["thread", "process"])
@pytest.mark.parametrize(
    "wrong", [42, "", ShmTransport, {}, {"kv": "shm"}, ["shm"], {"image": 1, "kv": "shm"}], ids=str
)
def test_a_pipeline_says_so_too(wrong: Any, hosting: Any) -> None:
    with pytest.raises(ConfigError):
        Pipeline(checkpoint("llava"), "EP+D", hosting=hosting, connector=wrong)


# ---------------------------------------------------------------- stages


async def answered(**settings: Any) -> Output:
    async with serving(**settings) as pipe:
        return await pipe.complete(ONE.request())


async def test_a_stage_by_its_entry_points_name_serves_in_processes() -> None:
    """The tokens are those of the same stage in this process, which are not those of the built-in one."""
    here = [Instance("E", stages=[MosaicStage]), Instance("P"), Instance("D")]
    wanted = await answered(placement=here)
    found = await answered(placement=MOSAIC, hosting="process")
    assert found.token_ids == wanted.token_ids != ONE.tokens
    assert found.route == ["E0", "P0", "D0"]


async def test_stages_that_processes_cannot_have_are_refused() -> None:
    for stage, error, said in (
        (MosaicStage, ConfigError, "entry point trinity.stages"),
        ("no-such-stage", ConfigError, "mosaic"),
    ):
        with pytest.raises(error, match=said):
            await answered(placement=[Instance("E", stages=[stage]), Instance("PD")], hosting="process")
    with pytest.raises(UnknownName, match="mosaic"):
        await answered(placement=[Instance("E", stages=["no-such-stage"]), Instance("PD")])
