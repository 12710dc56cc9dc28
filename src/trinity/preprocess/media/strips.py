"""Cuts an image into strips: runs of its tiles, each encoded as an item of its own (EPDServe 3.2.2).

A model that cuts an image into tiles encodes each tile by itself, so that the features of a run of tiles are the same
beside the others or alone. LLaVA-NeXT and LLaVA-OneVision then put the tiles' rows of patches side by side, drop
padding, and end each row with a learned one: whole rows of tiles are runs of placeholders all the same, and
``grid_crop`` tells the encoder what is left of them. An image of another layout, or whose numbers do not add up, stays
in one: a strip is a gain of time and no duty.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from trinity.core.image_strips import name_strip, share_evenly
from trinity.preprocess.media.media_kinds import MediaItem

GRID_CROP = "grid_crop"


class Tiles(NamedTuple):
    """Tiles of an image, or rows of tiles: visual tokens of each, and the inputs of those from ``first`` to ``end``."""

    tokens: Sequence[int]
    inputs: Callable[[int, int], dict[str, Any]]


def cut_items(
    items: Sequence[MediaItem], places: Sequence[int], most: int, layout: str, config: Any
) -> list[MediaItem]:
    """Cut the images of a prompt into at most ``most`` strips each; ``places``: positions of all their placeholders."""
    cut, used = list[MediaItem](), 0
    for item in items:
        own = places[used : used + item.tokens]
        cut += cut_item(item, own, most, layout, config) if item.kind == "image" else [item]
        used += item.tokens
    return cut


def cut_item(item: MediaItem, places: Sequence[int], most: int, layout: str, config: Any) -> list[MediaItem]:
    """Cut an image into at most ``most`` strips of about equally many tiles, in order.

    ``places``: positions of its placeholders in the prompt. ``layout``: a name in ``LAYOUTS``. The same image gives the
    same strips in every prompt, named by its content and their range.
    """
    tiles = LAYOUTS[layout](item, _runs(places), config)
    if tiles is None or sum(tiles.tokens) != item.tokens or min(tiles.tokens) < 1:
        return [item]
    ranges = share_evenly(len(tiles.tokens), most)
    if len(ranges) < 2:
        return [item]
    return [
        msgspec.structs.replace(
            item,
            tokens=sum(tiles.tokens[first:end]),
            inputs=tiles.inputs(first, end),
            content=name_strip(item.content, first, end),
            strip=number,
        )
        for number, (first, end) in enumerate(ranges)
    ]


def _runs(places: Sequence[int]) -> list[int]:
    """Lengths of the runs of placeholders without another token between them."""
    breaks = [at for at, (one, two) in enumerate(pairwise(places), 1) if two != one + 1]
    return [end - first for first, end in pairwise([0, *breaks, len(places)])]


def _tokens_of(runs: Sequence[int], count: int) -> list[int]:
    """Visual tokens of each of ``count`` tiles: separated by text, or of equal length; [0] where neither."""
    if len(runs) == count:
        return list(runs)
    return [runs[0] // count] * count if len(runs) == 1 and runs[0] % count == 0 else [0]


def _along(axis: int) -> Callable[[MediaItem, Sequence[int], Any], Tiles | None]:
    """Tiles along one axis of all inputs: InternVL's first, Idefics3's and SmolVLM's second."""

    def find(item: MediaItem, runs: Sequence[int], config: Any) -> Tiles | None:
        values = list(item.inputs.values())
        if not all(getattr(value, "ndim", 0) > axis for value in values):
            return None
        counts = {value.shape[axis] for value in values}
        if len(counts) != 1 or not runs:
            return None

        def take(first: int, end: int) -> dict[str, Any]:
            return {name: value.narrow(axis, first, end - first) for name, value in item.inputs.items()}

        return Tiles(_tokens_of(runs, counts.pop()), take)

    return find


def _patches(item: MediaItem, runs: Sequence[int], config: Any) -> Tiles | None:
    """Tiles as runs of patches along the last axis, their sizes in ``target_sizes``: MiniCPM-V's slices."""
    if set(item.inputs) != {"pixel_values", "target_sizes"}:
        return None
    pixels, sizes = item.inputs["pixel_values"], item.inputs["target_sizes"]
    ends = [0]
    for height, width in sizes.tolist():
        ends.append(ends[-1] + height * width * pixels.shape[-2])
    if ends[-1] != pixels.shape[-1]:
        return None

    def take(first: int, end: int) -> dict[str, Any]:
        part = pixels.narrow(-1, ends[first], ends[end] - ends[first]).contiguous()
        return {"pixel_values": part, "target_sizes": sizes[first:end]}

    return Tiles(_tokens_of(runs, len(sizes)), take)


def _grid(item: MediaItem, runs: Sequence[int], config: Any) -> Tiles | None:
    """The image as one tile, then rows of tiles: LLaVA-NeXT's and LLaVA-OneVision's.

    Where the latter shrinks the grid, and where an image has company, the tokens do not add up.
    """
    pixels, side = item.inputs["pixel_values"], config.vision_config.image_size
    patches = side // config.vision_config.patch_size
    height, width = item.inputs["image_sizes"][0].tolist()
    rows, columns = _grid_shape(height, width, config.image_grid_pinpoints, side)
    if pixels.shape[1] != 1 + rows * columns:
        return None
    top, left = _padding(height, width, rows * patches, columns * patches)
    line = columns * patches - 2 * left + 1  # and a learned row
    heights = [min((row + 1) * patches, rows * patches - top) - max(row * patches, top) for row in range(rows)]

    def take(first: int, end: int) -> dict[str, Any]:
        import torch

        before = max(0, first - 1)  # rows of tiles above these
        taken = pixels.narrow(1, 1 + before * columns, (end - 1 - before) * columns)
        taken = torch.cat((pixels[:, :1], taken), 1) if first == 0 else taken
        begins, lines = max(0, top - before * patches), sum(heights[before : end - 1])
        return {"pixel_values": taken, GRID_CROP: torch.tensor([[int(first == 0), columns, begins, lines, left]])}

    return Tiles([patches * patches, *(max(0, each) * line for each in heights)], take)


def _grid_shape(height: int, width: int, grids: Any, side: int) -> tuple[int, int]:
    """Rows and columns of tiles of an image of this size, in pixels."""
    from transformers.image_processing_utils import select_best_resolution

    best_height, best_width = select_best_resolution((height, width), grids)
    return best_height // side, best_width // side


def _padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of patches to drop on either side of the grid, since they show no part of the image."""
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


LAYOUTS: dict[str, Callable[[MediaItem, Sequence[int], Any], Tiles | None]] = {
    "first axis": _along(0),
    "second axis": _along(1),
    "patches": _patches,
    "grid": _grid,
}
"""Where a processor's inputs have the tiles of an image, by name."""
