"""The benchmark of speed: that all three simulate the same pipeline, what its table says, and that it runs."""

from __future__ import annotations

import pytest

from benchmarks.planning import plan_speed
from benchmarks.planning.plan_speed import Speed, Took
from benchmarks.planning.simpy_pipeline import Model
from benchmarks.setting import Setting
from trinity import traces
from trinity.costs.model_shape import get_model_shape
from trinity.simulation import compiled_engine

SERVED = {"compiled": Speed(400_000.0, 0.06, 0.028), "plain simpy": Speed(9000.0, 0.061, 0.029)}


@pytest.mark.parametrize("rate", [5.0, 40.0])
def test_the_simpy_model_is_the_same_pipeline(rate: float) -> None:
    trace = traces.synthesise(
        "TextCaps", 150, visual_tokens=get_model_shape(plan_speed.SIMULATED).visual_tokens, rate=rate, seed=3
    )
    plain, ours = plan_speed.by_simpy(trace), plan_speed.by_simulator(trace, "python")
    assert plain == pytest.approx(ours, rel=0.05)


def test_every_request_of_the_simpy_model_gets_all_its_tokens_in_order() -> None:
    trace = traces.synthesise("POPE", 60, visual_tokens=lambda width, height: 576, rate=50.0, seed=0)
    served = Model(plan_speed.simulator(), plan_speed.PLACEMENT, trace).run()
    assert [len(each.times) for each in served] == [row.output_length for row in trace]
    assert all(each.times == sorted(each.times) and each.times[0] > each.job.at for each in served)


@pytest.mark.skipif(
    bool(compiled_engine.why_unavailable()), reason=f"no compiled twin: {compiled_engine.why_unavailable()}"
)
def test_compiled_and_python_find_the_same() -> None:
    trace = traces.synthesise("TextCaps", 80, visual_tokens=lambda width, height: 576, rate=30.0, seed=1)
    assert plan_speed.by_simulator(trace, "compiled") == plan_speed.by_simulator(trace, "python")


def test_the_fastest_round_counts() -> None:
    clock = iter([0.0, 4.0, 10.0, 12.0, 20.0, 29.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan_speed.time, "process_time", lambda: next(clock))
        assert plan_speed.fastest(lambda: (0.1, 0.2), 100, 3) == Speed(50.0, 0.1, 0.2)


@pytest.mark.parametrize(("seconds", "met"), [(0.99, True), (1.01, False)])
def test_cpu_time_is_judged(seconds: float, met: bool) -> None:
    found = {"race, N = 8": Took(seconds, 7.0, 22, 6000, "8EPD"), "race, N = 2": Took(9.0, 9.0, 5, 100, "2EPD")}
    made = plan_speed.result(found, SERVED)
    (aim,) = made.aims
    assert (aim.what, aim.met, aim.aim) == ("plan, race, N = 8", met, "<= 1 s")
    assert made.tables[0].rows[0] == ["race, N = 8", f"{seconds:.2f}", "7.00", "22", "6,000", "8EPD"]
    assert made.tables[1].rows[1] == ["plain simpy", "9,000", "61.0", "29.00"]
    assert made.values["plans"]["race, N = 2"]["replays"] == 5


def test_a_plan_that_takes_too_long_is_cut_off_and_falls_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_speed, "MOST_S", 0.0)
    took = plan_speed.planned(traces.read_shipped("servegen-image-1h").window(0, 130), 2)
    assert took.placement == "none: cut off"
    assert [aim.met for aim in plan_speed.result({"race, N = 64": took}, SERVED).aims] == [False]


def test_a_plan_that_is_refused_falls_short() -> None:
    took = plan_speed.planned(traces.read_shipped("servegen-image-1h").head(20), 1)
    assert took.placement == "none: TraceTooShort"
    assert [aim.met for aim in plan_speed.result({"race, N = 64": took}, SERVED).aims] == [False]


@pytest.mark.slow
def test_it_runs() -> None:
    made = plan_speed.run(Setting(quick=True))
    alone, whole = made.values["plans"].values()
    assert alone["placement"] == whole["placement"]
    assert 0 < alone["replays"] <= whole["replays"]
    assert len(made.values["simulated"]) == 3 - bool(compiled_engine.why_unavailable())
    assert all(each["rate"] > 0 for each in made.values["simulated"].values())
    assert not made.aims
