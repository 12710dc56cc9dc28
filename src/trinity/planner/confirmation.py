"""Replays the best of a search on the cores that serve, with their true settings.

Where the screening engine had to take other settings (``trinity.simulation.screening_table``), its figures only select
the candidates. Replays on the cores are dear, so they are few, and of a stretch of the trace: the first candidate is
searched from its screened rate, and each other one is asked for the next rate above the best so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from trinity.errors import TraceTooShort
from trinity.planner.candidates import Deployment
from trinity.planner.problem import PlanningProblem
from trinity.planner.race import race
from trinity.planner.search import SearchResult
from trinity.planner.trials import Trials, rate_of, step_of
from trinity.simulation.simulator import Replay
from trinity.traces.goodput import RatePoint, RequestOutcome
from trinity.traces.trace import Trace

FINALISTS = 5
STRETCH = 3_000  # requests
LONGER = 1.2  # times what a trace must last at the rate that is asked
NEAR = 5  # grid steps, 10 %: a candidate expected further behind the best is not replayed
WINDOWS = 8  # of the trace, among which the stretch is chosen
MOST_RUNS = 12
BUDGET_S = 40.0  # CPU seconds of replays on the cores, by the figures below
REQUEST_S, TOKEN_S, REPORT_S = (
    2.5e-4,
    8e-6,
    2e-5,
)  # of a request, an output token, a report


class CoreResult(NamedTuple):
    """Result of a candidate on the cores.

    - ``found``: with rates as of the whole trace. Its highest rate is known if ``found.exact``; else it fails at
      ``found.bound``.
    - ``points``: attainment seen on the cores, by rate.
    - ``replay``: the one at its goodput.
    """

    found: SearchResult
    points: tuple[RatePoint, ...]
    replay: Replay | None


class Confirmation(NamedTuple):
    """Results of candidates on the cores, best first, from ``runs`` replays of ``requests`` requests each."""

    confirmed: list[CoreResult]
    requests: int
    runs: int

    def of(self, deployment: Deployment) -> CoreResult | None:
        """Return a deployment's result; None where it was not replayed on the cores."""
        return next((each for each in self.confirmed if each.found.entry.deployment == deployment), None)


def confirm(case: PlanningProblem, found: Sequence[SearchResult], also: Sequence[SearchResult] = ()) -> Confirmation:
    """Replay the best results of a search, and those in ``also``, on the cores with the true settings.

    Raises ``TraceTooShort`` where not even the whole trace is long enough.
    """
    leaders = find_leaders(case.trials, found, FINALISTS)
    chosen = {each.entry.deployment: each for each in (*also, *leaders) if each.step is not None}
    finals = sorted(chosen.values(), key=lambda each: -each.score)
    count = max(STRETCH, math.ceil(LONGER * case.trials.least_s * finals[0].rate)) if finals else 0
    while finals:
        cores = _Cores(case, choose_stretch(case, finals[0], count))
        try:
            return _CoreRace(case, cores, finals, [each.entry.deployment for each in also]).run()
        except TraceTooShort:
            if len(cores.trace) >= len(case.trace):
                raise
            count *= 2
    return Confirmation([], 0, 0)


def find_leaders(trials: Trials, found: Sequence[SearchResult], count: int) -> list[SearchResult]:
    """Find the best by the screening engine, each searched to the end: a race for each place."""
    rest, ahead = list(found), list[SearchResult]()
    while rest and len(ahead) < count:
        known = [each for each in rest if each.exact]
        open_ones = [each.entry for each in rest if not each.exact]
        rest = race(trials, open_ones, known)
        ahead.append(rest.pop(0))
    return ahead


# ---------------------------------------------------------------- the stretch


def choose_stretch(case: PlanningProblem, leader: SearchResult, count: int) -> Trace:
    """Choose ``count`` consecutive requests of the trace, or all of it where it has few more.

    Of ``WINDOWS`` stretches it is the one that the screening engine finds most nearly as hard as the whole trace.
    """
    rows = case.trace.by_arrival()
    if len(rows) <= LONGER * count:
        return case.trace
    last = len(rows) - count
    starts = sorted({round(last * place / (WINDOWS - 1)) for place in range(WINDOWS)})
    windows = [
        Trace(row.request_at(row.timestamp - rows[at].timestamp) for row in rows[at : at + count]) for at in starts
    ]
    whole = leader.rate / case.trials.own
    return min(windows, key=lambda window: abs(math.log(_times_faster(case, leader, window) / whole)))


