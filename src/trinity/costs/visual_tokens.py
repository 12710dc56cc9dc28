"""Rules of model families for the number of visual tokens of an image.

A visual token is a row of the image cache: an output of the encoder that enters the language model. Separators between
tiles are text. Sizes are (width, height) in pixels; bind a model's settings to a rule with ``functools.partial``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from trinity.errors import ConfigError
from trinity.traces.synthetic import VisualTokenRule

LLAVA_NEXT_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # (height, width) in pixels
_MOST_IDEFICS = 4096  # pixels: Idefics3 shrinks images with a longer edge


def fixed_tokens(width: int, height: int, *, tokens: int = 576) -> int:
    """LLaVA-1.5: ``tokens`` for every image, which is scaled and cropped to one size."""
    _check_size(width, height)
    return tokens


def anyres_tokens(
    width: int,
    height: int,
    *,
    grids: Sequence[Sequence[int]] = LLAVA_NEXT_GRIDS,
    tile: int = 336,
    patch: int = 14,
) -> int:
    """LLaVA-NeXT: the whole image as one tile, and tiles of the grid that wastes least, without padding.

    Each row of patches ends with one more token. ``tile`` and ``patch``: edges in pixels.
    """
    return sum(anyres_tiles(width, height, grids=grids, tile=tile, patch=patch))


def anyres_tiles(
    width: int,
    height: int,
    *,
    grids: Sequence[Sequence[int]] = LLAVA_NEXT_GRIDS,
    tile: int = 336,
    patch: int = 14,
) -> tuple[int, ...]:
    """LLaVA-NeXT: visual tokens of the whole image as one tile, then of each row of tiles; padding may leave 0."""
    _check_size(width, height)
    best_height, best_width = _best_grid(width, height, grids)
    side, lines = tile // patch, best_height // tile
    rows, columns = side * lines, side * (best_width // tile)
    top = left = 0  # padding on either side, in patches
    if width / height > columns / rows:
        top = (rows - int(round(height * (columns / width), 7))) // 2
    else:
        left = (columns - int(round(width * (rows / height), 7))) // 2
    kept = [min(side * (line + 1), rows - top) - max(side * line, top) for line in range(lines)]
    return (side * side, *(max(0, each) * (columns - 2 * left + 1) for each in kept))


def _best_grid(width: int, height: int, grids: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Choose the (height, width) that keeps most of the image's pixels and, among those, needs least padding."""

    def worth(grid: Sequence[int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    best = max(grids, key=worth)
    return best[0], best[1]


def smart_resize_tokens(
    width: int,
    height: int,
    *,
    factor: int = 28,
    least: int = 56 * 56,
    most: int = 28 * 28 * 1280,
) -> int:
    """Qwen2-VL and Qwen2.5-VL: a token for each square of ``factor`` pixels.

    The image is first scaled to between ``least`` and ``most`` pixels. Raises ``ConfigError`` for an image over 200
    times as long as wide, as the model does.
    """
    _check_size(width, height)
    if max(width, height) / min(width, height) > 200:
        raise ConfigError(f"an image of {width} x {height} pixels is too narrow for this model: at most 200 to 1")
    rows, columns = round(height / factor), round(width / factor)
    if rows * columns * factor**2 > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * columns


def tile_tokens(width: int, height: int, *, tile: int = 448, tokens: int = 256, fewest: int = 1, most: int = 12) -> int:
    """InternVL: the grid of tiles whose shape is nearest to the image's, and a thumbnail where there are several."""
    _check_size(width, height)
    shapes = [(columns, rows) for columns in range(1, most + 1) for rows in range(1, most + 1)]
    shapes = sorted(
        (each for each in shapes if fewest <= each[0] * each[1] <= most), key=lambda each: each[0] * each[1]
    )
    best, distance = (1, 1), math.inf
    for columns, rows in shapes:
        off = abs(width / height - columns / rows)
        roomy = width * height > 0.5 * tile * tile * columns * rows
        if off < distance or (off == distance and roomy):
            best, distance = (columns, rows), off
    count = best[0] * best[1]
    return tokens * (count + 1 if count > 1 else 1)


def slice_tokens(width: int, height: int, *, tile: int = 448, tokens: int = 64, most: int = 9) -> int:
    """MiniCPM-V: about as many slices as the image has tiles of pixels, and a thumbnail where there are several."""
    _check_size(width, height)
    wanted = min(math.ceil(width * height / (tile * tile)), most)
    if wanted <= 1:
        return tokens
    shape = math.log(width / height)
    counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
    grids = [(count // rows, rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]
    columns, rows = min(grids, key=lambda grid: (abs(shape - math.log(grid[0] / grid[1])), -grid[1]), default=(1, 1))
    return tokens * (columns * rows + 1)


def pan_and_scan_tokens(
    width: int, height: int, *, tokens: int = 256, crops: int = 0, least_crop: int = 256, least_ratio: float = 1.2
) -> int:
    """Gemma 3: ``tokens`` for the image, and for each of up to ``crops`` crops of a long one (0: none)."""
    _check_size(width, height)
    longer, shorter = max(width, height), min(width, height)
    if not crops or longer / shorter < least_ratio:
        return tokens
    count = min(crops, max(2, min(longer // least_crop, math.floor(longer / shorter + 0.5))))
    if min(math.ceil(longer / count), shorter) < least_crop:
        return tokens
    return tokens * (count + 1)


def split_tokens(width: int, height: int, *, longest: int = 4 * 364, tile: int = 364, tokens: int = 169) -> int:
    """Idefics3 and SmolVLM: scaled to ``longest`` pixels, cut into tiles, and a thumbnail where there are several."""
    _check_size(width, height)
    width, height = _to_longest(width, height, longest)
    if max(width, height) > _MOST_IDEFICS:
        shape = width / height
        wide = width >= height
        width = _MOST_IDEFICS if wide else max(1, int(_MOST_IDEFICS * shape))
        height = max(1, int(_MOST_IDEFICS / shape)) if wide else _MOST_IDEFICS
    count = math.ceil(width / tile) * math.ceil(height / tile)
    return tokens * (count + 1 if count > 1 else 1)


def _to_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Scale so that the longer edge has ``longest`` pixels; the shorter one becomes even."""
    shape = width / height
    if width >= height:
        other = int(longest / shape)
        return longest, max(1, other + other % 2)
    other = int(longest * shape)
    return max(1, other + other % 2), longest


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ConfigError(f"an image has at least 1 x 1 pixels, got {width} x {height}")


_RULES: Mapping[str, VisualTokenRule] = {  # by the names under which they are sent
    "fixed": fixed_tokens,
    "anyres": anyres_tokens,
    "smart_resize": smart_resize_tokens,
    "tiles": tile_tokens,
    "slices": slice_tokens,
    "pan_and_scan": pan_and_scan_tokens,
    "split": split_tokens,
}


_EQUAL_TILES: Mapping[Any, int] = {tile_tokens: 256, slice_tokens: 64, split_tokens: 169}
"""Visual tokens of a tile where a rule's settings do not say, of those that have tiles of one size."""


def list_tiles(rule: VisualTokenRule, tokens: int, width: int = 0, height: int = 0) -> tuple[int, ...]:
    """List the visual tokens of each tile of an image, in order; ``(tokens,)`` for one that is encoded in one.

    ``width`` and ``height`` (pixels, 0: unknown) are needed for LLaVA-NeXT alone, whose tiles are rows of tiles. What
    does not add up to ``tokens`` is in one, as it is where it is served.
    """
    bound, each = _bind(rule), equal_tile_tokens(rule)
    tiles = (each,) * (tokens // each) if each else ()
    if bound.func is anyres_tokens and width and height and not bound.args:
        tiles = anyres_tiles(width, height, **bound.keywords)
    return tiles if sum(tiles) == tokens and min(tiles, default=0) > 0 else (tokens,)


def equal_tile_tokens(rule: VisualTokenRule) -> int:
    """Visual tokens of a tile, of a rule that makes tiles of equal tokens; 0 of any other."""
    bound = _bind(rule)
    return max(0, int(bound.keywords.get("tokens", _EQUAL_TILES[bound.func]))) if bound.func in _EQUAL_TILES else 0


def _bind(rule: VisualTokenRule) -> partial[int]:
    return rule if isinstance(rule, partial) else partial(rule)


def encode_rule(rule: Any) -> dict[str, Any]:
    """Encode one of this module's rules and its settings as plain values; msgspec's ``enc_hook``.

    Raises ``ConfigError`` for a rule of your own: it is code, which is never sent.
    """
    bound = _bind(rule)
    name = next((name for name, known in _RULES.items() if known is bound.func), None)
    if name is None or bound.args:
        raise ConfigError(
            f"{rule!r} cannot be sent to other processes: give a rule of trinity.costs.visual_tokens, settings bound "
            "by name with functools.partial"
        )
    return {"rule": name, "settings": bound.keywords}


def decode_rule(kind: Any, fields: Any) -> VisualTokenRule:
    """Decode a rule that ``encode_rule`` encoded; msgspec's ``dec_hook``. Raises ``ConfigError`` for other values."""
    if kind != VisualTokenRule or not isinstance(fields, dict) or fields.get("rule") not in _RULES:
        raise ConfigError(f"{fields!r:.80} describes no rule of trinity.costs.visual_tokens")
    rule = _RULES[fields["rule"]]
    return partial(rule, **fields["settings"]) if fields["settings"] else rule
