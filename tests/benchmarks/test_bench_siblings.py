"""The benchmark of work that idle siblings take: what it would call a failure, and that it runs."""

from __future__ import annotations

import pytest

from benchmarks.serving.siblings import (
    LOADS,
    MOST_IMAGES,
    OUTPUTS,
    Loads,
    Pair,
    Served,
    aims,
    jobs,
    pair,
    replay,
    result,
    rows,
)

GOOD = Pair(Served(1.0, 2.0, 0.01, 0.9, 100), Served(0.9, 1.5, 0.01, 0.95, 110))
LATE = Pair(Served(1.0, 2.0, 0.01, 0.9, 100), Served(0.9, 2.1, 0.01, 0.9, 110))
LOST = Pair(Served(1.0, 2.0, 0.01, 0.9, 100), Served(0.9, 1.9, 0.01, 0.89, 110))
WAITS = Pair(Served(1.0, 2.0, 2.0, 0.9, 100), Served(0.9, 1.9, 0.5, 0.95, 110))
HELPED = Pair(Served(1.0, 2.0, 2.0, 0.9, 100), Served(0.9, 1.9, 0.02, 0.95, 110))


def loads(*found: Pair) -> Loads:
    return {("4E2P2D", "images", "round_robin", float(rate)): each for rate, each in enumerate(found)}


@pytest.mark.parametrize(
    ("found", "met"),
    [
        ((GOOD,), [True, True, True]),
        ((GOOD, LATE), [False, True, True]),
        ((GOOD, LOST), [True, False, True]),
        ((GOOD, WAITS), [True, True, False]),
        ((GOOD, HELPED), [True, True, True]),
    ],
)
def test_a_load_that_is_served_worse_falls_short(found: tuple[Pair, ...], met: list[bool]) -> None:
    assert [aim.met for aim in aims(loads(*found))] == met


def test_each_load_is_a_row_and_a_value() -> None:
    found = result(loads(GOOD, LATE), 40, 1)
    assert [len(row) for row in rows(loads(GOOD, LATE))] == [len(found.tables[0].header)] * 2
    assert found.values["4E2P2D images round_robin 0.0"] == [list(GOOD.without), list(GOOD.with_)]


def test_its_sizes_have_a_heavy_tail() -> None:
    sizes = sorted(job.prompt for job in jobs(5.0, 400, "text", seed=1))
    assert sizes[-1] > 20 * sizes[200], "the longest is many times the median"
    pictures = [len(job.images) for job in jobs(5.0, 400, "images", seed=1)]
    assert (min(pictures), max(pictures)) == (1, MOST_IMAGES)
    assert {job.max_tokens for job in jobs(5.0, 9, "images", seed=1)} == {OUTPUTS}


def test_where_nothing_waits_nothing_changes() -> None:
    asked = jobs(0.2, 12, "images", seed=1)
    assert replay("4E2P2D", asked, "round_robin", False)[:2] == replay("4E2P2D", asked, "round_robin", True)[:2]


def test_under_load_requests_are_taken() -> None:
    found = pair("4E2P2D", "images", 16.0, "round_robin", 40, 1)
    assert found.with_ != found.without


def test_the_loads_reach_from_rest_to_more_than_is_served() -> None:
    assert all(len(rates) >= 2 and list(rates) == sorted(rates) for rates in LOADS.values())


def test_decodes_that_wait_for_blocks_are_taken() -> None:
    found = pair("2P4D", "long outputs", 12.0, "round_robin", 120, 1)
    assert found.without.gap > 1.0
    assert found.with_.goodput > found.without.goodput
