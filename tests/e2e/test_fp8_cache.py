"""A KV cache in FP8: the tokens of transformers' own model over a cache that rounds, and what it refuses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.kernels.fp8_cache import RoundingCache
from support.checkpoint_files import checkpoint
from support.exact_pipelines import requests
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from trinity import CacheConfig, Instance, Pipeline
from trinity.core.messages import KV
from trinity.errors import ConfigError
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Request
from trinity.testing.oracle import Oracle

BLOCKS = {"image": 16, "kv": 256}


class RoundingOracle(Oracle):
    """``generate()`` over a ``RoundingCache``: its whole prompt attends to rounded values too."""

    def inputs(self, request: Request) -> Any:
        return super().inputs(request) | {"past_key_values": RoundingCache()}


async def serve(name: str, placement: str, **settings: Any) -> list[tuple[int, ...]]:
    options = pipeline_options({"dtype": "float32", "pools": BLOCKS, "kv_dtype": "fp8_e4m3", **settings})
    async with Pipeline(checkpoint(name), placement, **options) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(request) for request in requests()))
    return [tuple(output.token_ids) for output in outputs]


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def named(request: pytest.FixtureRequest) -> tuple[str, list[tuple[int, ...]]]:
    return request.param, [tuple(each) for each in RoundingOracle(checkpoint(request.param)).generate_all(requests())]


@pytest.mark.parametrize("placement", ["EPD", "EP+D", "1E1P1D"])
async def test_tokens_are_those_of_the_model_over_rounded_keys_and_values(
    placement: str, named: tuple[str, list[tuple[int, ...]]]
) -> None:
    name, wanted = named
    assert await serve(name, placement) == wanted


async def test_chunks_of_a_prompt_change_no_token(named: tuple[str, list[tuple[int, ...]]]) -> None:
    name, wanted = named
    assert await serve(name, "EPD", token_budget=7) == wanted, "a first chunk attends to what later ones will read"


async def test_blocks_move_between_processes(
    named: tuple[str, list[tuple[int, ...]]], torch_launcher: Launcher
) -> None:
    name, wanted = named
    with sharing(torch_launcher):
        assert await serve(name, "1E1P1D", hosting="process", connector="shm") == wanted


def test_the_rounding_can_change_tokens() -> None:
    """Else the tests above would show nothing."""
    exact = Oracle(checkpoint("llava")).generate_all(requests())
    assert RoundingOracle(checkpoint("llava")).generate_all(requests()) != exact


async def test_a_block_has_a_quarter_of_the_bytes() -> None:
    sizes = {}
    for kv_dtype in ("auto", "fp8_e4m3"):
        options = pipeline_options({"dtype": "float32", "pools": BLOCKS, "kv_dtype": kv_dtype})
        async with Pipeline(checkpoint("llava"), **options) as pipe:
            memory = next(iter(pipe.hosts.values())).loaded.memory
            sizes[kv_dtype] = {kind: each.block_bytes for kind, each in memory.items()}
    assert sizes["fp8_e4m3"][KV] * 4 == sizes["auto"][KV]
    assert sizes["fp8_e4m3"]["image"] == sizes["auto"]["image"], "features stay as they are"


async def test_a_backend_that_cannot_read_it_is_refused_by_name() -> None:
    options = pipeline_options({"pools": BLOCKS, "kv_dtype": "fp8_e4m3"})
    with pytest.raises(ConfigError, match=r"attention='native' cannot run here: .*float8_e4m3fn"):
        async with Pipeline(checkpoint("llava"), [Instance("EPD", attention="native")], **options):
            pass


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="kv_dtype"):
        CacheConfig(kv_dtype="int4")  # type: ignore[arg-type]
