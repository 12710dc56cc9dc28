"""Pixels are those of transformers: of its ``load_image`` for images, and of its processors for arrays and tensors."""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.checkpoint_files import checkpoint
from support.image_reader import image_reader
from trinity.preprocess.media.image_kind import ImageReader
from trinity.preprocess.media.images import image_digest, read_image
from trinity.preprocess.media_limits import MediaLimits, MediaProblem
from trinity.preprocess.processor import RequestProcessor
from trinity.testing.oracle import load_as_transformers

DEFAULT = MediaLimits()


def made_by_transformers(source: Any, name: str = "llava") -> torch.Tensor:
    """Pixels of the model's own processor, given what transformers' ``load_image`` or a caller gives it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's, of palettes
        loaded = load_as_transformers(source)
    pixels: torch.Tensor = _own(name)(images=[[loaded]], return_tensors="pt")["pixel_values"]
    return pixels


@cache
def _own(name: str) -> Any:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(checkpoint(name), backend="pil")


@cache
def _reader(name: str) -> ImageReader:
    return image_reader(RequestProcessor(checkpoint(name)))


MODES = "1 L LA P PA RGB RGBA RGBX CMYK YCbCr HSV LAB"


def of_mode(mode: str) -> Image.Image:
    rgba = Image.fromarray(np.random.default_rng(5).integers(0, 255, (60, 80, 4), dtype=np.uint8))
    if mode == "LAB":
        return Image.frombytes("LAB", (80, 60), rgba.convert("RGB").tobytes())
    through = {"PA": "P", "RGBX": "RGB", "HSV": "RGB", "YCbCr": "RGB", "CMYK": "RGB"}
    return rgba.convert(through[mode]).convert(mode) if mode in through else rgba.convert(mode)


@pytest.mark.parametrize("mode", MODES.split())
def test_pillow_images_become_what_transformers_makes_of_them(mode: str) -> None:
    image = of_mode(mode)
    found = _reader("llava").read(read_image(image, DEFAULT)).inputs["pixel_values"]
    assert torch.equal(found, made_by_transformers(image))


FILES = [("PNG", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA")]
FILES += [("TIFF", mode) for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK")]
FILES += [("JPEG", mode) for mode in ("L", "RGB", "CMYK")] + [
    ("WEBP", "RGBA"),
    ("GIF", "P"),
    ("BMP", "L"),
    ("PPM", "L"),
]


@pytest.mark.parametrize(("form", "mode"), FILES)
def test_files_become_what_transformers_makes_of_them(form: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{form.lower()}"
    of_mode(mode).save(path, form)
    with Image.open(path) as opened:
        pictures = [read_image(source, DEFAULT) for source in (path, str(path), path.read_bytes(), opened)]
    assert len({image_digest(picture) for picture in pictures}) == 1
    found = _reader("llava").read(pictures[0]).inputs["pixel_values"]
    assert torch.equal(found, made_by_transformers(path.read_bytes()))


def arrays() -> dict[str, Any]:
    pixels = np.random.default_rng(6).integers(0, 255, (60, 80, 3), dtype=np.uint8)
    first = np.ascontiguousarray(np.moveaxis(pixels, -1, 0))
    return {
        "bytes": pixels,
        "channels first": first,
        "one channel": pixels[:, :, :1],
        "one channel first": first[:1],
        "0 to 1": pixels / 255,
        "0 to 1, channels first": (first / 255).astype(np.float32),
        "half": (pixels / 255).astype(np.float16),
        "0 to 255 as floats": pixels.astype(np.float64),
        "whole numbers": pixels.astype(np.int64),
        "0 to 1, one channel": pixels[:, :, :1] / 255,
        "strange strides": pixels[::-1, ::-2],
        "tensor": torch.from_numpy(first),
        "tensor of floats": torch.from_numpy(first / 255),
        "tensor, channels last": torch.from_numpy(pixels),
        "tensor with a gradient": torch.from_numpy(first / 255).requires_grad_(),
        "tensor of a class of one's own": torch.from_numpy(first).as_subclass(OwnTensor),
    }


class OwnTensor(torch.Tensor):
    """As torchvision's and other packages' are: of a module that is not torch's."""


@pytest.mark.parametrize("name", ["llava", "qwen2_vl", "internvl", "llava_onevision"])
@pytest.mark.parametrize("kind", arrays())
def test_arrays_and_tensors_become_what_transformers_makes_of_them(kind: str, name: str) -> None:
    source = arrays()[kind]
    item = _reader(name).read(read_image(source, DEFAULT))
    plain = source.detach() if isinstance(source, torch.Tensor) else np.ascontiguousarray(source)
    assert torch.equal(item.inputs["pixel_values"], made_by_transformers(plain, name))
    assert (item.height, item.width) in ((60, 80), (60, 40))


def test_layouts_of_the_same_numbers_have_one_key_and_other_numbers_have_others() -> None:
    def content(source: Any) -> str:
        return _reader("llava").read(read_image(source, DEFAULT)).content

    given = arrays()
    assert content(given["bytes"]) == content(given["channels first"]) == content(given["tensor"])
    assert content(given["0 to 1"]) == content(np.moveaxis(given["0 to 1"], -1, 0))
    assert len({content(given[kind]) for kind in ("bytes", "0 to 1", "half", "whole numbers")}) == 4


@pytest.mark.parametrize("array", [np.full((60, 80, 3), -1.0), np.full((60, 80, 3), 300), np.full((60, 80, 3), 2.5)])
def test_numbers_that_transformers_refuses_are_refused(array: np.ndarray) -> None:
    with pytest.raises(ValueError, match="outside the range"):
        made_by_transformers(array)
    with pytest.raises(MediaProblem, match="outside the range"):
        _reader("llava").read(read_image(array, DEFAULT))
