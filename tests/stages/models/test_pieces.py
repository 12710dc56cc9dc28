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
from trinity.memory.devices import ENCODE_BYTES
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.request import Request
from trinity.stages.models import load_model, loaded_model
from trinity.stages.models.loaded_model import UNKNOWN_VALUE_BYTES, LoadedModel, count_value_bytes, split_items
from trinity.testing.checkpoints import ARCHITECTURES
from trinity.testing.checkpoints_llava import llava_7b

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


def on_gpu(config: Any) -> LoadedModel:
    """A model with this config on a GPU, of which nothing is loaded."""
    nothing: Any = None
    return LoadedModel(nothing, "E", config, nothing, torch.bfloat16, torch.device("cuda"), "")


def test_what_a_gpu_encodes_together_keeps_its_working_memory() -> None:
    """Of LLaVA-1.5-7B an image of 336 x 336 is 576 patches of 6 x 1024 + 2 x 4096 values in the widest layer."""
    model, values = on_gpu(llava_7b().config), 3 * 336 * 336
    of_image = 576 * (6 * 1024 + 2 * 4096) * 2
    assert model.encode_piece // values == ENCODE_BYTES // of_image == 65
    pieces = list(split_items([item(values)] * 200, model.encode_piece))
    assert [part.stop - part.start for part in pieces] == [65, 65, 65, 5]


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in ("llama", "mistral")])
def test_every_encoder_has_a_bound_on_a_gpu(name: str) -> None:
    config = read_config(checkpoint(name))
    assert count_value_bytes(config, 2) > 0
    assert 2 * count_value_bytes(config, 2) == count_value_bytes(config, 4) or not hasattr(config, "vision_config")
    assert on_gpu(config).encode_piece > 0
    assert count_value_bytes(None, 2) == UNKNOWN_VALUE_BYTES


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
