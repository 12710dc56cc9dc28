"""Goodput by bisection: trials at chosen rates, of which every one tells of all SLOs and rules at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from trinity.bench.machine import FOREIGN
from trinity.errors import ConfigError
from trinity.tables import distribution
from trinity.traces.goodput import SHARE
from trinity.traces.trace import COMPLETE, SLO, SLORule, Trace, TraceRow

RULES: tuple[SLORule, ...] = ("p90", "p99")  # the papers' rule, and one that lets no stall pass
LATE_S = 0.05  # the 95th percentile of the client's lateness, beyond which a rate is invalid
LEADING = 0.1  # of the requests come first and are not judged: what was there to be warmed up is warm
TRIES = 3  # of a trial that others disturbed
TOLERANCE = 0.12


class Goal(msgspec.Struct, frozen=True):
    """Enough requests within an SLO, by a rule."""

    slo: SLO
    rule: SLORule

    @property
    def key(self) -> str:
        return f"{self.slo.ttft:g}/{self.slo.tbt:g}/{self.rule}"


class Trial(msgspec.Struct, kw_only=True):
    """One engine at one rate (requests a second) with the arrivals of one seed, and what was seen."""

    engine: str
    rate: float
    seed: int
    requests: int
    failed: int
    attainment: dict[str, float]  # by goal
    ttft_s: dict[str, float] | None
    tbt_s: dict[str, float] | None
    late_p95_s: float
    cpu_s: float
    wall_s: float
    foreign: float

    @property
    def late(self) -> bool:
        return self.late_p95_s > LATE_S

    @property
    def disturbed(self) -> bool:
        return self.foreign > FOREIGN

    def holds(self, goal: Goal) -> bool:
        return self.attainment[goal.key] >= SHARE


def judged(served: Trace) -> list[TraceRow]:
    """The rows that count: all but the first tenth by arrival."""
    rows = served.by_arrival()
    return rows[int(LEADING * len(rows)) :]


def trial(engine: str, rate: float, seed: int, served: Trace, goals: Iterable[Goal], **seen: float) -> Trial:
    """``seen``: cpu_s, wall_s and foreign. Failures count in the denominator, as a miss under every rule."""
    rows = judged(served)
    late = distribution(row.late_s or 0.0 for row in served)
    gaps = [gap for row in rows for gap in row.itl_s]
    return Trial(
        engine=engine,
        rate=rate,
        seed=seed,
        requests=len(rows),
        failed=sum(row.finish_reason not in COMPLETE for row in rows),
        attainment={goal.key: sum(goal.slo.is_met(row, goal.rule) for row in rows) / len(rows) for goal in goals},
        ttft_s=distribution(row.ttft_s for row in rows if row.ttft_s is not None),
        tbt_s=distribution(gaps),
        late_p95_s=late["p95"] if late else 0.0,
        **seen,
    )


class Bracket(msgspec.Struct, frozen=True):
    """The highest rate that holds (0: none) and the lowest that does not (inf: none was seen)."""

    low: float
    high: float


def bracket(trials: Iterable[Trial], goal: Goal) -> Bracket:
    """A rate at which the client was late says nothing good; it may only fail."""
    fails = [each.rate for each in trials if not each.holds(goal)]
    high = min(fails, default=math.inf)
    holds = [each.rate for each in trials if each.holds(goal) and not each.late and each.rate < high]
    return Bracket(max(holds, default=0.0), high)


def next_rate(
    trials: Sequence[Trial], goals: Iterable[Goal], rates: Sequence[float], tolerance: float = TOLERANCE
) -> float | None:
    """Where to look next, None where all goals are found: on the grid first, then between two of its rates.

    On the grid: where the answers of all goals that are open tell most together. A rate is not tried again.
    """
    tried = {each.rate for each in trials}
    found = [bracket(trials, goal) for goal in goals]
    inside = [[rate for rate in rates if each.low < rate < each.high and rate not in tried] for each in found]
    if any(inside):  # of equals the highest: its trial is the shortest
        return max(sorted(rates, reverse=True), key=lambda rate: sum(_told(each, rate) for each in inside))
    for each in found:
        middle = round(math.sqrt(each.low * each.high), 4) if each.low > 0 and each.high < math.inf else None
        if middle is not None and each.high / each.low > 1 + tolerance and middle not in tried:
            return middle
    return None


def _told(inside: Sequence[float], rate: float) -> float:
    """What a trial tells, in nats, of a goal whose limit lies anywhere between these rates, or beyond either end."""
    if rate not in inside:
        return 0.0
    below = (inside.index(rate) + 1) / (len(inside) + 1)
    return -below * math.log(below) - (1 - below) * math.log(1 - below)


def checked_rates(rates: Iterable[float]) -> list[float]:
    """Ascending. Raises ``ConfigError`` unless there are some, all positive."""
    ordered = sorted(set(rates))
    if not ordered or not all(0 < rate < math.inf for rate in ordered):
        raise ConfigError(f"give rates above 0 in requests a second, such as 0.5,1,2, got {list(rates)}")
    return ordered


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's goodput for one goal: by seed, requests a second; ``open`` where the highest rate still held.

    ``disturbed``: it rests on a trial of which every try was disturbed by others.
    """

    engine: str
    goal: str
    by_seed: dict[int, float]
    open: bool
    disturbed: bool = False

    @property
    def median(self) -> float | None:
        return median(self.by_seed.values()) if self.by_seed else None

    def said(self) -> str:
        if not self.by_seed:
            return "not run"
        low, high = min(self.by_seed.values()), max(self.by_seed.values())
        more = "≥ " if self.open else ""
        return f"{more}{self.median:.2f} ({low:.2f} to {high:.2f})" + (" DISTURBED" if self.disturbed else "")


