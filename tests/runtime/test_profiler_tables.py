"""Tables of costs measured on real models: every stage, batch and context; on pipelines that serve before and after."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.pipeline_driver import all_tokens, good_ones, serving
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from trinity.core.messages import KV, Open, Sampled, Step
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.step_cost import CostTables
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import ClosedError, ConfigError
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.preprocess.processor import RequestProcessor
from trinity.remote.supervision.fork_client import Launcher
from trinity.runtime.host import LoadedInstance
from trinity.runtime.loader import ServingConfig, load_instances
from trinity.runtime.profiler import CombinedProbe, Probe, profile_tables
from trinity.stages.language import LanguageStage

FEW: dict[str, Any] = {"contexts": (1, 32), "rows": (1, 4), "tokens": (1, 16), "images": (1, 2), "repeats": 1}


@pytest.fixture(scope="module")
def processor() -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint("llava"))
    yield made
    made.close()


def loaded(processor: RequestProcessor, *roles: str) -> list[LoadedInstance]:
    deployment = ServingConfig(
        checkpoint("llava"),
        dtype="float32",
        cache=CacheConfig(image_block_size=64, pools={"image": 8, "kv": 16}),
    )
    return load_instances(deployment, name_instances([Instance(each) for each in roles]), processor)


def check(tables: CostTables, letters: str) -> None:
    for letter, counts in (("D", (3, 0, 0)), ("P", (0, 9, 0)), ("E", (0, 0, 5))):
        assert (tables.seconds(*counts) > 0) == (letter in letters), letter
    assert tables.dtype == "torch.float32"
    assert tables.device.startswith("cpu ")
    assert tables.model


@pytest.mark.parametrize("roles", [("E",), ("P",), ("D",), ("EPD",), ("E", "P", "D"), ("EP", "D"), ("PD", "ED")])
def test_every_stage_of_the_instances_is_measured(roles: tuple[str, ...], processor: RequestProcessor) -> None:
    tables = profile_tables(loaded(processor, *roles), processor, **FEW)
    check(tables, "".join(roles))
    language = set("".join(roles)) & {"P", "D"}
    assert [context for context, _ in tables.costs] == ([1, 32] if language else [1])


def test_what_no_pool_has_room_for_is_not_tried(processor: RequestProcessor) -> None:
    found = profile_tables(loaded(processor, "EPD"), processor, **{**FEW, "contexts": (1, 4096), "tokens": (8, 4096)})
    assert [context for context, _ in found.costs] == [1, 16 * 16 - 2]
    assert [count for count, _ in found.costs[0][1].prefill] == [8]


def test_each_stage_runs_on_the_first_instance_that_has_it(processor: RequestProcessor) -> None:
    first, second, third = (Probe(each, processor) for each in loaded(processor, "EP", "PD", "D"))
    together = CombinedProbe([first, second, third])
    assert together.letters == "EPD"
    assert together._having == {"E": first, "P": first, "D": second}
    assert together.longest == min(first.longest, second.longest)
    assert together.most_images() == first.most_images()


def test_rows_have_blocks_of_their_own_while_there_are_some(
    processor: RequestProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Open] = []
    forward = LanguageStage.forward

    def seen(stage: LanguageStage, step: Step) -> dict[str, Sampled]:
        opened.extend(stage._requests.find(name).opening for name in step.decodes)
        return forward(stage, step)

    monkeypatch.setattr(LanguageStage, "forward", seen)
    (instance,) = loaded(processor, "D")
    Probe(instance, processor).decode(6, 60)
    assert [each.blocks for each in opened[:5]] == [
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
        (12, 13, 14, 15),
        (0, 1, 2, 3),
    ]
    assert instance.memory[KV].blocks == 16


# ---------------------------------------------------------------- pipelines


@pytest.fixture(scope="module")
def known() -> None:
    all_tokens()


@pytest.mark.parametrize("placement", ["EPD", "1E1P1D"])
@pytest.mark.usefixtures("known")
async def test_a_pipeline_is_profiled_between_requests_and_its_caches_stay(placement: str, tmp_path: Path) -> None:
    path = tmp_path / "tables.json"
    async with serving(placement, pools={"image": 16, "kv": 64}) as pipe:
        assert pipe.cost is None
        await good_ones(pipe)
        tables = await pipe.profile(path, **FEW)
        check(tables, "EPD")
        assert pipe.cost is tables
        await good_ones(pipe, 2)
        assert pipe.metrics.summary()["prefix_hits"] > 0
    assert CostTables.load(path, model=tables.model, device=tables.device) == tables


async def test_a_pipeline_of_processes_is_profiled_in_this_one(torch_launcher: Launcher) -> None:
    options: dict[str, Any] = {"hosting": "process", "dtype": "float32", "pools": {"image": 8, "kv": 32}}
    options["image_block_size"] = 64
    with sharing(torch_launcher):
        async with Pipeline(checkpoint("llava"), "EP+D", **pipeline_options(options)) as pipe:
            check(await pipe.profile(**FEW), "EPD")
    with pytest.raises(ClosedError):
        await pipe.profile(**FEW)


async def test_what_cannot_be_measured_is_said() -> None:
    emulated = Pipeline(
        EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(), scale=2048),
        "EPD",
        cache=CacheConfig(pools={"image": 2, "kv": 64}),
    )
    assert emulated.cost == LinearCost()
    with pytest.raises(ClosedError):
        await emulated.profile()
    async with emulated:
        with pytest.raises(ConfigError, match="nothing to profile"):
            await emulated.profile()
    async with serving("EPD") as pipe:
        object.__setattr__(pipe.instances[0], "address", "tcp:elsewhere:1")
        with pytest.raises(ConfigError, match="run elsewhere"):
            await pipe.profile(**FEW)
        object.__setattr__(pipe.instances[0], "address", None)
        with pytest.raises(ConfigError, match="at least 1 token"):
            await pipe.profile(contexts=())
