"""What a plan says of its prices: the engine assumed, seconds of steps, whose measurements; and memory counted once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.planner_options import planner_options
from trinity.costs.budgets import StepCost
from trinity.costs.cluster import Cluster
from trinity.costs.engines import ENGINES
from trinity.costs.model_shape import MODELS
from trinity.costs.step_cost import DEVICES, CostTables, Roofline, get_device
from trinity.errors import ConfigError, TraceTooShort, UnknownName
from trinity.planner import HybridPlanner, Plan
from trinity.planner.algorithm2 import choose_placements, memory_bound
from trinity.planner.hardware import Hardware, cluster_of
from trinity.planner.prices import label_devices
from trinity.planner.problem import GoodputCriterion, PlanningProblem
from trinity.planner.resample import MOST_DRAWN, DrawnTrace, plan_on_long_enough
from trinity.planner.search import search_above, search_to_end
from trinity.report.page import render_html
from trinity.simulation import compiled_engine
from trinity.traces import synthesise
from trinity.traces.trace import SLO, Trace, TraceRow

LLAVA = MODELS["llava-1.5-7b"]
TRACE = synthesise("TextCaps", 400, visual_tokens=lambda width, height: 576, rate=8, seed=2)
needs_twin = pytest.mark.skipif(bool(compiled_engine.why_unavailable()), reason="no compiled twin")


def plan(**options: Any) -> Plan:
    usual: dict[str, Any] = {"instances": 2, "seeds": 0, "least_requests": 250}
    return HybridPlanner(LLAVA, SLO(1.0, 0.08), **planner_options(usual | options)).plan(TRACE)


# ---------------------------------------------------------------- the engine


@pytest.mark.parametrize("engine", ["graphs", "eager"])
@needs_twin
def test_a_plan_and_its_report_print_the_engine_and_what_it_prices(engine: Any, tmp_path: Path) -> None:
    found = plan(engine=engine)
    (priced,) = found.priced
    cost = Roofline(model=LLAVA, device=get_device("H100", engine))
    assert (priced.device, priced.engine) == ("H100", engine)
    assert priced.decode_s == pytest.approx(cost.at(32, 0, 0, context=priced.context), rel=1e-3)
    assert priced.prefill_s == pytest.approx(cost.at(0, priced.prompt, 0, context=0))
    assert priced.encode_s == pytest.approx(cost.at(0, 0, 576, context=0, image_tokens=576))
    said = f"Engine assumed on H100: {engine} (a roofline with {1000 * ENGINES[engine].pass_s:g} ms a pass)"
    for text in (found.explain(), str(found), render_html(found)):
        assert said in text
        assert f"{1000 * priced.decode_s:.3g} ms" in text
    found.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == found


def test_graphs_are_the_default_and_other_engines_are_refused() -> None:
    assert {each.engine for each in Cluster.of("H100", 2).devices} == {"graphs"}
    assert {each.pass_s for each in Cluster.of("A100", 2, engine="eager").devices} == {0.02}
    with pytest.raises(UnknownName, match="engine"):
        HybridPlanner(LLAVA, SLO(1.0, 0.1), engine="steam")  # type: ignore[arg-type]
    with pytest.raises(UnknownName, match="engine"):
        Cluster.of("H100", 2, engine="steam")


def test_a_device_of_ones_own_and_a_cpu_keep_their_overheads() -> None:
    own = DEVICES["H100"].under("eager")
    assert Cluster.of(own, 1, engine="graphs").devices == (own,)
    assert get_device("cpu", "eager") == get_device("cpu", "graphs") == DEVICES["cpu"]


# ---------------------------------------------------------------- tables measured elsewhere


@needs_twin
def test_a_table_measured_on_a_cpu_is_not_labelled_h100() -> None:
    curves = StepCost.from_samples({1: 0.01, 64: 0.03}, {1: 0.01, 1024: 0.1}, {576: 0.02, 5760: 0.1})
    tables = CostTables(model="llava", device="AMD EPYC x 1", dtype="bfloat16", source="profiled", costs=((1, curves),))
    found = plan(cost=tables)
    assert found.devices == ("AMD EPYC x 1",) * 2
    assert "on 2 x AMD EPYC x 1" in found.explain().splitlines()[0]
    assert "H100" not in found.explain().splitlines()[0]
    assert "only the memory is that of H100" in found.explain()
    assert "Engine assumed on AMD EPYC x 1: measured (tables profiled)" in found.explain()


def tables(device: str) -> CostTables:
    curves = StepCost.from_samples({1: 0.01, 64: 0.03}, {1: 0.01, 1024: 0.1}, {576: 0.02, 5760: 0.1})
    return CostTables(model="llava", device=device, dtype="bfloat16", source="profiled", costs=((1, curves),))


@needs_twin
def test_candidates_bear_the_label_of_the_measurements_too() -> None:
    """Of a fewest_instances plan the best alone was said to run on an H100."""
    found = plan(cost=tables("AMD EPYC x 1"), instances=3, objective="fewest_instances", rate=0.5)
    assert {name for each in found.candidates for name in each.devices} == {"AMD EPYC x 1"}
    assert "on 1 x AMD EPYC x 1" in found.explain().splitlines()[0]
    assert "H100" not in found.explain().splitlines()[0]


@needs_twin
def test_kinds_that_share_their_measurements_are_told_apart_and_priced_once() -> None:
    found = plan(cost=tables("AMD EPYC x 1"), instances=None, cluster=Cluster.of(("H100", 1), ("L40S", 1)))
    own = {f"AMD EPYC x 1 (memory of {name})" for name in ("H100", "L40S")}
    assert set(found.devices) == own
    assert {name for each in found.candidates for name in each.devices} == own
    assert len({(each.placement, each.devices) for each in found.candidates}) == len(found.candidates)
    for text in (found.explain(), str(found)):
        assert text.count("Engine assumed on AMD EPYC x 1") == 1


def test_labels_are_unique() -> None:
    devices = {name: DEVICES[name] for name in ("H100", "L40S", "A100")}
    here = {name: Roofline(model=LLAVA, device=each) for name, each in devices.items()}
    assert label_devices(devices, here) == {name: name for name in devices}
    assert label_devices(devices, {**here, "H100": tables("cpu")}) == {"H100": "cpu", "L40S": "L40S", "A100": "A100"}
    borrowed = label_devices(devices, {**here, "H100": tables("L40S")})
    assert borrowed == {"H100": "L40S (memory of H100)", "L40S": "L40S", "A100": "A100"}
    assert len(set(label_devices(devices, dict.fromkeys(devices, tables("A100"))).values())) == 3


# ---------------------------------------------------------------- Algorithm 2


def problem(trace: Trace = TRACE, **options: Any) -> PlanningProblem:
    hardware = Hardware(LLAVA, cluster_of("H100", 4), None, {}, options)
    return PlanningProblem(hardware, trace, GoodputCriterion(SLO(4.0, 1.0), least_requests=2, least_ttfts=0.1), None)


def test_line_9_takes_its_share_of_the_memory_once() -> None:
    """0.9 of what the weights leave of 80 GB, by hand; the pool's 0.9 of the device was taken from that again."""
    rows = [TraceRow(timestamp=100.0 * n, input_length=600, text_length=600, output_length=89) for n in range(300)]
    case = problem(Trace(rows))
    each = 524_288 * (600 + 88)
    whole = int(0.9 * (80e9 - LLAVA.weight_bytes("D")) / each)
    assert case.profile().budgets.d == whole == 165
    assert memory_bound(case.bounds.load, LLAVA, 0.9 * 80e9) == 146, "what it was: the share of a share"


