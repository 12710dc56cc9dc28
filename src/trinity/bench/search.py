"""Goodput by bisection: chooses the rates of trials, each of which is scored for all SLOs and rules at once."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median
from typing import Any

import msgspec

from trinity.bench.machine import MAX_FOREIGN_SHARE
from trinity.errors import ConfigError
from trinity.tables import distribution
from trinity.traces.goodput import SHARE
from trinity.traces.trace import COMPLETE, SLO, SLORule, Trace, TraceRow

GOODPUT_RULES: tuple[SLORule, ...] = ("p90", "p99")  # the papers' rule, and one that lets no stall pass
MAX_CLIENT_LATE_S = 0.05  # seconds: a trial whose client's 95th percentile lateness exceeds it is invalid
WARMUP_SHARE = 0.1  # share of the requests that come first and do not count: the engine warms up
MAX_TRIES = 3  # at most, of a trial that others disturbed
BISECTION_TOLERANCE = 0.12


class Goal(msgspec.Struct, frozen=True):
    """An SLO and the rule by which a request meets it."""

    slo: SLO
    rule: SLORule

    @property
    def key(self) -> str:
        return f"{self.slo.ttft:g}/{self.slo.tbt:g}/{self.rule}"


class Trial(msgspec.Struct, kw_only=True):
    """Result of one engine at one rate (requests/s) with the arrivals of one seed."""

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
    def is_late(self) -> bool:
        return self.late_p95_s > MAX_CLIENT_LATE_S

    @property
    def is_disturbed(self) -> bool:
        return self.foreign > MAX_FOREIGN_SHARE

    def holds(self, goal: Goal) -> bool:
        return self.attainment[goal.key] >= SHARE


def judged_rows(served: Trace) -> list[TraceRow]:
    """Select the rows that count: all but the first tenth by arrival."""
    rows = served.by_arrival()
    return rows[int(WARMUP_SHARE * len(rows)) :]


def score_trial(engine: str, rate: float, seed: int, served: Trace, goals: Iterable[Goal], **seen: float) -> Trial:
    """Score a replay for every goal; a failed request misses every goal. ``seen`` has cpu_s, wall_s and foreign."""
    rows = judged_rows(served)
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


def find_bracket(trials: Iterable[Trial], goal: Goal) -> Bracket:
    """Bracket a goal's limit. A rate at which the client was late may fail, but never holds."""
    fails = [each.rate for each in trials if not each.holds(goal)]
    high = min(fails, default=math.inf)
    holds = [each.rate for each in trials if each.holds(goal) and not each.is_late and each.rate < high]
    return Bracket(max(holds, default=0.0), high)


def next_rate(
    trials: Sequence[Trial], goals: Iterable[Goal], rates: Sequence[float], tolerance: float = BISECTION_TOLERANCE
) -> float | None:
    """Choose the next rate to try, on the grid first, then between two of its rates; None once all goals are found.

    On the grid, the rate whose trial gives most information on all open goals together. No rate is tried twice.
    """
    tried = {each.rate for each in trials}
    found = [find_bracket(trials, goal) for goal in goals]
    inside = [[rate for rate in rates if each.low < rate < each.high and rate not in tried] for each in found]
    if any(inside):  # of equals the highest: its trial is the shortest
        return max(sorted(rates, reverse=True), key=lambda rate: sum(_information(each, rate) for each in inside))
    for each in found:
        middle = round(math.sqrt(each.low * each.high), 4) if each.low > 0 and each.high < math.inf else None
        if middle is not None and each.high / each.low > 1 + tolerance and middle not in tried:
            return middle
    return None


def _information(inside: Sequence[float], rate: float) -> float:
    """Information, in nats, of a trial on a goal whose limit lies anywhere between these rates or beyond either end."""
    if rate not in inside:
        return 0.0
    below = (inside.index(rate) + 1) / (len(inside) + 1)
    return -below * math.log(below) - (1 - below) * math.log(1 - below)


def check_rates(rates: Iterable[float]) -> list[float]:
    """Sort the rates. Raises ``ConfigError`` unless there are some, all positive."""
    ordered = sorted(set(rates))
    if not ordered or not all(0 < rate < math.inf for rate in ordered):
        raise ConfigError(f"give rates above 0 in requests a second, such as 0.5,1,2, got {list(rates)}")
    return ordered


