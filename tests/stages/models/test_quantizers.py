"""Quantised checkpoints of other methods than FP8: loaded by role, counted; what cannot be served is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from support.checkpoint_files import checkpoint
from support.quantised import quantised
from trinity.costs.model_config import read_model_shape
from trinity.errors import ConfigError, UnsupportedModel
from trinity.stages.attention.interface import register_attention
from trinity.stages.kernels.swaps import find_own_class
from trinity.stages.models import load_model, loader, quantizers
from trinity.stages.models.loader import can_share_weights, count_weight_bytes
from trinity.stages.models.quantizers import (
    QUANTIZERS,
    check_dtype,
    check_method,
    check_rows,
    find_quantised,
    list_held_tensors,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
KEPT = ["bnb-nf4", "bnb-nf4-text", "bnb-int8", "torchao-int8"]

register_attention()
slow_kept = pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in KEPT])


def quantise(directory: Path, **fields: Any) -> Path:
    config = json.loads((directory / "config.json").read_text()) | {"quantization_config": fields}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("llava"), tmp_path / "copied"))


def flat_state(model: Any) -> dict[str, Any]:
    return {
        name: [each.clone() for each in quantizers._inner_tensors(held, 3)] for name, held in model.named_parameters()
    }


@pytest.mark.parametrize(
    "name",
    ["compressed-int4", "compressed-int4-text", "compressed-int8",
     *(pytest.param(name, marks=pytest.mark.slow) for name in KEPT)],
)  # fmt: skip
def test_parts_hold_what_the_whole_model_of_transformers_holds(name: str) -> None:
    """Bit by bit, in each layer, quantised or not: a part must not take other layers for its last ones."""
    auto: Any = transformers.AutoModelForImageTextToText
    whole = auto.from_pretrained(quantised(name), dtype=torch.float32, local_files_only=True).eval()
    if name.startswith("compressed"):  # which widens at the first call
        with torch.inference_mode():
            whole(input_ids=torch.arange(5, 9)[None])
    wanted = flat_state(whole)
    for part in ("language", "vision"):
        found = flat_state(loader._load_part(quantised(name), part, torch.float32))
        assert found
        for key, tensors in found.items():
            assert len(tensors) <= len(wanted[key]), key
            assert all(torch.equal(*each) for each in zip(tensors, wanted[key], strict=False)), key
        assert not any(("language_model" in key) == (part == "vision") for key in found if "lm_head" not in key)


def test_a_part_of_which_nothing_stays_quantised_is_plain() -> None:
    """And so it has every kernel; one that rounds activations keeps the library's layers."""
    plain = load_model(checkpoint("quantised-plain"), "PD", dtype="float32").language
    for name, kept in (("compressed-int4", False), ("compressed-int8", True)):
        part = load_model(quantised(name), "PD", dtype="float32").language
        assert bool(part.trinity_quantised) is kept
        swapped = [find_own_class(each) is not type(each) for each in plain.modules()]
        found = [find_own_class(each) is not type(each) for each in part.modules()]
        assert found == ([False] * len(swapped) if kept else swapped)
        assert any(swapped)


def test_a_tower_that_is_not_quantised_is_plain() -> None:
    model = load_model(quantised("compressed-int4-text"), "E", dtype="float32")
    assert not model.vision.trinity_quantised
    plain = load_model(checkpoint("quantised-plain"), "E", dtype="float32")
    assert all(torch.equal(*each) for each in zip(model.vision.parameters(), plain.vision.parameters(), strict=True))


def test_any_odd_tensor_or_layer_counts_as_quantised() -> None:
    def make() -> Any:
        return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))

    assert find_quantised(make(), make()) == []
    packed, altered, scaled, replaced = make(), make(), make(), make()
    packed[0].weight = torch.nn.Parameter(torch.zeros(8, dtype=torch.uint8), requires_grad=False)
    altered[0].forward = torch.relu
    scaled[0].weight_scale = torch.nn.Parameter(torch.ones(1))
    replaced[0] = torch.nn.Bilinear(4, 4, 4)
    for model in (packed, altered, scaled, replaced):
        assert find_quantised(model, make()) == [model[0]]