def test_memory_that_is_left_to_others_is_not_the_devices() -> None:
    rows = [TraceRow(timestamp=100.0 * n, input_length=600, text_length=600, output_length=89) for n in range(300)]
    half = problem(Trace(rows), memory_share=0.45).profile().budgets.d
    assert half == int(0.9 * (40e9 - LLAVA.weight_bytes("D")) / (524_288 * 688))


@needs_twin
@pytest.mark.parametrize("seed", range(3))
def test_the_printed_lines_are_what_production_runs(seed: int) -> None:
    """The choice is the first of the three that is strictly better than those before it, each searched by itself."""
    trace, slo = synthesise("TextVQA", 1500, visual_tokens=lambda width, height: 576, rate=8, seed=seed), SLO(0.3, 0.06)
    options = planner_options({"seeds": 0, "strategy": "paper"})
    found = HybridPlanner(LLAVA, slo, instances=4, **options).plan(trace)
    case = PlanningProblem(Hardware(LLAVA, cluster_of("H100", 4), None, {}, {}), trace, GoodputCriterion(slo), None)
    best, reached = "", 0.0
    for entry in case.bound_paper_choices(case.hardware.names, "largest_remainder"):
        rate = search_to_end(case.trials, entry).rate
        best, reached = (str(entry.deployment), rate) if rate > reached else (best, reached)
    assert (found.best.placement, found.best.score, found.trace.requests) == (best, reached, 1500)
    assert found.paper is not None
    assert found.paper.placement in [str(each) for each in choose_placements(4, case.profile().seconds)]


