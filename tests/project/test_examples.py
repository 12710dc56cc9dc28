"""The examples do what they say: an own encode stage, an own transport; both short."""

from __future__ import annotations

import asyncio
import runpy
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

from examples import custom_stage, custom_transport
from examples.custom_stage import Mosaic, MosaicStage, ask
from examples.custom_transport import TcpTransport
from support.checkpoint_files import checkpoint
from support.pipeline_driver import ONE, PLACES, TWO, Case, all_tokens, good_ones, oracle, serving
from trinity import plugins
from trinity.connector import Connector
from trinity.errors import MigrationError, PeerLost
from trinity.instance import Instance
from trinity.testing.transport_contract import check_transport

EXAMPLES = Path(custom_stage.__file__).parent


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


@pytest.mark.parametrize("name", ["custom_stage.py", "custom_transport.py"])
def test_short(name: str) -> None:
    lines = (EXAMPLES / name).read_text(encoding="utf-8").splitlines()
    assert sum(1 for line in lines if line.strip()) < 80


# ---------------------------------------------------------------- an own stage


async def test_an_own_encode_stage_takes_the_built_in_ones_place() -> None:
    built_in, own, again = [await ask(checkpoint("llava"), *stages) for stages in ((), (MosaicStage,), (MosaicStage,))]
    assert own.token_ids == again.token_ids != built_in.token_ids
    assert own.route == ["E0", "P0", "D0"]
    assert [record["outcome"] for record in own.transfers] == ["pulled", "pulled"]


def test_without_it_the_tokens_are_the_models_own() -> None:
    output = asyncio.run(ask(checkpoint("llava")))
    assert output.token_ids == oracle().generate(custom_stage.question())


@pytest.mark.parametrize("placement", [["E", "P", "D"], ["EPD"], ["ED", "P"]])
async def test_its_tokens_are_the_same_wherever_it_runs(placement: list[str]) -> None:
    """Batched, migrated or not: each image's features are those of Mosaic, and text needs none of them."""
    instances = [Instance(roles, stages=[MosaicStage] if "E" in roles else []) for roles in placement]
    async with serving(instances) as pipe:
        outputs = [await pipe.complete(case.request()) for case in (ONE, TWO)]
    async with serving([Instance("E", stages=[MosaicStage]), Instance("PD")]) as pipe:
        for case, output in zip((ONE, TWO), outputs, strict=True):
            assert (await pipe.complete(case.request())).token_ids == output.token_ids != case.tokens


def test_mosaic_sees_colours_where_they_are() -> None:
    pixels = torch.zeros(3, 4, 4)
    pixels[:, :2] = 1.0
    features = Mosaic(8)(pixels, 2)
    assert features.shape == (2, 8)
    assert not torch.equal(features[0], features[1])


# ---------------------------------------------------------------- an own transport


async def test_it_keeps_the_contract() -> None:
    await check_transport(TcpTransport, timeout_s=60)
    await check_transport(TcpTransport, rows=1024, timeout_s=60)


@pytest.mark.parametrize("placement", PLACES[1:])
async def test_tokens_over_it_are_exact(placement: str) -> None:
    async with serving(placement, connector=TcpTransport()) as pipe:
        await good_ones(pipe, rounds=2)
        output = await pipe.complete(ONE.request())
        assert {record["scheme"] for record in output.transfers if record["outcome"] == "pulled"} <= {"tcp"}
        assert pipe.metrics.summary()["migrations"]


async def test_it_is_found_by_the_name_that_a_package_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("tcp", "examples.custom_transport:TcpTransport", "trinity.transports")
    monkeypatch.setattr(plugins, "entry_points", lambda **wanted: [entry] if wanted.get("name") == "tcp" else [])
    async with serving("E+PD", connector="tcp") as pipe:
        assert isinstance(pipe.connector.routes["kv"].transport, TcpTransport)
        await good_ones(pipe)


async def test_a_peer_that_is_gone_fails_the_request_by_name() -> None:
    transport = TcpTransport()
    async with serving("EP+D", connector=Connector(transport)) as pipe:
        await good_ones(pipe)
        await transport.aclose()
        with pytest.raises(MigrationError) as caught:
            await pipe.complete(Case("Something new", max_tokens=40).request())
        assert type(caught.value.__cause__) is PeerLost


@pytest.mark.parametrize("given", [[], ["one", "two"]])
def test_without_a_checkpoint_it_says_how_it_is_used(given: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["custom_transport.py", *given])
    with pytest.raises(SystemExit, match=r"usage: python examples/custom_transport\.py DIR"):
        runpy.run_path(custom_transport.__file__, run_name="__main__")


async def test_it_runs_as_a_program_would(capsys: pytest.CaptureFixture[str]) -> None:
    await custom_transport.main(str(checkpoint("llama")))
    assert "'scheme': 'tcp'" in capsys.readouterr().out
