"""A part taken from another process computes what one loaded from files does; what does not fit is not taken."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from support.checkpoint_files import checkpoint
from trinity.memory.shared_regions import make_region, open_region
from trinity.memory.weight_shelf import WeightShelf
from trinity.stages.kernels.gpu.device_layers import merge_products
from trinity.stages.kernels.swaps import without_swaps
from trinity.stages.models import load_model, loader
from trinity.stages.models.checks import set_attention
from trinity.stages.models.loader import _load_part, _make_empty_part
from trinity.stages.models.shared_parts import PartMismatch, PartTable, fill_part, move_part

CPU = torch.device("cpu")
BFLOAT16 = torch.bfloat16
NAMES = ("llava", "qwen2_vl", "gemma3", "llama")


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[WeightShelf]:
    made = WeightShelf(tmp_path / "weights.sock")
    yield made
    made.close()


def load(name: str | Path, letters: str, shelf: WeightShelf | None, **named: Any) -> Any:
    """Load as a process that has loaded nothing so far."""
    loader._parts.clear()
    directory = checkpoint(name) if isinstance(name, str) else name
    return load_model(
        directory, letters, dtype=named.pop("dtype", BFLOAT16), shelf=shelf.path if shelf else "", **named
    )


def tensors(model: Any) -> dict[str, torch.Tensor]:
    parts = [part for part in (model.vision, model.language) if part is not None]
    return {
        name: each
        for part in parts
        for name, each in (*part.named_parameters(remove_duplicate=False), *part.named_buffers(remove_duplicate=False))
    }


def forward(model: Any) -> list[torch.Tensor]:
    """What its language part makes of some tokens, by transformers' own code."""
    ids = torch.arange(3, 20)[None]
    text = model.adapter.language(model.language)
    with torch.inference_mode(), without_swaps(model.language):
        set_attention(model.language, model.adapter, "eager")
        states = text(inputs_embeds=text.get_input_embeddings()(ids), use_cache=False).last_hidden_state
        return [states, model.adapter.head(model.language, states[0])]


@pytest.mark.parametrize("name", NAMES)
def test_a_part_that_is_taken_is_the_part_that_was_loaded(name: str, shelf: WeightShelf) -> None:
    letters = "D" if name in ("llama", "qwen3") else "EPD"
    wanted = tensors(load(name, letters, None))
    own, taken = (load(name, letters, shelf) for _ in range(2))
    for found in (tensors(own), tensors(taken)):
        assert found.keys() == wanted.keys()
        for tensor, each in wanted.items():
            assert found[tensor].dtype == each.dtype
            assert torch.equal(found[tensor], each), tensor
    assert len(shelf._parts) == len(letters) if letters == "D" else 2
    assert taken.weight_bytes == own.weight_bytes == load(name, letters, None).weight_bytes
    for one, other in zip(forward(own), forward(taken), strict=True):
        assert torch.equal(one, other)


def test_tensors_are_there_once(shelf: WeightShelf) -> None:
    """Those of a process that takes a part are in the memory that the first has written."""
    load("llava", "PD", shelf)
    taken = load("llava", "PD", shelf)
    ((part, file),) = shelf._parts.values()
    region = open_region(CPU, file, part.size)
    table = msgspec.msgpack.decode(part.table, type=PartTable)
    for place in table.places:
        held = region.view(place.offset, place.shape, getattr(torch, place.dtype))
        assert all(torch.equal(tensors(taken)[name], held) for name in place.names)
    maps = Path("/proc/self/maps").read_text().splitlines()
    first = min(each.data_ptr() for each in tensors(taken).values())
    (line,) = [each for each in maps if int(each.split("-")[0], 16) <= first < int(each.split("-")[1].split()[0], 16)]
    assert " r--" in line
    assert "memfd:trinity-weights" in line


def test_tied_weights_are_one_tensor(shelf: WeightShelf) -> None:
    own, taken = (load("qwen2_vl", "D", shelf) for _ in range(2))
    for model in (own, taken):
        ties = model.language.get_output_embeddings().weight, model.language.get_input_embeddings().weight
        assert (ties[0] is ties[1]) == model.language.config.get_text_config().tie_word_embeddings


