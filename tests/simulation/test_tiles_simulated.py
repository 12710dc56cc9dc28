"""Tiles of an image on several encoders in the simulator: what is gained at rest; under load nothing is lost."""

from __future__ import annotations

import random
from math import ceil
from statistics import mean
from typing import Any

import pytest

from trinity.core.messages import Work
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.simulation.simulator import Replay, Simulator
from trinity.simulation.workload import jobs_of, work_of
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

SHAPE = get_model_shape("internvl2-8b")
TILE = 256
BASE_S, TILE_S, PREFILL_S = 0.5, 0.4, 0.05  # of a pass, and of a tile's encoding and prefill
COST = LinearCost(step_s=BASE_S, prefill_s=PREFILL_S / TILE, media_s=TILE_S / TILE)
LIGHT = LinearCost(step_s=0.02, prefill_s=0.005 / TILE, media_s=TILE_S / TILE)  # encoders alone are the limit
WIDE = (448 * 5, 448 * 2)  # pixels: ten tiles and a thumbnail


def row(seconds: float, name: str, size: tuple[int, int] = WIDE, **fields: Any) -> TraceRow:
    image = TraceImage(width=size[0] or None, height=size[1] or None, content=name, **fields)
    return TraceRow(timestamp=1000 * seconds, input_length=2, text_length=2, output_length=1, images=[image])


def replay(trace: Trace, placement: str, count: int, spread: int, cost: LinearCost = COST, **options: Any) -> Replay:
    budgets = StepBudgets(token_budget=32768, image_budget=11 * TILE)
    cluster = Cluster.of("A100", count)
    given: dict[str, Any] = {"cost": cost, "budgets": budgets} | options
    return Simulator(SHAPE, SLO(9.0, 2.0), cluster=cluster, spread=spread, **given).replay(trace, placement)


def ttft(found: Replay) -> float:
    return mean(outcome.ttft_s for outcome in found.outcomes if outcome.ttft_s is not None)


def encoding(found: Replay) -> float:
    return sum(busy.get("E", 0.0) for busy in found.busy_s.values())


def work(images: list[TraceImage], strips: int, tiled: bool = True) -> Work:
    asked = TraceRow(timestamp=0, input_length=2, text_length=2, output_length=1, images=images)
    (job,) = jobs_of(Trace([asked]), SHAPE, tiled=tiled)
    return work_of(job, 0, False, strips)


def test_images_become_strips() -> None:
    images = [TraceImage(width=WIDE[0], height=WIDE[1], content="a"), TraceImage(tokens=512), TraceImage(tokens=300)]
    spans = work(images, 3).media
    assert [(span.tokens, span.offset, span.strip) for span in spans] == [
        (768, 0, 0),
        (1024, 768, 1),
        (1024, 1792, 2),
        (256, 2816, 0),
        (256, 3072, 1),
        (300, 3328, 0),
    ]
    assert [span.content for span in spans[:3]] == ["a:2816/0-3", "a:2816/3-7", "a:2816/7-11"]
    whole = work(images, 1).media
    assert [(span.tokens, span.content) for span in whole] == [(2816, "a:2816"), (512, "0.1:512"), (300, "0.2:300")]
    assert work(images, 3, tiled=False).media == whole, "nobody asked for tiles"
    assert work(images, 3).prompt == work(images, 1).prompt


def test_rows_of_tiles_are_cut_by_the_size_of_the_image() -> None:
    asked = row(0.0, "a", (2000, 1200))
    (job,) = jobs_of(Trace([asked]), get_model_shape("llava-next-7b"), tiled=True)
    assert [span.tokens for span in work_of(job, 0, False, 9).media] == [576, 686, 686]
    (unknown,) = jobs_of(Trace([row(0.0, "a", (0, 0), tokens=1948)]), get_model_shape("llava-next-7b"), tiled=True)
    assert [span.tokens for span in work_of(unknown, 0, False, 9).media] == [1948]


@pytest.mark.parametrize("encoders", [1, 2, 3, 4, 6])
def test_the_gain_at_rest_is_that_of_the_formula(encoders: int) -> None:
    trace = Trace([row(60.0 * number, str(number)) for number in range(3)])
    found = replay(trace, f"{encoders}E1P1D", encoders + 2, spread=encoders)
    assert ttft(found) == pytest.approx(BASE_S + ceil(11 / encoders) * TILE_S + 11 * PREFILL_S, rel=0.01)
    assert encoding(found) == pytest.approx(3 * 11 * TILE_S)


@pytest.mark.parametrize(("placement", "count"), [("3EP1D", 4), ("3EPD", 3), ("1E2EP1D", 4)])
def test_those_that_prefill_as_well_share_tiles_while_they_are_idle(placement: str, count: int) -> None:
    trace = Trace([row(60.0 * number, str(number)) for number in range(3)])
    one, three = (replay(trace, placement, count, spread) for spread in (1, 3))
    assert ttft(one) == pytest.approx(BASE_S + 11 * (TILE_S + PREFILL_S), rel=0.01)
    assert ttft(three) == pytest.approx(BASE_S + 4 * TILE_S + 11 * PREFILL_S, rel=0.01)


def test_an_image_that_comes_again_is_found_tile_by_tile() -> None:
    """Its strips lie where they were encoded: nothing is encoded a second time, though nobody has the whole image."""
    trace = Trace([row(60.0 * number, "the same") for number in range(4)])
    assert encoding(replay(trace, "3E1P1D", 5, spread=3)) == pytest.approx(11 * TILE_S)


def crowd(load: float, encoders: int, requests: int = 100) -> Trace:
    """Requests of an image at random times, ``load`` times as many as the encoders can do."""
    draw, at, rows = random.Random(5), 0.0, []
    for number in range(requests):
        at += draw.expovariate(load * encoders / (11 * TILE_S))
        rows.append(row(at, str(number)))
    return Trace(rows)


def late(found: Replay) -> int:
    """Count the first tokens that come later than 5, 7, 9 and 12 s, over all four: an image alone takes 4.4 s."""
    times = [outcome.ttft_s for outcome in found.outcomes if outcome.ttft_s is not None]
    return sum(time > bound for time in times for bound in (5.0, 7.0, 9.0, 12.0))


@pytest.mark.parametrize(
    ("placement", "count", "routing"),
    [
        ("6E1P1D", 8, "round_robin"),
        ("6E1P1D", 8, "least_loaded"),
        ("6EP1D", 7, "least_loaded"),
        pytest.param("6EPD", 6, "least_loaded", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("load", [pytest.param(0.5, marks=pytest.mark.slow), 0.9, 1.2])
def test_no_load_is_served_worse_and_no_tile_encoded_twice(
    load: float, placement: str, count: int, routing: str
) -> None:
    """In turn, EP and EPD gain less at rest and lose at 0.9: decision 0092."""
    trace = crowd(load, 6)
    one, six = (replay(trace, placement, count, spread, LIGHT, routing=routing) for spread in (1, 6))
    assert ttft(six) < (0.7 if load == 0.5 else 1.0) * ttft(one)
    assert six.duration_s < 1.01 * one.duration_s
    assert encoding(six) == pytest.approx(encoding(one))
    assert late(six) <= late(one), "no goodput is lost"
