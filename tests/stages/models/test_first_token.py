"""A config with which a listed type's text model does not run is refused as it is loaded, and not at each request."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.checkpoint_files import checkpoint
from trinity.errors import ConfigError
from trinity.stages.models import load_model, loader, whole_forward

TYPES = ("llava", "gemma3", "qwen2_5_vl", "qwen3_omni_moe_thinker", "minicpmv4_6", "llama")


def changed(name: str, folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a checkpoint, with fields of its text model changed."""
    directory = Path(shutil.copytree(checkpoint(name), folder / "model"))
    fields = json.loads((directory / "config.json").read_text())
    change(fields.get("text_config", fields))
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


def set_rope(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.update(rope_parameters=value)


SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 4]}


@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    ("name", "change"), [("qwen2_vl", set_rope(None)), ("qwen2_5_vl", set_rope(SECTIONS))], ids=["none", "sections"]
)
def test_rotary_positions_that_do_not_fit_are_refused(
    name: str, change: Callable[[dict[str, Any]], None], large: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "LONG_LOAD_BYTES", 1 if large else 1 << 30)
    directory = changed(name, tmp_path, change)
    with pytest.raises(ConfigError, match=rf"'{name}' does not run with the checkpoint's config.json \(.*split_sizes"):
        load_model(directory, "PD", dtype="float32")
    assert load_model(directory, "E", dtype="float32").vision is not None, "an E runs no text model"


@torch.inference_mode()
def test_what_transformers_has_a_default_for_loads(tmp_path: Path) -> None:
    directory = changed("llama", tmp_path, set_rope(None))
    untyped: Any = AutoModelForCausalLM
    logits = untyped.from_pretrained(directory, local_files_only=True)(input_ids=torch.tensor([[3, 4]])).logits
    assert logits.isfinite().all()
    assert load_model(directory, "PD", dtype="float32").language is not None


@pytest.mark.parametrize("name", TYPES)
def test_a_large_model_is_tried_without_its_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    own = whole_forward._run_token

    def note(model: Any, adapter: Any, device: torch.device) -> Any:
        tried.append(device.type)
        return own(model, adapter, device)

    monkeypatch.setattr(whole_forward, "_run_token", note)
    monkeypatch.setattr(loader, "_parts", {})
    monkeypatch.setattr(loader, "LONG_LOAD_BYTES", 1)
    for _ in range(2):
        load_model(checkpoint(name), "PD", dtype="float32")
    assert tried == ["meta"]
