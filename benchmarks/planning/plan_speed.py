"""Seconds of plans, and simulated requests a second: compiled, in Python, and by plain simpy."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.paper_devices import ENGINE
from benchmarks.planning.simpy_pipeline import Model
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity import traces
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import get_model_shape
from trinity.errors import TrinityError
from trinity.planner import HybridPlanner, SearchConfig
from trinity.planner.hardware import Hardware, cluster_of
from trinity.planner.problem import GoodputCriterion, PlanningProblem
from trinity.simulation import compiled_engine
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces.trace import SLO, Trace

PLANNED, DEVICE, PLAN_SLO = "qwen2-vl-7b", "H100", SLO(2.0, 0.1)
LARGE_SLO = SLO(0.5, 0.1)  # of N = 1,024: a longer TTFT needs more requests than a planner draws
MOST_S = 150.0  # that one plan may take
SIMULATED, PLACEMENT, SIMULATED_SLO, RATE = "llava-1.5-7b", "1E3P4D", SLO(4.0, 0.08), 40.0
THINNED = 0.06  # of its requests that the shipped day has
AIMS = {
    "race alone, N = 8": 1.0,
    "race, N = 8": 1.0,
    "exhaustive, N = 8": 10.0,
    "race, N = 64": 10.0,
    "race, N = 1,024": MOST_S,
    "race, N = 8, 24 h": MOST_S,
}


class Took(NamedTuple):
    """Seconds of CPU and wall; replays of the search, requests of the trace, what was chosen."""

    cpu_s: float
    wall_s: float
    replays: int
    requests: int
    placement: str


class Speed(NamedTuple):
    """Requests a second of CPU, and the mean TTFT and gap in s that it found."""

    rate: float
    ttft: float
    gap: float


class TooLongError(Exception):
    """A plan took more than ``MOST_S``."""


QUICK_SEARCH = SearchConfig(seeds=0)


def planned(
    trace: Trace, instances: int, search: SearchConfig = QUICK_SEARCH, slo: SLO = PLAN_SLO, **options: Any
) -> Took:
    """Of a whole plan: the winner is described and verified too. ``QUICK_SEARCH`` gives no confidence.

    One that is cut off after ``MOST_S``, or refused, has chosen nothing.
    """
    replays, cpu, wall = 0, time.process_time(), time.perf_counter()

    def tell(runs: int, what: str) -> None:
        nonlocal replays
        replays = runs
        if time.process_time() - cpu > MOST_S:
            raise TooLongError

    options = {"instances": instances, "search": search, "progress": tell, **options}
    try:
        plan = HybridPlanner(PLANNED, slo, device=DEVICE, engine=ENGINE, **options).plan(trace)
        found = plan.runs, plan.trace.requests, plan.placement
    except TooLongError:
        found = replays, len(trace), "none: cut off"
    except TrinityError as error:
        found = replays, len(trace), f"none: {type(error).__name__}"
    return Took(time.process_time() - cpu, time.perf_counter() - wall, *found)


def searched(trace: Trace, instances: int) -> Took:
    """Of the race alone, as ``plan`` runs it, on a trace that is long enough."""
    hardware = Hardware(get_model_shape(PLANNED), cluster_of(DEVICE, instances, engine=ENGINE), None, {}, {})
    cpu, wall = time.process_time(), time.perf_counter()
    case = PlanningProblem(hardware, trace, GoodputCriterion(PLAN_SLO), None)
    found = case.search("race", case.bound_deployments(hardware.names))
    took = time.process_time() - cpu, time.perf_counter() - wall
    return Took(*took, case.trials.runs, len(trace), str(found[0].entry.deployment))


def fastest(one: Callable[[], tuple[float, float]], requests: int, rounds: int) -> Speed:
    """Of some rounds; ``one`` serves them all and returns the mean TTFT and gap."""
    best, seen = float("inf"), (0.0, 0.0)
    for _ in range(rounds):
        began = time.process_time()
        seen = one()
        best = min(best, time.process_time() - began)
    return Speed(requests / max(best, 1e-9), *seen)


def by_simulator(trace: Trace, engine: str) -> tuple[float, float]:
    return means(simulator(engine).replay(trace, PLACEMENT))


def simulator(engine: str = "auto") -> Simulator:
    return Simulator(SIMULATED, SIMULATED_SLO, cluster=Cluster.of(DEVICE, 8, engine=ENGINE), backend=engine)


def means(replay: Replay) -> tuple[float, float]:
    ttft = fmean(each.ttft_s for each in replay.outcomes if each.ttft_s is not None)
    return ttft, fmean(gap for each in replay.outcomes for gap in each.itl_s)


def by_simpy(trace: Trace) -> tuple[float, float]:
    served = Model(simulator(), PLACEMENT, trace).run()
    ttft = fmean(each.times[0] - each.job.at for each in served)
    return ttft, fmean((each.times[-1] - each.times[0]) / max(1, len(each.times) - 1) for each in served)


def speeds(requests: int, rounds: int) -> dict[str, Speed]:
    rule = get_model_shape(SIMULATED).visual_tokens
    trace = traces.synthesise("TextCaps", requests, visual_tokens=rule, rate=RATE, seed=0)
    found = (
        {}
        if compiled_engine.why_unavailable()
        else {"compiled": fastest(lambda: by_simulator(trace, "compiled"), requests, rounds)}
    )
    return {
        **found,
        "Python core": fastest(lambda: by_simulator(trace, "python"), requests, rounds),
        "plain simpy": fastest(lambda: by_simpy(trace), requests, rounds),
    }


def plans(quick: bool) -> dict[str, Took]:
    hour = traces.read_shipped("servegen-image-1h")
    if quick:
        few = hour.window(0, 130)
        return {"race alone, N = 2": searched(few, 2), "race, N = 2": planned(few, 2)}
    ten = hour.window(0, 600)
    found = {
        "race alone, N = 8": searched(ten, 8),
        "race, N = 8": planned(ten, 8),
        "race, N = 8, and confidence over 3 seeds": planned(ten, 8, SearchConfig()),
        "exhaustive, N = 8": planned(ten, 8, SearchConfig("exhaustive", seeds=0)),
        "race, N = 64": planned(ten, 64),
    }
    day = traces.densify(traces.read_shipped("servegen-image-24h"), 1 / THINNED, seed=0)
    return {
        **found,
        "race, N = 1,024": planned(ten, 1024, slo=LARGE_SLO),
        "race, N = 8, 24 h": planned(day, 8),
    }


def run(setting: Setting) -> Result:
    setting.settle()
    found = plans(setting.quick)
    served = speeds(60, 1) if setting.quick else speeds(3000, 3)
    return result(found, served)


def result(found: dict[str, Took], served: dict[str, Speed]) -> Result:
    made = Result(
        "plan_speed",
        "Speed of plans and of the simulator",
        f"CPU time of one thread, wall time beside it. Plans: {PLANNED} on {DEVICE} ({ENGINE}), SLO "
        f"{PLAN_SLO.ttft:g} s and {PLAN_SLO.tbt:g} s, on ten minutes of the shipped hour or on the shipped day at its "
        f"own rate again; the trace is there already. Simulated: {SIMULATED}, {PLACEMENT}, TextCaps at {RATE:g} req/s, "
        "best of three.",
    )
    rows = [
        [name, f"{took.cpu_s:.2f}", f"{took.wall_s:.2f}", f"{took.replays}", f"{took.requests:,}", took.placement]
        for name, took in found.items()
    ]
    header = ("plan", "CPU s", "wall s", "replays searched", "requests", "chosen")
    made.tables.append(Table("Plans", header, rows))
    rows = [
        [name, f"{each.rate:,.0f}", f"{each.ttft * 1e3:.1f}", f"{each.gap * 1e3:.2f}"] for name, each in served.items()
    ]
    made.tables.append(Table("Requests simulated a second", ("", "requests/s", "TTFT ms", "TBT ms"), rows))
    made.values = {
        "plans": {name: took._asdict() for name, took in found.items()},
        "simulated": {name: each._asdict() for name, each in served.items()},
    }
    for name, most in AIMS.items():
        if name in found:
            seen, wanted = found[name].cpu_s, f"<= {most:g} s" if most < MOST_S else "minutes (<= 2.5)"
            met = seen <= most and not found[name].placement.startswith("none")
            made.aims.append(Aim(f"plan, {name}", wanted, f"{seen:.2f} s", met))
    return made
