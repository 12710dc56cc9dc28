"""Pipelines of audio types that nobody listed, after their proof: tokens and logits of their own generate()."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.sounds import clip
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.preprocess.verdicts import find_verdict
from trinity.request import Media, Request, Sampling
from trinity.stages.proof import prove
from trinity.testing.oracle import Oracle
from trinity.testing.transports import zero_after_read

OUTPUTS = 6
SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": {"image": 16, "kv": 256}, "rules": BatchRules(token_budget=13)}


def proven(name: str) -> Path:
    directory = checkpoint(f"any-{name}")
    if find_verdict(directory) is None:
        assert prove(directory).failed is None
    return directory


def ask(name: str, sound: np.ndarray | None) -> Request:
    """A chat of two turns, with a clip or without."""
    parts: list[dict[str, Any]] = [] if sound is None else [{"type": "audio"}]
    turns = [
        {"role": "user", "content": [*parts, {"type": "text", "text": "What is said?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Two words."}]},
        {"role": "user", "content": [{"type": "text", "text": "Which?"}]},
    ]
    media = [] if sound is None else [Media("audio", sound)]
    asked = Sampling(ignore_eos=True)
    return Request(messages=turns, media=media, max_tokens=OUTPUTS, sampling=asked, request_id=name)


def requests() -> list[Request]:
    return [ask("one", clip(1)), ask("other", clip(2)), ask("long", clip(3, 1.93)), ask("text", None)]


async def serve(directory: Path, **options: Any) -> dict[str, tuple[list[int], torch.Tensor]]:
    """Serve the requests at once: tokens and logits [outputs, vocabulary] by request."""
    seen: dict[Any, torch.Tensor] = {}

    def observe(request: str, index: int, logits: torch.Tensor) -> None:
        seen[request, index] = logits.float().clone()

    async with Pipeline(directory, "1E1P1D", observe=observe, **pipeline_options({**SETTINGS, **options})) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(each) for each in requests()))
    logits = {each.request_id: torch.stack([seen[each.request_id, at] for at in range(OUTPUTS)]) for each in outputs}
    return {each.request_id: (list(each.token_ids), logits[each.request_id]) for each in outputs}


NEEDS_TORCHAUDIO = ("fun_asr_nano", "granite_speech")
SLOW = (*NEEDS_TORCHAUDIO, "nemo_speechlm")
NAMES = ["moss_transcribe_diarize", *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)]


@pytest.mark.parametrize("name", NAMES)
def test_an_audio_type_that_nobody_listed_is_served_exactly(name: str) -> None:
    if name in NEEDS_TORCHAUDIO:
        pytest.importorskip("torchaudio")
    directory = proven(name)
    found, oracle = asyncio.run(serve(directory)), Oracle(directory)
    wanted = {each.request_id: oracle.answer(each) for each in requests()}
    for request, own in wanted.items():
        tokens, logits = found[request]
        assert tokens == own.token_ids, request
        assert (logits - own.logits).abs().max() < 1e-4 * own.logits.abs().max()
    assert wanted["one"].token_ids != wanted["other"].token_ids, "another clip gives other tokens"
    silent = asyncio.run(serve(directory, connector=zero_after_read("image")))
    assert silent["one"][0] != wanted["one"].token_ids, "zeroed blocks of a clip give other tokens"
    assert silent["text"][0] == wanted["text"].token_ids
