"""Group sizes, pull costs, records: the pure parts of transfers that overlap with computing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.core.transfers import (
    PullCost,
    PullTimes,
    TokenRate,
    TransferPolicy,
    exposed_tail,
    group_layers,
    merge_records,
    overlap_ratio,
)
from trinity.errors import ConfigError


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown kv 'all'; known: auto, grouped, layer, off"):
        TransferPolicy(kv="all")  # type: ignore[arg-type]
    for never in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="lease_s"):
            TransferPolicy(lease_s=never)


def test_free_pulls_go_layer_by_layer() -> None:
    """The last layer alone is exposed."""
    assert exposed_tail(1, 8, compute=1.0, fixed=0.0, move=0.5) == 0.5
    assert exposed_tail(2, 8, compute=1.0, fixed=0.0, move=0.5) == 1.0
    assert group_layers(8, compute=1.0, fixed=0.0, move=0.5) == 1


def test_a_cost_for_each_pull_makes_groups() -> None:
    """EPD-Serve's baseline: a pull of one layer takes longer than a layer's computing, and they queue up."""
    alone = exposed_tail(1, 24, compute=1.0, fixed=3.0, move=0.1)
    group = group_layers(24, compute=1.0, fixed=3.0, move=0.1)
    assert alone == pytest.approx(1 + 24 * 3.1 - 24)
    assert exposed_tail(group, 24, 1.0, 3.0, 0.1) == pytest.approx(3.4), "the last four layers"
    assert group > 1


def test_a_slow_medium_takes_all_at_once_only_if_starting_costs_more_than_it_hides() -> None:
    assert group_layers(10, compute=0.001, fixed=5.0, move=1.0) == 10
    assert group_layers(10, compute=1.0, fixed=0.1, move=2.0) == 1


def test_one_layer_is_one_group() -> None:
    assert group_layers(1, 1.0, 1.0, 1.0) == 1


def test_what_follows_the_last_layer_hides_the_last_group() -> None:
    """The head and the last feed-forward part take two seconds: all layers may go together if they are as quick."""
    assert exposed_tail(8, 8, compute=1.0, fixed=0.5, move=0.1, rest=2.0) == 0.0
    assert group_layers(8, compute=1.0, fixed=0.5, move=0.1, rest=2.0) == 8
    assert group_layers(8, compute=1.0, fixed=0.5, move=0.5, rest=2.0) == 5, "then three, which take two seconds"


seconds = st.floats(0.0, 10.0)


@given(st.integers(1, 40), seconds, seconds, seconds)
def test_no_other_group_exposes_less(layers: int, compute: float, fixed: float, move: float) -> None:
    best = group_layers(layers, compute, fixed, move)
    tail = exposed_tail(best, layers, compute, fixed, move)
    assert 1 <= best <= layers
    for other in range(1, layers + 1):
        assert tail <= exposed_tail(other, layers, compute, fixed, move) + 1e-6


@given(st.integers(1, 40), st.integers(1, 40), seconds, seconds, seconds)
def test_what_is_exposed_is_at_least_a_pull_and_at_most_all_of_them(
    layers: int, group: int, compute: float, fixed: float, move: float
) -> None:
    tail = exposed_tail(min(group, layers), layers, compute, fixed, move)
    assert exposed_tail(min(group, layers), layers, compute, fixed, move, rest=1.0) <= tail
    pulls = -(-layers // min(group, layers))
    assert fixed + move - 1e-9 <= tail <= pulls * fixed + layers * move + 1e-9


def test_pull_costs_come_out_of_pulls_of_two_sizes() -> None:
    times = PullTimes()
    assert times.cost() is None
    for cells in (10, 100, 30, 10, 70):
        times.add(cells, 0.5 + 0.01 * cells)
    assert times.cost() == pytest.approx(PullCost(0.5, 0.01))


def test_pulls_of_one_size_say_what_a_cell_costs_at_most() -> None:
    times = PullTimes()
    for _ in range(3):
        times.add(10, 2.0)
    assert times.cost() == pytest.approx(PullCost(0.0, 0.2))


@given(st.lists(st.tuples(st.integers(1, 10_000), st.floats(0.0, 10.0)), min_size=1, max_size=30))
def test_pull_costs_are_never_negative(pulls: list[tuple[int, float]]) -> None:
    times = PullTimes()
    for cells, taken in pulls:
        times.add(cells, taken)
    cost = times.cost()
    assert cost is not None
    assert cost.fixed >= 0
    assert cost.cell >= 0


def test_newer_pulls_count_more() -> None:
    times = PullTimes()
    for taken in [1.0] * 30 + [3.0] * 60:
        times.add(10, taken)
    cost = times.cost()
    assert cost is not None
    assert cost.cell == pytest.approx(0.3, rel=0.01)


def test_a_rate_is_a_mean_that_fades() -> None:
    pace = TokenRate()
    assert pace.seconds(100) == 0.0
    pace.add(100, 1.0)
    assert pace.seconds(50) == 0.5
    for _ in range(100):
        pace.add(100, 2.0)
    assert pace.seconds(100) == pytest.approx(2.0, rel=0.01)


def test_a_transfer_in_pieces_is_one_record() -> None:
    one = {"kind": "kv", "bytes": 10, "seconds": 1.0, "setup_s": 0.5, "pieces": 2, "scheme": "shm"}
    all = merge_records(merge_records({**one, "pulls": 1}, one), {**one, "outcome": "failed"})
    assert all == {**one, "bytes": 30, "seconds": 3.0, "setup_s": 1.5, "pieces": 6, "pulls": 3, "outcome": "failed"}


def test_the_overlap_ratio_is_what_was_not_exposed() -> None:
    assert overlap_ratio(0.25, 1.0) == 0.75
    assert overlap_ratio(3.0, 1.0) == 0.0
    assert overlap_ratio(0.0, 0.0) == 1.0