class EngineGoodput(msgspec.Struct, frozen=True, kw_only=True):
    """An engine's goodput for one goal, by seed, in requests/s; ``open`` where the highest rate still held.

    ``disturbed`` where it rests on a trial whose every try was disturbed by others.
    """

    engine: str
    goal: str
    by_seed: dict[int, float]
    open: bool
    disturbed: bool = False

    @property
    def median(self) -> float | None:
        return median(self.by_seed.values()) if self.by_seed else None

    def describe(self) -> str:
        if not self.by_seed:
            return "not run"
        low, high = min(self.by_seed.values()), max(self.by_seed.values())
        more = "≥ " if self.open else ""
        return f"{more}{self.median:.2f} ({low:.2f} to {high:.2f})" + (" DISTURBED" if self.disturbed else "")


def countable_trials(trials: Iterable[Trial]) -> list[Trial]:
    """Select one trial of each engine, rate and seed: the last undisturbed one, else the last."""
    cells: dict[tuple[str, float, int], list[Trial]] = {}
    for each in trials:
        cells.setdefault((each.engine, each.rate, each.seed), []).append(each)
    return [each for cell in cells.values() for each in ([calm for calm in cell if not calm.is_disturbed] or cell)[-1:]]


def find_goodputs(
    trials: Sequence[Trial],
    engines: Sequence[str],
    goals: Sequence[Goal],
    rates: Sequence[float],
    seeds: Sequence[int],
    tolerance: float = BISECTION_TOLERANCE,
) -> list[EngineGoodput]:
    """Find the goodput of every engine and goal, from the seeds whose bisection has ended."""
    usable = countable_trials(trials)
    found = []
    for engine in engines:
        own = {seed: [each for each in usable if (each.engine, each.seed) == (engine, seed)] for seed in seeds}
        ended = {
            seed: own[seed] for seed in seeds if own[seed] and next_rate(own[seed], goals, rates, tolerance) is None
        }
        rough = any(each.is_disturbed for trials_of in ended.values() for each in trials_of)
        for goal in goals:
            ends = {seed: find_bracket(each, goal) for seed, each in ended.items()}
            rate = {seed: each.low for seed, each in ends.items()}
            is_open = any(each.high == math.inf for each in ends.values())
            found.append(EngineGoodput(engine=engine, goal=goal.key, by_seed=rate, open=is_open, disturbed=rough))
    return found


def schedule_trials(
    trials: list[Trial],
    engines: Sequence[str],
    goals: Sequence[Goal],
    rates: Sequence[float],
    seeds: Sequence[int],
    tolerance: float = BISECTION_TOLERANCE,
) -> Iterator[tuple[str, float, int]]:
    """Yield the next (engine, rate, seed), engines in turn (A B A B), seed by seed; the caller appends to ``trials``.

    A trial that others disturbed is repeated, up to ``MAX_TRIES`` times.
    """
    for seed in seeds:
        while True:
            due = [each for engine in engines if (each := _next(trials, engine, goals, rates, seed, tolerance))]
            if not due:
                break
            yield from due


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
        if len(same) < MAX_TRIES and all(other.is_disturbed for other in same):
            return engine, each.rate, seed
    rate = next_rate(countable_trials(own), goals, rates, tolerance)
    return None if rate is None else (engine, rate, seed)


def goodput_ratio(
    found: Sequence[EngineGoodput], goal: str, engine: str, against: str
) -> tuple[float, float, float] | None:
    """Compare an engine's goodput with another's seed by seed: median, lowest, highest; None where either has none."""
    by_engine: dict[str, dict[int, float]] = {each.engine: each.by_seed for each in found if each.goal == goal}
    mine, other = by_engine.get(engine, {}), by_engine.get(against, {})
    each = sorted(mine[seed] / other[seed] for seed in mine if other.get(seed))
    return (median(each), each[0], each[-1]) if each else None


def to_plain(trials: Iterable[Trial]) -> list[Any]:
    return [msgspec.to_builtins(each) for each in trials]
