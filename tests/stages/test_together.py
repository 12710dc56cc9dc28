"""Tokens of all images of a prompt that see each other: their group, and what no chunk may cut."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from trinity.core.messages import MediaSpan, Open, Work
from trinity.errors import StageError
from trinity.preprocess.checkpoint.verdicts import MediaFacts
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.attention.interface import AttentionParams, build_mask
from trinity.stages.models.generic import GenericAdapter
from trinity.stages.request_table import RequestTable, _number_groups

CONFIG = LlamaConfig(hidden_size=2, num_attention_heads=1, num_hidden_layers=4)
IDS = [1, 9, 5, 5, 8, 2, 2, 9, 5, 8, 3]  # two images of placeholders 5, with marks 9 and 8 around


def groups(facts: MediaFacts, outputs: list[int]) -> Any:
    at = np.flatnonzero(np.array(IDS) == 5)
    return _number_groups(GenericAdapter(CONFIG, facts), at, np.array(IDS), len(IDS) + len(outputs))


def test_tokens_of_all_images_are_one_group_and_outputs_of_none() -> None:
    found = groups(MediaFacts(image_token_id=5, whole_media=True, together=(5, 8, 9)), [5, 8])
    assert found.tolist() == [-1, 0, 0, 0, 0, -1, -1, 0, 0, 0, -1, -1, -1]
    apart = groups(MediaFacts(image_token_id=5, whole_media=True), [5, 8])
    assert apart.tolist() == [-1, -1, 0, 0, -1, -1, -1, -1, 1, -1, -1, -1, -1]


def test_a_clip_beside_images_that_are_whole_is_causal() -> None:
    """As Gemma 4's own mask has it; a chunk may end in the clip and not in the image."""
    facts = MediaFacts(image_token_id=5, audio_token_id=6, whole_media=True)
    adapter = GenericAdapter(CONFIG, facts)
    model: Any = SimpleNamespace(media_token_ids=(5, 6), adapter=adapter, language=None)
    spans = (
        MediaSpan("image", content="i", tokens=3, offset=1, length=3, atomic=True),
        MediaSpan("audio", content="a", tokens=3, offset=5, length=3),
    )
    work = Work(request="both", prompt=(1, 5, 5, 5, 2, 6, 6, 6, 3), media=spans)
    row = RequestTable(model, 16, 16)._row(Open(work=work, blocks=(0,), images=((0,), (1,))), np.zeros(1))
    assert row.groups is not None
    assert row.groups.tolist() == [-1, 0, 0, 0, -1, -1, -1, -1, -1]
    assert row.input_ids.tolist() == [1, 0, 0, 0, 2, 0, 0, 0, 3]
    assert row._groups(4, 7) is None
    with pytest.raises(StageError, match="cuts the media item around position 2"):
        row._groups(0, 2)


def test_such_tokens_see_an_image_behind_them_and_the_text_between_does_not() -> None:
    places, numbers = torch.arange(5), torch.tensor([0, -1, -1, 0, -1])
    seen = build_mask(places, places, AttentionParams(0, 1.0), (numbers, numbers))
    assert seen.int().tolist() == [
        [1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize(
    ("whole_prompt", "together", "whole"),
    [(False, (), 0), (True, (), 11), (False, (5, 8, 9), 10), (False, (2,), 7), (False, (77,), 0)],
)
def test_what_no_chunk_may_cut_ends_with_the_last_of_them(whole_prompt: bool, together: Any, whole: int) -> None:
    processor: Any = RequestProcessor.__new__(RequestProcessor)
    processor.loaded = SimpleNamespace(whole_prompt=whole_prompt, together=frozenset(together))
    assert processor._count_whole(IDS) == whole
