"""Hybrids beside a plain Pipeline: composed by hand, and with an SLO, for which their steps are profiled."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

import trinity
from support.hybrid_models import build_hybrid, generated, hybrid_requests
from support.pipeline_options import pipeline_options
from trinity.core.messages import Work
from trinity.errors import ConfigError
from trinity.preprocess.processor import RequestProcessor
from trinity.runtime.compose import LoadedStage

SIZES = trinity.CacheConfig(pools={"kv": 64, "state": 3}, kv_block_size=4)
OUTPUTS = 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_hybrid(tmp_path_factory.mktemp("hybrid") / "lfm2", "lfm2")


def work_of(folder: Path) -> Work:
    processor = RequestProcessor(folder)
    try:
        return processor.process(hybrid_requests(OUTPUTS)[1]).work
    finally:
        processor.close()


async def load(folder: Path, roles: str) -> LoadedStage:
    return await trinity.load_stage(folder, roles, dtype="float32", cache=SIZES)


async def compose(folder: Path, work: Work, moves: bool = True) -> tuple[int, ...]:
    """Prefill on one stage, decode on another; ``moves``: the states too."""
    connector = trinity.Connector()
    async with await load(folder, "P") as prefill, await load(folder, "D") as decode:
        kv, held = prefill.allocate("kv", len(work.prompt)), prefill.allocate("state", 1)
        await prefill.open(work, kv, state=held)
        assert await prefill.prefill(work, 0, 5) is None
        tokens = [await prefill.prefill(work, 5)]
        table, place = decode.allocate("kv", len(work.prompt) + work.max_tokens), decode.allocate("state", 1)
        await connector.move(prefill.pools["kv"], kv, decode.pools["kv"], table[: len(kv)], rows=len(work.prompt))
        if moves:
            await connector.move(prefill.pools["state"], held, decode.pools["state"], place)
        await decode.open(work, table, tokens=[tokens[0] or 0], state=place)
        while len(tokens) < work.max_tokens:
            tokens += await decode.decode(work.request)
    await connector.aclose()
    return tuple(token for token in tokens if token is not None)


async def test_stages_composed_by_hand_move_states(folder: Path) -> None:
    work, wanted = await asyncio.to_thread(work_of, folder), await asyncio.to_thread(generated, folder, OUTPUTS)
    assert await compose(folder, work) == wanted[1]
    assert await compose(folder, work, moves=False) != wanted[1], "the states were not needed"


async def test_what_is_wrong_with_blocks_of_states_is_said(folder: Path) -> None:
    work = await asyncio.to_thread(work_of, folder)
    async with await load(folder, "P") as stage:
        blocks, held = stage.allocate("kv", len(work.prompt)), stage.allocate("state", 2)
        for given, said in (
            ((), "allocate"),
            (held, "has 2 blocks"),
            ((2,), "allocate them first"),
            ((9,), "pool of 3"),
        ):
            with pytest.raises(ConfigError, match=said):
                await stage.open(work, blocks, state=given)
        await stage.open(work, blocks, state=held[:1])
        with pytest.raises(ConfigError, match="which is open"):
            stage.free("state", held[:1])
        await stage.prefill(work, 0, 5)
        with pytest.raises(ConfigError, match="states of request"):
            await stage.prefill(work, 3)
        assert await stage.prefill(work, 0) == generated(folder, OUTPUTS)[1][0], "from 0 it begins anew"
        with pytest.raises(ConfigError, match="2 state blocks, and 1 of 3 are free"):
            stage.allocate("state", 2)


async def test_a_model_without_states_takes_none_by_hand() -> None:
    from support.checkpoint_files import checkpoint

    llama = checkpoint("llama")
    processor = await asyncio.to_thread(RequestProcessor, llama)
    work = (await processor.aprocess(hybrid_requests(2)[1])).work
    await processor.aclose()
    async with await trinity.load_stage(llama, "P", dtype="float32", cache=SIZES) as stage:
        with pytest.raises(ConfigError, match="keeps no states"):
            await stage.open(work, stage.allocate("kv", len(work.prompt)), state=(0,))


@pytest.mark.parametrize("placement", ["PD", pytest.param("1P1D", marks=pytest.mark.slow)])
def test_a_pipeline_with_an_slo_profiles_a_hybrid_and_serves(placement: str, folder: Path) -> None:
    async def main() -> list[Any]:
        options = {"dtype": "float32", "pools": {"kv": 64, "state": 3}, "slo": trinity.SLO(60, 60)}
        async with trinity.Pipeline(folder, placement, **pipeline_options(options)) as pipe:
            return await asyncio.gather(*(pipe.complete(request) for request in hybrid_requests(OUTPUTS)))

    outputs = asyncio.run(main())
    assert [tuple(output.token_ids) for output in outputs] == generated(folder, OUTPUTS)
