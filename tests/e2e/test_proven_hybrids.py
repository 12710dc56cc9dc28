"""Multimodal hybrids, after their proof: images and states migrate, tokens and logits are those of ``generate()``."""

from __future__ import annotations

import asyncio
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.checkpoint_files import checkpoint
from support.hybrid_models import zero_states
from support.pipeline_options import pipeline_options
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.preprocess.checkpoint.model_types import PROVEN
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.request import Request, Sampling
from trinity.stages.proof import prove
from trinity.testing.oracle import Oracle, OracleAnswer

OUTPUTS = 16
SIZES = ((90, 70), (64, 120), (150, 66))
QUICK = ("qwen3_5", "1E1P1D")
_LATER = ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "nemotron_h_omni")
HYBRIDS = ("qwen3_5", "qwen3_5_moe", "lfm2_vl", "lfm3_vl", *_LATER)
TYPES = (*HYBRIDS, "granite_docling")
PLACEMENTS = ("1E1P1D", "1EP1D", "1ED1P", "EPD")
POOLS = {"image": 16, "kv": 256, "state": 3}
SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": POOLS, "rules": BatchRules(token_budget=23)}
OLDER = tuple(map(int, version("transformers").split(".")[:2])) < (5, 23)
Found = dict[str, tuple[list[int], torch.Tensor]]


def proven(name: str) -> Path:
    directory = checkpoint(f"any-{name}")
    if name not in PROVEN and find_verdict(directory) is None:  # a listed type may have another text model
        assert prove(directory).failed is None
    return directory


def picture(seed: int, size: tuple[int, int]) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (5, 7, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize(size)


def ask(name: str, images: int, seed: int = 0) -> Request:
    """A chat of so many images over two turns, the last of them late, so that its tokens show in the next."""
    first = [{"type": "image"}, {"type": "text", "text": "picture"}] * (images - 1)
    last = [{"type": "text", "text": "Which is red?"}, *[{"type": "image"}] * min(images, 1)]
    talk = ("user", [*first, {"type": "text", "text": "Look."}]), ("assistant", [{"type": "text", "text": "A boat."}])
    return Request(
        messages=[{"role": role, "content": content} for role, content in (*talk, ("user", last))],
        images=[picture(seed + number, SIZES[number]) for number in range(images)],
        max_tokens=OUTPUTS,
        request_id=name,
        sampling=Sampling(ignore_eos=True),
    )


REQUESTS = [ask("one", 1), ask("three", 3, 40), ask("other", 1, 30), ask("text", 0)]


def serve(directory: Path, placement: str, zeroed: bool = False) -> tuple[Found, set[str]]:
    """Serve the requests at once: tokens and logits [outputs, vocabulary] by request, and the kinds that moved."""
    seen: dict[Any, torch.Tensor] = {}

    def observe(request: str, index: int, logits: torch.Tensor) -> None:
        seen[request, index] = logits.float().clone()

    async def main() -> list[Any]:
        async with Pipeline(directory, placement, observe=observe, **pipeline_options(SETTINGS)) as pipe:
            if zeroed:
                zero_states(pipe)
            return await asyncio.gather(*(pipe.complete(request) for request in REQUESTS))

    outputs = asyncio.run(main())
    logits = {each.request_id: torch.stack([seen[each.request_id, at] for at in range(OUTPUTS)]) for each in outputs}
    moved = {record["kind"] for each in outputs for record in each.transfers if record["outcome"] == "pulled"}
    return {each.request_id: (list(each.token_ids), logits[each.request_id]) for each in outputs}, moved


def list_differing(found: Found, wanted: dict[str, OracleAnswer]) -> list[str]:
    """List the requests whose tokens or logits are not the model's own."""

    def agrees(name: str, own: OracleAnswer) -> bool:
        tokens, logits = found[name]
        return tokens == own.token_ids and bool((logits - own.logits).abs().max() < 1e-4 * own.logits.abs().max())

    return [name for name, own in wanted.items() if not agrees(name, own)]


@cache
def answer(directory: Path) -> dict[str, OracleAnswer]:
    oracle = Oracle(directory)
    return {request.request_id: oracle.answer(request) for request in REQUESTS}


MOVED = {"1E1P1D": {"image", "kv", "state"}, "1EP1D": {"kv", "state"}, "1ED1P": {"image", "kv", "state"}, "EPD": set()}


def mark(name: str, placement: str) -> Any:
    return pytest.param(name, placement, marks=() if (name, placement) == QUICK else pytest.mark.slow)


@pytest.mark.parametrize(("name", "placement"), [mark(name, each) for name in TYPES for each in PLACEMENTS])
def test_a_hybrid_with_images_is_served_exactly(name: str, placement: str) -> None:
    directory = proven(name)
    wanted, (found, moved) = answer(directory), serve(directory, placement)
    depends = name == "minicpmv4_6" and OLDER  # its model takes the first image's size for all of a prompt's
    assert list_differing(found, wanted) == ["three"] * depends
    assert moved == MOVED[placement] - ({"state"} if name not in HYBRIDS else set())
    assert wanted["one"].token_ids != wanted["other"].token_ids, "another image gives other tokens"


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=() if each == QUICK[0] else pytest.mark.slow) for each in HYBRIDS]
)
def test_the_control_zeroed_states_change_the_tokens(name: str) -> None:
    directory = proven(name)
    wanted, (found, _) = answer(directory), serve(directory, "1E1P1D", zeroed=True)
    changed = [each for each, own in wanted.items() if found[each][0] != own.token_ids]
    assert changed == list(wanted)
