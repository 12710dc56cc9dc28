"""How many visual tokens an image becomes, by each model family's rule.

A visual token is a row of the image cache: what the encoder hands to the language model. Separators between tiles are
text. Sizes are (width, height) in pixels; a rule is bound to a model's settings with ``functools.partial``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from trinity.errors import ConfigError

VisualTokenRule = Callable[[int, int], int]
LLAVA_NEXT_GRIDS = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # (height, width) in pixels
_RULES = ("fixed", "anyres", "smart_resize", "tiles", "slices", "pan_and_scan", "split")
_MOST_IDEFICS = 4096  # pixels of the longer edge beyond which Idefics3's images are shrunk


def described(rule: Any) -> dict[str, Any]:
    """One of this module's rules, with its settings, as plain values that travel; for msgspec's ``enc_hook``.

    Raises ``ConfigError`` for a rule of your own: it is code.
    """
    bound = rule if isinstance(rule, partial) else partial(rule)
    name = getattr(bound.func, "__name__", "")
    if name not in _RULES or bound.func is not globals()[name] or bound.args:
        raise ConfigError(
            f"{rule!r} cannot travel to other processes: give a rule of trinity.costs.visual_tokens, settings bound "
            "by name with functools.partial"
        )
    return {"rule": name, "settings": bound.keywords}


def as_described(kind: Any, fields: Any) -> VisualTokenRule:
    """What ``described`` was given; for msgspec's ``dec_hook``. Raises ``ConfigError`` where it is no such rule."""
    if kind != VisualTokenRule or not isinstance(fields, dict) or fields.get("rule") not in _RULES:
        raise ConfigError(f"{fields!r:.80} describes no rule of trinity.costs.visual_tokens")
    found: VisualTokenRule = globals()[fields["rule"]]
    return partial(found, **fields["settings"]) if fields["settings"] else found


def fixed(width: int, height: int, *, tokens: int = 576) -> int:
    """The same for every image, which is scaled and cropped to one size (LLaVA-1.5: 576)."""
    _check(width, height)
    return tokens


def anyres(
    width: int,
    height: int,
    *,
    grids: Sequence[Sequence[int]] = LLAVA_NEXT_GRIDS,
    tile: int = 336,
    patch: int = 14,
) -> int:
    """LLaVA-NeXT: the whole image as one tile, and tiles of the grid that wastes least, without their padding.

    Each row of patches ends with one more token. Tiles have ``tile`` pixels, patches ``patch``.
    """
    _check(width, height)
    best_height, best_width = _best_grid(width, height, grids)
    side = tile // patch
    rows, columns = side * (best_height // tile), side * (best_width // tile)
    if width / height > columns / rows:
        rows -= 2 * ((rows - int(round(height * (columns / width), 7))) // 2)
    else:
        columns -= 2 * ((columns - int(round(width * (rows / height), 7))) // 2)
    return side * side + rows * (columns + 1)


def _best_grid(width: int, height: int, grids: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The (height, width) that keeps most of the image's pixels and, among those, has fewest to fill."""

    def worth(grid: Sequence[int]) -> tuple[int, int]:
        scale = min(grid[1] / width, grid[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - grid[0] * grid[1]

    best = max(grids, key=worth)
    return best[0], best[1]


def smart_resize(
    width: int,
    height: int,
    *,
    factor: int = 28,
    least: int = 56 * 56,
    most: int = 28 * 28 * 1280,
) -> int:
    """Qwen2-VL and Qwen2.5-VL: one token for each square of ``factor`` pixels, after the image was brought between
    ``least`` and ``most`` pixels. Raises ``ConfigError`` for an image 200 times as long as wide, as the model does.
    """
    _check(width, height)
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


def tiles(width: int, height: int, *, tile: int = 448, tokens: int = 256, fewest: int = 1, most: int = 12) -> int:
    """InternVL: the grid of tiles whose shape is nearest to the image's, and a small copy where there are several."""
    _check(width, height)
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


def slices(width: int, height: int, *, tile: int = 448, tokens: int = 64, most: int = 9) -> int:
    """MiniCPM-V: about as many slices as the image has tiles of pixels, and a small copy where there are several."""
    _check(width, height)
    wanted = min(math.ceil(width * height / (tile * tile)), most)
    if wanted <= 1:
        return tokens
    shape = math.log(width / height)
    counts = [count for count in (wanted - 1, wanted, wanted + 1) if 1 < count <= most]
    grids = [(count // rows, rows) for count in counts for rows in range(1, count + 1) if count % rows == 0]
    columns, rows = min(grids, key=lambda grid: (abs(shape - math.log(grid[0] / grid[1])), -grid[1]), default=(1, 1))
    return tokens * (columns * rows + 1)


def pan_and_scan(
    width: int, height: int, *, tokens: int = 256, crops: int = 0, least_crop: int = 256, least_ratio: float = 1.2
) -> int:
    """Gemma 3: ``tokens`` for the image, and for each crop of a long one where up to ``crops`` are made (0: none)."""
    _check(width, height)
    longer, shorter = max(width, height), min(width, height)
    if not crops or longer / shorter < least_ratio:
        return tokens
    count = min(crops, max(2, min(longer // least_crop, math.floor(longer / shorter + 0.5))))
    if min(math.ceil(longer / count), shorter) < least_crop:
        return tokens
    return tokens * (count + 1)


def split(width: int, height: int, *, longest: int = 4 * 364, tile: int = 364, tokens: int = 169) -> int:
    """Idefics3 and SmolVLM: scaled to ``longest`` pixels, cut into tiles, and a small copy where there are several."""
    _check(width, height)
    width, height = _to_longest(width, height, longest)
    if max(width, height) > _MOST_IDEFICS:
        shape = width / height
        wide = width >= height
        width = _MOST_IDEFICS if wide else max(1, int(_MOST_IDEFICS * shape))
        height = max(1, int(_MOST_IDEFICS / shape)) if wide else _MOST_IDEFICS
    count = math.ceil(width / tile) * math.ceil(height / tile)
    return tokens * (count + 1 if count > 1 else 1)


def _to_longest(width: int, height: int, longest: int) -> tuple[int, int]:
    """Scaled so that the longer edge has ``longest`` pixels; the shorter one is made even."""
    shape = width / height
    if width >= height:
        other = int(longest / shape)
        return longest, max(1, other + other % 2)
    other = int(longest * shape)
    return max(1, other + other % 2), longest


def _check(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise ConfigError(f"an image has at least 1 x 1 pixels, got {width} x {height}")
