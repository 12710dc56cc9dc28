"""Pictures of one to four coloured shapes on a grey ground, one in a corner: drawn by a seed, or as somebody says."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (214, 40, 40),
    "green": (46, 160, 67),
    "blue": (38, 84, 214),
    "yellow": (250, 204, 21),
    "purple": (147, 51, 190),
    "orange": (249, 130, 20),
    "black": (25, 25, 25),
    "white": (250, 250, 250),
}
SHAPES = ("circle", "square", "triangle", "star")
ROW_WORDS = ("top", "bottom")
COLUMN_WORDS = ("left", "right")
CORNERS = tuple(f"{row} {column}" for row in ROW_WORDS for column in COLUMN_WORDS)
UNSEEN_PAIRS = (("white", "circle"), ("black", "square"), ("orange", "triangle"), ("purple", "star"))
"""Pairs of colour and shape that no picture of the training shows: each word is learned, the two never together."""
SEEN_PAIRS = tuple((colour, shape) for colour in COLOURS for shape in SHAPES if (colour, shape) not in UNSEEN_PAIRS)
_COUNTS = (1, 2, 2, 2, 2, 3, 4)  # of shapes: most questions can be asked about two
_GREY = (175, 175, 175)


class DrawnShape(NamedTuple):
    """One shape: its corner as row and column (0 or 1 each); centre and radius as shares of the picture's edge."""

    colour: str
    shape: str
    row: int
    column: int
    x: float
    y: float
    radius: float

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def corner(self) -> str:
        return f"{ROW_WORDS[self.row]} {COLUMN_WORDS[self.column]}"


class Scene(NamedTuple):
    """Content of a picture: its shapes, in the order of reading, and the colour of its ground."""

    shapes: tuple[DrawnShape, ...]
    ground: tuple[int, int, int]

    def describe(self) -> str:
        """Say for a reader what is where: "a red circle at the top left"."""
        return ", ".join(f"{with_article(each.name)} at the {each.corner}" for each in self.shapes)


def with_article(name: str) -> str:
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def random_scene(rng: Random, pairs: Sequence[tuple[str, str]] = SEEN_PAIRS) -> Scene:
    """Make up a scene of one to four shapes, each of another of ``pairs``, in corners of their own."""
    corners = rng.sample(range(len(CORNERS)), rng.choice(_COUNTS))
    chosen = zip(sorted(corners), rng.sample(pairs, len(corners)), strict=True)
    shapes = tuple(_place(pair, corner, rng) for corner, pair in chosen)
    grey = rng.randint(125, 200)
    red, green, blue = (grey + rng.randint(-10, 10) for _ in range(3))
    return Scene(shapes, (red, green, blue))


def _place(pair: tuple[str, str], corner: int, rng: Random) -> DrawnShape:
    row, column = divmod(corner, len(COLUMN_WORDS))
    x, y = (0.25 + 0.5 * half + rng.uniform(-0.04, 0.04) for half in (column, row))
    return DrawnShape(*pair, row, column, x, y, rng.uniform(0.14, 0.19))


def draw_shapes(placed: Mapping[str, str], size: int = 256) -> Any:
    """Draw what ``placed`` says, as an image of PIL: ``{"top left": "red circle", "bottom right": "blue square"}``.

    Corners are those of ``CORNERS``; of each shape one of ``COLOURS`` and one of ``SHAPES`` is named. Raises
    ``ValueError`` for another name.
    """
    shapes = [_read_shape(corner, name) for corner, name in placed.items()]
    return draw_scene(Scene(tuple(sorted(shapes, key=lambda each: (each.row, each.column))), _GREY), size)


def _read_shape(corner: str, name: str) -> DrawnShape:
    colour, _, shape = name.partition(" ")
    if corner not in CORNERS or colour not in COLOURS or shape not in SHAPES:
        known = f"corners are {', '.join(CORNERS)}; colours {', '.join(COLOURS)}; shapes {', '.join(SHAPES)}"
        raise ValueError(f"cannot draw {name!r} at {corner!r}: {known}")
    row, column = divmod(CORNERS.index(corner), len(COLUMN_WORDS))
    return DrawnShape(colour, shape, row, column, 0.25 + 0.5 * column, 0.25 + 0.5 * row, 0.17)


def draw_scene(scene: Scene, size: int) -> Any:
    """Draw a scene as a square image of PIL, ``size`` pixels wide."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size, size), scene.ground)
    pen = ImageDraw.Draw(image)
    for each in scene.shapes:
        _draw(pen, each, size)
    return image


def _draw(pen: Any, each: DrawnShape, size: int) -> None:
    x, y, radius, colour = each.x * size, each.y * size, each.radius * size, COLOURS[each.colour]
    if each.shape == "circle":
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    elif each.shape == "square":
        half = 0.88 * radius  # about the circle's area
        pen.rectangle((x - half, y - half, x + half, y + half), fill=colour)
    elif each.shape == "triangle":
        pen.polygon([(x, y - radius), (x - radius, y + 0.85 * radius), (x + radius, y + 0.85 * radius)], fill=colour)
    else:
        pen.polygon([*_star(x, y, radius)], fill=colour)


def _star(x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """List the ten corners of a star with five points, from its top."""
    reach = [1.1 * radius, 0.45 * radius] * 5
    angles = [math.pi * (number / 5 - 0.5) for number in range(10)]
    return [(x + far * math.cos(angle), y + far * math.sin(angle)) for far, angle in zip(reach, angles, strict=True)]
