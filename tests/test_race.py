"""Trials on a grid of rates, the race against the exhaustive ranking, and what each costs in replays."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.errors import TraceTooShort
from trinity.goodput import Outcome, Serve, goodput
from trinity.planner.candidates import Deployment, deployments
from trinity.planner.race import Entry, Found, _Left, by_nominal, exhaustive, race, reaches
from trinity.planner.trials import GRID, Trials, rate_of, step_of
from trinity.trace import SLO, Trace, TraceRow

LOOSE = SLO(ttft=2.0, tbt=1.0)
FIVE = deployments(["A"] * 3)[:5]


def evenly(count: int = 1000, rate: float = 1.0) -> Trace:
    return Trace(TraceRow(timestamp=1000 * n / rate, input_length=1, output_length=1) for n in range(count))


def queue(service_s: float) -> Serve:
    """One server, first come first served."""

    def serve(trace: Trace) -> list[Outcome]:
        arrivals = [row.timestamp / 1000 for row in trace]
        ends = list(accumulate(arrivals, lambda end, at: max(end, at) + service_s, initial=-math.inf))[1:]
        return [Outcome(end - at) for at, end in zip(arrivals, ends, strict=True)]

    return serve


def trials(service_s: Callable[[Deployment], float], trace: Trace | None = None, slo: SLO = LOOSE) -> Trials:
    return Trials(lambda deployment: queue(service_s(deployment)), evenly() if trace is None else trace, slo)


def known(seconds: list[float]) -> tuple[Trials, list[Entry]]:
    """One deployment for each service time, whose bounds are its own rate: upper times 1.2, nominal as it is."""
    placed = deployments(["A"] * len(seconds), ["EP+D"])[: len(seconds)] + deployments(["A"] * len(seconds))
    chosen = dict(zip(dict.fromkeys(placed), seconds, strict=False))
    entries = [Entry(each, 1.2 / service, 1 / service) for each, service in chosen.items()]
    return trials(lambda deployment: chosen[deployment]), entries


# ---------------------------------------------------------------- trials


def test_steps_of_the_grid_are_two_percent_apart() -> None:
    assert rate_of(0) == 1
    assert rate_of(36) / rate_of(35) == pytest.approx(GRID) == pytest.approx(1.02)
    assert [step_of(rate_of(step)) for step in range(-300, 300)] == list(range(-300, 300))
    assert step_of(1.0199) == 0


@pytest.mark.parametrize("service_s", [0.03, 0.1, 0.71])
@pytest.mark.parametrize("guess", [0.3, 1.0, 20.0])
def test_the_limit_is_that_of_goodput_whatever_the_guess(service_s: float, guess: float) -> None:
    made = trials(lambda _: service_s)
    step = made.limit(FIVE[0], guess / service_s)
    assert step is not None
    assert rate_of(step) == pytest.approx(goodput(queue(service_s), evenly(), LOOSE).rate, rel=0.03)
    assert made.holds(FIVE[0], step)
    assert not made.holds(FIVE[0], step + 1)


def test_each_rate_is_replayed_once_and_remembered_in_order() -> None:
    made = trials(lambda _: 0.1)
    step = made.limit(FIVE[0], 10)
    runs = made.runs
    assert made.limit(FIVE[0], 10) == step
    assert made.runs == runs == len(made.points(FIVE[0])) <= 8
    rates = [point.rate for point in made.points(FIVE[0])]
    assert rates == sorted(rates)
    assert made.points(FIVE[1]) == ()


def test_where_no_rate_holds_there_is_no_limit() -> None:
    made = trials(lambda _: 3.0)  # longer than the TTFT bound
    assert made.limit(FIVE[0], 1 / 3) is None
    assert made.runs == 4


def test_a_limit_far_below_the_guess_is_found_as_well() -> None:
    made = trials(lambda _: 0.5)
    step = made.limit(FIVE[0], 1500.0)
    assert step is not None
    assert made.holds(FIVE[0], step)
    assert not made.holds(FIVE[0], step + 1)


def test_from_a_step_that_holds_it_is_not_replayed_again() -> None:
    made = trials(lambda _: 0.1)
    assert made.limit(FIVE[0], 1e9, least=step_of(5)) == trials(lambda _: 0.1).limit(FIVE[0], 10)


def test_a_rate_that_holds_in_too_short_a_time_is_no_answer() -> None:
    made = trials(lambda _: 1e-4)
    with pytest.raises(TraceTooShort, match=r"1E1P1D serves .* of 20 s that it must last.*resample=True") as caught:
        made.limit(FIVE[0], 1000)
    assert caught.value.needed_s > 1000


@pytest.mark.parametrize(("count", "said"), [(0, "no rate"), (1, "no rate"), (2, "too short"), (999, "too short")])
def test_too_few_requests_are_refused_before_anything_runs(count: int, said: str) -> None:
    with pytest.raises(TraceTooShort, match=said):
        trials(lambda _: 0.1, evenly(count))


def slow_ends(output: int, gap_s: float) -> tuple[Serve, Trace]:
    """No queue at all, and outputs of one token or of many, which take as long as they are in time for."""

    def serve(trace: Trace) -> list[Outcome]:
        return [Outcome(0.1, [gap_s] * (row.output_length - 1)) for row in trace]

    rows = [TraceRow(timestamp=1000.0 * n, input_length=1, output_length=output if n % 2 else 1) for n in range(1000)]
    return serve, Trace(rows)


def test_long_outputs_in_time_are_no_instability_of_a_short_trace() -> None:
    serve, trace = slow_ends(101, 0.09)  # 9 s where 10 s are allowed: (2 + 50 · 0.1) / 0.05 s make completions tell
    slo = SLO(ttft=2.0, tbt=0.1)
    made = Trials(lambda _: serve, trace, slo)
    assert made.steady_s == pytest.approx(140)
    step = step_of(1000 / 30)  # over in 30 s
    assert not made.point(FIVE[0], step).stable
    assert made.holds(FIVE[0], step)
    assert made.holds(FIVE[0], step, "p90")  # the guard is kept, so no output waits without end


def test_a_starved_decode_that_the_papers_rule_does_not_see_is_unstable() -> None:
    _, trace = slow_ends(101, 0.09)

    def serve(offered: Trace) -> list[Outcome]:
        return [Outcome(0.1, [20.0] + [0.05] * (row.output_length - 2)) for row in offered]

    made = Trials(lambda _: serve, trace, SLO(ttft=2.0, tbt=0.1))
    point = made.point(FIVE[0], step_of(1000 / 30))
    assert point.attainment["p90"] > point.attainment["guard"]
    assert not made.holds(FIVE[0], step_of(1000 / 30), "p90")


def test_work_that_piles_up_for_long_is_seen() -> None:
    made = trials(lambda _: 0.1, slo=SLO(ttft=1.9, tbt=50.0))
    step = made.limit(FIVE[0], 10)
    assert step is not None
    assert rate_of(step) < 10.4


def test_progress_is_told_of_every_replay() -> None:
    told: list[tuple[int, str]] = []
    made = Trials(lambda _: queue(0.1), evenly(), LOOSE, progress=lambda runs, what: told.append((runs, what)))
    made.limit(FIVE[0], 10)
    assert [runs for runs, _ in told] == list(range(made.runs))
    assert "1E1P1D at" in told[0][1]


# ---------------------------------------------------------------- the race


def test_it_finds_the_best_and_asks_the_others_once() -> None:
    made, entries = known([0.2, 0.1, 0.11, 0.15, 0.101])
    found = race(made, by_nominal(entries))
    assert found[0].entry is entries[1]
    assert found[0].rate == pytest.approx(10, rel=0.03)
    assert [each.exact for each in found] == [True, False, False, False, False]
    assert made.runs <= 8 + 4
    assert all(each.bound <= found[0].rate * GRID * 1.0001 for each in found[1:])


def test_one_whose_upper_bound_is_lower_is_not_asked() -> None:
    made, entries = known([0.1, 0.5])
    found = race(made, by_nominal(entries))
    assert made.points(entries[1].deployment) == ()
    assert found[1].bound == pytest.approx(2.4)


def test_one_whose_nominal_bound_is_lower_by_more_than_the_margin_is_not_asked() -> None:
    made, entries = known([0.1, 0.18])
    loose = [entry._replace(upper=100.0) for entry in entries]
    found = race(made, loose, margin=1.4)
    assert made.points(entries[1].deployment) == ()
    assert found[1].bound == 100.0
    race(made, loose, margin=2.0)
    assert len(made.points(entries[1].deployment)) == 1


def test_what_nominal_bounds_were_worth_for_a_method_decides_who_is_next() -> None:
    """EP+D reaches a third of its nominal bounds here: after one of them, the other method comes first."""
    placed = [*deployments(["A"] * 4, ["EP+D"]), *deployments(["A"] * 4, ["ED+P"])]
    seconds = {each: 0.3 if each.method == "EP+D" else 0.12 for each in placed}
    entries = [Entry(each, 100.0, 10.0 if each.method == "EP+D" else 8.0) for each in placed]
    asked: list[str] = []

    def serve(deployment: Deployment) -> Serve:
        asked.append(deployment.method)
        return queue(seconds[deployment])

    found = race(Trials(serve, evenly(), LOOSE), by_nominal(entries), margin=10.0)
    assert asked[:2] == ["EP+D", "ED+P"]
    assert found[0].entry.deployment.method == "ED+P"


@pytest.mark.parametrize("seed", range(20))
def test_who_is_next_is_the_likely_best_of_all_that_are_left(seed: int) -> None:
    """By the definition: nominal bound times worth, times the mean of what was reached over it for its method."""
    draw = random.Random(seed)
    entries = [
        Entry(each, 99.0, draw.choice([5.0, 10.0, draw.uniform(1, 20)]), draw.choice([1.0, 0.5]))
        for each in deployments(["A"] * 6)
    ]
    left, order, ratios = list(entries), _Left(entries, (), learns=True), dict[str, list[float]]()
    while left:
        means = {method: sum(each) / len(each) for method, each in ratios.items()}
        values = [each.nominal * each.worth * means.get(each.deployment.method, 1.0) for each in left]
        best = left.pop(values.index(max(values)))
        assert order.next() == best
        found = Found(best, draw.random() < 0.5, draw.choice([20, 40, 90]), draw.uniform(1, 20))
        order.learn(found)
        reached = found.rate if found.exact else min(found.bound, best.nominal)
        ratios.setdefault(best.deployment.method, []).append(reached / best.nominal)
    assert order.next() is None
    usual = _Left(entries, (), learns=False)
    assert [usual.next() for _ in entries] == entries, "without a margin: as they are given"


def test_a_bad_order_costs_replays_and_nothing_else() -> None:
    made, entries = known([0.2, 0.1, 0.11, 0.15, 0.101])
    assert race(made, reversed(by_nominal(entries)))[0].entry is entries[1]


def test_of_equal_ones_the_first_stays() -> None:
    made, entries = known([0.1, 0.1, 0.1])
    found = race(made, entries)
    assert found[0].entry is entries[0]
    assert [each.exact for each in found] == [True, False, False]


def test_what_is_known_is_not_searched_again_and_must_be_beaten() -> None:
    made, entries = known([0.1, 0.2, 0.05])
    first = race(made, entries[:2])
    runs = made.runs
    found = race(made, by_nominal(entries), first)
    assert found[0].entry is entries[2]
    assert made.runs - runs <= 8
    assert len(found) == 3


def test_worth_turns_rates_into_scores() -> None:
    made, entries = known([0.1, 0.05])
    dear = [entries[0]._replace(worth=1.0), entries[1]._replace(worth=0.4)]  # 10 against 20 · 0.4
    found = race(made, by_nominal(dear))
    assert found[0].entry is dear[0]
    assert found[0].score == pytest.approx(10, rel=0.03)


def test_where_none_holds_all_were_searched() -> None:
    made, entries = known([3.0, 4.0])
    assert [(each.exact, each.step, each.score) for each in race(made, entries)] == [(True, None, 0.0)] * 2


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(0.05, 0.5), min_size=2, max_size=6), st.integers(0, 99))
def test_its_winner_is_the_exhaustive_winner(seconds: list[float], seed: int) -> None:
    made, entries = known(seconds)
    mixed = random.Random(seed).sample(entries, len(entries))
    raced = race(made, mixed)[0]
    ranked = exhaustive(made, entries)
    assert raced.rate == ranked[0].rate
    assert [each.score for each in ranked] == sorted((each.score for each in ranked), reverse=True)
    assert all(each.exact for each in ranked)


def test_who_reaches_a_rate() -> None:
    made, entries = known([0.2, 0.1, 0.05])
    assert reaches(made, by_nominal(entries), 15.0) is entries[2]
    assert reaches(made, entries, 8.0) is entries[1]
    runs = made.runs
    assert reaches(made, entries, 100.0) is None  # beyond every upper bound
    assert made.runs == runs
