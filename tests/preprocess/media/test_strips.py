"""Strips of an image: they cover it in order, are named by content and range, and give the features of the whole."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from PIL import Image

from support.checkpoint_files import checkpoint
from support.image_reader import image_reader
from support.stage_driver import picture
from trinity.core.messages import MediaSpan
from trinity.core.values import join_strips
from trinity.preprocess.media.media_markup import IMAGE_TEXT
from trinity.preprocess.media.strips import GRID_CROP, LAYOUTS, cut_item
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Request
from trinity.stages.models import load_model

TILED = ("idefics3", "internvl", "llava_next", "llava_onevision", "minicpmv4_6", "smolvlm")
WHOLE = ("gemma3", "llava", "qwen2_vl", "qwen3_vl")


@cache
def processor_of(name: str, strips: int) -> RequestProcessor:
    return RequestProcessor(checkpoint(name), strips=strips)


@cache
def encoder(name: str) -> Any:
    return load_model(checkpoint(name), "E", dtype="float32")


def made(name: str, strips: int, images: list[Image.Image], **fields: Any) -> ProcessedRequest:
    return processor_of(name, strips).process(Request("So: " + "<image> and " * len(images), images=images, **fields))


def features(name: str, request: ProcessedRequest) -> list[torch.Tensor]:
    """Of each item, every one encoded alone."""
    rows = []
    for span, inputs in zip(request.work.media, request.inputs, strict=True):
        rows += encoder(name).encode("image", [inputs], [span.tokens])
    return rows


def images_of(seed: int, count: int) -> list[Image.Image]:
    draw = random.Random(seed)
    return [picture(seed * 10 + each, draw.randint(20, 300), draw.randint(20, 300)) for each in range(count)]


def test_who_is_cut_and_who_is_not() -> None:
    assert {name for name, text in IMAGE_TEXT.items() if text.tiles} == set(TILED)
    assert {text.tiles for text in IMAGE_TEXT.values() if text.tiles} == set(LAYOUTS)
    for name in WHOLE:
        request = made(name, 4, [picture(1, 300, 200)])
        assert [span.strip for span in request.work.media] == [0]
        assert request.work.given_media == request.work.media


@pytest.mark.parametrize("name", TILED)
def test_strips_cover_an_image_in_order(name: str) -> None:
    cut = 0
    for seed in range(9):
        images = images_of(seed, 1 + seed % 3)
        one, two = made(name, 1, images), made(name, 3, images)
        assert two.work.prompt == one.work.prompt
        assert [(span.tokens, span.offset, span.length) for span in two.work.given_media] == [
            (span.tokens, span.offset, span.length) for span in one.work.media
        ]
        placeholders = processor_of(name, 3).media_token_ids
        for span in two.work.media:
            assert two.work.prompt[span.offset] in placeholders
            assert two.work.prompt[span.end - 1] in placeholders
            assert sum(each in placeholders for each in two.work.prompt[span.offset : span.end]) == span.tokens
        for before, after in zip(two.work.media, two.work.media[1:], strict=False):
            assert before.end <= after.offset
            assert after.strip in (0, before.strip + 1)
        assert max(span.strip for span in two.work.media) < 3
        assert two.input_bytes <= 1.1 * one.input_bytes + 400, "no tile travels twice"
        cut += len(two.work.media) - len(images)
    assert cut > 0, "some of these have tiles"


@pytest.mark.parametrize("name", TILED)
def test_the_features_of_the_strips_are_those_of_the_image(name: str) -> None:
    lines = False
    for seed in range(5):
        images = images_of(100 + seed, 1 + seed % 2)
        whole = features(name, made(name, 1, images))
        for strips in (2, 3, 9):
            request = made(name, strips, images)
            found = features(name, request)
            lines = lines or any(GRID_CROP in each for each in request.inputs)
            firsts = [at for at, span in enumerate(request.work.media) if not span.strip]
            joined = [torch.cat(found[at:end]) for at, end in zip(firsts, [*firsts[1:], len(found)], strict=True)]
            for rows, wanted in zip(joined, whole, strict=True):
                assert rows.shape == wanted.shape
                assert (rows - wanted).abs().max() < 1e-5 * wanted.abs().max()
            together = encoder(name).encode("image", request.inputs, [span.tokens for span in request.work.media])
            for rows, wanted in zip(together, found, strict=True):
                assert (rows - wanted).abs().max() < 1e-5 * wanted.abs().max()
    assert lines is (IMAGE_TEXT[name].tiles == "grid")


@pytest.mark.parametrize("name", TILED)
def test_a_strip_is_named_by_content_and_range(name: str) -> None:
    """Equal images in any prompt have equal strips, with equal inputs; another image or salt shares none."""
    image, other = picture(5, 260, 250), picture(6, 260, 250)
    alone, pair = made(name, 3, [image]), made(name, 3, [image, image])
    names = [span.content for span in alone.work.media]
    assert len(set(names)) == len(names)
    if name != "llava_onevision":  # which cuts no image that has company
        assert [span.content for span in pair.work.media] == names * 2
        for one, two in zip(alone.inputs * 2, pair.inputs, strict=True):
            assert one.keys() == two.keys()
            assert all(torch.equal(one[key], two[key]) for key in one)
    assert not set(names) & {span.content for span in made(name, 3, [other]).work.media}
    assert not set(names) & {span.content for span in made(name, 3, [image], cache_salt="mine").work.media}
    again = made(name, 3, [image])
    assert [span.content for span in again.work.media] == names


@pytest.mark.parametrize("name", TILED)
def test_what_does_not_add_up_stays_whole(name: str) -> None:
    loaded = processor_of(name, 1).loaded
    item = image_reader(processor_of(name, 1)).read(picture(5, 260, 250))
    layout = IMAGE_TEXT[name].tiles
    places = list(range(item.tokens + 7))
    odd = [*places[:1], *places[2:]] if layout != "grid" else places  # runs of lengths that no tiles have
    assert cut_item(item, odd[: item.tokens], 1, layout, loaded.config) == [item], "strips=1 cuts nothing"
    wrong = {**item.inputs, "pixel_values": item.inputs["pixel_values"][..., :-1, :, :, :]}
    if layout == "patches":
        wrong = {**item.inputs, "target_sizes": item.inputs["target_sizes"][:-1]}
    broken = type(item)(item.kind, item.expansion, item.tokens + 1, wrong, item.content, item.meta)
    assert cut_item(broken, odd[: item.tokens + 1], 3, layout, loaded.config) == [broken]


def test_strips_of_one_image_are_joined() -> None:
    a, b = MediaSpan("image", 4, 0, 4, "a/0-2"), MediaSpan("image", 3, 6, 3, "a/2-4", strip=1)
    c = MediaSpan("image", 5, 9, 5, "c")
    assert join_strips([a, b, c]) == (MediaSpan("image", 7, 0, 9, "a/0-2"), c)
    assert join_strips([a, b, a, b]) == (MediaSpan("image", 7, 0, 9, "a/0-2"),) * 2
    assert join_strips([]) == ()
