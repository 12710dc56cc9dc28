"""Weights of InternVL as published: each role reads its own, by other names, and fused rows fall apart as they were."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.internvl_answers import ANSWERS
from support.internvl_chats import copy_published, needs_sentencepiece, published, requests
from support.internvl_folders import PUBLISHED
from trinity import commands
from trinity.errors import ConfigError
from trinity.preprocess.processor import RequestProcessor
from trinity.stages.models import load_model
from trinity.stages.models.internvl_weights import ungroup
from trinity.stages.models.loader import count_weight_bytes

LANGUAGE = "language_model."


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in folder.glob("*.safetensors") for name, each in load_file(path).items()}


def keep(folder: Path, wanted: Any) -> Path:
    """Leave the weights of one file whose names are wanted."""
    path = folder / "model.safetensors"
    save_file({name: each for name, each in load_file(path).items() if wanted(name)}, path, metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize(("heads", "keys"), [(4, 2), (4, 4), (6, 1), (8, 2)])
@pytest.mark.parametrize("width", [(), (24,)])
def test_fused_rows_are_queries_a_key_and_a_value_of_each_group(heads: int, keys: int, width: tuple[int, ...]) -> None:
    size = 4
    rows = torch.arange((heads + 2 * keys) * size * (width[0] if width else 1)).view(-1, *width)
    wanted: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    left = list(rows.split(size))
    for _ in range(keys):
        wanted["q"] += [left.pop(0) for _ in range(heads // keys)]
        wanted["k"].append(left.pop(0))
        wanted["v"].append(left.pop(0))
    text = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=keys, hidden_size=heads * size)
    for found, each in zip(ungroup(rows, text), wanted.values(), strict=True):
        assert torch.equal(found, torch.cat(each))


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_role_holds_its_own_weights_and_counts_them(name: str) -> None:
    folder = published(name)
    stored = tensors(folder)
    for letters, mine in (("E", False), ("PD", True), ("D", True)):
        model = load_model(folder, letters)
        assert (model.vision is None, model.language is None) == (mine, not mine)
        part: Any = model.language if mine else model.vision
        size = sum(each.nbytes for key, each in stored.items() if key.startswith(LANGUAGE) is mine)
        assert sum(each.nbytes for each in part.parameters()) == size
        assert sum(each.nbytes for each in part.buffers() if each.numel() > 64) == 0
        assert abs(count_weight_bytes(folder, letters) - size) < 1024, "and buffers of positions"


@pytest.mark.parametrize("name", ["small", "qwen"])
def test_a_role_needs_no_weights_of_others(name: str, tmp_path: Path) -> None:
    text = keep(copy_published(name, tmp_path / "text"), lambda key: key.startswith(LANGUAGE))
    images = keep(copy_published(name, tmp_path / "images"), lambda key: not key.startswith(LANGUAGE))
    assert load_model(text, "PD").language is not None
    assert load_model(images, "E").vision is not None
    with pytest.raises(ConfigError, match=r"lacks weights of.*vision_tower|lacks weights of.*multi_modal_projector"):
        load_model(text, "E")
    with pytest.raises(ConfigError, match=r"lacks weights of.*(lm_head|language_model)"):
        load_model(images, "D")


@pytest.mark.parametrize("name", PUBLISHED)
def test_features_are_those_of_the_original(name: str) -> None:
    needs_sentencepiece()
    processor, model = RequestProcessor(published(name)), load_model(published(name), "E", dtype="float32")
    for request in requests():
        found, wanted = processor.process(request), ANSWERS[name][str(request.request_id)]
        if found.inputs:
            with torch.inference_mode():
                rows = model.vision.base_model.get_image_features(**found.inputs[-1], return_dict=True).pooler_output
            assert torch.allclose(rows[-1, -1, :3], torch.tensor(wanted.feature), atol=2e-4), request.request_id
    processor.close()


@pytest.mark.parametrize("lost", ["mlp1.0.weight", "mlp1.3.bias", "vision_model.encoder.layers.0.attn.qkv.weight"])
def test_a_lost_weight_of_an_encoder_is_named(lost: str, tmp_path: Path) -> None:
    folder = keep(copy_published("qwen", tmp_path), lambda key: key != lost)
    assert load_model(folder, "D").language is not None
    with pytest.raises(ConfigError, match="lacks weights of"):
        load_model(folder, "E")


def test_a_layer_behind_the_one_whose_features_are_taken_may_be_lost(tmp_path: Path) -> None:
    folder = keep(copy_published("qwen", tmp_path), lambda key: not key.startswith("vision_model.encoder.layers.1."))
    processor = RequestProcessor(folder)
    models = [load_model(each, "E", dtype="float32").vision.base_model for each in (published("qwen"), folder)]
    found = next(made for made in map(processor.process, requests()) if made.inputs)
    with torch.inference_mode():
        whole, cut = (each.get_image_features(**found.inputs[-1], return_dict=True).pooler_output for each in models)
    assert torch.equal(torch.as_tensor(whole[-1]), torch.as_tensor(cut[-1]))
    processor.close()


@pytest.mark.parametrize(
    "lost", ["language_model.model.layers.1.attention.wqkv.weight", "language_model.output.weight"]
)
def test_a_lost_weight_of_a_text_model_is_named(lost: str, tmp_path: Path) -> None:
    folder = keep(copy_published("small", tmp_path), lambda key: key != lost)
    with pytest.raises(ConfigError, match="lacks weights of"):
        load_model(folder, "P")


def test_a_lost_file_is_a_typed_error(tmp_path: Path) -> None:
    folder = copy_published("large", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    for letters in ("E", "D"):
        with pytest.raises(ConfigError):
            load_model(folder, letters)


@pytest.mark.parametrize(
    ("part", "name", "value", "letters"),
    [
        ("llm_config", "num_key_value_heads", 4, "D"),
        ("llm_config", "num_attention_heads", 3, "D"),
        ("llm_config", "num_key_value_heads", 3, "D"),
        ("llm_config", "hidden_size", 1 << 20, "D"),
        ("llm_config", "intermediate_size", 1 << 30, "P"),
        ("llm_config", "num_hidden_layers", 400, "P"),
        ("vision_config", "hidden_size", 1 << 18, "E"),
        ("vision_config", "num_hidden_layers", 500, "E"),
        ("vision_config", "num_attention_heads", 5, "E"),
    ],
)
def test_sizes_of_another_model_are_typed_errors(
    part: str, name: str, value: int, letters: str, tmp_path: Path
) -> None:
    folder = copy_published("small", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config[part][name] = value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError):
        load_model(folder, letters)


@pytest.mark.slow
def test_trinity_check_proves_it(capsys: pytest.CaptureFixture[str]) -> None:
    needs_sentencepiece()
    assert commands.main(["check", str(published("small"))]) == 0
    assert "internvl serves: image, text" in capsys.readouterr().out
