"""transformers' own video processors, loaded without torchvision and without telling anybody that it is there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trinity.errors import UnsupportedModel
from trinity.preprocess.checkpoint import torch_pixels
from trinity.preprocess.checkpoint.video_processors import backend_name, load_video_processor


def has_torchvision() -> bool:
    from transformers.utils import is_torchvision_available

    return bool(is_torchvision_available())


without_torchvision = pytest.mark.skipif(has_torchvision(), reason="torchvision is installed: no twins are made")


def config(model_type: str) -> Any:
    return SimpleNamespace(model_type=model_type)


def clip(frames: int = 4, height: int = 56, width: int = 84) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


@without_torchvision
def test_a_twin_logs_as_the_module_that_it_is_of(tmp_path: Path) -> None:
    module = sys.modules[type(load_video_processor(tmp_path, config("qwen2_vl"))).__module__]
    assert module.__name__.startswith("trinity_twin_of.")
    assert module.logger.name == "transformers.models.qwen2_vl.video_processing_qwen2_vl"


def test_a_type_has_the_class_that_transformers_names(tmp_path: Path) -> None:
    for model_type, name in (("qwen2_5_vl", "Qwen2VLVideoProcessor"), ("internvl", "InternVLVideoProcessor")):
        assert type(load_video_processor(tmp_path, config(model_type))).__name__ == name
    assert load_video_processor(tmp_path, config("llama")) is None


def test_settings_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    settings = {"video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 16, "min_pixels": 1024}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    made = load_video_processor(tmp_path, config("anything"))
    assert (made.patch_size, made.size["shortest_edge"]) == (16, 1024)


def test_a_class_that_does_not_exist_is_named(tmp_path: Path) -> None:
    (tmp_path / "video_preprocessor_config.json").write_text('{"video_processor_type": "NoSuchVideoProcessor"}')
    with pytest.raises(UnsupportedModel, match="'NoSuchVideoProcessor'"):
        load_video_processor(tmp_path, config("qwen2_vl"))


def test_pixels_are_the_frames_resized_and_normalised(tmp_path: Path) -> None:
    """The rows of Qwen2-VL's processor are patches of two frames each, laid out anew here by hand."""
    made = load_video_processor(tmp_path, config("qwen2_vl"))
    frames = clip(height=56, width=112)
    size = {"shortest_edge": 28 * 28, "longest_edge": 56 * 112}
    found = made([frames], do_sample_frames=False, return_tensors="pt", size=size)
    assert found["video_grid_thw"].tolist() == [[2, 4, 8]]
    mean, std = (np.array(each, dtype=np.float32) for each in (made.image_mean, made.image_std))
    plain = torch.from_numpy((frames.astype(np.float32) / 255 - mean) / std)
    first = plain[:2, :14, :14].permute(3, 0, 1, 2).flatten()
    assert torch.allclose(found["pixel_values_videos"][0], first, atol=1e-5)
    second = plain[2:, :14, :14].permute(3, 0, 1, 2).flatten()
    assert torch.allclose(found["pixel_values_videos"][4 * 8], second, atol=1e-5)


@without_torchvision
def test_nobody_else_is_told_that_torchvision_is_there(tmp_path: Path) -> None:
    load_video_processor(tmp_path, config("smolvlm"))
    import transformers
    from transformers import image_processing_backends, image_utils
    from transformers.utils import is_torchvision_available

    assert not [name for name in sys.modules if name.partition(".")[0] == "torchvision"]
    assert not is_torchvision_available()
    assert not hasattr(image_processing_backends, "tvF")
    assert not image_utils.pil_torch_interpolation_mapping
    with pytest.raises((ImportError, ModuleNotFoundError)):
        transformers.SmolVLMVideoProcessor()


@without_torchvision
def test_the_backend_is_torch_in_its_version() -> None:
    assert backend_name() == f"torch {torch.__version__}"


@without_torchvision
def test_the_functions_are_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twins find ``torch_pixels`` and nothing else: another resize gives other pixels."""
    made = load_video_processor(tmp_path, config("llava_onevision"))
    before = made([clip()], return_tensors="pt")["pixel_values_videos"]
    monkeypatch.setattr(torch_pixels, "resize", lambda image, size, **_: image.new_zeros(*image.shape[:-2], *size))
    after = made([clip()], return_tensors="pt")["pixel_values_videos"]
    assert before.shape == after.shape
    assert not torch.equal(before, after)
