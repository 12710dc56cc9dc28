"""Pictures of the demo: drawn where and as they say, and never a pair that the model is not to see."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from trinity.demo import draw_shapes
from trinity.demo.pictures import (
    COLOURS,
    CORNERS,
    SEEN_PAIRS,
    SHAPES,
    UNSEEN_PAIRS,
    draw_scene,
    random_scene,
    with_article,
)

MIDDLES = {"top left": (64, 64), "top right": (192, 64), "bottom left": (64, 192), "bottom right": (192, 192)}


def test_what_is_asked_for_is_drawn_in_its_corner_and_nothing_elsewhere() -> None:
    placed = {"top right": "red star", "bottom left": "black square"}
    image = draw_shapes(placed)
    assert image.size == (256, 256)
    assert image.getpixel(MIDDLES["top right"]) == COLOURS["red"]
    assert image.getpixel(MIDDLES["bottom left"]) == COLOURS["black"]
    ground = image.getpixel((0, 0))
    assert all(image.getpixel(place) == ground for corner, place in MIDDLES.items() if corner not in placed)
    assert {colour for _, colour in image.getcolors()} == {ground, COLOURS["red"], COLOURS["black"]}


def area(shape: str) -> np.ndarray:
    """Which pixels of the top left quarter a shape covers."""
    pixels = np.asarray(draw_shapes({"top left": f"red {shape}"}))[:128, :128]
    return (pixels == COLOURS["red"]).all(axis=2)


def test_no_two_shapes_look_alike() -> None:
    areas = {shape: area(shape) for shape in SHAPES}
    for one in SHAPES:
        for other in SHAPES:
            both, either = (areas[one] & areas[other]).sum(), (areas[one] | areas[other]).sum()
            assert (both / either > 0.95) == (one == other), f"{one} and {other} cover the same pixels"


@pytest.mark.parametrize(
    "placed", [{"middle": "red star"}, {"top left": "pink star"}, {"top left": "red cube"}, {"top left": "star"}]
)
def test_a_name_that_nobody_knows_is_refused_with_those_known(placed: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=r"cannot draw .*corners are top left, .*colours red, .*shapes circle, "):
        draw_shapes(placed)


def test_scenes_have_one_to_four_shapes_each_in_a_corner_of_its_own() -> None:
    rng, counts = Random(3), set()
    for _ in range(300):
        scene = random_scene(rng)
        counts.add(len(scene.shapes))
        corners = [CORNERS.index(each.corner) for each in scene.shapes]
        assert corners == sorted(set(corners)), "in the order of reading"
        assert len({each.name for each in scene.shapes}) == len(scene.shapes)
        for each in scene.shapes:
            reach = 1.1 * each.radius  # of a star's points
            assert each.column * 0.5 < each.x - reach
            assert each.x + reach < each.column * 0.5 + 0.5
            assert each.row * 0.5 < each.y - reach
            assert each.y + reach < each.row * 0.5 + 0.5
    assert counts == {1, 2, 3, 4}


def test_pairs_are_kept_apart() -> None:
    assert len(SEEN_PAIRS) + len(UNSEEN_PAIRS) == len(COLOURS) * len(SHAPES)
    assert not set(SEEN_PAIRS) & set(UNSEEN_PAIRS)
    assert {colour for colour, _ in SEEN_PAIRS} == set(COLOURS), "each word is learned"
    assert {shape for _, shape in SEEN_PAIRS} == set(SHAPES)
    rng = Random(5)
    seen = {(each.colour, each.shape) for _ in range(500) for each in random_scene(rng).shapes}
    unseen = {(each.colour, each.shape) for _ in range(100) for each in random_scene(rng, UNSEEN_PAIRS).shapes}
    assert seen == set(SEEN_PAIRS)
    assert unseen == set(UNSEEN_PAIRS)


def test_a_seed_gives_the_same_picture_at_every_size() -> None:
    one, again, other = random_scene(Random(1)), random_scene(Random(1)), random_scene(Random(2))
    assert one == again != other
    assert draw_scene(one, 64).tobytes() == draw_scene(again, 64).tobytes()
    small, large = (np.asarray(draw_scene(one, size).resize((32, 32)), float) for size in (128, 256))
    assert np.abs(small - large).mean() < 3


def test_a_scene_is_described_in_words() -> None:
    words = random_scene(Random(4)).describe()
    assert all(word in words for word in (" at the ",))
    assert with_article("orange star") == "an orange star"
    assert with_article("red star") == "a red star"