class Loudest(torch.nn.Linear):
    """A layer that rounds its input by one scale of all rows."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale = input.abs().max() / 127
        return super().forward((input / scale).round() * scale)


class Fine(torch.nn.Linear):
    """A layer that rounds each row by its own largest value."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scale = input.abs().amax(-1, keepdim=True) / 127
        return super().forward((input / scale).round() * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_text_model_that_runs_in_another_dtype_is_refused_with_its_own(dtype: torch.dtype) -> None:
    """bitsandbytes keeps the dtype of its files, whatever is asked: keys and values would not fit their blocks."""
    model = SimpleNamespace(get_input_embeddings=lambda: torch.nn.Embedding(4, 8, dtype=dtype))
    check_dtype(model, dtype)
    with pytest.raises(ConfigError, match=f"give dtype='{str(dtype).removeprefix('torch.')}'"):
        check_dtype(model, torch.float16)


@pytest.mark.slow
def test_bitsandbytes_in_a_dtype_that_is_not_its_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="give dtype='float32'"):
        load_model(quantised("bnb-nf4"), "PD", dtype="bfloat16")
    load_model(quantised("bnb-nf4"), "E", dtype="bfloat16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_that_mixes_rows_is_found(dtype: torch.dtype) -> None:
    check_rows([torch.nn.Linear(64, 32, dtype=dtype), Fine(64, 32, dtype=dtype)], None, dtype, CPU)
    with pytest.raises(UnsupportedModel, match=r"\(Loudest\) gives a row other numbers"):
        check_rows([Loudest(64, 32, dtype=dtype)], None, dtype, CPU)


def test_a_checkpoint_that_mixes_rows_is_refused_each_time() -> None:
    """Also where an error before, which holds the part, is still held."""
    held = []
    for letters in ("EPD", "EPD", "E", "PD"):
        with pytest.raises(UnsupportedModel, match="tokens would depend on what else runs") as refused:
            load_model(quantised("compressed-mixed-rows"), letters, dtype="float32")
        held.append(refused)


@pytest.mark.parametrize("error", [RuntimeError("shape '[96, 0]' is invalid"), TypeError("no kernel")])
def test_a_layer_that_its_library_cannot_run_is_refused_by_its_sizes(error: Exception) -> None:
    class Packed(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(UnsupportedModel, match=r"Packed of 48 inputs and 96 outputs: .*layers of this size") as refused:
        check_rows([Packed(48, 96)], None, torch.float32, CPU)
    assert str(error) in str(refused.value)


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError()])
def test_a_host_without_memory_refuses_no_layer(error: Exception) -> None:
    class Packed(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            raise error

    with pytest.raises(type(error)):
        check_rows([Packed(48, 96)], None, torch.float32, CPU)


def test_the_head_is_checked_as_it_is_called() -> None:
    """With rows alone, where all other layers have a batch before them."""

    class Batched(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) if input.ndim == 3 else input.new_zeros((len(input), 32))

    head = Batched(64, 32)
    check_rows([head], None, torch.float32, CPU)
    with pytest.raises(UnsupportedModel, match="Batched"):
        check_rows([head], head, torch.float32, CPU)


@pytest.mark.parametrize("method", ["hqq", "quanto", "nvfp4", "metal", "something", None])
def test_what_is_not_served_is_refused_by_name(method: str | None, copied: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"quantised by '{method}', which is not served") as refused:
        load_model(quantise(copied, quant_method=method), "EPD")
    assert "bitsandbytes" in str(refused.value)
    assert ("reads no checkpoint" in str(refused.value)) is (method in ("hqq", "quanto", "nvfp4"))


@pytest.mark.parametrize("method", sorted(QUANTIZERS))
def test_a_package_that_is_missing_is_named(method: str, copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers, "find_spec", lambda name: None)
    packages, fields = QUANTIZERS[method].packages, {"quant_method": method}
    if packages:
        with pytest.raises(UnsupportedModel, match=f"'{method}'.*: pip install {' '.join(packages)}$"):
            check_method(fields, copied, CUDA)
    elif not QUANTIZERS[method].refused:
        assert check_method(fields, copied, CUDA) is QUANTIZERS[method]


@pytest.mark.parametrize("method", [name for name, each in QUANTIZERS.items() if each.gpu])
def test_what_needs_a_gpu_says_so(method: str, copied: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"'{method}', which runs on GPUs alone, and this instance is on cpu"):
        check_method({"quant_method": method}, copied, CPU)


def test_keys_and_values_that_are_rounded_too_are_refused(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizers, "find_spec", lambda name: name)
    fields: dict[str, Any] = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    with pytest.raises(UnsupportedModel, match="kv_cache_scheme"):
        check_method(fields, copied)


def test_old_fields_of_bitsandbytes_are_known() -> None:
    assert (
        quantizers.name_method({"load_in_4bit": True})
        == quantizers.name_method({"load_in_8bit": True})
        == "bitsandbytes"
    )


def test_they_are_shared_by_no_processes() -> None:
    assert can_share_weights(checkpoint("llava"), "cpu")
    assert not can_share_weights(checkpoint("quantised-mxfp4"), "cpu")


@pytest.mark.parametrize("letters", ["P", "PD"])
def test_widened_bytes_are_counted_as_they_are_held(letters: str) -> None:
    directory = checkpoint("quantised-mxfp4")
    part = load_model(directory, letters, dtype="float32").language
    held = sum(each.nbytes for each in list_held_tensors(part))
    assert count_weight_bytes(directory, letters, dtype="float32") == held


@slow_kept
@pytest.mark.parametrize("letters", ["E", "PD"])
def test_kept_bytes_are_counted_by_the_files(name: str, letters: str) -> None:
    """But for tables of bytes that are read and not held, buffers that no file has, and the tower's last layer."""
    model = load_model(quantised(name), letters, dtype="float32")
    plain = load_model(checkpoint("quantised-plain"), letters, dtype="float32").weight_bytes
    counted, layers = count_weight_bytes(quantised(name), letters, dtype="float32", device=CUDA), 14
    unused = 2 * model.weight_bytes // 5 if letters == "E" else 0
    assert -256 <= counted - model.weight_bytes <= layers * 1400 + unused
    quantised_part = "text" not in name or letters == "PD"
    assert (model.weight_bytes < 0.75 * plain) is quantised_part


@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"quant_method": "gptq", "bits": 4}, 0.5),
        ({"quant_method": "awq", "bits": 4}, 0.5),
        ({"quant_method": "auto-round", "bits": 2}, 0.25),
        ({"quant_method": "gptq", "bits": "many"}, None),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 1),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 0.5),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, 1),
        ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Float8WeightOnlyConfig"}}}, None),
        ({"quant_method": "mxfp4"}, None),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, None),
    ],
)
def test_the_planner_knows_their_bytes(fields: dict[str, Any], size: float | None, copied: Path) -> None:
    plain, found = read_model_shape(checkpoint("llava")), read_model_shape(quantise(copied, **fields))
    assert found.layer_dtype_bytes == size
    saved = plain.language.weights * (plain.dtype_bytes - (size or plain.dtype_bytes))
    assert plain.language_bytes - found.language_bytes == saved
    assert (plain.vision_bytes, plain.kv_bytes) == (found.vision_bytes, found.kv_bytes)


def test_a_tensor_inside_of_another_is_listed_once() -> None:
    layer = torch.nn.Linear(4, 4, bias=False)
    assert [each.shape for each in list_held_tensors(layer)] == [(4, 4)]