def counted(trials: Iterable[Trial]) -> list[Trial]:
    """Undisturbed ones; of a rate and seed that had none, those there are."""
    cells: dict[tuple[str, float, int], list[Trial]] = {}
    for each in trials:
        cells.setdefault((each.engine, each.rate, each.seed), []).append(each)
    return [each for cell in cells.values() for each in ([calm for calm in cell if not calm.disturbed] or cell)[-1:]]


def goodputs(
    trials: Sequence[Trial],
    engines: Sequence[str],
    goals: Sequence[Goal],
    rates: Sequence[float],
    seeds: Sequence[int],
    tolerance: float = TOLERANCE,
) -> list[Found]:
    """Of every engine and goal, from the seeds whose bisection has come to its end."""
    usable = counted(trials)
    found = []
    for engine in engines:
        own = {seed: [each for each in usable if (each.engine, each.seed) == (engine, seed)] for seed in seeds}
        ended = {
            seed: own[seed] for seed in seeds if own[seed] and next_rate(own[seed], goals, rates, tolerance) is None
        }
        rough = any(each.disturbed for trials_of in ended.values() for each in trials_of)
        for goal in goals:
            ends = {seed: bracket(each, goal) for seed, each in ended.items()}
            rate = {seed: each.low for seed, each in ends.items()}
            is_open = any(each.high == math.inf for each in ends.values())
            found.append(Found(engine=engine, goal=goal.key, by_seed=rate, open=is_open, disturbed=rough))
    return found


def turns(
    trials: list[Trial],
    engines: Sequence[str],
    goals: Sequence[Goal],
    rates: Sequence[float],
    seeds: Sequence[int],
    tolerance: float = TOLERANCE,
) -> Iterator[tuple[str, float, int]]:
    """(engine, rate, seed) to try next, engines in turn (A B A B), seed by seed; whoever asks appends to ``trials``.

    A trial that others disturbed is repeated, up to ``TRIES`` times.
    """
    for seed in seeds:
        while True:
            asked = [each for engine in engines if (each := _next(trials, engine, goals, rates, seed, tolerance))]
            if not asked:
                break
            yield from asked


def _next(
    trials: Sequence[Trial],
    engine: str,
    goals: Sequence[Goal],
    rates: Sequence[float],
    seed: int,
    tolerance: float,
) -> tuple[str, float, int] | None:
    own = [each for each in trials if (each.engine, each.seed) == (engine, seed)]
    for each in own:
        same = [other for other in own if other.rate == each.rate]
        if len(same) < TRIES and all(other.disturbed for other in same):
            return engine, each.rate, seed
    rate = next_rate(counted(own), goals, rates, tolerance)
    return None if rate is None else (engine, rate, seed)


def ratios(found: Sequence[Found], goal: str, engine: str, against: str) -> tuple[float, float, float] | None:
    """Median, lowest and highest of an engine's goodput over another's, seed by seed; None where either has none."""
    by_engine: dict[str, dict[int, float]] = {each.engine: each.by_seed for each in found if each.goal == goal}
    mine, other = by_engine.get(engine, {}), by_engine.get(against, {})
    each = sorted(mine[seed] / other[seed] for seed in mine if other.get(seed))
    return (median(each), each[0], each[-1]) if each else None


def plain(trials: Iterable[Trial]) -> list[Any]:
    return [msgspec.to_builtins(each) for each in trials]
