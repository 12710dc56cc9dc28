"""One rule for strips: they cover an image in order, as evenly as its tiles allow, or it stays whole."""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from trinity.core.image_strips import cut_span, name_strip, share_evenly
from trinity.core.values import MediaSpan, join_strips


def image(tokens: int, offset: int = 0) -> MediaSpan:
    return MediaSpan("image", tokens, offset, tokens, "cat", width=30, height=20)


@pytest.mark.parametrize(
    ("tiles", "most", "ranges"),
    [
        (1, 4, [(0, 1)]),
        (7, 1, [(0, 7)]),
        (7, 0, [(0, 7)]),
        (7, 3, [(0, 2), (2, 4), (4, 7)]),
        (10, 6, [(0, 1), (1, 3), (3, 5), (5, 6), (6, 8), (8, 10)]),
        (3, 99, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_tiles_are_shared_out_in_order(tiles: int, most: int, ranges: list[tuple[int, int]]) -> None:
    assert share_evenly(tiles, most) == ranges


def test_no_strip_has_two_tiles_more_than_another() -> None:
    for tiles in range(1, 40):
        for most in range(1, 14):
            sizes = [end - first for first, end in share_evenly(tiles, most)]
            assert sum(sizes) == tiles
            assert len(sizes) == min(most, tiles)
            assert max(sizes) - min(sizes) <= 1


def test_strips_join_to_the_image_again() -> None:
    draw = random.Random(7)
    for _ in range(300):
        tiles = [draw.randint(1, 9) for _ in range(draw.randint(1, 12))]
        whole, most = image(sum(tiles), draw.randint(0, 50)), draw.randint(1, 14)
        spans = cut_span(whole, tiles, most)
        assert len(spans) == max(1, min(most, len(tiles)))
        assert [span.strip for span in spans] == list(range(len(spans)))
        assert [span.offset for span in spans[1:]] == [span.end for span in spans[:-1]]
        assert {(span.width, span.height, span.kind) for span in spans} == {(30, 20, "image")}
        (joined,) = join_strips(spans)
        assert replace(joined, content="cat") == whole
        assert len({span.content for span in spans}) == len(spans)


def test_a_strip_is_named_by_its_range_of_tiles() -> None:
    spans = cut_span(image(5), [1, 1, 3], 2)
    assert [(span.content, span.tokens) for span in spans] == [("cat/0-1", 1), ("cat/1-3", 4)]
    assert name_strip("cat", 1, 3) == "cat/1-3"


@pytest.mark.parametrize("tiles", [(), (5,), (2, 2), (3, 3), (5, 0), (6, -1)])
def test_what_does_not_add_up_stays_whole(tiles: tuple[int, ...]) -> None:
    assert cut_span(image(5), tiles, 4) == [image(5)]
