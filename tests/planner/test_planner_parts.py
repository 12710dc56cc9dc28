"""Parts of the planner alone: what limits a placement, the winner on both engines, progress, hosts and costs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from support.analytic_simulator import Analytic
from support.planner_options import planner_options
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import MODELS
from trinity.costs.step_cost import DEVICES, CostTables, Roofline
from trinity.errors import ConfigError
from trinity.errors.display import is_display_watched
from trinity.placement import Placement
from trinity.planner import HybridPlanner, SearchConfig, evaluate
from trinity.planner.candidates import Deployment
from trinity.planner.evaluate import count_late, find_busiest_stage, find_late_stages
from trinity.planner.hardware import Hardware, cluster_of
from trinity.planner.hybrid import offer_at_once, score_effective_throughput, score_throughput
from trinity.planner.progress import ProgressBar
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces import synthesise
from trinity.traces.goodput import RequestOutcome, score_outcomes
from trinity.traces.trace import SLO, Trace, TraceRow

LLAVA = MODELS["llava-1.5-7b"]
SECOND = SLO(ttft=1.0, tbt=0.1)


def trace(count: int = 250) -> Trace:
    return synthesise("MME", count, visual_tokens=lambda width, height: 576, rate=10, seed=3)


def placed(text: str) -> Deployment:
    placement = Placement.parse(text)
    return Deployment.of(placement, ["H100"] * placement.size)


# ---------------------------------------------------------------- what limits a placement


@pytest.mark.parametrize(
    ("outcomes", "stages"),
    [
        ([RequestOutcome(0.5, [0.05])] * 9, "EPD"),  # none misses it
        ([RequestOutcome(0.5, [0.05])] * 9 + [RequestOutcome(1.5, [0.05])], "EP"),
        ([RequestOutcome(0.5, [0.05])] * 9 + [RequestOutcome(0.5, [0.5])], "D"),
        ([RequestOutcome(None, (), "error")], "EP"),
        ([RequestOutcome(1.5, [0.5]), RequestOutcome(0.5, [0.5]), RequestOutcome(0.5, [0.5])], "D"),
    ],
)
def test_which_bound_is_missed_says_which_stages_limit(outcomes: list[RequestOutcome], stages: str) -> None:
    assert find_late_stages(*count_late(outcomes, SECOND, "guard")) == stages
    rows = [TraceRow(timestamp=n, input_length=1, output_length=2) for n in range(len(outcomes))]
    found = score_outcomes(Trace(rows), outcomes, SECOND)
    assert find_late_stages(1 - found.attainment["guard"], 1 - found.ttft_attainment) == stages, "as a point says it"


def test_of_those_stages_the_one_that_works_most_in_the_busiest_group() -> None:
    shares = {"E0": {"E": 0.3}, "P0": {"P": 0.7}, "P1": {"P": 0.9}, "D0": {"D": 1.0}}
    assert find_busiest_stage(placed("1E2P1D"), shares) == "D"
    assert find_busiest_stage(placed("1E2P1D"), shares, "EP") == "P"
    assert find_busiest_stage(placed("1EP1D"), {"EP0": {"E": 0.2, "P": 0.1}, "D0": {"D": 0.9}}, "EP") == "E"
    assert find_busiest_stage(placed("2EPD"), {"EPD0": {"E": 0.2, "P": 0.1, "D": 0.5}}, "EP") == "E"
    assert find_busiest_stage(placed("2EPD"), {}, "EP") == ""


# ---------------------------------------------------------------- objectives of one replay


def replay(outcomes: list[RequestOutcome], duration_s: float) -> Replay:
    return Replay(
        outcomes=outcomes,
        duration_s=duration_s,
        busy_s={},
        peak_blocks={},
        pools={},
        moved_bytes={},
        events=0,
        backend="python",
    )


def test_throughput_counts_what_was_served_to_its_end() -> None:
    done = [RequestOutcome(0.5, [0.1]), RequestOutcome(None, (), "error"), RequestOutcome(9.0, [0.1])]
    assert score_throughput(replay(done, 4.0), placed("EPD")) == 0.5
    assert score_throughput(replay([], 0.0), placed("EPD")) == 0.0


def test_effective_throughput_as_epd_serve_has_it() -> None:
    """EPD-Serve table 5: 10 requests/s of 64 tokens on 3 devices, all in time: 213 tokens/s a device."""
    in_time, late = RequestOutcome(0.5, [0.05] * 63), RequestOutcome(1.5, [0.05] * 63)
    score = score_effective_throughput(SECOND, "guard")
    assert score(replay([in_time] * 100, 10.0), placed("1E1P1D")) == pytest.approx(640 / 3)
    assert score(replay([in_time] * 90 + [late] * 10, 10.0), placed("1E1P1D")) == pytest.approx(0.9 * 640 / 3)
    assert score(replay([], 0.0), placed("EPD")) == 0.0


def test_offline_all_requests_are_there_at_once() -> None:
    assert [row.timestamp for row in offer_at_once(trace(5))] == [0.0] * 5
    assert [row.output_length for row in offer_at_once(trace(5))] == [row.output_length for row in trace(5)]


# ---------------------------------------------------------------- the winner on both engines


class Compiled(Analytic):
    """Says that it is the compiled engine; ``wrong`` makes one request later than the cores would."""

    wrong = False

    def __init__(self, *args: Any, backend: str = "auto", **rest: Any) -> None:
        super().__init__(*args, backend="compiled" if backend == "auto" else backend, **rest)

    def replay(self, trace: Trace, placement: Placement, *, record: bool = False) -> Replay:
        told = super().replay(trace, placement, record=record)
        if self.backend == "compiled" and Compiled.wrong:
            told.outcomes[3] = RequestOutcome(9.9, told.outcomes[3].itl_s)
        return told


def planner(**options: Any) -> HybridPlanner:
    usual = {"seeds": 0, "least_requests": 250, "engine": "eager"}
    return HybridPlanner(LLAVA, SLO(0.3, 0.5), instances=2, **planner_options({**usual, **options}))


def test_what_the_compiled_engine_found_is_replayed_on_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.planner.hardware.Simulator", Compiled)
    monkeypatch.setattr(evaluate, "VERIFIED", 50)
    monkeypatch.setattr(evaluate, "VERIFIED_LEAST", 1)
    plan = planner().plan(trace())
    assert plan.backend == "compiled"
    assert "first 50 requests were replayed on the cores that serve, with equal outcomes" in plan.explain()


@pytest.mark.parametrize(("each", "least", "said"), [(120, 1, 60), (120, 80, 80), (10**6, 1, 250)])
def test_of_many_instances_fewer_requests_are_replayed(
    monkeypatch: pytest.MonkeyPatch, each: int, least: int, said: int
) -> None:
    monkeypatch.setattr("trinity.planner.hardware.Simulator", Compiled)
    monkeypatch.setattr(evaluate, "VERIFIED_EACH", each)
    monkeypatch.setattr(evaluate, "VERIFIED_LEAST", least)
    assert f"first {said} requests were replayed" in planner().plan(trace()).explain()


def test_engines_that_differ_are_a_fault_of_trinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.planner.hardware.Simulator", Compiled)
    monkeypatch.setattr(Compiled, "wrong", True)
    with pytest.raises(AssertionError, match=r'differ in 1 of 250 requests on .* use backend="python" and report it'):
        planner().plan(trace())


def test_on_the_cores_themselves_nothing_is_replayed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinity.planner.hardware.Simulator", Compiled)
    plan = planner(backend="python").plan(trace())
    assert plan.backend == "python"
    assert "cores that serve" not in plan.explain()


def test_a_real_plan_runs_on_the_engine_there_is() -> None:
    """The whole chain once over the cores themselves: two instances, two output tokens."""
    plan = HybridPlanner(LLAVA, SLO(0.15, 0.1), instances=2, search=SearchConfig(seeds=0, least_requests=100)).plan(
        trace(120)
    )
    assert plan.met
    assert {each.placement for each in plan.candidates} == {"1EP1D", "1ED1P", "1PD1E", "2EPD"}
    assert plan.best.utilisation
    assert all(0 <= held["kv_peak"] <= 1 for held in plan.best.memory.values() if "kv_peak" in held)
    assert sum(sum(each.values()) for each in plan.best.utilisation.values()) > 0


# ---------------------------------------------------------------- hardware


def hardware(cluster: Cluster, **options: Any) -> Hardware:
    return Hardware(LLAVA, cluster, options.pop("cost", None), options.pop("prices", {}), options)


def test_devices_as_a_user_may_say_them() -> None:
    assert cluster_of("H100", None).size == 8
    assert cluster_of(DEVICES["L40S"], 3).devices == (DEVICES["L40S"],) * 3
    assert [each.name for each in cluster_of({"H100": 1, "L40S": 2}, None).devices] == ["H100", "L40S", "L40S"]


def test_devices_keep_their_hosts_and_hosts_are_laid_out_for_each_placement() -> None:
    made = hardware(Cluster.of("H100", 4, per_host=2))
    four = made.simulator(placed("2P2D"), SECOND)
    assert four.cluster.hosts == ("host0", "host1", "host0", "host1")  # each host has a P and a D
    assert made.simulator(placed("2P2D"), SECOND) is four
    assert made.simulator(placed("1P3D"), SECOND) is not four
    assert made.simulator(placed("1P1D"), SECOND).cluster.size == 2


def test_costs_by_device() -> None:
    cost = {name: Roofline(model=LLAVA, device=DEVICES[name]) for name in ("H100", "L40S")}
    made = hardware(Cluster.of(("H100", 1), ("L40S", 1)), cost=cost)
    assert made.kinds["L40S"].cost is cost["L40S"]
    with pytest.raises(ConfigError, match="no cost is given for device L40S, only for H100: add one"):
        hardware(Cluster.of("L40S", 1), cost={"H100": cost["H100"]})


def test_prices_of_a_device_and_of_the_planner() -> None:
    own = msgspec.structs.replace(DEVICES["H100"], price=2.5)
    made = hardware(Cluster(devices=(own, DEVICES["L40S"])))
    assert made.price(["H100", "H100"]) == 5.0
    assert made.price(["H100", "L40S"]) is None
    assert hardware(Cluster(devices=(own,)), prices={"H100": 1.0}).price(["H100"]) == 1.0


# ---------------------------------------------------------------- progress


def test_progress_goes_to_who_asks_for_it(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[tuple[int, str]] = []
    with ProgressBar(lambda runs, what: told.append((runs, what)), watched=True) as progress:
        progress(3, "1E1P1D")
    assert told == [(3, "1E1P1D")]
    assert capsys.readouterr().err == ""


def test_a_bar_is_shown_where_somebody_sees_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trinity.planner.progress._DELAY_S", 0.0)
    with ProgressBar(watched=True) as progress:
        for runs in range(30):
            progress(runs, "1E1P1D")
    assert "replays" in capsys.readouterr().err
    with ProgressBar(watched=False) as progress:
        progress(3, "1E1P1D")
    assert capsys.readouterr().err == ""


def test_without_tqdm_there_is_no_bar_and_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with ProgressBar(watched=True) as progress:
        progress(3, "1E1P1D")


def test_measured_tables_plan_as_rooflines_do() -> None:
    found = {"decodes": {1: 0.01, 64: 0.03}, "prefill": {64: 0.01, 1024: 0.06}, "media": {576: 0.02, 2304: 0.05}}
    tables = CostTables.from_samples({1: found}, model=LLAVA.name, device="H100", dtype="bfloat16")
    same, by_name = (
        HybridPlanner(
            LLAVA, SLO(0.3, 0.1), instances=2, search=SearchConfig(seeds=0, least_requests=100), cost=cost
        ).plan(trace(150))
        for cost in (tables, {"H100": tables})
    )
    assert same == by_name
    assert same.met
    assert (same.best.score or 0) <= (same.best.bound or 0)


def test_a_pipe_sees_no_bar_a_terminal_and_a_notebook_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert not is_display_watched()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert is_display_watched()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert is_display_watched()


@pytest.mark.parametrize(
    ("name", "says"),
    [("strategy", r"a field of search=SearchConfig\(strategy="), ("strateg", ""), ("step_factor", "longer_steps")],
)
def test_an_option_that_is_not_the_planners_says_where_it_belongs(name: str, says: str) -> None:
    asked: dict[str, Any] = {name: "bayesian"}
    with pytest.raises(ConfigError, match=rf"HybridPlanner\(\) has no keyword '{name}'.*{says}"):
        HybridPlanner("llava-1.5-7b", SLO(2.0, 0.08), instances=2, **asked)


ODD: tuple[Any, ...] = ("x", None, True, [1], {}, object(), float("nan"), -1, 10**400)
TYPED = ("memory_share", "max_waiting", "interference", "depth", "ask", "lanes", "routing", "backend", "reservation")


@pytest.mark.parametrize("name", [*TYPED, "rules", "budgets", "transfers"])
def test_an_option_of_a_wrong_type_is_typed_from_both_doors(name: str) -> None:
    """Each odd value is an option that works, or is refused by its name: none ends in Python's own exceptions."""
    said: list[str] = []
    for value in ODD:
        asked: dict[str, Any] = {name: value}
        with collected(said):
            HybridPlanner(LLAVA, SECOND, instances=2, **asked)
        with collected(said):
            Simulator(LLAVA, SECOND, cluster=Cluster.of("H100", 2), **asked).check("1EP1D")
    assert len(said) >= 8
    assert all(name.split("_")[0] in each for each in said), said


@contextmanager
def collected(said: list[str]) -> Iterator[None]:
    """Collect what a ``ConfigError`` says."""
    try:
        yield
    except ConfigError as error:
        said.append(str(error))


@pytest.mark.parametrize("value", ["a", None, True, [1]])
def test_a_step_factor_that_is_no_number_is_typed(value: Any) -> None:
    with pytest.raises(ConfigError, match="step_factor is a number above 0"):
        Simulator(LLAVA, SECOND, cluster=Cluster.of("H100", 1), step_factor=value)


@pytest.mark.parametrize("beside", [{"device": "A100"}, {"engine": "eager"}, {"device": {"H100": 2}}])
def test_a_cluster_has_its_devices_and_their_engine(beside: dict[str, Any]) -> None:
    """They were ignored: a plan for an eager engine was one for graphs."""
    with pytest.raises(ConfigError, match=r"not read beside cluster=.*leave them out"):
        HybridPlanner(LLAVA, SECOND, cluster=Cluster.of("H100", 2), **beside)
    own: dict[str, Any] = {"device": "H100", "engine": "graphs"}
    assert HybridPlanner(LLAVA, SECOND, cluster=Cluster.of("H100", 2, engine="eager"), **own).hardware.kinds
