"""Preempted and computed again: the tokens and logits of the model's own generate(), whatever the method."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.recordings import METHODS, copy_of, problems, serve
from support.request_cases import BUDGET, TEXT, Waves, answers, ask, red, waves
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline

pytestmark = pytest.mark.xdist_group("llava")

TIGHT = {"image": 9, "kv": 56}  # of 7 and 4 rows: three images, and the longest request with a few rows beside it
COMMON: dict[str, Any] = {
    "rules": BatchRules(token_budget=BUDGET),
    "pools": TIGHT,
    "image_block_size": 7,
    "kv_block_size": 4,
}
OFF = {"prefix_cache": False, "image_cache": False}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{method: (method, {}) for method in METHODS},
    "PD+E": ("PD+E", {}),
    "depth": ("EPD", {"depth": 2}),
    "lanes": ("EPD", {"lanes": ("vision", "language")}),
    "uncached": ("EPD", OFF),
    "uncached-E+P+D": ("E+P+D", OFF),
}


def copies(count: int) -> Waves:
    """The cases of the matrix, each asked so often at once."""
    return tuple(tuple(copy_of(one, n) for n in range(count) for one in wave) for wave in waves("llava"))


FAST = ("EPD", "ED+P", "E+P+D", "depth")


@pytest.mark.parametrize(
    "name", [each if each in FAST else pytest.param(each, marks=pytest.mark.slow) for each in CASES]
)
def test_what_is_preempted_goes_on_as_if_nothing_had_been(name: str) -> None:
    placement, options = CASES[name]
    found = serve(checkpoint("llava"), placement, copies(2), reservation="optimistic", **COMMON, **options)
    assert problems(found, answers("llava")) == {}
    assert len(found.outputs) == 2 * sum(map(len, waves("llava")))
    assert [each for each in found.outputs.values() if each.preemptions], "the pool was large enough for all"


def noisy() -> Waves:
    """Drawn from what the model finds likely, by seeds: each position has noise of its own."""
    texts = [ask(f"text{n}", f"{TEXT} {n}", outputs=60, temperature=1.0, seed=n) for n in range(5)]
    penalties: dict[str, Any] = {"presence_penalty": 0.8, "frequency_penalty": 0.5, "logit_bias": {66: 3.0, 70: -100.0}}
    texts.append(ask("penalties", TEXT, outputs=60, temperature=1.0, seed=8, **penalties))
    return ((*texts, ask("image", "<image> and then?", [red()], outputs=60, temperature=0.7, seed=9)),)


@pytest.mark.parametrize("method", ["EPD", "E+P+D"])
def test_sampled_tokens_are_those_of_a_pool_that_holds_all(method: str) -> None:
    full = serve(checkpoint("llava"), method, noisy(), **{**COMMON, "pools": {"image": 32, "kv": 512}})
    found = serve(checkpoint("llava"), method, noisy(), reservation="optimistic", **COMMON)
    assert {name: output.token_ids for name, output in found.outputs.items()} == {
        name: output.token_ids for name, output in full.outputs.items()
    }
    assert sum(output.preemptions for output in found.outputs.values())
    assert not sum(output.preemptions for output in full.outputs.values())


@pytest.mark.slow
def test_instances_in_processes_send_requests_back_too() -> None:
    async def main() -> None:
        options: dict[str, Any] = {
            **COMMON,
            "dtype": "float32",
            "hosting": "process",
            "connector": "shm",
            "reservation": "optimistic",
        }
        async with Pipeline(checkpoint("llava"), "E+P+D", **pipeline_options(options)) as pipe:
            wanted = answers("llava")
            asked = [request for wave in copies(2) for request in wave]
            outputs = await asyncio.gather(*(pipe.complete(request) for request in asked))
            told = sum(output.preemptions for output in outputs)
            async with asyncio.timeout(120):  # a heartbeat comes every second
                while pipe.loads["D0"].preemptions != told:
                    await asyncio.sleep(0.1)
        for output in outputs:
            assert output.token_ids == wanted[output.request_id.partition("#")[0]].token_ids
        assert told > 0
        assert pipe.metrics.summary()["preemptions"] == told
        assert "preemptions" in str(pipe.metrics)

    asyncio.run(main())
