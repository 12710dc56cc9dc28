"""Shifts in the shipped traffic: how soon they are found, how many a day has, how often calm traffic gives an alarm.

The predicate, stated before the run: a doubled output length and a tenfold image share are found within 120 s of the
recorded hour's traffic for every seed, with no alarm before; on the shipped day at 60 % load, as recorded and at its
full rate, proposals come at most every 600 s though no cooldown holds them back and every plan proposes something.
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

from benchmarks.paper_devices import paper_device
from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity import traces
from trinity.adapt.drift import DemandShift, DriftDetector
from trinity.adapt.replanner import Proposal, Replanner
from trinity.costs.demand import Demand, peak_load
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import Roofline
from trinity.traces.trace import SLO, Trace, TraceRow

LOAD = 0.6
BOUND = SLO(ttft=2.0, tbt=0.08)
QWEN = get_model_shape("qwen2-vl-7b")
PLACEMENT = "1E3P4D"
WITHIN_S = 120.0
APART_S = 600.0
THINNED = 0.06  # of the day's requests are in the shipped day
CALM_HOURS = 200
Change = Callable[[TraceRow, bool], TraceRow]  # of a row, which comes after the shift or before it


@cache
def hour() -> Trace:
    return traces.read_shipped("servegen-image-1h")


@cache
def day() -> Trace:
    return traces.read_shipped("servegen-image-24h")


def at_load(trace: Trace) -> Demand:
    """On a device so much slower than an H100, or faster, that the trace's mean demand is ``LOAD`` of the placement."""
    h100 = paper_device("H100")
    fast = Demand.for_slo(Roofline(model=QWEN, device=h100), BOUND)
    factor = peak_load(fast.rate(trace), PLACEMENT) / LOAD
    slow = msgspec.structs.replace(
        h100,
        flops=h100.flops * factor,
        bandwidth=h100.bandwidth * factor,
        pass_s=h100.pass_s / factor,
        row_s=h100.row_s / factor,
    )
    return msgspec.structs.replace(fast, cost=Roofline(model=QWEN, device=slow))


@cache
def hourly() -> Demand:
    return at_load(hour())


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


def _thin_delays(seeds: int) -> list[float]:
    """Of a doubled output length in two hours of the day as recorded: some 68 requests in two minutes."""
    demand = at_load(day())
    return [found_in(*stretch(seed, day(), 7200.0)[:2], doubled, demand).seconds for seed in range(seeds)]


def _days(quick: bool) -> dict[str, list[Proposal]]:
    kinds = {"as recorded, 0.57 requests/s": day()}
    if not quick:
        kinds["at its full rate, 9.4 requests/s"] = traces.densify(day(), 1 / THINNED, seed=0)
    return {
        kind: proposed(Replanner(DriftDetector(at_load(trace)), PLACEMENT, cooldown_s=0), trace)
        for kind, trace in kinds.items()
    }


def run(setting: Setting) -> Result:
    seeds, hours = (3, 1) if setting.quick else (20, CALM_HOURS)
    delays, days, alarms = _delays(seeds), _days(setting.quick), calm_alarms(hours)
    thin = _thin_delays(seeds)
    rows = [
        [
            kind,
            *(f"{of([each.seconds for each in found]):.0f}" for of in (median, max)),
            str(sum(each.alarms for each in found)),
        ]
        for kind, found in delays.items()
    ]
    over = [[kind, str(len(found)), f"{spacing(found):,.0f}"] for kind, found in days.items()]
    in_time = all(each.seconds <= WITHIN_S and not each.alarms for found in delays.values() for each in found)
    worst = max(each.seconds for found in delays.values() for each in found)
    closest = min(map(spacing, days.values()))
    return Result(
        name="watch",
        title="Shifts found in traffic",
        method=(
            f"trinity.adapt.drift on ServeGen image traffic, Qwen2-VL-7B by roofline, {PLACEMENT} at {LOAD:.0%} load; "
            f"shifts put into twenty minutes of the recorded hour, {seeds} seeds."
        ),
        tables=[
            Table("Seconds of traffic until a shift is found", ("shift", "median", "most", "alarms before it"), rows),
            Table(
                "The shipped day, every plan a proposal, no cooldown", ("rate", "proposals", "closest two (s)"), over
            ),
        ],
        aims=[
            Aim(
                "both shifts found, and no alarm before", f"within {WITHIN_S:.0f} s", f"{worst:.0f} s at most", in_time
            ),
            Aim("proposals apart on the shipped day", f"{APART_S:.0f} s", f"{closest:,.0f} s", closest >= APART_S),
        ],
        notes=[
            f"Calm traffic: {alarms} alarms in {hours} hours of the recorded hour's own minutes, drawn anew.",
            f"At 0.57 requests/s, as the day is shipped, a doubled output length takes {median(thin):.0f} s in the "
            f"middle of {seeds} seeds, {sum(each <= WITHIN_S for each in thin)} of them within {WITHIN_S:.0f} s: two "
            "minutes hold some 68 requests there, too few to tell it from their noise.",
        ],
        values={
            "delays": {kind: [each.seconds for each in found] for kind, found in delays.items()},
            "days": {kind: [each.at_s for each in found] for kind, found in days.items()},
            "thin": [each if math.isfinite(each) else None for each in thin],
            "calm": {"hours": hours, "alarms": alarms},
        },
    )
