"""What a failed replay says of others, and how often outputs meet a step in progress: by hand and by counting."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from trinity.placement import Placement
from trinity.planner.candidates import Deployment, list_deployments
from trinity.planner.collisions import PULL_S, predict_encode_waits, predict_step_waits
from trinity.planner.pruning import find_short_roles, has_no_more
from trinity.traces.goodput import RatePoint
from trinity.traces.trace import SLO, SLO_RULES


def placed(text: str, devices: str = "") -> Deployment:
    placement = Placement.parse(text)
    return Deployment.of(placement, devices or "A" * placement.size)


def seen(first: float, kept: float, **load: float) -> RatePoint:
    met: dict[str, float] = dict.fromkeys(SLO_RULES, kept)
    return RatePoint(rate=9.0, duration_s=60.0, attainment=met, completed=1.0, ttft_attainment=first, load=load)


# ---------------------------------------------------------------- too few of which


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


# ---------------------------------------------------------------- steps in progress

STEP = 0.025
TIGHT = SLO(2.0, 0.04)


def counted(count: int, rate: float, lasting: float, spare: float, draws: int = 40_000) -> float:
    """Share of requests, in turn to so many instances, that find more than ``spare`` of a step left."""
    noise, until, now, late = random.Random(7), [0.0] * count, 0.0, 0
    for number in range(draws):
        now += noise.expovariate(rate)
        place = number % count
        late += now < until[place] and noise.uniform(0, STEP) > spare
        until[place] = now + lasting
    return late / draws


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("gaps", [1, 8])
def test_at_that_rate_a_tenth_meets_a_step_in_progress(count: int, gaps: int) -> None:
    rate = predict_step_waits(count, STEP, Counter({gaps: 100}), TIGHT, "guard", 0.9)
    assert counted(count, rate, gaps * STEP, TIGHT.tbt - STEP - PULL_S) == pytest.approx(0.1, abs=0.015)


def test_what_tolerates_a_late_gap_does_not_count() -> None:
    assert predict_step_waits(2, STEP, Counter({10: 100}), TIGHT, "guard", 0.9) == math.inf
    assert predict_step_waits(2, STEP, Counter({10: 100}), TIGHT, "p99", 0.9) < 10
    assert predict_step_waits(2, STEP, Counter({0: 100}), TIGHT, "guard", 0.9) == math.inf
    assert predict_step_waits(2, STEP, Counter({8: 10, 50: 90}), TIGHT, "guard", 0.9) == math.inf  # a tenth may be late
    assert predict_step_waits(2, STEP, Counter({8: 100}), SLO(2.0, 0.06), "guard", 0.9) == math.inf  # two steps fit
    assert predict_step_waits(2, STEP, Counter({8: 100}), TIGHT, "tpot", 0.9) == math.inf  # seven others make up for it
    assert predict_step_waits(2, STEP, Counter({1: 100}), TIGHT, "tpot", 0.9) < math.inf
    assert predict_step_waits(1, STEP, Counter(), TIGHT, "guard", 0.9) == math.inf


def test_more_instances_serve_more_than_in_proportion_since_each_comes_in_turn() -> None:
    rates = [predict_step_waits(count, STEP, Counter({8: 100}), TIGHT, "guard", 0.9) for count in range(1, 8)]
    assert all(rates[n] / rates[0] > n + 1 for n in range(1, 7))


def test_an_encode_in_between_is_a_late_gap() -> None:
    few, many = Counter({5: 100}), Counter({30: 100})
    rate = predict_encode_waits(4, 0.03, STEP, few, TIGHT, 0.9)
    assert 1 - math.exp(-rate / 4 * 5 * STEP) == pytest.approx(0.1)
    assert predict_encode_waits(4, 0.03, STEP, many, TIGHT, 0.9) == math.inf
    assert predict_encode_waits(4, 0.01, STEP, few, TIGHT, 0.9) == math.inf
