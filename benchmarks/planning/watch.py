"""Shifts in the shipped traffic: how soon they are found, how many a day has, how often calm traffic gives an alarm.

The placement serves it: the share of requests in time is measured by replay and shown beside each table. The predicate:
at least nine requests in ten are in time before any shift; a doubled output length and a tenfold image share are found
within 130 s in the middle of all seeds and within 180 s in each, with no alarm before; bursts of a minute, of two to
ten times the requests, give none; on the shipped day, as recorded and at its full rate, proposals come at most once an
hour on the mean, though no cooldown holds them back and every plan proposes something. The bounds of 130 s and of one
an hour were set once first figures were seen, the others before.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import msgspec

from benchmarks.paper_devices import paper_cluster, paper_device
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity import traces
from trinity.adapt.drift import DemandShift, DriftDetector
from trinity.adapt.replanner import Proposal, Replanner
from trinity.costs.demand import Demand
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import Roofline
from trinity.placement import Placement
from trinity.simulation.simulator import Simulator
from trinity.traces.trace import SLO, Trace, TraceRow, attainment

BOUND = SLO(ttft=2.0, tbt=0.08)
QWEN = get_model_shape("qwen2-vl-7b")
PLACEMENT = "3EPD"  # serves 16 requests/s within the bounds; the hour has 10.2
IN_TIME = 0.9
WITHIN_S, MEDIAN_S = 180.0, 130.0
BURST_S = 60.0
MOST_A_DAY = 24
THINNED = 0.06  # of the day's requests are in the shipped day
CALM_HOURS = 200
Change = Callable[[TraceRow, bool], TraceRow]  # of a row, which comes after the shift or before it


@cache
def hour() -> Trace:
    return traces.read_shipped("servegen-image-1h")


@cache
def day() -> Trace:
    return traces.read_shipped("servegen-image-24h")


@cache
def hourly() -> Demand:
    """Demand by the device that serves."""
    return Demand.for_slo(Roofline(model=QWEN, device=paper_device("H100")), BOUND)


def served(trace: Trace) -> float:
    """Share of a trace's requests that the placement serves in time."""
    simulator = Simulator(QWEN, BOUND, cluster=paper_cluster("H100", Placement.parse(PLACEMENT).size))
    return attainment(simulator.replay(trace, PLACEMENT).outcomes, BOUND, "guard")


def in_bursts(rows: Trace, at_s: float, length_s: float, times: int) -> Trace:
    """The same traffic, of which each request comes ``times`` times from ``at_s`` for ``length_s`` seconds."""
    end_s = at_s + length_s
    return Trace(row for row in rows for _ in range(times if at_s <= row.timestamp / 1000 < end_s else 1))


class Other:
    """A plan that always proposes something else: the most proposals that there can be."""

    placement, score, screened, met = "8EPD", 2.0, None, True

    @property
    def best(self) -> Other:
        return self

    @property
    def candidates(self) -> list[Present]:
        return [Present()]


class Present:
    placement, score, screened = PLACEMENT, 1.0, None


def proposed(replanner: Replanner, rows: Iterable[TraceRow]) -> list[Proposal]:
    """Watch a trace where every plan proposes something."""
    found = [replanner.propose(Other()) for row in rows if replanner.feed(row) is not None]
    return [proposal for proposal in found if proposal is not None]


def spacing(found: list[Proposal]) -> float:
    """Seconds between the two that are closest to each other."""
    return min((later.at_s - sooner.at_s for sooner, later in pairwise(found)), default=math.inf)


def longer(row: TraceRow) -> TraceRow:
    return msgspec.structs.replace(row.request_at(row.timestamp), output_length=2 * row.output_length)


def doubled(row: TraceRow, after: bool) -> TraceRow:
    return longer(row) if after else row


def tenfold(noise: random.Random) -> Change:
    """Of the requests before the shift one in ten keeps its images."""

    def change(row: TraceRow, after: bool) -> TraceRow:
        if after or noise.random() < 0.1:
            return row
        return msgspec.structs.replace(row.request_at(row.timestamp), images=[], input_length=row.text_tokens)

    return change


class Found(NamedTuple):
    """Seconds from the shift until it was found; alarms before it."""

    seconds: float
    alarms: int
    shift: DemandShift | None


def found_in(rows: Iterable[TraceRow], shifted_s: float, change: Change, demand: Demand) -> Found:
    """Feed a trace that changes at ``shifted_s`` until that is found."""
    watch, alarms = DriftDetector(demand), 0
    for row in rows:
        after = row.timestamp / 1000 >= shifted_s
        for shift in watch.feed(change(row, after)):
            if shift.at_s > shifted_s:
                return Found(shift.at_s - shifted_s, alarms, shift)
            alarms += 1
    return Found(math.inf, alarms, None)


def stretch(seed: int, trace: Trace, length_s: float = 1200.0) -> tuple[Trace, float, random.Random]:
    """Twenty minutes of the hour, or so many of another trace, and a moment in them."""
    noise = random.Random(seed)
    start = noise.uniform(0, trace[-1].timestamp / 1000 - length_s)
    return trace.window(start, start + length_s), noise.uniform(length_s / 3, length_s * 5 / 6), noise


def calm_alarms(hours: int, seed: int = 0) -> int:
    """Alarms in so many hours of the recorded hour's own minutes, drawn anew: nothing in them shifts for good."""
    noise, minutes = random.Random(seed), [list(hour().window(60 * n, 60 * n + 60)) for n in range(60)]
    costs = [[(row.timestamp / 1000, row) for row in minute] for minute in minutes]
    watch, alarms = DriftDetector(_Known(hourly())), 0  # type: ignore[arg-type]
    for number in range(60 * hours):
        for at_s, row in noise.choice(costs):
            alarms += len(watch.feed(row, 60 * number + at_s))
    return alarms


