"""The benchmark of EPDServe's table 6: its model, what it would call a failure, and that it runs."""

from __future__ import annotations

import pytest

from benchmarks.planning.long_outputs import (
    LONG_OUTPUT,
    PAPER,
    RATE,
    REACTION_S,
    Latencies,
    Served,
    arrivals,
    cost,
    count_wrong,
    gain_aims,
    make_request,
    means,
    result,
    run,
    shift,
    simulate,
)
from benchmarks.setting import Setting
from trinity.emulation.model import EmulatedModel, EmulatedShape
from trinity.errors import StageError
from trinity.pipeline import Pipeline


def served(latencies: Latencies, lost: int = 0) -> Served:
    return Served(latencies, lost, [("E4", 0.1, 0.4, 0.1)])


def test_the_traffic_is_the_papers() -> None:
    asked = arrivals(2000)
    assert [output for _, output in asked[:11]] == [50] * 10 + [500]
    assert len(asked) / asked[-1][0] == pytest.approx(RATE, rel=0.1)
    assert shift(asked) == asked[10][0]


def test_without_a_switch_the_model_is_fitted_to_the_paper() -> None:
    """The figures of the row that is fitted; those of the other one nobody has put in."""
    found = simulate(arrivals(100), None)
    assert found.latencies.tpot == pytest.approx(PAPER[False].tpot, rel=0.02)
    assert found.latencies.latency == pytest.approx(PAPER[False].latency, rel=0.05)
    assert (found.lost, found.switches) == (0, [])


def test_the_sooner_it_switches_the_better() -> None:
    asked = arrivals(100)
    soon, late = (simulate(asked, delay).latencies for delay in (REACTION_S, 20.0))
    assert soon.latency < late.latency < simulate(asked, None).latencies.latency


def test_means_are_those_of_the_requests() -> None:
    assert means([[1.0, 2.0, 4.0], [3.0]]) == Latencies(5.0, 2.0, 3.0)


@pytest.mark.parametrize(
    ("found", "met"),
    [
        (PAPER[True], [True] * 4),
        (Latencies(40.0, 1.42, 0.05), [False, True, True, True]),
        (Latencies(28.0, 1.42, 0.07), [True, False, True, True]),
        (Latencies(28.0, 2.50, 0.05), [True, True, False, True]),
    ],
)
def test_gains_far_from_the_papers_fall_short(found: Latencies, met: list[bool]) -> None:
    aims = gain_aims("live", {False: served(PAPER[False]), True: served(found)})
    assert [aim.met for aim in aims] == met


def test_a_lost_request_falls_short() -> None:
    aims = list(gain_aims("live", {False: served(PAPER[False]), True: served(PAPER[True], lost=1)}))
    assert [aim.met for aim in aims] == [True, True, True, False]


async def test_a_wrong_token_counts_as_lost() -> None:
    model = EmulatedModel(shape=EmulatedShape(
        name="tiny", layers=2, kv_heads=1, head_dim=8, image_width=8, image_tokens=64, vocabulary=1000
    ), cost=cost(0.001))  # fmt: skip
    requests = [make_request(number, 5) for number in range(3)]
    async with Pipeline(model, "1EPD") as pipe:
        outputs = [await pipe.complete(each) for each in requests]
        assert count_wrong(pipe, requests, outputs, model) == 0
        outputs[0].token_ids[3] += 1
        outputs[1].token_ids.pop()
        assert count_wrong(pipe, requests, [*outputs[:2], StageError("it failed")], model) == 3


def test_the_result_says_what_was_measured() -> None:
    live = {False: served(PAPER[False]), True: served(PAPER[True])}
    simulated = {delay: served(PAPER[delay is not None]) for delay in (None, 0.0, 2.0, 5.0, 10.0, 20.0)}
    found = result(live, simulated)
    assert all(aim.met for aim in found.aims)
    assert found.tables[0].rows[1] == ["live, switched", "28.01", "1.42", "0.050", "2.18x", "0.94x", "2.40x", "0"]
    assert found.tables[2].rows == [["E4", "0.10", "0.40", "0.10"]]
    assert str(LONG_OUTPUT) in found.method


@pytest.mark.slow
def test_it_runs() -> None:
    """Two replays of eighteen requests; the simulated figures are the full ones."""
    found = run(Setting(quick=True))
    assert len(found.tables[0].rows) == 6
    assert [aim.met for aim in found.aims[4:]] == [True] * 4
    assert found.aims[3].measured == "0"
    assert [row[0] for row in found.tables[2].rows] == ["E4", "E3", "E2"]