def _times_faster(case: PlanningProblem, leader: SearchResult, window: Trace) -> float:
    """Compute how many times faster than recorded a window can be served, by the screening engine."""
    trials = _short(case, window)
    step = trials.limit(leader.entry.deployment, leader.rate * trials.own / case.trials.own)
    return math.inf if step is None else rate_of(step) / trials.own


def _short(case: PlanningProblem, window: Trace) -> Trials:
    """Make trials of a window, which may be shorter than a trace must be: they are only compared with each other."""
    return case.make_trials(window, least_requests=2, least_ttfts=1.0)


def replay_seconds(trace: Trace, rate: float, instances: int, informed: bool) -> float:
    """Estimate CPU seconds of a replay on the cores at ``rate`` requests/s."""
    tokens = sum(row.output_length for row in trace)
    reports = 10 * len(trace) / rate * instances * (instances + 1) if informed else 0.0
    return REQUEST_S * len(trace) + TOKEN_S * tokens + REPORT_S * reports


class _Cores:
    """Trials of a stretch on the cores, at rates of the whole trace.

    To be as hard as the whole trace, the stretch is offered ``offset`` grid steps faster: the difference between the
    rates at which the screening engine has the stretch and the whole trace fail.
    """

    def __init__(self, case: PlanningProblem, trace: Trace) -> None:
        self.case, self.trace = case, trace
        self.trials = case.make_trials(trace, self._serve_of, least_requests=2, least_ttfts=1.0, progress=case.progress)
        self._screen = case.trials if trace is case.trace else _short(case, trace)
        self._offsets: dict[Deployment, int] = {}
        self._asked: dict[Deployment, dict[int, Replay]] = {}
        self._last: Replay | None = None

    def _serve_of(self, deployment: Deployment) -> Callable[[Trace], Sequence[RequestOutcome]]:
        simulator = self.case.hardware.simulator(deployment, self.case.asked.slo, backend="python")

        def serve(trace: Trace) -> Sequence[RequestOutcome]:
            self._last = simulator.replay(trace, deployment.placement)
            return self._last.outcomes

        return serve

    def offset(self, found: SearchResult) -> int:
        deployment = found.entry.deployment
        if deployment not in self._offsets:
            self._offsets[deployment] = self._offset(found)
        return self._offsets[deployment]

    def _offset(self, found: SearchResult) -> int:
        if self._screen is self.case.trials or found.step is None:
            return 0
        own = self._screen.own / self.case.trials.own
        step = self._screen.limit(found.entry.deployment, found.rate * own)
        return step_of(own) if step is None else step - found.step

    def holds(self, found: SearchResult, step: int) -> bool:
        """Check on the cores if a rate of the whole trace holds."""
        deployment = found.entry.deployment
        self._last = None
        held = self.trials.holds(deployment, step + self.offset(found))
        if self._last is not None:
            self._asked.setdefault(deployment, {})[step] = self._last
        return held

    def points(self, found: SearchResult) -> tuple[RatePoint, ...]:
        deployment, offset = found.entry.deployment, self.offset(found)
        return tuple(
            msgspec.structs.replace(self.trials.point(deployment, step + offset), rate=rate_of(step))
            for step in sorted(self._asked.get(deployment, {}))
        )

    def replay(self, found: SearchResult, step: int | None) -> Replay | None:
        return None if step is None else self._asked.get(found.entry.deployment, {}).get(step)


# ---------------------------------------------------------------- the race on the cores


def limit_near(holds: Callable[[int], bool], start: int, may_ask: Callable[[], bool]) -> tuple[int | None, int | None]:
    """Find (the highest step that holds, the next that does not) near ``start``; None for one that was not seen.

    It goes one step up or down, then two, four, and back by halves. It ends early where ``may_ask()`` is false.
    """
    low: int | None = None
    high: int | None = None
    step, stride = start, 1
    while (low is None or high is None or high - low > 1) and may_ask():
        if holds(step):
            low = step
        else:
            high = step
        if low is None or high is None:
            step, stride = step + (stride if high is None else -stride), 2 * stride
        else:
            step = (low + high) // 2
    return low, high


