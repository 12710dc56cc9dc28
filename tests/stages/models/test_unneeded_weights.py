"""Weights that files may lack: those on which no feature depends, found by running, and no others."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from support.checkpoint_files import checkpoint
from trinity.errors import ConfigError
from trinity.preprocess.checkpoint.config_file import read_config
from trinity.stages.models import load_model
from trinity.stages.models.registry import find_adapter
from trinity.stages.models.unneeded_weights import list_needed, list_needed_by_encoder
from trinity.stages.proof import prove


def test_of_a_tower_that_is_read_before_its_end_just_the_end_is_not_needed() -> None:
    """Each tensor of the part is asked for; by transformers' code LLaVA's features are of the layer before the last."""
    from transformers import LlavaForConditionalGeneration

    directory = checkpoint("llava")
    config = read_config(directory)
    adapter, _ = find_adapter(config, directory)
    whole: Any = LlavaForConditionalGeneration.from_pretrained(directory, dtype=torch.float32)
    names = [name for name, _ in whole.named_parameters() if "language_model" not in name and "lm_head" not in name]
    last = f".encoder.layers.{config.vision_config.num_hidden_layers - 1}."
    found = list_needed_by_encoder(directory, whole.eval(), adapter, names, torch.float32)
    assert {name for name in names if name not in found} == {
        name for name in names if "post_layernorm" in name or last in name
    }


class Routed(nn.Module):
    """A module with two experts, of which an input chooses one, and a part whose output is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.wasted = nn.Linear(4, 4)

    def forward(self, rows: Tensor) -> Tensor:
        self.wasted(rows)
        found: Tensor = self.experts[int(rows.sum() < 0)](rows)
        return found


def test_what_does_not_run_for_a_sample_may_be_for_others_and_is_needed() -> None:
    model = Routed().requires_grad_(False)
    names = [name for name, _ in model.named_parameters()]
    needed = list_needed(model, names, lambda: [model(torch.ones(2, 4))])
    assert needed == [name for name in sorted(names) if "experts" in name]
    assert all(bool(each.isnan().all()) for name, each in model.named_parameters() if "wasted" in name)
    assert not any(bool(each.isnan().any()) for name, each in model.named_parameters() if "experts" in name)


class Placed(nn.Module):
    """A module that looks its rows up by a buffer of whole numbers and hides some by one of truth values."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(8, 4)
        self.register_buffer("places", torch.arange(8))
        self.register_buffer("mask", torch.ones(8, 1, dtype=torch.bool))

    def forward(self, rows: Tensor) -> Tensor:
        return (rows + self.rows(self.places)) * self.mask  # type: ignore[no-any-return, operator]


def test_what_cannot_be_nan_is_needed() -> None:
    model = Placed().requires_grad_(False)
    assert list_needed(model, ["places", "mask"], lambda: [model(torch.ones(8, 4))]) == ["mask", "places"]


def test_all_are_needed_where_nothing_can_be_run() -> None:
    model = Routed().requires_grad_(False)

    def fail() -> list[Tensor]:
        raise RuntimeError("no")

    assert list_needed(model, ["wasted.weight"], fail) == ["wasted.weight"]
    assert list_needed(model, ["wasted.weight"], lambda: [torch.full((1,), torch.nan)]) == ["wasted.weight"]


def copy_without(name: str, pattern: str, folder: Path) -> Path:
    directory = Path(shutil.copytree(checkpoint(name), folder / "model"))
    weights = load_file(directory / "model.safetensors")
    left = {key: value for key, value in weights.items() if not re.search(pattern, key)}
    assert len(left) < len(weights)
    save_file(left, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_needed_one_is_named_and_one_that_is_not_needed_is_not(tmp_path: Path) -> None:
    directory = copy_without("llava", "post_layernorm", tmp_path)
    assert load_model(directory, "E", dtype="float32").vision is not None
    other = copy_without("llava", "post_layernorm|pre_layrnorm", tmp_path / "other")
    with pytest.raises(ConfigError, match="lacks weights of") as refused:
        load_model(other, "E")
    assert "pre_layrnorm" in str(refused.value)
    assert "post_layernorm" not in str(refused.value)


@pytest.mark.parametrize(("pattern", "serves"), [("post_layernorm", True), ("layers.0.layer_norm1", False)])
def test_a_proof_knows_what_is_not_needed(pattern: str, serves: bool, tmp_path: Path) -> None:
    """ViP-LLaVA takes layers before the last, and is a type that nobody listed."""
    verdict = prove(copy_without("any-vipllava", pattern, tmp_path))
    assert (verdict.failed is None) is serves, verdict.failed
    if verdict.failed is not None:
        assert verdict.failed.name == "weights"
        assert pattern in verdict.failed.said