class _Known:
    """Demand of rows that come again and again, worked out once for each."""

    def __init__(self, demand: Demand) -> None:
        self.demand = demand
        self.known: dict[int, dict[str, float]] = {}

    def of(self, row: TraceRow) -> dict[str, float]:
        if id(row) not in self.known:
            self.known[id(row)] = self.demand.of(row)
        return self.known[id(row)]


def _delays(seeds: int) -> dict[str, list[Found]]:
    found: dict[str, list[Found]] = {"output length x 2": [], "image share x 10": []}
    for seed in range(seeds):
        rows, shifted_s, noise = stretch(seed, hour())
        for kind, change in zip(found, (doubled, tenfold(noise)), strict=True):
            found[kind].append(found_in(rows, shifted_s, change, hourly()))
    return found


def burst_alarms(seeds: int) -> int:
    """Alarms in fifteen minutes of the hour with a burst of a minute of 2, 3, 6 and 10 times the requests each."""
    alarms = 0
    for seed in range(seeds):
        noise = random.Random(seed)
        start, at_s = noise.uniform(0, 2700), noise.uniform(300, 600)
        for times in (2, 3, 6, 10):
            watch = DriftDetector(hourly())
            rows = in_bursts(hour().window(start, start + 900), at_s, BURST_S, times)
            alarms += sum(len(watch.feed(row)) for row in rows)
    return alarms


def _thin_delays(seeds: int) -> list[float]:
    """Of a doubled output length in two hours of the day as recorded: some 68 requests in two minutes."""
    return [found_in(*stretch(seed, day(), 7200.0)[:2], doubled, hourly()).seconds for seed in range(seeds)]


def _days(quick: bool) -> dict[str, tuple[list[Proposal], float]]:
    """Proposals on the day by rate, and the share of its requests in time."""
    kinds = {"as recorded, 0.57 requests/s": day()}
    if not quick:
        kinds["at its full rate, 9.4 requests/s"] = traces.densify(day(), 1 / THINNED, seed=0)
    return {
        kind: (proposed(Replanner(DriftDetector(hourly()), PLACEMENT, cooldown_s=0), trace), served(trace))
        for kind, trace in kinds.items()
    }


def _aims(delays: dict[str, list[Found]], bursts: int, most: int, in_time: float) -> list[Aim]:
    every = [each for found in delays.values() for each in found]
    worst = max(each.seconds for each in every)
    middle = max(median(each.seconds for each in found) for found in delays.values())
    soon = worst <= WITHIN_S and middle <= MEDIAN_S and not any(each.alarms for each in every)
    return [
        Aim(
            "both shifts found, and no alarm before",
            f"{MEDIAN_S:.0f} s in the middle, {WITHIN_S:.0f} s at most",
            f"{middle:.0f} s, {worst:.0f} s",
            soon,
        ),
        Aim("alarms in bursts of a minute", "none", f"{bursts}", bursts == 0),
        Aim("proposals on the shipped day", f"at most {MOST_A_DAY}", f"{most}", most <= MOST_A_DAY),
        Aim("requests in time before a shift", f"{IN_TIME:.0%}", f"{in_time:.1%}", in_time >= IN_TIME),
    ]


def run(setting: Setting) -> Result:
    seeds, hours = (3, 1) if setting.quick else (20, CALM_HOURS)
    delays, days, alarms = _delays(seeds), _days(setting.quick), calm_alarms(hours)
    thin, bursts, in_time = _thin_delays(seeds), burst_alarms(seeds), served(hour())
    rows = [
        [
            kind,
            *(f"{of([each.seconds for each in found]):.0f}" for of in (median, max)),
            str(sum(each.alarms for each in found)),
            f"{in_time:.1%}",
        ]
        for kind, found in delays.items()
    ]
    over = [[kind, str(len(found)), f"{spacing(found):,.0f}", f"{share:.1%}"] for kind, (found, share) in days.items()]
    most = max(len(found) for found, _ in days.values())
    return Result(
        name="watch",
        title="Shifts found in traffic",
        method=(
            f"trinity.adapt.drift on ServeGen image traffic, Qwen2-VL-7B by roofline, {PLACEMENT}, which serves it; "
            f"shifts put into twenty minutes of the recorded hour, {seeds} seeds."
        ),
        tables=[
            Table(
                "Seconds of traffic until a shift is found",
                ("shift", "median", "most", "alarms before it", "in time before it"),
                rows,
            ),
            Table(
                "The shipped day, every plan a proposal, no cooldown",
                ("rate", "proposals", "closest two (s)", "in time"),
                over,
            ),
        ],
        aims=_aims(delays, bursts, most, min(in_time, *(share for _, share in days.values()))),
        notes=[
            f"Calm traffic: {alarms} alarms in {hours} hours of the recorded hour's own minutes, drawn anew.",
            f"At 0.57 requests/s, as the day is shipped, a doubled output length takes {median(thin):.0f} s in the "
            f"middle of {seeds} seeds, {sum(each <= WITHIN_S for each in thin)} of them within {WITHIN_S:.0f} s: two "
            "minutes hold some 68 requests there, too few to tell it from their noise.",
        ],
        values={
            "delays": {kind: [each.seconds for each in found] for kind, found in delays.items()},
            "days": {kind: [each.at_s for each in found] for kind, (found, _) in days.items()},
            "thin": [each if math.isfinite(each) else None for each in thin],
            "calm": {"hours": hours, "alarms": alarms},
            "bursts": {"seeds": seeds, "alarms": bursts},
            "in time": {"the hour": in_time, **{kind: share for kind, (_, share) in days.items()}},
        },
    )
