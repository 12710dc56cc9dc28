"""Tiles of an image of a size: those that transformers' image processors and a pipeline's strips have."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.stage_driver import picture
from trinity.costs import visual_tokens
from trinity.costs.model_config import read_model_shape
from trinity.costs.model_shape import MODELS
from trinity.costs.visual_tokens import anyres_tiles, anyres_tokens, list_tiles
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request

EACH = 99  # strips: more than there are tiles, so that each is one


@pytest.mark.parametrize("name", ["idefics3", "internvl", "llava_next", "smolvlm"])
def test_as_the_models_own_processor_cuts(name: str) -> None:
    """The live side has transformers' pixels, whose features strips are proven to give; it knows no rule of sizes."""
    shape, processor = read_model_shape(checkpoint(name)), RequestProcessor(checkpoint(name), strips=EACH)
    draw, several = random.Random(11), 0
    for _ in range(12):
        width, height = draw.randint(20, 300), draw.randint(20, 300)
        image = picture(1, height, width)
        media = processor.process(Request("So: <image>", images=[image])).work.media
        tiles = shape.tiles(shape.visual_tokens(width, height), width, height)
        assert tiles == tuple(span.tokens for span in media), (width, height)
        several += len(tiles) > 1
    assert several > 3


def test_tokens_are_those_of_the_tiles() -> None:
    """Of each known model and size: none is lost, and whose tiles are equal needs no size."""
    draw = random.Random(2)
    for shape in MODELS.values():
        for _ in range(100):
            width, height = draw.randint(8, 4000), draw.randint(8, 4000)
            if max(width, height) > 100 * min(width, height):
                continue
            tokens = shape.visual_tokens(width, height)
            tiles = shape.tiles(tokens, width, height)
            assert sum(tiles) == tokens
            assert min(tiles) > 0
            assert shape.name.startswith("llava-next") or shape.tiles(tokens) == tiles


@pytest.mark.parametrize(
    ("model", "tiles"),
    [
        ("internvl2-8b", [256] * 7),
        ("minicpm-v-2.6", [64] * 9),
        ("llava-next-7b", [576, 686, 686]),
        ("qwen2-vl-7b", [3053]),
        ("llava-1.5-7b", [576]),
    ],
)
def test_of_a_picture_of_2000_by_1200_pixels(model: str, tiles: list[int]) -> None:
    shape = MODELS[model]
    assert (
        list(shape.tiles(sum(tiles), 2000, 1200))
        == tiles
        == list(shape.tiles(shape.visual_tokens(2000, 1200), 2000, 1200))
    )


def test_a_row_of_tiles_that_shows_no_image_has_no_tokens() -> None:
    """A long image in a grid of four rows: of two of them only some lines of patches are left, of others none."""
    grids = ((336 * 4, 336),)
    assert anyres_tiles(336, 336 * 4, grids=grids) == (576, *[24 * 25] * 4)
    assert anyres_tiles(336, 336, grids=grids) == (576, 0, 12 * 25, 12 * 25, 0)
    assert anyres_tokens(336, 336, grids=grids) == 576 + 24 * 25
    rule = partial(anyres_tokens, grids=grids)
    assert list_tiles(rule, 576 + 24 * 25, 336, 336) == (576 + 24 * 25,), "an empty strip would have no block"


def own_rule(width: int, height: int) -> int:
    return width


@pytest.mark.parametrize(
    ("rule", "tokens", "size"),
    [
        (own_rule, 512, (512, 512)),
        (partial(own_rule, height=1), 512, ()),
        (visual_tokens.anyres_tokens, 1948, ()),
        (visual_tokens.anyres_tokens, 1947, (2000, 1200)),
        (visual_tokens.tile_tokens, 513, (2000, 1200)),
        (partial(visual_tokens.tile_tokens, tokens=0), 512, ()),
        (visual_tokens.pan_and_scan_tokens, 512, (900, 300)),
        (visual_tokens.smart_resize_tokens, 64, (900, 300)),
    ],
)
def test_what_no_rule_cuts_is_in_one(rule: Any, tokens: int, size: tuple[int, ...]) -> None:
    assert list_tiles(rule, tokens, *size) == (tokens,)


def test_settings_of_a_rule_are_its_tiles() -> None:
    assert list_tiles(partial(visual_tokens.tile_tokens, tokens=100), 300) == (100,) * 3
    assert list_tiles(visual_tokens.split_tokens, 338) == (169, 169)
    assert list_tiles(partial(visual_tokens.slice_tokens, most=4), 128) == (64, 64)
