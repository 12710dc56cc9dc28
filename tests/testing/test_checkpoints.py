"""Tiny checkpoints: real architectures whose greedy output is diverse and depends on what it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support import checkpoint_files
from support.checkpoint_files import checkpoint
from trinity.errors import UnknownName
from trinity.preprocess.loader import load_processor
from trinity.testing import checkpoints
from trinity.testing.checkpoints import ARCHITECTURES, MIDSIZE_CHECKPOINTS, build_checkpoint, build_midsize

TEXT_ONLY = ("llama", "mistral")


def picture(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((80, 60))


def loaded(directory: Path) -> tuple[Any, Any, Any]:
    """Model, tokenizer and processor (None: text only), as transformers loads them."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(directory), AutoTokenizer.from_pretrained(directory)
    processor = load_processor(directory, config, tokenizer)
    family: Any = AutoModelForCausalLM if processor is None else AutoModelForImageTextToText
    model, report = family.from_pretrained(directory, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    return model, tokenizer, processor


def greedy(parts: tuple[Any, Any, Any], question: str, image: Image.Image | None) -> list[int]:
    model, tokenizer, processor = parts
    content: Any = question if processor is None else [{"type": "image"}, {"type": "text", "text": question}]
    chat = [{"role": "user", "content": content}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    kwargs = {"return_tensors": "pt", "add_special_tokens": False}
    if processor is None:
        inputs = tokenizer(text, return_token_type_ids=False, **kwargs)
    else:
        inputs = processor(images=[image], text=text, **kwargs)
    out = model.generate(**inputs, max_new_tokens=32, do_sample=False)
    return out[0, inputs["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_output_is_diverse_and_depends_on_the_input(name: str) -> None:
    parts = loaded(checkpoint(name))
    first = greedy(parts, "What is this?", picture(0))
    assert len(first) == 32
    assert len(set(first)) >= 8
    assert not set(first) & set(parts[1].added_tokens_decoder)
    assert greedy(parts, "Who is this?", picture(0)) != first
    if name not in TEXT_ONLY:
        assert greedy(parts, "What is this?", picture(1)) != first


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_sizes_and_files(name: str) -> None:
    directory = checkpoint(name)
    files = {path.name: path.stat().st_size for path in directory.iterdir()}
    assert 400_000 < files["model.safetensors"] < 1_500_000
    wanted = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}
    if name not in TEXT_ONLY:
        wanted |= {"preprocessor_config.json", "processor_config.json"}
    assert wanted <= set(files)


def weights(directory: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(directory / "model.safetensors")


def test_weights_follow_the_seed_and_leave_the_callers_random_state_alone(tmp_path: Path) -> None:
    torch.manual_seed(3)
    build_checkpoint("llama", tmp_path / "a")
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))
    one, other = weights(build_checkpoint("llama", tmp_path / "b")), weights(tmp_path / "a")
    assert all(torch.equal(one[key], other[key]) for key in one)
    third = weights(build_checkpoint("llama", tmp_path / "c", seed=1))
    assert not any(torch.equal(one[key], third[key]) for key in one)
    assert {tensor.dtype for tensor in one.values()} == {torch.float32}


def test_mistral_slides_its_window_within_a_short_prompt() -> None:
    from transformers import AutoConfig

    assert AutoConfig.from_pretrained(checkpoint("mistral")).sliding_window == 24
    text = AutoConfig.from_pretrained(checkpoint("gemma3")).text_config
    assert (text.sliding_window, set(text.layer_types)) == (24, {"sliding_attention", "full_attention"})


@pytest.mark.parametrize("build", [build_checkpoint, build_midsize])
def test_unknown_names_list_the_known_ones(build: Any, tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="llama"):
        build("llama-7b", tmp_path)
    assert not list(tmp_path.iterdir())


def test_midsize_text_model(tmp_path: Path) -> None:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(build_midsize("llama-512x8", tmp_path))
    assert (config.hidden_size, config.num_hidden_layers, config.num_key_value_heads) == (512, 8, 2)
    assert len(set(greedy(loaded(tmp_path), "What is this?", None))) >= 8


SIZES = {"llava-110m": (110e6, 3e6), "llava-500m": (500e6, 15e6)}
SHAPES = {"llava-110m": ((384, 12), (768, 12)), "llava-500m": ((768, 12), (1280, 22))}


@pytest.mark.parametrize("name", SIZES)
def test_midsize_llavas_have_the_shapes_and_the_parameters_that_their_names_say(name: str) -> None:
    recipe = checkpoints._recipe(name)
    with torch.device("meta"):
        model = recipe.model_class(recipe.config)
    vision, text = recipe.config.vision_config, recipe.config.text_config
    shapes = tuple((each.hidden_size, each.num_hidden_layers) for each in (vision, text))
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(SIZES[name][0], abs=SIZES[name][1])
    assert shapes == SHAPES[name]
    assert text.num_attention_heads == 4 * text.num_key_value_heads
    assert (vision.image_size // vision.patch_size) ** 2 == 576


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_midsize_llava(name: str, tmp_path: Path) -> None:
    parts = loaded(build_midsize(name, tmp_path))
    assert len(set(greedy(parts, "What is this?", picture(0)))) >= 4
    assert greedy(parts, "What is this?", picture(0)) != greedy(parts, "What is this?", picture(1))


def test_every_name_has_a_recipe() -> None:
    assert set(MIDSIZE_CHECKPOINTS) == {"llava-110m", "llava-500m", "llama-512x8"}
    assert len(set(ARCHITECTURES)) == 13


def test_fixture_builds_once_and_shares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = []

    def build(name: str, directory: Path) -> Path:
        built.append(name)
        directory.mkdir(parents=True)
        return directory

    monkeypatch.setattr(checkpoint_files, "CACHE", tmp_path)
    monkeypatch.setattr(checkpoint_files.checkpoints, "build_checkpoint", build)
    uncached = checkpoint_files.checkpoint.__wrapped__
    assert uncached("llama") == uncached("llama") == tmp_path / checkpoint_files.recipe_hash() / "llama"
    assert built == ["llama"]
    assert [path.name for path in (tmp_path / checkpoint_files.recipe_hash()).iterdir()] == ["llama"]


def test_fixture_survives_a_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process publishes the same checkpoint while this one builds it."""
    target = tmp_path / checkpoint_files.recipe_hash() / "llama"

    def build(_: str, directory: Path) -> Path:
        for place in (target, directory):
            place.mkdir(parents=True)
            (place / "config.json").write_text(place.parent.name)
        return directory

    monkeypatch.setattr(checkpoint_files, "CACHE", tmp_path)
    monkeypatch.setattr(checkpoint_files.checkpoints, "build_checkpoint", build)
    assert checkpoint_files.checkpoint.__wrapped__("llama") == target
    assert (target / "config.json").read_text() == target.parent.name
    assert list(target.parent.iterdir()) == [target]


def test_naming_checkpoints_imports_no_torch() -> None:
    code = "import sys, trinity.testing.checkpoints; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
