"""A clip's features are the same whatever clips of others a step encodes with it, to the bit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from support.sounds import clip
from trinity.core.messages import Encode, Step
from trinity.memory.block_memory import BlockMemory
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Media, Request
from trinity.stages.encode import EncodeStage
from trinity.stages.models import load_model
from trinity.stages.models.loaded_model import LoadedModel
from trinity.stages.proof import prove

ROWS = 8
SECONDS = (0.7, 1.93, 0.31, 0.7)
LATER = ("fun_asr_nano", "granite_speech_plus", "moss_transcribe_diarize", "nemo_speechlm")


def proven(name: str) -> Path:
    directory = checkpoint(f"any-{name}")
    if find_verdict(directory) is None:
        assert prove(directory).failed is None
    return directory


def hear(directory: Path) -> list[ProcessedRequest]:
    """Process a clip of each length, each of a request of its own."""
    processor = RequestProcessor(directory)
    try:
        sounds = [clip(seed, seconds) for seed, seconds in enumerate(SECONDS)]
        asked = [Request("<audio>", media=[Media("audio", each)], request_id=str(at)) for at, each in enumerate(sounds)]
        return [processor.process(each) for each in asked]
    finally:
        processor.close()


def encode(model: LoadedModel, requests: Sequence[ProcessedRequest]) -> list[Tensor]:
    """Encode their clips in one step: rows [tokens, width] of each."""
    spans = [each.work.media[0] for each in requests]
    shape, counts = model.image_shape(ROWS), [-(-span.tokens // ROWS) for span in spans]
    assert shape is not None
    memory, free = BlockMemory(shape, sum(counts)), list(range(sum(counts)))
    blocks = [tuple(free.pop() for _ in range(count)) for count in counts]
    encodes = [
        Encode(each.work.request, 0, span, mine, each.inputs[0])
        for each, span, mine in zip(requests, spans, blocks, strict=True)
    ]
    EncodeStage(model, memory).forward(Step(0, "joint", encodes=tuple(encodes)))
    return [
        torch.cat([memory.tensor[block] for block in mine])[: span.tokens].clone()
        for mine, span in zip(blocks, spans, strict=True)
    ]


@pytest.mark.parametrize("name", ["granite_speech", *(pytest.param(each, marks=pytest.mark.slow) for each in LATER)])
def test_clips_of_strangers_change_no_bit_of_a_clips_features(name: str) -> None:
    if name in ("fun_asr_nano", "granite_speech", "granite_speech_plus"):
        pytest.importorskip("torchaudio")
    directory = proven(name)
    requests, model = hear(directory), load_model(directory, "E", dtype="float32")
    assert len({each.work.media[0].tokens for each in requests}) == 3
    together = encode(model, requests)
    for request, rows in zip(requests, together, strict=True):
        assert torch.equal(encode(model, [request])[0], rows)
    assert not torch.equal(together[0], together[3]), "two clips of one length"
