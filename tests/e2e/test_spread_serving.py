"""Images that several encoders share: tokens and logits are those of generate(), on one to four encoders."""

from __future__ import annotations

import asyncio
from functools import cache
from itertools import product
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.recordings import oracle, problems, serve
from support.request_cases import ask
from support.running_instances import PHOTOS
from support.thinned import in_turns, rarely
from trinity.core.messages import Helped, Submit
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.request import Output, Request
from trinity.testing.oracle import OracleAnswer

FAMILIES = ("llava", "qwen2_vl", "internvl", "gemma3")
RULES = BatchRules(token_budget=256, image_budget=1)  # one image a step
MARKED = ("", "<image>\nWhat is this?", "<image> and <image>: who?", "<image>, <image>, <image>?", "<image>" * 4 + "?")


def requests() -> list[Request]:
    """Of one to four images; the last one has the same image twice."""
    found = [ask(f"{count} images", MARKED[count], PHOTOS[:count], outputs=16) for count in (4, 3, 2, 1)]
    return [*found, ask("twice", MARKED[3], [PHOTOS[3], PHOTOS[0], PHOTOS[3]], outputs=16)]


@cache
def answers(architecture: str) -> dict[str, OracleAnswer]:
    return {request.request_id: oracle(architecture).answer(request) for request in requests()}


def from_others(output: Output) -> int:
    """How many images came from an encoder that the request was not sent to."""
    return sum(record["outcome"] == "store" for record in output.transfers)


@pytest.mark.parametrize(
    ("architecture", "placement"),
    [
        pytest.param(name, placement, marks=[pytest.mark.xdist_group(name), *rarely(often)])
        for name, placement, often in in_turns(FAMILIES, ("1E1P1D", "2E1PD", "3E1P1D", "4E2P1D"), 4)
    ],
)
def test_tokens_and_logits_are_those_of_generate(architecture: str, placement: str) -> None:
    answers(architecture)  # outside of the pipeline's event loop
    pools = {"image": 160, "kv": 256}
    waves = [[request] for request in requests()]  # each finds the encoders idle
    options: dict[str, Any] = {"rules": RULES, "pools": pools, "image_block_size": 7, "spread": 4}
    found = serve(checkpoint(architecture), placement, waves, **options)
    assert problems(found, answers(architecture)) == {}
    helps = [each.event for each in found.record.log if isinstance(each.event, Submit) and each.event.asker]
    assert bool(helps) is (placement[0] != "1")
    said = {each.event.said for each in found.record.log if isinstance(each.event, Helped)}
    assert ("ready" in said) is bool(helps), said


@pytest.mark.parametrize(
    ("architecture", "placement"),
    [
        pytest.param("llava", "2EP1D", marks=pytest.mark.xdist_group("llava")),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in product(FAMILIES, ("3EP1D", "2EPD", "1E2EP1D"))),
    ],
)
def test_those_that_prefill_help_each_other_too(architecture: str, placement: str) -> None:
    """Features of a helper come home, into the blocks that the prefill reads."""
    answers(architecture)
    waves = [[request] for request in requests()]
    pools = {"image": 160, "kv": 256}
    options: dict[str, Any] = {"rules": RULES, "pools": pools, "image_block_size": 7, "spread": 4}
    found = serve(checkpoint(architecture), placement, waves, **options)
    assert problems(found, answers(architecture)) == {}
    assert sum(map(from_others, found.outputs.values())) > 0
    asked = [(each.instance, each.event) for each in found.record.log if isinstance(each.event, Submit)]
    assert any("P" in name + event.asker for name, event in asked if event.asker), "one that prefills takes part"


def test_many_at_once_on_encoders_that_help_when_they_are_idle() -> None:
    """All at once, and again from the caches."""
    answers("llava")
    options: dict[str, Any] = {"rules": RULES, "pools": {"image": 64, "kv": 256}, "image_block_size": 7, "spread": 3}
    found = serve(checkpoint("llava"), "3E1P1D", [requests()], **options)
    assert problems(found, answers("llava")) == {}


@pytest.mark.slow
async def test_between_processes_features_come_home() -> None:
    wanted = {name: list(answer.token_ids) for name, answer in answers("llava").items()}
    options = pipeline_options({"pools": {"image": 16, "kv": 256}, "dtype": "float32", "rules": RULES})
    async with Pipeline(
        checkpoint("llava"), "3EP1D", hosting="process", connector="shm", verify="always", spread=3, **options
    ) as pipe:
        outputs = [await pipe.complete(request) for request in requests()]
        await asyncio.wait_for(pipe.wait_idle(), 60.0)
    assert {output.request_id: list(output.token_ids) for output in outputs} == wanted
    assert sum(map(from_others, outputs)) > 0


@pytest.mark.parametrize("verify", ["never", "always"])
async def test_between_processes_features_come_from_where_they_were_encoded(verify: Any) -> None:
    wanted = {name: list(answer.token_ids) for name, answer in answers("llava").items()}
    options = pipeline_options({"pools": {"image": 16, "kv": 256}, "dtype": "float32", "rules": RULES})
    async with Pipeline(
        checkpoint("llava"), "3E1P1D", hosting="process", connector="shm", verify=verify, spread=3, **options
    ) as pipe:
        outputs = [await pipe.complete(request) for request in requests()]
        await asyncio.wait_for(pipe.wait_idle(), 60.0)
    assert {output.request_id: list(output.token_ids) for output in outputs} == wanted
    assert sum(map(from_others, outputs)) > 0
