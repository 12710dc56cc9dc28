"""FP8 checkpoints: loaded by role, counted, digested; what cannot be served is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoint_files import checkpoint
from support.fp8_oracle import loadable
from trinity.costs.model_config import read_model_shape
from trinity.errors import ConfigError, UnsupportedModel
from trinity.memory.weight_digests import sample_digest
from trinity.stages.attention.fp8 import FP8
from trinity.stages.attention.interface import register_attention
from trinity.stages.models import load_model, loader, quantization
from trinity.stages.models.loader import count_weight_bytes
from trinity.testing.checkpoints_quantization import build_fp8_checkpoint

CUDA = torch.device("cuda", 0)


register_attention()


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoint("fp8-llava"), tmp_path / "fp8"))


def change_config(directory: Path, **fields: Any) -> Path:
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] |= fields
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantization, "explain_no_fp8_products", lambda device, dtype: None)


def weights_of(part: Any) -> dict[str, torch.dtype]:
    return {name: each.dtype for name, each in part.named_parameters()}


@pytest.mark.parametrize("name", ["llama", "llava", "qwen2_vl"])
def test_a_cpu_widens_them_as_transformers_does(name: str) -> None:
    """The same numbers, under the same names, in every weight of the part."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM if name == "llama" else transformers.AutoModelForImageTextToText
    with loadable(widened=True):
        whole = auto.from_pretrained(checkpoint(f"fp8-{name}"), dtype=torch.float32, local_files_only=True)
    wanted = whole.state_dict()
    for part in ("language",) if name == "llama" else ("language", "vision"):
        found = loader._load_part(checkpoint(f"fp8-{name}"), part, torch.float32).state_dict()
        assert found.keys() <= wanted.keys()
        assert all(torch.equal(value, wanted[key]) for key, value in found.items())


def test_parts_hold_their_own_weights_in_fp8(on_hopper: None) -> None:
    language, vision = (loader._load_part(checkpoint("fp8-llava"), part, torch.bfloat16, True) for part in
                        ("language", "vision"))  # fmt: skip
    held, seen = weights_of(language), weights_of(vision)
    in_fp8 = [key for key, dtype in held.items() if dtype == FP8]
    assert len(in_fp8) == 2 * 7
    assert all(key.endswith("_proj.weight") and held[f"{key}_scale_inv"] == torch.float32 for key in in_fp8)
    others = {dtype for key, dtype in held.items() if key not in in_fp8 and not key.endswith("scale_inv")}
    assert others == set(seen.values()) == {torch.bfloat16}, "what was not quantised has the dtype that was asked for"
    assert not any("language" in key for key in seen)


@pytest.mark.parametrize("letters", ["E", "PD", "EPD"])
def test_bytes_are_counted_before_they_are_loaded(letters: str, on_hopper: None) -> None:
    directory = checkpoint("fp8-llava")
    parts = ["vision"] * ("E" in letters) + ["language"] * ("P" in letters)
    for keep, device in ((True, CUDA), (False, None)):
        loaded = [loader._load_part(directory, part, torch.bfloat16, keep) for part in parts]
        held = sum(each.nbytes for part in loaded for each in (*part.parameters(), *part.buffers()))
        assert count_weight_bytes(directory, letters, dtype="bfloat16", device=device) == held


def test_a_gpu_that_cannot_says_why(copied: Path, on_hopper: None, monkeypatch: pytest.MonkeyPatch,
                                    caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    fields = quantization.read_quantization(copied)
    assert quantization.choose_fp8(fields, copied, torch.bfloat16, CUDA)
    assert not quantization.choose_fp8(fields, copied, torch.bfloat16, torch.device("cpu"))
    assert not quantization.choose_fp8(None, copied, torch.bfloat16, CUDA)
    assert not caplog.messages
    for odd in ({"activation_scheme": "static"}, {"scale_fmt": "ue8m0"}, {"weight_block_size": None},
                {"weight_block_size": [96, 32]}, {"weight_block_size": "ab"}):  # fmt: skip
        assert fields is not None
        assert not quantization.choose_fp8({**fields, **odd}, copied, torch.bfloat16, CUDA)
        assert "are widened to torch.bfloat16 on cuda:0: it" in caplog.messages[-1]
    monkeypatch.setattr(quantization, "explain_no_fp8_products", lambda device, dtype: "it is an A100")
    assert not quantization.choose_fp8(fields, copied, torch.bfloat16, CUDA)
    assert caplog.messages[-1].endswith("it is an A100")


def test_a_config_that_is_no_object_is_refused(copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text()) | {"quantization_config": [8]}
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"is an object of JSON, got \[8\]"):
        quantization.read_quantization(copied)


def test_weights_in_fp8_beside_linear_layers_are_refused(copied: Path) -> None:
    with pytest.raises(UnsupportedModel, match="besides those of linear layers"):
        load_model(change_config(copied, modules_to_convert=["embed_tokens"]), "EPD")


@pytest.mark.parametrize("keep", [True, False])
def test_a_scale_that_is_missing_is_found(keep: bool, copied: Path) -> None:
    """Without its scale a weight would be read as if it were plain."""
    weights = load_file(copied / "model.safetensors")
    gone = next(key for key in weights if key.endswith("down_proj.weight_scale_inv"))
    del weights[gone]
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match="down_proj"):
        loader._load_part(copied, "language", torch.float32, keep)


def test_a_layer_of_another_name_is_found(copied: Path) -> None:
    weights = load_file(copied / "model.safetensors")
    weights["elsewhere.proj.weight_scale_inv"] = torch.ones((1, 1))
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModel, match=r"does not name so: \['elsewhere.proj'\]"):
        loader._load_part(copied, "language", torch.float32, True)


def test_a_scale_is_part_of_the_digest(copied: Path) -> None:
    before = sample_digest(copied)
    weights = load_file(copied / "model.safetensors")
    next(value for key, value in weights.items() if key.endswith("scale_inv")).mul_(1.0001)
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    assert sample_digest(copied) != before


def test_the_planner_knows_their_bytes(copied: Path, tmp_path: Path) -> None:
    plain, found = read_model_shape(checkpoint("llava")), read_model_shape(copied)
    linear = plain.language.weights
    assert plain.language_bytes - found.language_bytes == linear * (plain.dtype_bytes - 1)
    assert (plain.vision_bytes, plain.kv_bytes) == (found.vision_bytes, found.kv_bytes)


def test_blocks_of_a_checkpoint_may_have_another_size(tmp_path: Path) -> None:
    directory = build_fp8_checkpoint("llama", tmp_path / "wide", block=(64, 64))
    held = quantization.list_fp8_layers(directory)
    assert held
    assert not any("k_proj" in name for name in held), "32 outputs are no whole block"
    model = loader._load_part(directory, "language", torch.float32, True)
    assert weights_of(model)["model.layers.0.self_attn.k_proj.weight"] == torch.float32


def test_a_text_config_that_is_quantised_is_so_for_everybody(copied: Path) -> None:
    """Fails at 8235ded: processes took such parts from each other, and plans counted two bytes for each weight."""
    config = json.loads((copied / "config.json").read_text())
    assert loader.can_share_weights(checkpoint("llava"), "cpu")
    wanted = read_model_shape(copied)
    config["text_config"]["quantization_config"] = config.pop("quantization_config")
    (copied / "config.json").write_text(json.dumps(config))
    assert quantization.read_quantization(copied) is not None
    assert not loader.can_share_weights(copied, "cpu")
    assert read_model_shape(copied).layer_dtype_bytes == wanted.layer_dtype_bytes == 1
