"""Budget search under every monotone and noisy cost, the cost tables, and the cache on disk."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.costs.budgets import BudgetCache, BudgetKey, StepBudgets, StepCost, combine_budgets, search_budget
from trinity.errors import ConfigError, TrinityWarning
from trinity.errors.cache_files import cache_folder


class Measured:
    """A cost function that records what it was asked."""

    def __init__(self, cost: Callable[[int], float]) -> None:
        self.cost, self.asked = cost, list[int]()

    def __call__(self, count: int) -> float:
        self.asked.append(count)
        return self.cost(count)


# ---------------------------------------------------------------- search

rising = st.tuples(st.integers(1, 60), st.lists(st.integers(1, 9), min_size=64, max_size=64))


def staircase(start: int, steps: list[int]) -> dict[int, float]:
    """Seconds by count, strictly rising."""
    total, table = start, dict[int, float]()
    for count, step in enumerate(steps, 1):
        total += step
        table[count] = float(total)
    return table


@given(rising, st.integers(1, 64), st.integers(1, 64), st.integers(1, 700))
def test_the_largest_feasible_budget(cost: tuple[int, list[int]], low: int, high: int, limit: int) -> None:
    low, high = min(low, high), max(low, high)
    table = staircase(*cost)
    feasible = [n for n in range(low, high + 1) if table[n] <= limit]
    measured = Measured(table.__getitem__)
    if not feasible:
        with pytest.warns(TrinityWarning, match="SLO will be missed"):
            result = search_budget(measured, float(limit), low=low, high=high, knee=1.0)
        assert (result.budget, result.feasible) == (low, False)
    else:
        result = search_budget(measured, float(limit), low=low, high=high, knee=1.0)
        rates = {n: n / table[n] for n in measured.asked}
        best = min(n for n in rates if rates[n] == max(rates.values()))
        assert result.budget == min(feasible[-1], best)
        assert result.feasible
        assert result.seconds == table[result.budget]
    assert set(measured.asked) <= set(range(low, high + 1))


def test_few_measurements_and_none_far_beyond_the_limit() -> None:
    measured = Measured(lambda n: (100 + n) / 1000)
    result = search_budget(measured, 0.4, high=1_000_000)
    assert result.budget == 300
    assert max(measured.asked) <= 600
    assert len(measured.asked) <= 35
    assert max(measured.asked.count(n) for n in measured.asked if n > 300) == 2


def test_all_of_the_range_fits() -> None:
    assert search_budget(lambda n: 1 + 0.001 * n, 1e6, low=3, high=100, knee=1.0).budget == 100
    assert search_budget(lambda n: float(n), 5.0, low=5, high=5).budget == 5


def test_the_budget_is_capped_at_the_knee() -> None:
    """Throughput is flat from 64 on: a larger batch only costs latency."""
    result = search_budget(lambda n: max(64, n) * 0.001, 1.0, high=4096)
    assert result.budget == 64


def test_the_knee_is_a_share_of_the_best_throughput() -> None:
    def cost(count: int) -> float:
        return 1.0 + 0.01 * count

    rates = {n: n / cost(n) for n in (2**i for i in range(14))}
    for knee in (0.5, 0.8, 0.95):
        smallest = min(n for n, rate in rates.items() if rate >= knee * max(rates.values()))
        assert search_budget(cost, 1e3, knee=knee).budget == smallest


def test_a_knee_beyond_the_limit_caps_nothing() -> None:
    result = search_budget(lambda n: 1.0 + 0.001 * n, 1.3)
    assert result.budget == 300  # 512 was measured too: its throughput is far better, and out of reach
    assert result.samples[300] == 1.3
    assert search_budget(lambda n: 1.0 + 0.001 * n, 1.5, knee=1.0).budget == 500


def test_a_limit_is_kept_exactly() -> None:
    assert search_budget(lambda n: n / 8, 2.0, knee=1.0, high=100).seconds <= 2.0


@pytest.mark.parametrize("seed", range(30))
def test_a_feasible_budget_holds_under_noise(seed: int) -> None:
    """Spikes make measurements slower: the result is near the largest, and its own fresh median kept the limit."""
    noise = random.Random(seed)
    log: list[tuple[int, float]] = []

    def cost(count: int) -> float:
        seconds = (0.5 + 0.01 * count) * (1 + (noise.random() < 0.15) * noise.random())
        log.append((count, seconds))
        return seconds

    result = search_budget(cost, 1.0, high=2000)
    assert result.feasible
    last = log[-3:]
    assert {count for count, _ in last} == {result.budget}
    assert sorted(seconds for _, seconds in last)[1] == result.seconds <= 1.0
    assert 25 <= result.budget <= 50


def test_a_budget_that_does_not_hold_twice_gives_way_to_a_smaller_one() -> None:
    times: dict[int, int] = {}

    def warming(count: int) -> float:
        """Fast the first time, slow afterwards (a clock that throttles)."""
        times[count] = times.get(count, 0) + 1
        return (0.2 + 0.008 * count) * (1 if times[count] == 1 else 1.2)

    result = search_budget(warming, 1.0, knee=1.0, high=128)
    assert result.feasible
    assert result.seconds <= 1.0
    assert 64 <= result.budget <= 79
    assert times[100] == 1 + 3


def test_where_nothing_holds_the_search_ends() -> None:
    calls = iter(range(10_000))

    def falling_apart(count: int) -> float:
        return 0.5 if next(calls) < 7 else 2.0

    with pytest.warns(TrinityWarning):
        result = search_budget(falling_apart, 1.0, high=64)
    assert (result.budget, result.feasible, result.seconds) == (1, False, 2.0)


def test_what_cannot_run_is_infinitely_slow() -> None:
    assert search_budget(lambda n: 0.1 if n <= 37 else math.inf, 1.0, knee=1.0).budget == 37
    with pytest.warns(TrinityWarning, match="1 item"):
        assert search_budget(lambda n: math.inf, 1.0).feasible is False


def test_the_warning_points_at_the_caller() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        search_budget(lambda n: 2.0, 1.0)
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize("limit", [0.0, -1.0, math.nan, math.inf])
def test_a_limit_is_positive_and_finite(limit: float) -> None:
    with pytest.raises(ConfigError, match=r"(latency bound|limit_s is a number)"):
        search_budget(lambda n: 1.0, limit)
    with pytest.raises(ConfigError, match=r"(latency bound|limit_s is a number)"):
        StepBudgets(limit_s=limit)


@pytest.mark.parametrize("bounds", [{"low": 0}, {"low": 5, "high": 4}, {"knee": 0.0}, {"knee": 1.1}])
def test_bounds_must_have_a_meaning(bounds: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="a search needs"):
        search_budget(lambda n: 1.0, 1.0, **bounds)


@pytest.mark.parametrize("seconds", [math.nan, -1.0])
def test_a_measurement_is_a_time(seconds: float) -> None:
    with pytest.raises(ConfigError, match="measuring 1 item"):
        search_budget(lambda n: seconds, 1.0)


def test_a_measurement_of_zero_is_one() -> None:
    assert search_budget(lambda n: 0.0, 1.0, high=8).feasible


# ---------------------------------------------------------------- cost

tables = st.dictionaries(st.integers(1, 3000), st.floats(0, 10), max_size=6)
counts = st.integers(0, 6000)


@given(tables, tables, tables, st.tuples(counts, counts, counts), st.tuples(counts, counts, counts))
def test_cost_never_falls_when_a_count_grows(a: Any, b: Any, c: Any, x: Any, more: Any) -> None:
    cost = StepCost.from_samples(decodes=a, prefill=b, media=c)
    larger = tuple(map(sum, zip(x, more, strict=True)))
    assert cost.seconds(*larger) >= cost.seconds(*x) - 1e-9


def test_cost_lies_on_the_lines_between_measurements() -> None:
    cost = StepCost.from_samples(prefill={100: 1.0, 200: 3.0, 400: 4.0})
    assert [cost.seconds(0, n, 0) for n in (0, 1, 100, 150, 200, 300, 400)] == [0.0, 1.0, 1.0, 2.0, 3.0, 3.5, 4.0]
    assert cost.seconds(0, 500, 0) == 5.0  # 1 s per 100 over the whole table is steeper than the last line


def test_cost_beyond_a_steep_end_follows_it() -> None:
    assert StepCost.from_samples(media={1: 1.0, 2: 1.0, 3: 4.0}).seconds(0, 0, 5) == 10.0


def test_cost_of_one_measurement_is_proportional() -> None:
    cost = StepCost.from_samples(decodes={4: 2.0})
    assert [cost.seconds(n, 0, 0) for n in (1, 4, 8)] == [2.0, 2.0, 4.0]


def test_one_pass_for_decodes_and_prefill_is_paid_once() -> None:
    cost = StepCost.from_samples(decodes={1: 0.5, 8: 1.0}, prefill={1: 0.25, 100: 2.0}, media={10: 3.0})
    assert cost.seconds(8, 100, 0) == 1.0 + 2.0 - 0.25
    assert cost.seconds(8, 100, 10) == 1.0 + 2.0 - 0.25 + 3.0
    assert cost.seconds(8, 0, 10) == 4.0
    assert StepCost.from_samples(decodes={1: 0.5}).seconds(1, 50, 0) == 0.5


def test_times_that_fall_are_noise() -> None:
    assert StepCost.from_samples(prefill={1: 5.0, 2: 1.0, 4: 2.0}).prefill == ((1, 1.0), (2, 1.0), (4, 2.0))


def test_what_could_not_run_is_no_sample() -> None:
    found = search_budget(lambda n: 0.1 if n <= 37 else math.inf, 1.0, knee=1.0)
    assert max(found.samples) == 37
    assert combine_budgets({"decodes": found}, 0, 1.0).cost == StepCost.from_samples(decodes=found.samples)


@pytest.mark.parametrize(
    "table", [((0, 1.0),), ((2, 1.0), (1, 2.0)), ((1, 2.0), (2, 1.0)), ((1, math.inf),), ((1, -1.0),)]
)
def test_a_table_out_of_order_is_refused(table: Any) -> None:
    with pytest.raises(ConfigError, match="must ascend"):
        StepCost(media=table)


# ---------------------------------------------------------------- budgets and their cache


def test_defaults() -> None:
    assert (StepBudgets().token_budget, StepBudgets().image_budget, StepBudgets().feasible, StepBudgets().limit_s) == (
        2048,
        1,
        True,
        None,
    )


@pytest.mark.parametrize("fields", [{"token_budget": 0}, {"image_budget": 0}])
def test_a_budget_is_at_least_one(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        StepBudgets(**fields)


KEY = BudgetKey(model="abc", dtype="float32", device="cpu", threads=1, roles="EP", limit_s=0.5)
BUDGETS = StepBudgets(
    token_budget=77, image_budget=1152, limit_s=0.5, cost=StepCost.from_samples(prefill={1: 0.1, 64: 0.25})
)


def test_the_cache_gives_back_what_it_was_given(tmp_path: Path) -> None:
    cache = BudgetCache(tmp_path)
    assert cache.get(KEY) is None
    assert cache.put(KEY, BUDGETS)
    assert BudgetCache(tmp_path).get(KEY) == BUDGETS
    assert len(list((tmp_path / "budgets").iterdir())) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"model": "abd"},
        {"dtype": "bfloat16"},
        {"device": "cuda"},
        {"threads": 2},
        {"roles": "E"},
        {"limit_s": 0.6},
        {"versions": "torch 9"},
    ],
)
def test_every_part_of_the_key_counts(tmp_path: Path, change: dict[str, Any]) -> None:
    cache = BudgetCache(tmp_path)
    cache.put(KEY, BUDGETS)
    assert cache.get(msgspec.structs.replace(KEY, **change)) is None


@pytest.mark.parametrize("damage", [b"", b"{", b"\xff\x00", b"[]", b"null", b'{"key":{},"budgets":{}}'])
def test_a_corrupt_file_is_ignored_and_written_anew(tmp_path: Path, damage: bytes) -> None:
    cache = BudgetCache(tmp_path)
    cache.put(KEY, BUDGETS)
    cache.path(KEY).write_bytes(damage)
    assert cache.get(KEY) is None
    assert cache.put(KEY, BUDGETS)
    assert cache.get(KEY) == BUDGETS


@pytest.mark.parametrize(
    "wrong", [{"token_budget": 0}, {"cost": {"prefill": [[2, 1.0], [1, 2.0]]}}, {"limit_s": -1.0}, {"tokens": 77}]
)
def test_a_file_with_impossible_budgets_or_names_of_another_version_is_ignored(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    cache = BudgetCache(tmp_path)
    cache.put(KEY, BUDGETS)
    entry = msgspec.json.decode(cache.path(KEY).read_bytes())
    entry["budgets"].update(wrong)
    cache.path(KEY).write_bytes(msgspec.json.encode(entry))
    assert cache.get(KEY) is None


def test_a_file_of_another_key_is_ignored(tmp_path: Path) -> None:
    cache = BudgetCache(tmp_path)
    other = msgspec.structs.replace(KEY, model="other")
    cache.put(other, BUDGETS)
    cache.path(other).rename(cache.path(KEY))
    assert cache.get(KEY) is None


def test_a_cache_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    cache = BudgetCache(tmp_path / "file")
    assert not cache.put(KEY, BUDGETS)
    assert cache.get(KEY) is None


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = BudgetCache(tmp_path)
    cache.put(KEY, BUDGETS)

    def full(*_: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("trinity.errors.cache_files.os.replace", full)
    assert not cache.put(KEY, StepBudgets())
    assert cache.get(KEY) == BUDGETS
    assert len(list(cache.folder.iterdir())) == 1


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name in ("TRINITY_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    expected = {"linux": ".cache/trinity", "darwin": "Library/Caches/trinity", "win32": "trinity"}
    for platform, path in expected.items():
        monkeypatch.setattr("trinity.errors.cache_files.sys.platform", platform)
        assert cache_folder() == tmp_path / path
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/shared/trinity")
    monkeypatch.setenv("TRINITY_CACHE", "/own")
    assert cache_folder() == Path("/own")
    assert BudgetCache().folder == Path("/own/budgets")
    monkeypatch.setenv("TRINITY_CACHE", "off")
    assert not BudgetCache().put(KEY, BUDGETS)
    assert BudgetCache().get(KEY) is None
