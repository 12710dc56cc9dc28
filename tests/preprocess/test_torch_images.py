"""Image processors that have torchvision's backend alone: they load over torch, and stay within their bounds."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers import Idefics3Config

from trinity.preprocess.checkpoint import video_processors
from trinity.preprocess.checkpoint.processor_parts import load_media_parts
from trinity.preprocess.checkpoint.torch_pixels import pad, pil_to_tensor
from trinity.preprocess.checkpoint.video_processors import find_images
from trinity.preprocess.media.image_calls import ImageTooLarge, guard_resizes
from trinity.preprocess.media.image_kind import make_channels_contiguous

NAMES = ("Cohere2VisionImageProcessor", "Llama4ImageProcessor", "Lfm2VlImageProcessor", "MiniMaxM3VLImageProcessor")


def picture(width: int = 80, height: int = 60) -> Image.Image:
    coarse = np.random.default_rng(3).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


@pytest.mark.parametrize("name", NAMES)
def test_a_processor_without_a_pil_backend_loads_and_makes_pixels(name: str) -> None:
    made = find_images(name, "torchvision")()([picture()], return_tensors="pt")
    assert made["pixel_values"].isfinite().all()
    other = find_images(name, "torchvision")()([picture(81, 60)], return_tensors="pt")
    assert made["pixel_values"].shape != other["pixel_values"].shape or not torch.equal(
        made["pixel_values"], other["pixel_values"]
    )


def test_what_transformers_does_not_have_is_told() -> None:
    with pytest.raises(ImportError, match="no image processor NoSuchImageProcessor"):
        find_images("NoSuchImageProcessor", "torchvision")


def test_a_resize_beyond_the_limit_is_stopped_here_too() -> None:
    images, allowed = find_images("Cohere2VisionImageProcessor", "torchvision")(), threading.local()
    make_channels_contiguous(images)  # leaves it as it is: its images are tensors
    guard_resizes(images, allowed)
    images([picture()], return_tensors="pt")
    allowed.pixels = 1000
    with pytest.raises(ImageTooLarge, match="beyond max_processed_pixels"):
        images([picture()], return_tensors="pt")


def test_settings_of_a_checkpoint_are_followed(tmp_path: Path) -> None:
    kind: Any = find_images("Cohere2VisionImageProcessor", "torchvision")
    kind(size={"height": 28, "width": 28}).save_pretrained(tmp_path)
    from trinity.preprocess.checkpoint.config_file import read_json

    again = kind.from_dict(read_json(tmp_path / "preprocessor_config.json"))
    assert again([picture()], return_tensors="pt")["pixel_values"].shape[-2:] == (28, 28)


def test_padding_takes_a_number_for_each_channel() -> None:
    image = torch.ones(3, 2, 2, dtype=torch.uint8)
    found = pad(image, [1, 0, 0, 2], fill=[5, 6, 7])
    assert found.shape == (3, 4, 3)
    assert found[:, -1, 0].tolist() == [5, 6, 7]
    assert found[:, 0, 1].tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="shorter"):
        pad(image, [1, 0, 0, 2], fill=[5, 6])


@pytest.mark.parametrize(("mode", "shape"), [("RGB", (3, 60, 80)), ("L", (1, 60, 80))])
def test_a_picture_becomes_channels_first(mode: str, shape: tuple[int, ...]) -> None:
    found = pil_to_tensor(picture().convert(mode))
    assert found.dtype == torch.uint8
    assert tuple(found.shape) == shape


def test_a_class_that_the_root_hides_is_found_in_its_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers 5.17 hides Idefics3's where torchvision is not installed."""
    shown: Any = find_images("Idefics3ImageProcessorPil", "pil")
    shown(size={"longest_edge": 84}).save_pretrained(tmp_path)

    class DummyObject(type):
        def __getattr__(cls, name: str) -> Any:
            raise ImportError(f"{name} requires torchvision")

    monkeypatch.setattr(transformers, shown.__name__, DummyObject(shown.__name__, (), {}))
    loaded = load_media_parts(tmp_path, Idefics3Config(), ["image_processor"], False)["image_processor"]
    assert type(loaded) is shown
    assert loaded.size["longest_edge"] == 84


def test_names_of_video_processors_are_read_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name alone, as transformers 5.17 has it, or one for each backend."""
    named = {"one": "OneVideoProcessor", "two": {"torchvision": "TwoVideoProcessor"}, "none": None}
    monkeypatch.setattr(video_processors, "_load", lambda _name: SimpleNamespace(VIDEO_PROCESSOR_MAPPING_NAMES=named))
    assert video_processors._class_names() == {"one": "OneVideoProcessor", "two": "TwoVideoProcessor"}