class _CoreRace:
    """A race of candidates on the cores, in as many replays as the budget allows."""

    def __init__(
        self, case: PlanningProblem, cores: _Cores, finals: Sequence[SearchResult], also: Sequence[Deployment]
    ) -> None:
        self.cores, self.finals, self.also = cores, finals, also
        most = max(len(each.entry.deployment.devices) for each in finals)
        slo = case.asked.slo
        informed = any(case.hardware.simulator(each.entry.deployment, slo).informed for each in finals)
        self.most_runs = min(
            MOST_RUNS, max(2, int(BUDGET_S / replay_seconds(cores.trace, finals[0].rate, most, informed)))
        )
        self.known: dict[Deployment, SearchResult] = {}
        self.best: SearchResult | None = None
        self.gap = 0  # grid steps of the best one

    def run(self) -> Confirmation:
        """Search the candidates that may be best, each against the best so far; then the others' own limits.

        The others are searched as far as the budget goes, those in ``also`` first.
        """
        for each in self.finals:
            if self.best is None:
                self._search(each, each.step or 0)
            elif self._predict_step(each) > self._step_above(each) - NEAR:
                self._challenge(each, self._step_above(each))
        for each in sorted(self.finals, key=lambda each: each.entry.deployment not in self.also):
            known = self.known.get(each.entry.deployment)
            if known is None or not known.exact:
                self._search(each, self._predict_step(each))
        return Confirmation(self._collect(), len(self.cores.trace), self.cores.trials.runs)

    def _may_ask(self) -> bool:
        return self.cores.trials.runs < self.most_runs

    def _predict_step(self, each: SearchResult) -> int:
        """Predict the step at which the cores hold a candidate, with the gap of the best; not above what was seen."""
        seen, expected = self.known.get(each.entry.deployment), (each.step or 0) + self.gap
        return expected if seen is None else min(expected, step_of(seen.bound) - 1)

    def _step_above(self, each: SearchResult) -> int:
        """Return the next step above the best one's rate."""
        assert self.best is not None
        return step_of(rate_for(each, self.best.score)) + 1

    def _challenge(self, each: SearchResult, step: int) -> None:
        """Replay a candidate at a step; if that holds, search its limit."""
        if each.entry.upper < rate_of(step) or not self._may_ask():
            return
        if self.cores.holds(each, step):
            self._search(each, step)
        else:
            self._note(each, each._replace(exact=False, step=None, value=None, bound=rate_of(step)))

    def _search(self, each: SearchResult, start: int) -> None:
        low, high = limit_near(lambda step: self.cores.holds(each, step), start, self._may_ask)
        if low is not None:
            value = None if each.value is None else rate_of(low) - _cost(each)
            self._note(each, each._replace(exact=True, step=low, value=value))
        elif high is not None:
            self._note(each, each._replace(exact=False, step=None, value=None, bound=rate_of(high)))

    def _note(self, each: SearchResult, now: SearchResult) -> None:
        self.known[each.entry.deployment] = now
        if now.exact and (self.best is None or now.score > self.best.score):
            self.best, self.gap = now, (now.step or 0) - (each.step or 0)

    def _collect(self) -> list[CoreResult]:
        asked = [each for each in self.finals if each.entry.deployment in self.known]
        made = [self._to_result(each, self.known[each.entry.deployment]) for each in asked]
        return sorted(made, key=lambda each: (not each.found.exact, -each.found.score))

    def _to_result(self, screened: SearchResult, now: SearchResult) -> CoreResult:
        now = now._replace(screened=screened.rate)
        return CoreResult(now, self.cores.points(screened), self.cores.replay(screened, now.step))


def rate_for(found: SearchResult, score: float) -> float:
    """Return requests/s at which a candidate has this score."""
    return score / found.entry.worth if found.value is None else score + _cost(found)


def _cost(found: SearchResult) -> float:
    """Return the cost that was subtracted from its rate."""
    return 0.0 if found.value is None else found.rate - found.value


def merge_core_results(confirmation: Confirmation, found: Iterable[SearchResult]) -> list[SearchResult]:
    """Merge all results, those of the cores first; screened ones keep no figure of their own."""
    ahead = [each.found for each in confirmation.confirmed]
    known = {each.entry.deployment for each in ahead}
    rest = [mark_unconfirmed(each) for each in found if each.entry.deployment not in known]
    return [*ahead, *sorted(rest, key=lambda each: -(each.screened or 0.0))]


def mark_unconfirmed(found: SearchResult) -> SearchResult:
    """Mark a result as screened alone: its rate moves to ``screened``."""
    screened = found.rate if found.exact else None
    return found._replace(exact=False, step=None, value=None, bound=found.entry.upper, screened=screened)
