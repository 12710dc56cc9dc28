"""The benchmark of reservations: what its figures say, and that it runs."""

from __future__ import annotations

import asyncio
import random

import pytest

from benchmarks.report import Result
from benchmarks.serving import reservation
from benchmarks.serving.reservation import Found, Run
from benchmarks.setting import Setting


def made(rate: float, **tokens: list[int]) -> Run:
    """Ten requests, of which one decodes for three seconds and four do for one."""
    return Run([(3.0, 1), (1.0, 4)], 10 / rate, 2, [0.5] * 10, [0.02] * 90, tokens)


def test_concurrency_is_a_mean_over_time() -> None:
    run = made(5.0)
    assert (run.most, run.mean, run.rate) == (4, 7 / 4, 5.0)
    assert run.figures()["tokens_s"] == 50.0


def test_pairs_are_compared_and_other_tokens_are_noticed() -> None:
    result = Result("r", "r", "r")
    pairs = [("full", made(2.0, a=[1])), ("optimistic", made(6.0, a=[1]))]
    reservation._live(result, [*pairs, ("full", made(1.0, a=[1])), ("optimistic", made(5.0, a=[1]))])  # type: ignore[list-item]
    assert result.values["live_ratio"] == 4.0
    assert [aim.met for aim in result.aims] == [True]
    other = Result("r", "r", "r")
    reservation._live(other, [("full", made(2.0, a=[1])), ("optimistic", made(6.0, a=[2]))])
    assert [aim.met for aim in other.aims] == [False]


def test_simulated_requests_ask_for_much_and_use_little() -> None:
    trace = reservation.asked(50, lambda draw: 20)
    full = reservation.simulated("EPD", 1, trace, ask=2048, memory_share=0.35)
    found = reservation.simulated("EPD", 1, trace, ask=2048, memory_share=0.35, reservation="optimistic")
    assert found.most > full.most
    assert len(full.gaps) == len(found.gaps) == 50 * 19


def test_outputs_are_as_they_say() -> None:
    draw = random.Random(1)
    fixed, spread = ([output(draw) for _ in range(4000)] for output in reservation.OUTPUTS.values())
    assert set(fixed) == {reservation.USED}
    assert 280 < sum(spread) / len(spread) < 320
    assert max(spread) <= 2000 < reservation.ASKED


def test_policies_are_told_beside_algorithm_1() -> None:
    result = Result("r", "r", "r")
    found: dict[tuple[str, str, str], Found] = {
        (placement, policy, order): Found(2.0 if policy == "time" else 1.0, 3.0, 0.1, 0.01)
        for placement in reservation.PLACEMENTS
        for policy in reservation.POLICIES
        for order in reservation.ORDERS
    }
    reservation._policies(result, found)
    assert len(result.tables[0].rows) == len(found)
    assert any("best is time with fcfs, of which Algorithm 1, first come, has 50%" in note for note in result.notes)


def test_goodput_of_a_trace_that_is_too_short_is_none() -> None:
    serve = reservation._serving("4EPD", "alg1", "fcfs")
    assert reservation._goodput(serve, reservation.recorded(20), "guard") == 0.0


@pytest.mark.slow
def test_without_any_goodput_percentiles_are_at_the_rate_of_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, only in (("PLACEMENTS", "4EPD"), ("POLICIES", "alg1"), ("ORDERS", "fcfs")):
        monkeypatch.setattr(reservation, name, (only,))
    (found,) = reservation.policies(reservation.recorded(20)).values()
    assert found.guard == found.p99 == 0.0
    assert found.ttft > 0


def test_live_requests_get_the_same_tokens_under_both() -> None:
    runs = [asyncio.run(reservation.live(each, 5)) for each in reservation.RESERVATIONS]
    assert runs[0].tokens == runs[1].tokens
    assert {len(tokens) for tokens in runs[0].tokens.values()} == {reservation.USED}
    assert runs[1].most > runs[0].most == 4


@pytest.mark.slow
def test_it_runs() -> None:
    result = reservation.run(Setting(quick=True))
    assert [aim.met for aim in result.aims] == [True]
    assert len(result.tables) == 3
