"""Live beside simulated: the same trace, costs measured beforehand and frozen; paced pipelines and a real model.

The predicate, stated before the run: at three loads, the heaviest 0.9 of the simulated goodput, p50 and p90 of TTFT and
TPOT differ by at most 10 % between a live pipeline and the simulator, for every method on paced instances; goodput too;
for a real model by at most 10 % or what three live repeats differ by, whichever is larger; and placements have the same
order by live goodput as by simulated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from typing import Any

import msgspec

from benchmarks.fidelity import real_model as fidelity_real
from benchmarks.fidelity.comparison import Load, Row, seen
from benchmarks.fidelity.host import Host, calibrated
from benchmarks.paper_devices import paper_device
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import MAX_FOREIGN_SHARE, ForeignLoad, Setting, disturbed
from trinity.bench.live_replay import live_goodput, replay
from trinity.core.scheduler import latency_bound
from trinity.costs.budgets import StepBudgets, predict_budgets
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import Roofline
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.simulation.simulator import Simulator
from trinity.traces.goodput import Goodput, GoodputOptions, goodput
from trinity.traces.synthetic import Dataset, synthesise
from trinity.traces.trace import SLO, Trace

PLACEMENTS = ("2EPD", "1EP1D", "1ED1P", "1PD2E", "1E2P1D")  # every method, N = 2 to 4
SHARES = (0.6, 0.75, 0.9)  # of the simulated goodput
AT_ONCE = 5  # placements that are served at the same time: each takes a few percent of a core
TOLERANCE = 0.10
APART = 1.08  # goodputs nearer to each other than this have no order: a live search ends at 4 % on either side

MODEL = get_model_shape("llava-1.5-7b")
# slow passes: what the host adds is small beside them
DEVICE = msgspec.structs.replace(paper_device("A100"), pass_s=0.04)
COST = Roofline(model=MODEL, device=DEVICE)
PACED = EmulatedModel(shape=EmulatedShape.of(MODEL), cost=COST, scale=2048)
SLO_PACED = SLO(ttft=0.8, tbt=0.15)
BUDGETED = SLO(ttft=0.8, tbt=0.12)  # of the budgets: a step as long as the bound is late by what the host adds
REQUESTS = Dataset(name="photographs", sizes=((1024, 768, 1.0),), prompt=(40, 20), output=(16, 8))
POOLS = {"image": 128, "kv": 6000}
OPTIONS: dict[str, Any] = {
    "slo": BUDGETED,
    "cache": CacheConfig(pools=POOLS),
    "image_cache": False,
    "prefix_cache": False,
}
SEARCH: GoodputOptions = {"least_requests": 8, "least_ttfts": 0.5}
COARSE: GoodputOptions = {**SEARCH, "step": 1.08, "tolerance": 0.04}


@dataclass
class Case:
    """One placement: its goodputs, and what was seen at each load."""

    placement: str
    asked: Trace
    simulated: Goodput
    live: Goodput | None = None
    loads: list[Load] = field(default_factory=list)

    @property
    def off(self) -> float:
        assert self.live is not None
        return self.live.rate / self.simulated.rate - 1


def trace(count: int, rate: float, seed: int) -> Trace:
    return synthesise(REQUESTS, count, visual_tokens=MODEL.visual_tokens, rate=rate, seed=seed)


def simulator(placement: str, host: Host) -> Simulator:
    """Blocks of the emulation are 2,048 times smaller than the simulator believes: a pull takes what it takes here."""
    device = msgspec.structs.replace(DEVICE, pass_s=DEVICE.pass_s + host.step_s)
    cluster = Cluster(devices=(device,) * Placement.parse(placement).size, link=host.link, message_s=host.message_s)
    cost = msgspec.structs.replace(COST, device=device)
    return Simulator(MODEL, BUDGETED, cluster=cluster, cost=cost, budgets=budgets(placement))


def budgets(placement: str) -> dict[str, StepBudgets]:
    """By roles, as the pipeline searches them on its cost, without what the host adds."""
    roles = {each for _, each in Placement.parse(placement).instances()}
    bounds = {each: latency_bound(each, BUDGETED.ttft, BUDGETED.tbt) for each in roles}
    return {each: predict_budgets(COST.seconds, each, bounds[each], MODEL.image_tokens) for each in roles}


def pipeline(placement: str) -> Pipeline:
    return Pipeline(PACED, placement, **OPTIONS)


async def at_rest(requests: int) -> Host:
    """Measure what this host adds on one placement; the same holds for all."""
    placement = "1E1P1D"
    async with pipeline(placement) as pipe:
        return await calibrated(
            pipe,
            lambda row, number: EmulatedRequest.of(row, number, "alone/"),
            trace(requests, 1.0, seed=99),
            lambda host, alone: simulator(placement, host).replay(alone, placement).outcomes,
        )


# ---------------------------------------------------------------- paced: every method


def predicted(placement: str, host: Host, count: int, shares: Sequence[float]) -> Case:
    """The simulated side: goodput, and what is seen at shares of it."""
    asked, simulated = trace(count, 10.0, seed=3), simulator(placement, host)
    case = Case(placement, asked, goodput(simulated.serve(placement), asked, SLO_PACED, **SEARCH))
    for share in shares:
        expected = simulated.replay(asked.scale(rate=share * case.simulated.rate), placement)
        full = [name for name, peak in expected.peak_blocks.items() if any(peak[kind] >= POOLS[kind] for kind in peak)]
        assert not full, f"pools bind at {full}: both sides must have room"
        case.loads.append(Load(share, count, seen(expected.outcomes, SLO_PACED)))
    return case


async def serve(case: Case, turns: asyncio.Semaphore) -> None:
    """The live side: the same loads, and a goodput, searched from the simulated one on."""
    async with turns, pipeline(case.placement) as pipe:
        for load in case.loads:
            with ForeignLoad() as others:
                served = await replay(pipe, case.asked.scale(rate=load.share * case.simulated.rate))
            load.live.append(seen(served, SLO_PACED))
            load.foreign = others.share
        near: GoodputOptions = {**COARSE, "bound": case.simulated.rate / 0.9}
        case.live = await live_goodput(pipe, case.asked, SLO_PACED, **near)


async def paced(setting: Setting) -> tuple[Host, list[Case]]:
    """All that is simulated comes first: it would take time from what is served."""
    placements = PLACEMENTS[:2] if setting.quick else PLACEMENTS
    count, shares = (12, SHARES[2:]) if setting.quick else (150, SHARES)
    host = await at_rest(3 if setting.quick else 8)
    cases = await asyncio.to_thread(lambda: [predicted(each, host, count, shares) for each in placements])
    turns = asyncio.Semaphore(AT_ONCE)
    await asyncio.gather(*(serve(case, turns) for case in cases))
    return host, cases


def misplaced(cases: Sequence[Case]) -> list[str]:
    """Pairs whose simulated goodputs are apart, and whose live goodputs have another order."""
    wrong = []
    for pair in combinations(cases, 2):
        low, high = sorted(pair, key=lambda case: case.simulated.rate)
        assert low.live is not None
        assert high.live is not None
        if high.simulated.rate > APART * low.simulated.rate and low.live.rate >= high.live.rate:
            wrong.append(f"{low.placement} before {high.placement}")
    return wrong


# ---------------------------------------------------------------- what is shown


def run(setting: Setting) -> Result:
    """Every method on paced instances, then a real model on two processes."""
    setting.settle()
    host, cases = asyncio.run(paced(setting))
    real = fidelity_real.run(setting)
    return result(host, cases, real)


def result(host: Host, cases: Sequence[Case], real: fidelity_real.Real) -> Result:
    rows = [Row(case.placement, load, TOLERANCE) for case in cases for load in case.loads]
    actual = [Row(fidelity_real.PLACEMENT, load, TOLERANCE) for load in real.loads]
    shaken = [f"{row.name} at {row.load.share:g}" for row in (*rows, *actual) if row.load.foreign > MAX_FOREIGN_SHARE]
    return Result(
        name="fidelity",
        title="Live pipelines beside the simulator",
        method=_method(host, real),
        tables=[
            Table("Paced instances, ms: live / simulated, and live over simulated", Row.HEADER, _cells(rows)),
            Table("Goodput of paced placements, requests/s", GOODPUTS, [_goodput_cells(case) for case in cases]),
            Table("A real model, ms: median of live repeats / simulated", Row.HEADER, _cells(actual)),
        ],
        aims=[*_aims(cases, rows), *_real_aims(actual)],
        notes=disturbed(shaken),
        values={
            "host": asdict(host),
            "paced": {case.placement: _values(case) for case in cases},
            "real": real.values(),
        },
    )


def _method(host: Host, real: fidelity_real.Real) -> str:
    return (
        f"Open loop, the same requests on both sides. Paced: stages wait as long as a roofline of {MODEL.name} on an "
        f"{DEVICE.name} with {DEVICE.pass_s * 1e3:g} ms a pass says; one 576-token image, about 40 tokens of text and "
        f"16 of output each; SLO {SLO_PACED.ttft:g} s and {SLO_PACED.tbt:g} s, budgets for {BUDGETED.tbt:g} s; "
        f"{AT_ONCE} placements at a time. "
        f"Measured beforehand, on {_host(host)}. "
        f"{real.method()} Loads are shares of the simulated goodput. A row passes where p50 and p90 of TTFT and TPOT "
        f"are within {TOLERANCE:.0%} (real: or within the spread of the live repeats); p99 is shown beside them."
    )


def _host(host: Host) -> str:
    return (
        f"requests alone: a message takes {host.message_s * 1e6:.0f} us, a pull {host.pull_s * 1e3:.2f} ms, a step "
        f"{host.step_s * 1e3:.2f} ms more than its cost"
    )


def _cells(rows: Sequence[Row]) -> list[list[str]]:
    return [row.cells() for row in rows]


GOODPUTS = ("placement", "simulated", "live", "live over simulated", "")


def _goodput_cells(case: Case) -> list[str]:
    assert case.live is not None
    verdict = "PASS" if abs(case.off) <= TOLERANCE else "FAIL"
    return [case.placement, f"{case.simulated.rate:.2f}", f"{case.live.rate:.2f}", f"{case.off:+.1%}", verdict]


def _aims(cases: Sequence[Case], rows: Sequence[Row]) -> list[Aim]:
    made = []
    for case in cases:
        worst = max((row for row in rows if row.name == case.placement), key=lambda row: row.worst)
        what = f"paced {case.placement}: p50 and p90 of TTFT and TPOT, live against simulated"
        passed = all(row.passed for row in rows if row.name == case.placement)
        made.append(Aim(what, f"within {TOLERANCE:.0%}", f"at most {worst.worst:.1%} off", passed))
    furthest = max(abs(case.off) for case in cases)
    made.append(
        Aim("paced goodput, live against simulated", "within 10%", f"at most {furthest:.1%} off", furthest <= TOLERANCE)
    )
    wrong = misplaced(cases)
    what = f"order of {len(cases)} placements by live goodput, where simulated ones differ by {APART - 1:.0%}"
    made.append(Aim(what, "as simulated", ", ".join(wrong) or "as simulated", not wrong))
    return made


def _real_aims(rows: Sequence[Row]) -> list[Aim]:
    aim = f"within {TOLERANCE:.0%} or the repeats' spread"
    what = f"real model on {fidelity_real.PLACEMENT}, p50 and p90 of TTFT and TPOT, at"
    return [
        Aim(f"{what} {row.load.share:g} of goodput", aim, f"at most {row.worst:.1%} off", row.passed) for row in rows
    ]


def _values(case: Case) -> dict[str, Any]:
    assert case.live is not None
    return {
        "goodput": {"simulated": case.simulated.rate, "live": case.live.rate},
        "attainment_by_rate": [(point.rate, point.attainment) for point in case.live.points],
        "loads": [load.values() for load in case.loads],
    }
