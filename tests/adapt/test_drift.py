"""The shift detector by hand, ticks and restarts of a watch, and when a shift becomes a proposal."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.steady_traffic import FLAT, Plan, row, steady
from trinity.adapt.drift import NEGLIGIBLE, DemandShift, DriftDetector, PageHinkley
from trinity.adapt.replanner import Proposal, Replanner
from trinity.errors import ConfigError, TraceError, TrinityError
from trinity.traces.trace import Trace, TraceImage, TraceRow

E2 = math.e**2  # a ratio whose half logarithm is 1


def detector(**fields: Any) -> PageHinkley:
    return PageHinkley(**{"ratio": E2, "certainty": 12, "least": 3, "burst": 0, "warm": 1, **fields})


# ---------------------------------------------------------------- the test itself


def test_a_step_by_hand() -> None:
    test = detector()
    assert [test.add(0) for _ in range(9)] == [0] * 9
    assert (test.mean, test.noise, test.threshold, test.strength) == (0, 0, 3, 0)
    assert test.add(3) == 0
    assert test.mean == pytest.approx(0.3)
    assert test.noise**2 == pytest.approx(9 / 2 / 10)
    assert test.strength == pytest.approx((3 - 0.3 - 1) / 3)
    assert test.add(3) == 2  # sum 1.7 + 3 - 0.5454... - 1 = 3.1545..., above 3 and above 12 x 0.409 / 2
    assert test.strength == pytest.approx((1.7 + 2 - 6 / 11) / 3)


def test_a_fall_is_found_as_a_rise_is() -> None:
    up, down = detector(), detector()
    noise = random.Random(0)
    values = [noise.gauss(0, 0.5) for _ in range(30)] + [noise.gauss(2.5, 0.5) for _ in range(10)]
    found = [up.add(value) for value in values]
    assert [down.add(-value) for value in values] == found
    first = next(place for place, ticks in enumerate(found) if ticks)
    assert 30 < first < 36
    assert found[first] == first - 29  # it began with the 30th


def test_less_than_half_the_change_never_sums_up() -> None:
    test = detector()
    assert not any(test.add(0) for _ in range(50))
    assert not any(test.add(0.99) for _ in range(2000))
    assert test.strength == 0


def test_one_outlier_is_no_shift_and_lasting_ones_are() -> None:
    test = detector()
    assert not any(test.add(0) for _ in range(60))
    assert test.add(1e9) == 0
    assert test.mean < 0.1
    assert not any(test.add(0) for _ in range(60))
    assert any(test.add(1e9) for _ in range(4))


@pytest.mark.parametrize("start", [0, 0.5])
def test_a_burst_of_seven_values_is_no_change_and_what_lasts_is(start: float) -> None:
    """A burst of a minute touches seven ticks of ten seconds; the first and the last of them in part."""
    burst = [4 * (1 - start) or 4, *[4.0] * 5, 4 * start or 4]
    test, control = detector(burst=7), detector(burst=0)
    noise = random.Random(0)
    quiet = [noise.gauss(0, 0.2) for _ in range(90)]
    values = [*quiet[:30], *burst, *quiet[30:]]
    assert not any(test.add(each) for each in values)
    assert any(control.add(each) for each in values)
    assert any(test.add(4) for _ in range(12))


def test_noise_makes_it_slower() -> None:
    def delay(spread: float) -> int:
        test = detector()
        for place in range(200):
            assert not test.add(spread if place % 2 else -spread)
        return next(place for place in range(1000) if test.add(2 + (spread if place % 2 else -spread)))

    assert delay(0) < delay(0.7) < delay(1.2)
    test = detector()
    for place in range(400):
        test.add(0.5 if place % 2 else -0.5)
    assert test.noise == pytest.approx(1 / math.sqrt(2), rel=0.01)  # differences of 1, half of their square
    assert test.threshold == pytest.approx(max(3, 12 * 0.5 / 2), rel=0.01)


def test_nothing_is_found_while_it_warms_up() -> None:
    values = [0] * 10 + [4] * 5
    for warm, first in ((1, 12), (12, 13), (13, 14)):
        test = detector(warm=warm)
        assert next(count for count, value in enumerate(values, 1) if test.add(value)) == first
    assert detector(noise=2.0).threshold == 12 * 4 / 2


@given(st.lists(st.floats(-50, 50), max_size=60))
def test_what_is_found_lies_within_what_was_seen(values: list[float]) -> None:
    test = detector(warm=3)
    for count, value in enumerate(values, 1):
        assert 0 <= test.add(value) < count or count == 1
        assert test.threshold >= 3
        assert min(values) <= test.mean <= max(values)


@pytest.mark.parametrize(
    "wrong",
    [
        {"ratio": 1},
        {"ratio": math.inf},
        {"certainty": 0},
        {"certainty": math.nan},
        {"least": 0},
        {"warm": 0},
        {"burst": -1},
    ],
)
def test_a_test_needs_bounds_with_a_meaning(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="shift detector"):
        detector(**wrong)


# ---------------------------------------------------------------- ticks of demand


def shifts(watch: DriftDetector, rows: list[TraceRow]) -> list[DemandShift]:
    return [shift for each in rows for shift in watch.feed(each)]


def test_a_doubled_output_is_a_shift_of_d_by_hand() -> None:
    watch = DriftDetector(FLAT)
    found = shifts(watch, [*steady(0, 300), *steady(300, 420, out=21)])
    assert len(found) == 1
    (shift,) = found
    assert (shift.stage, shift.since_s) == ("D", 300)
    assert 390 <= shift.at_s <= 410
    assert shift.before == pytest.approx({"E": 0, "P": 0.1, "D": 1})
    assert shift.after == pytest.approx({"E": 0, "P": 0.1, "D": 2})
    assert shift.factor == pytest.approx(2)
    assert str(shift) == (
        f"at {shift.at_s:.0f} s: demand of D x 2.00 (stage seconds a second: E 0.000 to 0.000, P 0.100 to 0.100, "
        "D 1.000 to 2.000)"
    )


def test_the_first_images_are_a_shift_of_e_from_next_to_nothing() -> None:
    pictured = steady(300, 420, images=[TraceImage(tokens=50)])
    (shift,) = shifts(DriftDetector(FLAT), [*steady(0, 300), *pictured])
    assert shift.stage == "E"
    assert shift.before["E"] == 0
    assert shift.factor == pytest.approx(0.5 / NEGLIGIBLE)


def test_twice_the_requests_are_a_shift_and_silence_is_one() -> None:
    watch = DriftDetector(FLAT)
    (busy,) = shifts(watch, [*steady(0, 300), *steady(300, 420, every=0.5)])
    assert busy.after == pytest.approx({stage: 2 * seconds for stage, seconds in busy.before.items()})
    quiet = watch.advance(700)
    assert [shift.stage in "PD" and shift.after[shift.stage] == 0 for shift in quiet] == [True]
    assert watch.advance(700) == []


def test_after_a_shift_the_new_demand_is_the_usual_one() -> None:
    watch = DriftDetector(FLAT)
    found = shifts(watch, [*steady(0, 300), *steady(300, 1500, out=21), *steady(1500, 2000)])
    assert [(shift.since_s, round(shift.factor, 2)) for shift in found] == [(300, 2), (1500, 0.5)]


def test_a_row_counts_when_it_is_known() -> None:
    served = [row(n, latency_s=600.0, finish_reason="length") for n in range(300)]
    assert shifts(DriftDetector(FLAT), [*served, *(row(900 + n, out=21) for n in range(120))])[0].since_s == 900
    watch = DriftDetector(FLAT, tick_s=1)
    watch.feed(row(50), at_s=0)
    watch.feed(row(0), at_s=5)
    assert watch.now == 5
    assert watch.feed(row(0), at_s=2) == []  # late: it counts as of now
    assert watch.now == 5


def test_after_more_than_an_hour_of_silence_all_starts_anew() -> None:
    watch = DriftDetector(FLAT)
    assert shifts(watch, [*steady(0, 300), *steady(300 + 3700, 4400, out=210)]) == []


def test_bad_times_and_ticks() -> None:
    watch = DriftDetector(FLAT)
    for wrong in (math.nan, math.inf):
        with pytest.raises(TraceError, match="number of seconds"):
            watch.feed(row(0), at_s=wrong)
    for wrong in (0, 0.01, 3600, math.nan):
        with pytest.raises(ConfigError, match="tick"):
            DriftDetector(FLAT, tick_s=wrong)


# ---------------------------------------------------------------- from a shift to a proposal


def due(replanner: Replanner, rows: list[TraceRow]) -> list[Trace]:
    return [trace for each in rows if (trace := replanner.feed(each)) is not None]


def redeploy_at(placement: str = "1P1D", **fields: Any) -> Replanner:
    return Replanner(DriftDetector(FLAT), placement, **{"least": 5, "requests": 20, **fields})


def test_a_shift_is_planned_for_on_what_came_since() -> None:
    replanner = redeploy_at(requests=40)
    (trace,) = due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    assert {each.output_length for each in trace} == {21}
    assert len(trace) == replanner.shifts[0].at_s - 300 + 1
    assert trace[0].timestamp == 300_000
    plan = Plan("1P2D")
    proposal = replanner.propose(plan)
    assert proposal == Proposal(
        at_s=419, placement="1P2D", instead_of="1P1D", shift=replanner.shifts[0], requests=len(trace), plan=plan, gain=2
    )
    assert str(proposal).startswith("run 1P2D instead of 1P1D (2.00 times as good), planned on ")


@pytest.mark.parametrize(("present", "gain"), [(1.0, 2.0), (1.8, 2 / 1.8), (1.95, None), (2.0, None), (0.0, math.inf)])
def test_a_small_gain_is_not_worth_a_proposal(present: float, gain: float | None) -> None:
    replanner = redeploy_at()
    due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    proposal = replanner.propose(Plan("1P2D", present=present))
    assert (proposal.gain if proposal else None) == gain


def test_each_plan_must_know_the_present_placement_and_one_that_nothing_meets_proposes_nothing() -> None:
    for plan, said in ((Plan("1P2D", present=None), "no score of 1P1D, which runs now"), (Plan("1P2D", met=False), "")):
        replanner = redeploy_at()
        due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
        if said:
            with pytest.raises(ConfigError, match=said):
                replanner.propose(plan)
        else:
            assert replanner.propose(plan) is None
        assert due(replanner, [*steady(420, 720, out=21), *steady(720, 840, out=41)])  # and watching goes on


def test_where_the_cores_did_not_replay_it_the_screening_engine_tells_the_gain() -> None:
    replanner, plan = redeploy_at(), Plan("1P2D", present=None)
    due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    plan.candidates[0].screened, plan.candidates[1].screened = 3.0, 2.0
    proposal = replanner.propose(plan)
    assert proposal is not None
    assert proposal.gain == 1.5


def test_few_requests_are_drawn_again_and_too_few_waited_for() -> None:
    replanner = redeploy_at(least=115, requests=500)
    (trace,) = due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    assert len(trace) == 500
    assert {each.output_length for each in trace} == {21}
    proposal = replanner.propose(Plan("1P2D"))
    assert proposal is not None
    assert proposal.requests == 115


def test_one_plan_at_a_time_and_none_in_the_cooldown() -> None:
    replanner = redeploy_at(cooldown_s=600)
    outputs = [11, 21, 11, 21, 11, 21, 11]  # 300 s each: shifts at 300, 600, ... s
    rows = [each for n, out in enumerate(outputs) for each in steady(300 * n, 300 * n + 300, out=out)]
    asked, made = [], []
    for each in rows:
        if replanner.feed(each) is not None:
            asked.append(replanner.watch.now)
            proposal = replanner.propose(Plan("1P2D"))
            made.append(proposal)
    assert len(replanner.shifts) == 6
    assert 390 < asked[0] <= 410
    assert asked[1] == asked[0] + 600  # for the shift at 600 s, found in the cooldown
    assert len(made) == 3
    replanner = redeploy_at(cooldown_s=0)
    assert len(due(replanner, rows)) == 1  # the first plan is still being made


def test_a_plan_for_the_present_placement_proposes_nothing_and_costs_no_cooldown() -> None:
    replanner = redeploy_at(cooldown_s=600)
    for placement, start, out in (("1P1D", 0, 21), ("1P2D", 420, 41)):
        assert len(
            due(replanner, [*steady(start, start + 300, out=out // 2 + 1), *steady(start + 300, start + 420, out=out)])
        )
        proposal = replanner.propose(Plan(placement))
        assert (proposal is None) == (placement == "1P1D")


def test_a_shift_back_is_planned_for_on_all_since_what_it_goes_back_to() -> None:
    replanner = redeploy_at(cooldown_s=0, requests=500)
    swinging = [*steady(0, 300), *steady(300, 600, out=21), *steady(600, 900), *steady(900, 1020, out=21)]
    found = []
    for each in swinging:
        if (trace := replanner.feed(each)) is not None:
            found.append((replanner.watch.now, {row.output_length for row in trace}))
            assert replanner.propose(Plan("1P1D")) is None
    assert [outputs for _, outputs in found] == [{21}, {11, 21}, {11, 21}]
    assert found[1][0] == 900  # the fall is planned for once it has lasted five minutes
    assert [round(shift.since_s) for shift in replanner.shifts] == [300, 600, 900]
    assert [shift.at_s < 1020 for shift in replanner.shifts] == [True] * 3


def test_a_demand_that_was_never_there_is_planned_for_by_itself() -> None:
    replanner = redeploy_at(cooldown_s=0, requests=500)
    assert due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    replanner.propose(Plan("1P1D"))
    (trace,) = due(replanner, [*steady(420, 720, out=21), *steady(720, 840, out=41)])
    assert {each.output_length for each in trace} == {41}


def test_more_requests_than_a_plan_needs_are_drawn_from() -> None:
    replanner = redeploy_at(requests=20)
    (trace,) = due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    assert len(trace) == 80


def test_what_was_applied_is_the_present_placement() -> None:
    replanner = redeploy_at()
    replanner.set_placement("1P2D")
    due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    assert replanner.propose(Plan("1P2D")) is None


def test_a_plan_is_made_again_on_what_came_since_whatever_the_cooldown() -> None:
    replanner = redeploy_at(cooldown_s=600, requests=500)
    replanner.plan_again()
    assert due(replanner, steady(0, 300)) == []  # no plan ever was
    assert due(replanner, steady(300, 420, out=21))
    replanner.plan_again()  # while one is made
    assert due(replanner, steady(420, 440, out=21)) == []
    first = replanner.propose(Plan("1P2D"))
    assert due(replanner, steady(440, 460, out=21)) == []
    replanner.plan_again()
    assert len(due(replanner, steady(460, 480, out=21))) == 1
    again = replanner.propose(Plan("1P2D"))
    assert first is not None
    assert again is not None
    assert again.shift == first.shift
    assert again.requests > first.requests


def test_a_newer_shift_is_planned_for_in_place_of_the_one_before() -> None:
    replanner = redeploy_at(cooldown_s=6000)
    assert due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    assert replanner.propose(Plan("1P2D")) is not None
    assert due(replanner, [*steady(420, 720, out=21), *steady(720, 840, out=41)]) == []
    replanner.plan_again()
    assert due(replanner, steady(840, 842, out=41))
    proposal = replanner.propose(Plan("1P2D"))
    assert proposal is not None
    assert proposal.shift.since_s == 720


def test_a_plan_beside_a_placement_that_is_gone_is_made_again() -> None:
    replanner = redeploy_at()
    assert due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    replanner.set_placement("2P1D")  # somebody's, while the plan was made
    assert replanner.propose(Plan("1P2D")) is None
    assert due(replanner, steady(420, 421, out=21))
    answer = Plan("1P2D")
    answer.candidates[-1].placement = "2P1D"
    proposal = replanner.propose(answer)
    assert proposal is not None
    assert (proposal.instead_of, proposal.shift.since_s) == ("2P1D", 300)


def test_a_planner_that_fails_is_told_of_and_asked_again() -> None:
    replanner = redeploy_at()
    assert due(replanner, [*steady(0, 300), *steady(300, 420, out=21)])
    replanner.record_failure(TrinityError("too short"))
    assert str(replanner.error) == "too short"
    assert due(replanner, [*steady(420, 720, out=21), *steady(720, 840, out=41)])


def test_plans_that_nobody_asked_for_and_bad_settings() -> None:
    replanner = redeploy_at()
    for answer in (lambda: replanner.propose(Plan("1P1D")), lambda: replanner.record_failure(TrinityError())):
        with pytest.raises(ConfigError, match="no plan is due"):
            answer()
    for wrong in ({"cooldown_s": -1}, {"cooldown_s": math.nan}, {"least": 0}, {"least": 30, "requests": 20}):
        with pytest.raises(ConfigError, match="cooldown_s"):
            redeploy_at(**wrong)
    for least_gain in (0.99, math.nan, math.inf):
        with pytest.raises(ConfigError, match="least_gain must be at least 1"):
            redeploy_at(least_gain=least_gain)


def test_rows_of_more_than_an_hour_ago_are_let_go() -> None:
    replanner = redeploy_at()
    assert due(replanner, steady(0, 8000)) == []
    assert 3500 < len(replanner.watch.book) <= 3601