def test_what_is_mapped_from_files_needs_no_shelf(shelf: WeightShelf) -> None:
    """A checkpoint's own dtype on a CPU: its pages are in the system's cache, once for all."""
    model = load("llava", "PD", shelf, dtype=None)
    assert not shelf._parts
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("model.safetensors")]
    first = model.language.get_input_embeddings().weight.data_ptr()
    assert any(int(line.split("-")[0], 16) <= first < int(line.split("-")[1].split()[0], 16) for line in mapped)


def test_products_that_lie_side_by_side_are_merged_where_they_are(shelf: WeightShelf) -> None:
    model = _load_part(checkpoint("qwen2_vl"), "language", torch.float32)  # whose queries, keys and values have a bias
    layer = model.model.language_model.layers[0]
    merged = [
        [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj],
        [layer.mlp.gate_proj, layer.mlp.up_proj],
    ]
    wanted = [torch.cat([each.weight for each in group]) for group in merged]
    biases = torch.cat([each.bias for each in merged[0]])
    move_part(model, CPU)
    for group, weight in zip(merged, wanted, strict=True):
        found = merge_products(group)
        assert torch.equal(found.weight, weight)
        assert found.weight.data_ptr() == group[0].weight.data_ptr(), "nothing is copied"
    bias = merge_products(merged[0]).bias
    assert bias is not None
    assert torch.equal(bias, biases)
    assert not torch.equal(merge_products(merged[0][::-1]).weight, wanted[0]), "another order is no view"


# ---------------------------------------------------------------- what does not fit


def changed(model: Any, how: str) -> Any:
    layer = model.model.language_model.layers[0]
    if how == "class":
        layer.mlp.act_fn = torch.nn.GELU()
    elif how == "attention":
        model.config._attn_implementation = "eager"
    elif how == "name":
        layer.more = torch.nn.Parameter(torch.empty(1, device="meta"))
    elif how == "shape":
        layer.input_layernorm.weight = torch.nn.Parameter(torch.empty(3, device="meta"))
    elif how == "attribute":
        layer.kept = torch.empty(2, device="meta")
    return model


@pytest.mark.parametrize("how", ["class", "attention", "name", "shape", "attribute", ""])
def test_other_modules_are_not_filled(how: str) -> None:
    region, table = move_part(_load_part(checkpoint("llava"), "language", torch.float32), CPU)
    empty = changed(_make_empty_part(checkpoint("llava"), "language", torch.float32), how)
    if not how:
        fill_part(empty, region, table)
        assert not any(each.is_meta for each in empty.parameters())
        return
    with pytest.raises(PartMismatch):
        fill_part(empty, region, table)


def test_a_part_that_does_not_fit_is_loaded(
    shelf: WeightShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wanted = tensors(load("llava", "PD", shelf))
    made = loader._make_empty_part
    monkeypatch.setattr(loader, "_make_empty_part", lambda *given: changed(made(*given), "class"))
    with caplog.at_level(logging.WARNING, "trinity"):
        found = tensors(load("llava", "PD", shelf))
    assert (
        "the weights of the language part are this process's alone: PartMismatch: its modules are others" in caplog.text
    )
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_a_part_whose_modules_cannot_be_made_is_let_go(shelf: WeightShelf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails at 8235ded: its descriptor stayed, and with it a whole copy of the part."""

    def refuse(*_: object) -> None:
        raise RuntimeError("no meta device")

    load("llava", "D", shelf)
    monkeypatch.setattr(loader, "_make_empty_part", refuse)
    load("llava", "D", shelf)
    assert shelf._parts, "the guard of all tests counts what is left of it"


def test_memory_that_runs_out_is_no_end(
    shelf: WeightShelf, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(model: Any, device: torch.device) -> Any:
        next(model.parameters()).data = torch.zeros(1)  # it had begun
        raise OSError("No space left on device")

    monkeypatch.setattr(loader, "move_part", full)
    with caplog.at_level(logging.WARNING, "trinity"):
        found = tensors(load("llava", "PD", shelf))
    assert "No space left" in caplog.text
    assert not shelf._parts
    wanted = tensors(load("llava", "PD", None))
    assert all(torch.equal(found[name], each) for name, each in wanted.items())


def test_a_place_outside_of_the_region_is_refused() -> None:
    _, table = move_part(_load_part(checkpoint("llava"), "language", torch.float32), CPU)
    small = make_region(CPU, 64)
    with pytest.raises((PartMismatch, RuntimeError)):
        fill_part(_make_empty_part(checkpoint("llava"), "language", torch.float32), small, table)