@needs_twin
def test_one_replay_tells_that_a_method_is_not_better() -> None:
    case = PlanningProblem(
        Hardware(LLAVA, cluster_of("H100", 2), None, {}, {}),
        TRACE,
        GoodputCriterion(SLO(1.0, 0.08), least_requests=2, least_ttfts=0.1),
        None,
    )
    entry = case.bound_deployments(case.hardware.names)[0]
    whole = search_to_end(case.trials, entry)
    before = case.trials.runs
    assert not search_above(case.trials, entry, 10 * whole.rate).exact
    assert case.trials.runs == before + 1
    assert search_above(case.trials, entry, whole.rate / 2) == whole


# ---------------------------------------------------------------- many instances


@pytest.mark.parametrize(("needed", "drawn"), [(300_000, 450_000), (700_000, MOST_DRAWN), (940_000, MOST_DRAWN)])
def test_as_many_requests_are_drawn_as_there_is_room_for(needed: int, drawn: int, monkeypatch: Any) -> None:
    """A plan for 1,024 instances needs 350,000 requests; half as many again to spare were more than were allowed."""
    seen: list[int] = []
    monkeypatch.setattr("trinity.planner.resample.resample", _note(seen))

    def answer(trial: DrawnTrace) -> str:
        if not seen:
            span = (trial.trace[-1].timestamp - trial.trace[0].timestamp) / 1000
            raise TraceTooShort("short", needed * span / len(trial.trace))
        return "planned"

    assert plan_on_long_enough(DrawnTrace(TRACE, ()), 0, True, answer) == "planned"
    assert seen == [pytest.approx(drawn, rel=1e-3)]


def _note(seen: list[int]) -> Any:
    """Make a ``resample`` that notes how many requests are drawn, and draws none."""

    def resample(trace: Trace, count: int, seed: int) -> Trace:
        seen.append(count)
        return trace

    return resample


def test_more_than_that_is_said() -> None:
    def answer(trial: DrawnTrace) -> str:
        raise TraceTooShort("short", 1e9)

    with pytest.raises(TraceTooShort, match="more than the 1,000,000 that are drawn at most"):
        plan_on_long_enough(DrawnTrace(TRACE, ()), 0, True, answer)


def test_a_bad_share_of_a_device_is_refused() -> None:
    with pytest.raises(ConfigError):
        DEVICES["H100"].__class__(name="x", flops=1, bandwidth=1, memory=1, vision_share=1.5)
