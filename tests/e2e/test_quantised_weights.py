"""Checkpoints with quantised weights serve the tokens of the same quantised model's own ``generate()``."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.exact_pipelines import requests
from support.pipeline_options import pipeline_options
from support.quantised import count_equal, count_needed, find_disagreement, make_oracle, quantised, slow
from support.shared_launcher import sharing
from trinity import Pipeline, Request
from trinity.errors import UnsupportedModel
from trinity.remote.supervision.fork_client import Launcher
from trinity.testing.oracle import Oracle, OracleAnswer

SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": {"image": 16, "kv": 256}, "token_budget": 23}
FAST = ["compressed-int4", "mxfp4"]
SLOW = [
    *("bnb-int8", "bnb-nf4", "bnb-nf4-text", "compressed-int4-text", "compressed-int8", "compressed-fp8"),
    *("torchao-int8", "torchao-int8-rows", "awq", "gptq"),
]


def asked(name: str) -> list[Request]:
    """Of a text model the request without images, twice: a batch."""
    return [requests()[0], requests()[0]] if name == "mxfp4" else requests()


async def serve(name: str, placement: str, **settings: Any) -> list[tuple[int, ...]]:
    """Serve all requests at once, in chunks of at most 23 tokens beside decodes."""
    options = pipeline_options({**SETTINGS, **settings})
    model = await asyncio.to_thread(quantised, name)
    async with Pipeline(model, placement, **options) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(request) for request in asked(name)))
    return [tuple(output.token_ids) for output in outputs]


@pytest.fixture(scope="module", params=[*FAST, *slow(*SLOW)])
def answered(request: pytest.FixtureRequest) -> tuple[str, list[OracleAnswer]]:
    oracle = make_oracle(request.param)
    return request.param, [oracle.answer(each) for each in asked(request.param)]


def check(name: str, found: list[tuple[int, ...]], answers: list[OracleAnswer]) -> None:
    disagreements = [find_disagreement(name, *each) for each in zip(found, answers, strict=True)]
    assert disagreements == [None] * len(answers)
    assert count_equal(answers, found) >= count_needed(name, len(answers))


@pytest.mark.parametrize("disaggregated", [False, True])
async def test_tokens_are_those_of_the_same_quantised_model(
    disaggregated: bool, answered: tuple[str, list[OracleAnswer]]
) -> None:
    name, answers = answered
    whole, parts = ("PD", "1P1D") if name == "mxfp4" else ("EPD", "1E1P1D")
    check(name, await serve(name, parts if disaggregated else whole), answers)


async def test_processes_load_them_too(answered: tuple[str, list[OracleAnswer]], torch_launcher: Launcher) -> None:
    name, answers = answered
    if name in ("compressed-int4", "bnb-nf4", "torchao-int8", "awq", "gptq"):
        with sharing(torch_launcher):
            check(name, await serve(name, "1E1P1D", hosting="process", connector="shm"), answers)


def test_rounding_the_weights_changes_tokens(answered: tuple[str, list[OracleAnswer]]) -> None:
    """Else the tests above would show nothing: the same model before it was quantised says something else."""
    name, answers = answered
    if name != "mxfp4":  # whose experts are random, and were never anything else
        exact = [tuple(each) for each in Oracle(checkpoint("quantised-plain")).generate_all(asked(name))]
        assert count_equal(answers, exact) < count_needed(name, len(answers))


@pytest.mark.parametrize("name", ["compressed-mixed-rows", pytest.param("bnb-int8-outliers", marks=pytest.mark.slow)])
async def test_rows_that_change_each_other_are_refused(name: str) -> None:
    """A scale that a step's rows share, and LLM.int8's columns of outliers: what else runs would change tokens."""
    with pytest.raises(UnsupportedModel, match="tokens would depend on what else runs"):
        await serve(name, "EPD")
