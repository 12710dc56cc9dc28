"""Checkpoints with FP8 weights serve the tokens of transformers' own model of the same files."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.exact_pipelines import requests
from support.fp8_oracle import WidenedOracle
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from trinity import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.testing.oracle import Oracle

SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": {"image": 16, "kv": 256}}


async def serve(name: str, placement: str, **settings: Any) -> list[tuple[int, ...]]:
    options = pipeline_options({**SETTINGS, **settings})
    async with Pipeline(checkpoint(name), placement, **options) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(request) for request in requests()))
    return [tuple(output.token_ids) for output in outputs]


@pytest.fixture(scope="module", params=["llava", "qwen2_vl"])
def named(request: pytest.FixtureRequest) -> tuple[str, list[tuple[int, ...]]]:
    name = f"fp8-{request.param}"
    return name, [tuple(each) for each in WidenedOracle(checkpoint(name)).generate_all(requests())]


@pytest.mark.parametrize("placement", ["EPD", "1E1P1D"])
async def test_tokens_are_those_of_transformers_own_model(
    placement: str, named: tuple[str, list[tuple[int, ...]]]
) -> None:
    name, wanted = named
    assert await serve(name, placement) == wanted


async def test_processes_load_them_too(named: tuple[str, list[tuple[int, ...]]], torch_launcher: Launcher) -> None:
    name, wanted = named
    if name == "fp8-llava":
        with sharing(torch_launcher):
            assert await serve(name, "1E1P1D", hosting="process", connector="shm") == wanted


def test_rounding_the_weights_changes_tokens(named: tuple[str, list[tuple[int, ...]]]) -> None:
    """Else the tests above would show nothing."""
    name, wanted = named
    exact = Oracle(checkpoint(name.removeprefix("fp8-"))).generate_all(requests())
    assert [tuple(each) for each in exact] != wanted
