"""Bisection over several goals at once: found rates are those of a known machine; what does not count does not."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from trinity.bench import search
from trinity.bench.search import (
    Bracket,
    Goal,
    Trial,
    check_rates,
    countable_trials,
    find_bracket,
    find_goodputs,
    next_rate,
    schedule_trials,
)
from trinity.errors import ConfigError
from trinity.traces.trace import SLO, Trace, TraceRow

TIGHT, LOOSE = Goal(SLO(0.5, 0.05), "p90"), Goal(SLO(4.0, 0.4), "p90")
GOALS = (TIGHT, LOOSE)
RATES = [0.5, 1.0, 2.0, 4.0]


def seen(
    rate: float, limits: dict[Goal, float], *, engine: str = "a", seed: int = 0, foreign: float = 0.0, late: float = 0.0
) -> Trial:
    """At ``rate``, of an engine that meets each goal up to its limit."""
    return Trial(
        engine=engine,
        rate=rate,
        seed=seed,
        requests=10,
        failed=0,
        attainment={goal.key: 1.0 if rate <= limit else 0.5 for goal, limit in limits.items()},
        ttft_s=None,
        tbt_s=None,
        late_p95_s=late,
        cpu_s=1.0,
        wall_s=1.0,
        foreign=foreign,
    )


def searched(limits: dict[Goal, float], rates: Sequence[float] = RATES) -> list[Trial]:
    trials: list[Trial] = []
    while (rate := next_rate(trials, limits, rates)) is not None:
        trials.append(seen(rate, limits))
        assert len(trials) < 30
    return trials


@pytest.mark.parametrize("limits", [(0.7, 3.1), (0.51, 0.52), (1.0, 1.0), (1.9, 2.1)])
def test_bisection_comes_within_its_tolerance_of_every_goals_limit(limits: tuple[float, float]) -> None:
    known = dict(zip(GOALS, limits, strict=True))
    trials = searched(known)
    for goal, limit in known.items():
        found = find_bracket(trials, goal)
        assert found.low <= limit < found.high
        assert found.high / found.low <= 1 + search.BISECTION_TOLERANCE
    rates = [each.rate for each in trials]
    assert len(rates) == len(set(rates)) <= 14


def test_one_trial_answers_all_goals() -> None:
    assert len(searched({TIGHT: 1.9, LOOSE: 1.9})) == len(searched({TIGHT: 1.9}))


def test_the_next_rate_is_the_one_that_tells_most_of_all_goals() -> None:
    """One goal is open between 0.5 and 4, the other above 1: 2 halves what is left of both, 1 is of no use to one."""
    trials = [seen(0.5, {TIGHT: 9.0, LOOSE: 9.0}), seen(1.0, {TIGHT: 0.5, LOOSE: 9.0})]
    assert next_rate(trials[:1], GOALS, [0.5, 1.0, 2.0, 4.0]) == 2.0
    assert next_rate(trials, GOALS, [0.5, 1.0, 2.0, 4.0, 8.0]) == 4.0
    assert next_rate([], GOALS, [1.0, 2.0]) == 2.0  # both tell as much: the shorter trial


def test_a_grid_is_bisected() -> None:
    """All limits at one place: as few trials as a bisection needs; at several, fewer than one for each."""
    grid = [1.25**power for power in range(10)]
    assert max(len(searched({TIGHT: limit, LOOSE: limit}, grid)) for limit in (0.5, 1.1, 2.2, 5.5, 99.0)) <= 9
    trials: list[Trial] = []
    while (rate := next_rate(trials, GOALS, grid, 0.26)) is not None:
        trials.append(seen(rate, {TIGHT: 1.1, LOOSE: 6.0}))
    assert len(trials) <= 6


def test_none_that_holds_is_0_and_one_that_always_does_is_open() -> None:
    trials = searched({TIGHT: 0.1, LOOSE: 100.0})
    assert find_bracket(trials, TIGHT) == Bracket(0.0, 0.5)
    assert find_bracket(trials, LOOSE) == Bracket(4.0, math.inf)
    tight, loose = find_goodputs(trials, ["a"], GOALS, RATES, [0])
    assert (tight.by_seed, tight.open, tight.describe()) == ({0: 0.0}, False, "0.00 (0.00 to 0.00)")
    assert (loose.by_seed, loose.open, loose.describe()) == ({0: 4.0}, True, "≥ 4.00 (4.00 to 4.00)")


def test_a_rate_above_one_that_failed_does_not_hold() -> None:
    trials = [seen(1.0, {TIGHT: 2.0}), seen(2.0, {TIGHT: 1.0}), seen(4.0, {TIGHT: 9.0})]
    assert find_bracket(trials, TIGHT) == Bracket(1.0, 2.0)


def test_a_late_client_proves_nothing_good() -> None:
    trials = [seen(1.0, {TIGHT: 9.0}), seen(2.0, {TIGHT: 9.0}, late=1.0)]
    assert trials[1].is_late
    assert find_bracket(trials, TIGHT).low == 1.0
    assert find_bracket([seen(2.0, {TIGHT: 1.0}, late=1.0)], TIGHT).high == 2.0


def test_disturbed_trials_count_only_where_there_are_no_others() -> None:
    rough, calm = seen(1.0, {TIGHT: 0.1}, foreign=0.5), seen(1.0, {TIGHT: 9.0})
    alone = seen(2.0, {TIGHT: 9.0}, foreign=0.5)
    assert countable_trials([rough, calm, alone]) == [calm, alone]
    assert countable_trials([rough]) == [rough]


@pytest.mark.parametrize("foreign", [0.05, 0.5])
def test_a_goodput_that_rests_on_disturbed_trials_says_so(foreign: float) -> None:
    trials = [seen(1.0, {TIGHT: 9.0}, foreign=foreign), seen(2.0, {TIGHT: 9.0})]
    (found,) = find_goodputs(trials, ["a"], [TIGHT], [1.0, 2.0], [0])
    assert found.disturbed == (foreign > 0.1)
    assert found.describe().endswith("DISTURBED") == found.disturbed


def test_turns_alternate_between_engines_and_go_on_seed_by_seed() -> None:
    limits = {"a": {TIGHT: 1.5}, "b": {TIGHT: 3.0}}
    trials: list[Trial] = []
    for engine, rate, seed in schedule_trials(trials, ["a", "b"], [TIGHT], RATES, [0, 1]):
        trials.append(seen(rate, limits[engine], engine=engine, seed=seed))
    assert [each.engine for each in trials[:4]] == ["a", "b", "a", "b"]
    assert [each.seed for each in trials] == sorted(each.seed for each in trials)
    found = {each.engine: each for each in find_goodputs(trials, ["a", "b"], [TIGHT], RATES, [0, 1])}
    assert all(1.5 / 1.12 <= rate <= 1.5 for rate in found["a"].by_seed.values())
    ratio = search.goodput_ratio(list(found.values()), TIGHT.key, "b", "a")
    assert ratio is not None
    assert ratio[0] == pytest.approx(2.0, rel=0.13)
    assert ratio[1] <= ratio[0] <= ratio[2]


def test_a_disturbed_trial_is_repeated_a_few_times() -> None:
    trials: list[Trial] = []
    for number, (engine, rate, seed) in enumerate(schedule_trials(trials, ["a"], [TIGHT], [1.0], [0])):
        assert number < 10
        trials.append(seen(rate, {TIGHT: 9.0}, engine=engine, seed=seed, foreign=0.5))
    assert [each.rate for each in trials] == [1.0] * search.MAX_TRIES


def test_a_seed_that_has_not_come_to_its_end_has_no_goodput() -> None:
    trials = searched({TIGHT: 1.5, LOOSE: 1.5})
    assert find_goodputs(trials[:-1], ["a"], GOALS, RATES, [0])[0].describe() == "not run"
    assert find_goodputs(trials, ["a"], GOALS, RATES, [0, 1])[0].by_seed.keys() == {0}
    assert search.goodput_ratio(find_goodputs(trials, ["a"], GOALS, RATES, [0]), TIGHT.key, "a", "nobody") is None


def row(at: float, ttft: float | None, gaps: Sequence[float] = (), late: float = 0.0) -> TraceRow:
    reason = "error" if ttft is None else "length"
    return TraceRow(
        timestamp=at,
        input_length=1,
        output_length=len(gaps) + 1,
        ttft_s=ttft,
        itl_s=list(gaps),
        finish_reason=reason,
        late_s=late,
    )


def test_the_first_tenth_warms_up_and_failures_are_in_the_denominator() -> None:
    rows = [row(0, 9.0), *(row(at, 0.1) for at in range(1, 9)), row(9, None)]
    made = search.score_trial("a", 1.0, 0, Trace(rows), [TIGHT], cpu_s=1.0, wall_s=2.0, foreign=0.0)
    assert (made.requests, made.failed) == (9, 1)
    assert made.attainment[TIGHT.key] == pytest.approx(8 / 9)
    assert made.ttft_s is not None
    assert made.ttft_s["max"] == 0.1  # neither the one that was left out nor the one that failed


def test_both_rules_stand_side_by_side() -> None:
    stalls = [row(at, 0.1, [0.01] * 18 + [1.0]) for at in range(10)]  # one gap in nineteen
    goals = [Goal(SLO(0.5, 0.05), rule) for rule in search.GOODPUT_RULES]
    made = search.score_trial("a", 1.0, 0, Trace(stalls), goals, cpu_s=0.0, wall_s=1.0, foreign=0.0)
    assert [made.holds(goal) for goal in goals] == [True, False]


def test_lateness_is_its_95th_percentile() -> None:
    rows = [row(at, 0.1, late=0.2 if at >= 18 else 0.0) for at in range(20)]
    given = {"cpu_s": 0.0, "wall_s": 1.0, "foreign": 0.0}
    assert search.score_trial("a", 1.0, 0, Trace(rows), [TIGHT], **given).is_late
    rows[18] = row(18, 0.1)
    assert not search.score_trial("a", 1.0, 0, Trace(rows), [TIGHT], **given).is_late


@pytest.mark.parametrize("rates", [[], [0.0], [1.0, -1.0], [math.inf], [math.nan]])
def test_rates_are_positive(rates: list[float]) -> None:
    with pytest.raises(ConfigError, match="requests a second"):
        check_rates(rates)


def test_rates_are_put_in_order() -> None:
    assert check_rates([2, 0.5, 2]) == [0.5, 2]
