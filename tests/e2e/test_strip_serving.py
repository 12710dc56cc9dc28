"""Tiles of one image on several encoders: tokens and logits are those of generate(), on one to four encoders."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.recordings import oracle, problems, serve
from support.request_cases import ask
from support.running_instances import PHOTOS
from support.stage_driver import picture
from trinity.core.messages import Helped, Submit
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.request import Output, Request
from trinity.testing.oracle import OracleAnswer

FAMILIES = ("internvl", "llava_next", "minicpmv4_6", "smolvlm")
RULES = BatchRules(token_budget=256, image_budget=1)
PLACEMENTS = ("1E1P1D", "2E1PD", "3E1P1D", "4E2P1D")


def requests() -> list[Request]:
    """Of an image of a single row of tiles, of another, of two of which one was there before, of the same one twice.

    LLaVA-OneVision cuts the first alone: it shrinks the grids of the others. Then no encoder has reported yet.
    """
    return [
        ask("wide", "Wide: <image>", [picture(7, 160, 80)], outputs=16),
        ask("one", "<image>\nWhat is this?", PHOTOS[:1], outputs=16),
        ask("two", "<image> and <image>: who?", PHOTOS[:2], outputs=16),
        ask("twice", "<image>, <image>?", [PHOTOS[2], PHOTOS[2]], outputs=16),
    ]


@cache
def answers(architecture: str) -> dict[str, OracleAnswer]:
    return {request.request_id: oracle(architecture).answer(request) for request in requests()}


def from_others(output: Output) -> int:
    return sum(record["outcome"] == "store" for record in output.transfers)


def check(architecture: str, placement: str) -> None:
    answers(architecture)  # outside of the pipeline's event loop
    waves = [[request] for request in requests()]  # each finds the encoders idle
    pools = {"image": 160, "kv": 256}
    options: dict[str, Any] = {"rules": RULES, "pools": pools, "image_block_size": 7, "spread": 4}
    found = serve(checkpoint(architecture), placement, waves, **options)
    assert problems(found, answers(architecture)) == {}
    helps = [each.event for each in found.record.log if isinstance(each.event, Submit) and each.event.asker]
    assert bool(helps) is (placement[0] != "1")
    strips = [each for each in helps if "/" in each.work.media[0].content]
    assert len(strips) == len(helps) or architecture == "llava_onevision", "which cuts no image that has company"
    assert bool(strips) is bool(helps)
    said = {each.event.said for each in found.record.log if isinstance(each.event, Helped)}
    assert ("ready" in said) is bool(helps), said
    encoded = [(row.request.partition("~")[0], row.span.content) for row in found.record.encodes()]
    assert len(encoded) == len(set(encoded)), "no strip is encoded twice for a request"


@pytest.mark.parametrize("architecture", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in FAMILIES])
def test_tokens_and_logits_are_those_of_generate(architecture: str) -> None:
    check(architecture, "3E1P1D")


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("architecture", [*FAMILIES, "idefics3", "llava_onevision"])
def test_on_one_to_four_encoders(architecture: str, placement: str) -> None:
    check(architecture, placement)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", FAMILIES)
async def test_between_processes_strips_come_from_where_they_were_encoded(architecture: str) -> None:
    wanted = {name: list(answer.token_ids) for name, answer in answers(architecture).items()}
    options = pipeline_options({"pools": {"image": 32, "kv": 256}, "dtype": "float32", "rules": RULES})
    async with Pipeline(
        checkpoint(architecture), "3E1P1D", hosting="process", connector="shm", verify="always", spread=3, **options
    ) as pipe:
        outputs = [await pipe.complete(request) for request in requests()]
        await asyncio.wait_for(pipe.wait_idle(), 60.0)
        rows = await pipe.features([PHOTOS[3], PHOTOS[0]]) if architecture == "internvl" else None
        images = [len(row.images) for row in pipe.trace]
    assert {output.request_id: list(output.token_ids) for output in outputs} == wanted
    assert sum(map(from_others, outputs)) > 0
    assert images == [1, 1, 2, 2], "a trace has images, not strips"
    assert rows is None or len(rows.rows) == 2
