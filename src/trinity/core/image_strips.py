"""Cuts tiles of an image into strips: one rule for what is processed, emulated and simulated (EPDServe 3.2.2)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from trinity.core.values import MediaSpan


def share_evenly(tiles: int, most: int) -> list[tuple[int, int]]:
    """Share tiles out among at most ``most`` strips: the range of each."""
    count = max(1, min(most, tiles))
    return list(pairwise(number * tiles // count for number in range(count + 1)))


def name_strip(content: str, first: int, end: int) -> str:
    """Name the content of an image's tiles from ``first`` to ``end``: the same in every prompt."""
    return f"{content}/{first}-{end}"


def cut_span(image: MediaSpan, tiles: Sequence[int], most: int) -> list[MediaSpan]:
    """Cut an image without separators into at most ``most`` strips, in order.

    ``tiles``: visual tokens of each tile. Where these do not add up to the image's, or one has none, it stays whole.
    """
    ranges = share_evenly(len(tiles), most)
    if len(ranges) < 2 or sum(tiles) != image.tokens or min(tiles) < 1:
        return [image]
    spans: list[MediaSpan] = []
    offset = image.offset
    for strip, (first, end) in enumerate(ranges):
        rows, content = sum(tiles[first:end]), name_strip(image.content, first, end)
        spans.append(replace(image, tokens=rows, offset=offset, length=rows, content=content, strip=strip))
        offset += rows
    return spans
