"""Trials on a grid of rates, the race against the exhaustive ranking, its replays, and what a failed one rules out."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import accumulate
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.errors import TraceTooShort
from trinity.placement import Placement
from trinity.planner.candidates import Deployment, list_deployments
from trinity.planner.race import find_short_roles, has_no_more, race, reaches
from trinity.planner.search import BoundedCandidate, search_all, sort_by_guess
from trinity.planner.trials import GRID, Trials, rate_of, step_of
from trinity.traces.goodput import RatePoint, RequestOutcome, ServeFunction, goodput
from trinity.traces.trace import SLO, SLO_RULES, Trace, TraceRow

LOOSE = SLO(ttft=2.0, tbt=1.0)
FIVE = list_deployments(["A"] * 3)[:5]


def evenly(count: int = 1000, rate: float = 1.0) -> Trace:
    return Trace(TraceRow(timestamp=1000 * n / rate, input_length=1, output_length=1) for n in range(count))


def queue(service_s: float) -> ServeFunction:
    """One server, first come first served."""

    def serve(trace: Trace) -> list[RequestOutcome]:
        arrivals = [row.timestamp / 1000 for row in trace]
        ends = list(accumulate(arrivals, lambda end, at: max(end, at) + service_s, initial=-math.inf))[1:]
        return [RequestOutcome(end - at) for at, end in zip(arrivals, ends, strict=True)]

    return serve


def trials(service_s: Callable[[Deployment], float], trace: Trace | None = None, slo: SLO = LOOSE) -> Trials:
    return Trials(lambda deployment: queue(service_s(deployment)), evenly() if trace is None else trace, slo)


def known(seconds: list[float]) -> tuple[Trials, list[BoundedCandidate]]:
    """One deployment for each service time, whose bounds are its own rate: upper times 1.2, nominal as it is."""
    placed = list_deployments(["A"] * len(seconds), ["EP+D"])[: len(seconds)] + list_deployments(["A"] * len(seconds))
    chosen = dict(zip(dict.fromkeys(placed), seconds, strict=False))
    entries = [BoundedCandidate(each, 1.2 / service, 1 / service) for each, service in chosen.items()]
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


@pytest.mark.parametrize("guess", [2.0, 300.0, 1500.0])
def test_its_first_steps_are_those_that_it_asks_while_none_holds(guess: float) -> None:
    made = trials(lambda _: 3.0)
    assert made.limit(FIVE[0], guess) is None
    first = made.first_steps(guess)
    assert [step_of(point.rate * 1.001) for point in made.points(FIVE[0])][:0:-1] == list(first)


def test_a_rate_that_holds_in_too_short_a_time_is_no_answer() -> None:
    made = trials(lambda _: 1e-4)
    with pytest.raises(TraceTooShort, match=r"1E1P1D serves .* of 20 s that it must last.*resample=True") as caught:
        made.limit(FIVE[0], 1000)
    assert caught.value.needed_s > 1000


@pytest.mark.parametrize(("count", "said"), [(0, "no rate"), (1, "no rate"), (2, "too short"), (999, "too short")])
def test_too_few_requests_are_refused_before_anything_runs(count: int, said: str) -> None:
    with pytest.raises(TraceTooShort, match=said):
        trials(lambda _: 0.1, evenly(count))


def slow_ends(output: int, gap_s: float) -> tuple[ServeFunction, Trace]:
    """No queue at all, and outputs of one token or of many, which take as long as they are in time for."""

    def serve(trace: Trace) -> list[RequestOutcome]:
        return [RequestOutcome(0.1, [gap_s] * (row.output_length - 1)) for row in trace]

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

    def serve(offered: Trace) -> list[RequestOutcome]:
        return [RequestOutcome(0.1, [20.0] + [0.05] * (row.output_length - 2)) for row in offered]

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
    found = race(made, sort_by_guess(entries))
    assert found[0].entry is entries[1]
    assert found[0].rate == pytest.approx(10, rel=0.03)
    assert [each.exact for each in found] == [True, False, False, False, False]
    assert made.runs <= 8 + 4
    assert all(each.bound <= found[0].rate * GRID * 1.0001 for each in found[1:])


def test_one_whose_upper_bound_is_lower_is_not_asked() -> None:
    made, entries = known([0.1, 0.5])
    found = race(made, sort_by_guess(entries))
    assert made.points(entries[1].deployment) == ()
    assert found[1].bound == pytest.approx(2.4)


def test_what_guesses_were_worth_for_a_method_decides_who_is_next() -> None:
    """The first of EP+D comes to a third of its guess: the others of it, guessed higher than ED+P, come after that."""
    placed = [*list_deployments(["A"] * 4, ["EP+D"]), *list_deployments(["A"] * 4, ["ED+P"])]
    asked: list[str] = []

    def serve(deployment: Deployment) -> ServeFunction:
        asked.append(deployment.method)
        return queue(0.3 if deployment.method == "EP+D" else 0.12)

    guesses = dict(zip(placed, (10.0, 9.4, 9.4, 8.0, 8.0, 8.0), strict=True))
    first = race(made := Trials(serve, evenly(), LOOSE), [BoundedCandidate(placed[0], 100.0, 10.0)])
    found = race(made, [BoundedCandidate(each, 100.0, guess) for each, guess in guesses.items()], first)
    assert asked[:2] == ["EP+D", "ED+P"]
    assert found[0].entry.deployment.method == "ED+P"


def test_who_is_thought_worse_than_its_stages_say_comes_later_and_is_searched_from_there() -> None:
    made, entries = known([0.5, 0.1])
    entries[0] = entries[0]._replace(nominal=40.0, upper=50.0, likely=2.0)
    assert sort_by_guess(entries) == [entries[1], entries[0]]
    alone = trials(lambda _: 0.5)
    assert search_all(made, entries[:1])[0].step == alone.limit(entries[0].deployment, 2.0)
    assert made.runs == alone.runs


def test_until_one_holds_nobody_is_searched_to_the_end() -> None:
    """Three are guessed twenty times too high; the fourth is as it says, and the first that is searched."""
    made, entries = known([2.0, 1.0, 1.0, 0.2])
    wrong = [each._replace(nominal=20.0 * each.nominal, upper=100.0) for each in entries[:3]]
    found = race(made, [*wrong, entries[3]])
    assert found[0].entry is entries[3]
    assert sum(each.exact for each in found) <= 2
    all_of_them, _ = known([2.0, 1.0, 1.0, 0.2])
    search_all(all_of_them, [*wrong, entries[3]])
    assert made.runs < all_of_them.runs


def test_a_winners_goodput_is_that_of_a_search_alone() -> None:
    """Where rates that fail lie between such that hold, the race may not see another one than ``search_all``."""

    def serve(trace: Trace) -> list[RequestOutcome]:
        at = [row.timestamp / 1000 for row in trace]
        rate = (len(at) - 1) / (at[-1] - at[0])
        return [RequestOutcome(9.0 if 10 < rate < 12 or rate > 14 else 0.1)] * len(at)

    holed, even = list_deployments(["A"] * 3, ["EP+D"])
    entries = [BoundedCandidate(even, 100.0, 12.5), BoundedCandidate(holed, 100.0, 10.0)]
    made, alone = (
        Trials(lambda deployment: serve if deployment == holed else queue(0.08), evenly(), LOOSE) for _ in range(2)
    )
    found = race(made, entries)
    fresh = search_all(alone, entries)
    assert [(each.entry, each.rate) for each in found if each.exact] == [(each.entry, each.rate) for each in fresh]
    assert found[0].entry is entries[0]


class Short:
    """What a rate above that of its fewest instances looks like: those are at work all the time."""

    def __init__(self, deployment: Deployment, each: dict[str, float]) -> None:
        self.counts = {group.roles: group.count for group in deployment.placement.groups}
        self.each = each

    def __call__(self, trace: Trace) -> list[RequestOutcome]:
        raise AssertionError

    def point(self, trace: Trace, slo: SLO, rate: float | None) -> RatePoint:
        assert rate is not None
        load = {roles: rate / (count * self.each[roles]) for roles, count in self.counts.items()}
        decodes = next(roles for roles in load if "D" in roles)
        first = 0.1 if any(share > 1 for roles, share in load.items() if roles != decodes) else 1.0
        kept = 0.0 if load[decodes] > 1 else first
        met: dict[str, float] = dict.fromkeys(SLO_RULES, kept)
        return RatePoint(rate=rate, duration_s=1e4, attainment=met, completed=1.0, ttft_attainment=first, load=load)


@pytest.mark.parametrize("best", [({"EP": 2.0, "D": 10.0}), ({"EP": 10.0, "D": 2.0}), ({"EP": 3.0, "D": 3.0})])
def test_those_that_lack_what_another_lacked_are_not_asked(best: dict[str, float]) -> None:
    """Bounds that say nothing, and a guess that is the same for all: what failed must tell who else will."""
    placed = list_deployments(["A"] * 16, ["EP+D"])
    made = Trials(lambda each: Short(each, best), evenly(), LOOSE)
    entries = [BoundedCandidate(each, inf, 9.0) for each in random.Random(3).sample(placed, len(placed))]
    found = race(made, entries)
    alone = search_all(Trials(lambda each: Short(each, best), evenly(), LOOSE), entries)
    assert found[0].rate == alone[0].rate
    assert sum(bool(made.points(each.entry.deployment)) for each in found) <= 11 < len(placed)


def test_a_bad_order_costs_replays_and_nothing_else() -> None:
    made, entries = known([0.2, 0.1, 0.11, 0.15, 0.101])
    assert race(made, reversed(sort_by_guess(entries)))[0].entry is entries[1]


def test_of_equal_ones_the_first_stays() -> None:
    made, entries = known([0.1, 0.1, 0.1])
    found = race(made, entries)
    assert found[0].entry is entries[0]
    assert [each.exact for each in found] == [True, False, False]


def test_what_is_known_is_not_searched_again_and_must_be_beaten() -> None:
    made, entries = known([0.1, 0.2, 0.05])
    first = race(made, entries[:2])
    runs = made.runs
    found = race(made, sort_by_guess(entries), first)
    assert found[0].entry is entries[2]
    assert made.runs - runs <= 8
    assert len(found) == 3


def test_worth_turns_rates_into_scores() -> None:
    made, entries = known([0.1, 0.05])
    dear = [entries[0]._replace(worth=1.0), entries[1]._replace(worth=0.4)]  # 10 against 20 · 0.4
    found = race(made, sort_by_guess(dear))
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
    ranked = search_all(made, entries)
    assert raced.rate == ranked[0].rate
    assert [each.score for each in ranked] == sorted((each.score for each in ranked), reverse=True)
    assert all(each.exact for each in ranked)


def test_who_reaches_a_rate() -> None:
    made, entries = known([0.2, 0.1, 0.05])
    assert reaches(made, sort_by_guess(entries), 15.0) is entries[2]
    assert reaches(made, entries, 8.0) is entries[1]
    runs = made.runs
    assert reaches(made, entries, 100.0) is None  # beyond every upper bound
    assert made.runs == runs


# ---------------------------------------------------------------- too few of which


def placed(text: str, devices: str = "") -> Deployment:
    placement = Placement.parse(text)
    return Deployment.of(placement, devices or "A" * placement.size)


def seen(first: float, kept: float, **load: float) -> RatePoint:
    met: dict[str, float] = dict.fromkeys(SLO_RULES, kept)
    return RatePoint(rate=9.0, duration_s=60.0, attainment=met, completed=1.0, ttft_attainment=first, load=load)


@pytest.mark.parametrize(
    ("placement", "point", "short"),
    [
        ("2E4P2D", seen(0.5, 0.5, E=0.2, P=0.95, D=1.0), {"P"}),
        ("6EP2D", seen(0.5, 0.5, EP=0.95, D=1.0), {"EP"}),
        ("6EP2D", seen(0.5, 0.5, EP=0.6, D=1.0), set()),  # P waits for D, which holds its blocks
        ("6EP2D", seen(1.0, 0.85, EP=0.6, D=1.0), {"D"}),
        ("6EP2D", seen(0.5, 0.4, EP=0.95, D=1.0), {"EP", "D"}),
        ("6EP2D", seen(0.95, 0.86, EP=0.95, D=1.0), set()),  # a tenth of those in time may be late
        ("2E4P2D", seen(0.5, 0.5, E=1.0, P=0.5, D=0.2), {"E"}),
        ("2E4P2D", seen(0.5, 0.5, E=1.0, P=0.95, D=0.2), {"P"}),  # E may take larger batches
        ("6PD2E", seen(0.5, 0.5, E=1.0, PD=1.0), set()),
        ("4PD4E", seen(0.5, 0.5, E=0.3, PD=1.0), set()),  # what decodes is always at work
        ("4PD4E", seen(0.9, 0.5, E=0.3, PD=1.0), {"PD"}),
        ("4ED4P", seen(0.8, 0.3, ED=0.3, P=1.0), {"ED", "P"}),
        ("8EPD", seen(0.5, 0.1, EPD=1.0), set()),  # there is no other ratio
        ("6EP2D", seen(-1.0, 0.1, EP=1.0, D=1.0), set()),  # not known
        ("6EP2D", seen(0.5, 0.5), set()),  # an engine that does not say
    ],
)
def test_of_which_there_were_too_few(placement: str, point: RatePoint, short: set[str]) -> None:
    assert find_short_roles(placed(placement), point, 0.9, "guard") == short


def test_those_with_as_many_or_fewer_of_them_lack_them_too() -> None:
    failed = placed("2E4P2D")
    named = [str(each) for each in list_deployments("A" * 8, ["E+P+D"]) if has_no_more(each, failed, {"P", "D"})]
    assert "1E4P3D" in named
    assert "1E5P2D" in named
    assert "1E3P4D" in named
    assert not {"1E6P1D"} - set(named)
    assert has_no_more(placed("1E1P6D"), failed, {"P"})
    assert not has_no_more(placed("1E5P2D"), failed, {"P"})
    assert not has_no_more(failed, failed, set())


def test_other_devices_say_nothing() -> None:
    assert has_no_more(placed("1EP2D", "AAA"), placed("2EP1D", "AAA"), {"EP"})
    assert not has_no_more(placed("1EP2D", "BBB"), placed("2EP1D", "AAA"), {"EP"})
    assert not has_no_more(placed("1EP2D", "BAA"), placed("2EP1D", "BAA"), {"EP"})
