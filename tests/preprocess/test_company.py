"""What a prompt's images make of each other: an image alone and the same in company are different features."""

from __future__ import annotations

import threading
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.checkpoint_files import checkpoint
from support.recordings import MULTIMODAL
from trinity.errors import UnsupportedModel
from trinity.preprocess.loader import load_tokenizer_and_processor
from trinity.preprocess.media.image_kind import ImageReader, _is_repeated
from trinity.preprocess.media.media_kinds import LoadedProcessor
from trinity.preprocess.media_limits import MediaProblem
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request


def picture(seed: int, width: int = 90, height: int = 60) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height))


@cache
def processor_of(name: str) -> RequestProcessor:
    return RequestProcessor(checkpoint(name))


def spans(name: str, count: int) -> Any:
    images = [picture(seed) for seed in range(count)]
    return processor_of(name).process(Request("<image>" * count, images=images)).work.media


@pytest.mark.parametrize("name", MULTIMODAL)
def test_an_image_has_a_key_for_each_way_in_which_it_is_encoded(name: str) -> None:
    alone, two, three = (spans(name, count)[0] for count in (1, 2, 3))
    assert two.content == three.content
    assert (alone.content == two.content) == (alone.tokens == two.tokens) == (name != "llava_onevision")


def test_equal_keys_mean_equal_inputs() -> None:
    """Whatever its place and its company, an image with one key has one set of pixels."""
    seen: dict[str, Any] = {}
    for order in ((0,), (1,), (0, 1), (1, 0), (1, 0, 2), (2, 2, 0, 1)):
        images = [picture(seed, 60 + 50 * seed) for seed in order]
        done = processor_of("llava_onevision").process(Request("<image>" * len(order), images=images))
        for span, inputs in zip(done.work.media, done.inputs, strict=True):
            kept = seen.setdefault(span.content, (span.tokens, inputs["pixel_values"]))
            assert kept[0] == span.tokens
            assert torch.equal(kept[1], inputs["pixel_values"])
    assert len(seen) == 2 + 3, "two were seen alone, and three in company"


class _Images:
    """An image processor's face, as far as a fingerprint of it reads it."""

    def to_dict(self) -> dict[str, Any]:
        return {}


class _Counting:
    """A processor whose image is as many tokens as its prompt has images, and one more if it is wide."""

    image_token = "@"

    def __init__(self, spoken: threading.local, most: int) -> None:
        self.image_processor, self._spoken, self._most = _Images(), spoken, most

    def __call__(self, images: list[list[Image.Image]], text: str, return_tensors: str) -> dict[str, Any]:
        (shown,) = images
        first, *others = text.split("@")
        assert len(others) == len(shown), "as a chat: one text, and a list of its images"
        counts = [min(len(shown), self._most) + (each.width > each.height) for each in shown]
        expanded = ("<" + "@" * count + ">" + other for count, other in zip(counts, others, strict=True))
        self._spoken.text = first + "".join(expanded)
        self._spoken.special = True
        pixels = torch.tensor([[float(np.asarray(each).sum())] for each in shown])
        ids = torch.tensor([_tokens(self._spoken.text)])
        return {"input_ids": ids, "pixel_values": pixels, "of": torch.tensor([len(shown)])}


def _tokens(text: str) -> list[int]:
    return [7 if each == "@" else 1 for each in text]


class _Tokenizer:
    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": _tokens(text)}


def loaded_with(processor: Any, spoken: threading.local) -> LoadedProcessor:
    real = load_tokenizer_and_processor(checkpoint("llava"))
    text = real.placeholders["image"]
    marks = {"image": type(text)(token="@", marker="@")}
    return LoadedProcessor(
        real.config, _Tokenizer(), processor, spoken, frozenset(), marks, frozenset({7}), real.run_tokenizer
    )


@pytest.mark.parametrize("most", [1, 2, 3, 100])
def test_a_processor_is_asked_how_many_images_matter(most: int) -> None:
    spoken = threading.local()
    reader = ImageReader(loaded_with(_Counting(spoken, most), spoken))
    wide, narrow = picture(0), picture(1, 60, 90)
    contents = {among: reader.read(wide, among).content for among in (1, 2, 3, 4, 5)}
    assert [reader.read(wide, among).tokens for among in (1, 2, 3, 4, 5)] == [min(n, most) + 1 for n in range(1, 6)]
    assert [reader.read(narrow, among).tokens for among in (1, 2, 5)] == [min(n, most) for n in (1, 2, 5)]
    assert len(set(contents.values())) >= min(most, 5)
    assert reader.read(wide, 4).inputs["pixel_values"].tolist() == [[float(np.asarray(wide).sum())]]


class _Mixing(_Counting):
    """A processor that writes the images of a prompt in an order of its own."""

    def __call__(self, images: list[list[Image.Image]], text: str, return_tensors: str) -> dict[str, Any]:
        return super().__call__([sorted(images[0], key=lambda each: each.width)], text, return_tensors)


def test_images_that_cannot_be_told_apart_are_refused() -> None:
    spoken = threading.local()
    reader = ImageReader(loaded_with(_Mixing(spoken, 100), spoken))
    assert reader.read(picture(0), 1).tokens == 2
    with pytest.raises(MediaProblem, match="cannot be told apart"):
        reader.read(picture(0), 2)


def test_a_processor_that_fails_on_any_image_is_refused_at_load() -> None:
    def broken(**_: Any) -> Any:
        raise RuntimeError("no codec")

    broken.image_processor = _Images()  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModel, match=r"processor of model type 'llava' fails on an image .*no codec"):
        ImageReader(loaded_with(broken, threading.local()))


def test_inputs_that_count_rows_on_from_image_to_image_are_copies() -> None:
    one = torch.tensor([[0, 1], [2, -1]])
    shifted = torch.tensor([[3, 4], [5, -1]])
    assert _is_repeated(torch.cat([one, shifted]), one, 2)
    assert _is_repeated(torch.cat([one, shifted, torch.tensor([[6, 7], [8, -1]])]), one, 3)
    assert not _is_repeated(torch.cat([one, shifted + 1, shifted]), one, 3), "unequal steps"
    assert not _is_repeated(torch.cat([one, torch.tensor([[3, 4], [5, 6]])]), one, 2), "-1 is none"
    assert not _is_repeated(torch.cat([one, torch.tensor([[3, 4], [6, -1]])]), one, 2)
    assert not _is_repeated(torch.cat([one, shifted]).float(), one.float(), 2), "pixels are no numbers of rows"
