"""The benchmark of several encoders for one request: what it would call a failure, and that it runs."""

from __future__ import annotations

import pytest

from benchmarks.serving.encoders import (
    PAPER,
    TILES,
    Gain,
    Load,
    Tiles,
    due_s,
    formula,
    load_aims,
    rest_aims,
    run,
    tile_aims,
)
from benchmarks.setting import Setting


def test_the_formula_is_near_the_papers_table() -> None:
    for images, ratio in {2: 1.39, 4: 2.14, 6: 2.66, 8: 2.39}.items():
        assert formula(images).ratio == pytest.approx(ratio, rel=0.04)


def test_gains_far_from_the_formula_fall_short() -> None:
    good = {images: formula(images) for images in PAPER}
    bad = {**good, 8: Gain(4.27, 4.27)}
    rest = {images: (each, each) for images, each in good.items()}
    assert [aim.met for aim in rest_aims(good, rest)] == [True, True]
    assert [aim.met for aim in rest_aims(bad, rest)] == [False, True]


def test_an_image_of_tiles_gains_what_as_many_images_do() -> None:
    assert due_s(TILES, 1) / due_s(TILES, 6) == pytest.approx(2.74, abs=0.005)
    assert formula(TILES).ratio == due_s(TILES, 1) / due_s(TILES, 6)
    good = {n: due_s(TILES, n) for n in (1, 2, 6)}
    assert [aim.met for aim in tile_aims(Tiles(good, {**good, 6: good[2]}))] == [True, False]


def test_a_load_that_is_served_worse_falls_short() -> None:
    good = Load(Gain(2.0, 1.0), Gain(100.0, 100.5), Gain(50.0, 50.0))
    bad = Load(Gain(2.0, 2.1), Gain(100.0, 102.0), Gain(50.0, 51.0))
    assert [aim.met for aim in load_aims({0.5: good}, "tiles")] == [True] * 3
    assert [aim.met for aim in load_aims({0.5: good, 1.0: bad}, "tiles")] == [False] * 3


@pytest.mark.slow
def test_it_runs() -> None:
    """Simulated figures are those of virtual time, whatever the machine does."""
    found = run(Setting(quick=True))
    assert [len(table.rows) for table in found.tables] == [4, 2, 5, 5]
    met = {aim.what: aim.met for aim in found.aims if "live" not in aim.what}
    assert met["gains of the first token, simulated"]
    assert met["gains for one image of tiles, simulated"]
    assert met["images encoded twice"]
    assert met["tiles encoded twice"]
