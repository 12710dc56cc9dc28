"""Batches of media go through an encoder on a CPU in pieces, and come out as they would together."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support.checkpoint_files import checkpoint
from support.stage_driver import picture, processor_of
from trinity.request import Request
from trinity.stages.models import load_model, loaded_model
from trinity.stages.models.loaded_model import split_items
from trinity.testing.checkpoints import ARCHITECTURES

sizes = st.lists(st.integers(0, 40), max_size=20)


def item(size: int) -> dict[str, Any]:
    """``size`` numbers that count, and others that do not."""
    return {"pixel_values": torch.zeros(1, size), "grid": torch.zeros(1, 99, dtype=torch.int64), "text": "no tensor"}


@given(sizes, st.integers(1, 60))
def test_pieces_hold_every_item_once_in_order_and_as_many_as_fit(held: list[int], most: int) -> None:
    found = list(split_items([item(size) for size in held], most))
    assert list(itertools.chain.from_iterable(range(len(held))[some] for some in found)) == list(range(len(held)))
    parts = [held[some] for some in found]
    assert all(parts) or not held
    assert all(sum(part) <= most or len(part) == 1 for part in parts)
    assert all(sum(part) + after[0] > most for part, after in itertools.pairwise(parts))
    assert list(split_items([item(size) for size in held], None)) == [slice(0, len(held))]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("llama", "mistral")])
def test_features_do_not_hang_on_the_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [picture(seed, *size) for seed, size in enumerate([(60, 80), (130, 90), (60, 80), (33, 120), (60, 80)])]
    made = processor_of(name).process(Request("<image>" * len(images), images=images))
    model, counts = load_model(checkpoint(name), "E", dtype="float32"), [span.tokens for span in made.work.media]
    calls: list[int] = []
    plain = type(model.adapter).encode

    def counted(adapter: Any, part: Any, kind: str, items: Any, wanted: Any) -> Any:
        calls.append(len(items))
        return plain(adapter, part, kind, items, wanted)

    monkeypatch.setattr(type(model.adapter), "encode", counted)
    together = model.encode("image", made.inputs, counts)
    assert calls == [5], "small images stay together"
    one = made.inputs[0]["pixel_values"].numel()
    monkeypatch.setattr(loaded_model, "ENCODE_PIECE", 2 * one)
    apart = model.encode("image", made.inputs, counts)
    assert len(calls) > 2
    assert sum(calls) == 10
    for rows, wanted in zip(apart, together, strict=True):
        assert rows.shape == wanted.shape
        assert (rows - wanted).abs().max() < 1e-5 * wanted.abs().max()
