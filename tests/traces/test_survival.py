"""The estimate of output lengths beside published figures, and beside the true distribution of drawn ones."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.traces.survival import RUNNING, OutputSurvival, Seen, observe
from trinity.traces.trace import TraceRow

# Weeks of remission under 6-MP (Freireich and others, Blood 21, 1963), and the estimate as textbooks print it (Cox and
# Oakes, Analysis of Survival Data, 1984, table 4.1; Kleinbaum and Klein, Survival Analysis, chapter 2).
ENDED = [6, 6, 6, 7, 10, 13, 16, 22, 23]
WENT_ON = [6, 9, 10, 11, 17, 19, 20, 25, 32, 32, 34, 35]
PRINTED = {5: 1.0, 6: 0.857, 7: 0.807, 10: 0.753, 13: 0.690, 16: 0.627, 22: 0.538, 23: 0.448, 35: 0.448}


def seen(ended: list[int], went_on: list[int]) -> list[Seen]:
    return [*((each, True) for each in ended), *((each, False) for each in went_on)]


def row(output: int, reason: str = "", most: int | None = None) -> TraceRow:
    return TraceRow(timestamp=0, input_length=9, output_length=output, finish_reason=reason, max_tokens=most)


def test_the_estimate_is_the_printed_one() -> None:
    """Too few of the 21 are at risk late: without older ones the pooled shares are their own."""
    survival = OutputSurvival(seen(ENDED, WENT_ON))
    assert {weeks: round(survival.chance(weeks), 3) for weeks in PRINTED} == PRINTED


def test_what_is_expected_by_hand() -> None:
    survival = OutputSurvival(seen([2, 4], []), [])
    assert survival.expected(0) == 3
    assert survival.expected(2) == 4
    assert survival.expected(3, most=4) == 4
    assert survival.expected(0, most=3) == 2.5  # 2 or, cut, 3
    running = OutputSurvival(seen([2], [2]))  # half of them go on beyond 2, and no one was longer
    assert running.chance(2) == 0.5
    assert running.expected(2) == pytest.approx(2 + 1 / (1 - math.exp(-0.5)))  # at most as much again: exp(-1 / 2)
    assert running.expected(2, most=3) == 3


def test_where_none_has_ended_it_is_the_limit_or_what_is_there() -> None:
    survival = OutputSurvival(seen([], [5, 9]))
    assert (survival.expected(5), survival.expected(5, most=64)) == (5, 64)
    assert OutputSurvival([]).expected(0, most=7) == 7


def test_older_outputs_tell_of_lengths_that_few_recent_ones_have_reached() -> None:
    recent, older = seen([], [10] * 50), seen([20] * 50 + [40] * 50, [])
    both = OutputSurvival(recent, older)
    assert both.expected(10) == pytest.approx(30)
    assert both.chance(19) == 1
    few = OutputSurvival(seen([], [30] * 9), seen([20] * 50, []))
    assert few.chance(20) == pytest.approx(9 / 59)  # nine that came so far do not yet say that none ends there
    assert OutputSurvival(seen([], [30] * 10), seen([20] * 50, [])).chance(20) == 1
    assert OutputSurvival(recent + seen([5] * 50, []), older).chance(10) == pytest.approx(0.5)  # recent where enough


def drawn(seed: int, mean: float, count: int) -> list[Seen]:
    """Geometric lengths of which each is watched up to a token of its own, drawn without regard to the length."""
    noise = random.Random(seed)
    found = []
    for _ in range(count):
        length, until = 1 + int(noise.expovariate(1 / mean)), noise.randrange(int(2 * mean))
        found.append((length, True) if length <= until else (until, False))
    return found


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_is_the_true_one_where_that_of_ended_ones_is_half_of_it(seed: int) -> None:
    mean, seen = 200.0, drawn(seed, 200.0, 4000)
    assert fmean(tokens for tokens, ended in seen if ended) < 0.65 * mean
    survival = OutputSurvival(seen)
    assert survival.expected(0) == pytest.approx(mean, rel=0.07)
    assert survival.expected(150) == pytest.approx(150 + mean, rel=0.1)  # geometric: what is left is always the mean
    capped = mean * (1 - math.exp(-100 / mean))
    assert survival.expected(0, most=100) == pytest.approx(capped, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans()), max_size=40), st.integers(0, 90), st.integers(1, 90))
def test_it_expects_no_less_than_there_is_and_no_more_than_the_limit(
    outputs: list[Seen], tokens: int, most: int
) -> None:
    survival = OutputSurvival(outputs[::2], outputs[1::2])
    chances = [survival.chance(each) for each in range(80)]
    assert all(1 >= sooner >= later >= 0 for sooner, later in pairwise(chances))
    limited = survival.expected(tokens, most)
    assert tokens <= limited <= max(tokens, most) + 1e-9
    assert limited <= survival.expected(tokens) + 1e-9 or not survival.knows_ends
    longest = max((each for each, _ in outputs), default=0)
    assert survival.expected(tokens) <= max(tokens, longest) + max(1, longest) + 1.6


def test_what_rows_say() -> None:
    assert observe(row(7, "stop", 9)) == (7, True)
    assert observe(row(7)) == (7, True)
    assert observe(row(7, RUNNING, 9)) == observe(row(7, "cancelled")) == (7, False)
    assert observe(row(9, "length", 9)) == (8, False)  # its own limit ended it
    assert observe(row(9, "length")) == (9, True)
    survival = OutputSurvival(seen([2, 4], []))
    assert [survival.fill(each) for each in (row(9), row(2, RUNNING), row(0, "refused", 2))] == [9, 4, 2]
