"""Plan: the disaggregation method and ratio to run, the figures of every candidate, and why the best one is best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from trinity.errors import ConfigError
from trinity.errors.arguments import check_call
from trinity.errors.files import name_file, read_regular_file, write_file
from trinity.placement import Placement
from trinity.planner.explain import (
    arrangement,
    devices_in_words,
    explain_plan,
    format_figure,
    headline,
    is_same_candidate,
)
from trinity.planner.prices import PricedSteps, list_prices
from trinity.tables import Table, as_html, as_text
from trinity.traces.goodput import RatePoint
from trinity.traces.statistics import TraceStatistics
from trinity.traces.trace import SLO, SLO_RULES, SLORule

Strategy = Literal["race", "paper", "exhaustive", "bayesian"]
Objective = Literal["goodput", "goodput_per_cost", "fewest_instances", "throughput", "effective_throughput"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
SHOWN = 12  # candidates that a printed plan lists


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One placement and its figures.

    - ``placement``, ``method``: as text.
    - ``devices``: names as in the plan's, one for each of ``Placement.parse(placement).instances()``, in that order;
      empty where they are the plan's and all equal.
    - ``exact``: true if it was searched to the end. Otherwise ``score`` and ``goodput`` are empty.
    - ``score``: in the plan's objective, higher is better.
    - ``goodput`` (requests/s): by rule.
    - ``bound`` (requests/s; None: no bound): its goodput cannot exceed this, because of its stage times or because it
      failed at that rate.
    - ``nominal`` (requests/s): goodput by its instances' stage times alone.
    - ``attainment``: seen at each rate, ascending.
    - ``bottleneck``: letter of the stage that limits it.
    - ``utilisation``: share of the time that an instance works for each stage at the goodput.
    - ``memory``: by instance, bytes of "weights" and of the pools "image" and "kv", and the highest share of each that
      was held ("image_peak", "kv_peak").
    - ``spread`` (requests/s): goodput by the plan's rule on each of the plan's ``seeds``.
    - ``longer_steps``: (factor, requests/s), its goodput with steps that many times as long at the same budgets; of the
      best, and of those that were compared with it.
    - ``price``: of an hour of all its devices.
    - ``settings``: knobs that a wider search has set.
    - ``screened`` (requests/s): goodput by the screening engine, in a plan with ``stand_ins``. There ``goodput``,
      ``score`` and all figures at them are the cores', for those that were replayed on the cores.
    """

    placement: str
    method: str
    devices: tuple[str, ...] = ()
    exact: bool = False
    score: float | None = None
    goodput: dict[str, float] = {}
    bound: float | None = None
    nominal: float | None = None
    attainment: tuple[RatePoint, ...] = ()
    bottleneck: str = ""
    utilisation: dict[str, dict[str, float]] = {}
    memory: dict[str, dict[str, float]] = {}
    spread: tuple[float, ...] = ()
    price: float | None = None
    settings: dict[str, str | int | float] = {}
    screened: float | None = None
    longer_steps: tuple[tuple[float, float], ...] = ()

    @property
    def gap(self) -> float | None:
        """Return by how much the cores exceed the screening engine, as a share of that; None where one is unknown."""
        reached = next(iter(self.goodput.values()), None)
        return None if not self.screened or reached is None else reached / self.screened - 1

    @property
    def instances(self) -> int:
        return Placement.parse(self.placement).size

    @check_call
    def best_attainment(self, rule: str) -> float | None:
        """Return the highest attainment seen at any rate; None where none was."""
        return max((point.attainment[rule] for point in self.attainment), default=None)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a planner.

    - ``model``, ``objective``, ``strategy``, ``rule``: as the planner's.
    - ``devices``: names, of what the steps were measured on where they were.
    - ``slo``: None where the objective has none.
    - ``best``: the candidate to run.
    - ``candidates``: the best, then the others by their scores; one that stands on a cliff may have a higher score than
      the best (``longer_steps``, and a note).
    - ``paper``: Algorithm 2's own choice.
    - ``priced``: the engine that is assumed on each kind of device, and the seconds of a few steps.
    - ``trace``: statistics of the trace that was planned on.
    - ``seeds``: of the redrawn traces behind ``spread``.
    - ``runs``: replays of the search.
    - ``more_runs``: replays of Algorithm 2 after it and behind the figures of both choices.
    - ``met``: false where no candidate meets the SLO at any rate; then ``best`` has the highest attainment seen.
    - ``backend``: "compiled" or "python", where the search ran on the true settings; "screening" where ``stand_ins``
      took their place and the best were replayed on the cores.
    - ``notes``: deviations from what was requested.
    - ``stand_ins``: such as "depth=2 as 1".
    - ``core_runs``, ``core_requests``: replays on the cores, and requests of each.
    """

    model: str
    objective: Objective
    strategy: Strategy
    rule: SLORule
    slo: SLO | None
    devices: tuple[str, ...]
    best: Candidate
    candidates: tuple[Candidate, ...]
    paper: Candidate | None
    trace: TraceStatistics
    priced: tuple[PricedSteps, ...] = ()
    seeds: tuple[int, ...] = ()
    runs: int = 0
    more_runs: int = 0
    met: bool = True
    backend: str = ""
    notes: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    core_runs: int = 0
    core_requests: int = 0

    @property
    def placement(self) -> str:
        """Placement to run: ``Pipeline(model, placement=plan)`` takes it."""
        return self.best.placement

    def explain(self) -> str:
        """Explain in words what to run, by how much it is better, what limits it, and how sure that is."""
        return explain_plan(self)

    @check_call
    def save(self, path: str | Path) -> None:
        """Write the plan as JSON."""
        write_file(path, msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    @check_call
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote. Raises ``ConfigError`` where it is no plan."""
        try:
            return msgspec.json.decode(read_regular_file(path), type=cls)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ConfigError(
                f"{name_file(path)} holds no plan of trinity: {error}; write one with plan.save(path)"
            ) from error

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain dicts, lists, numbers and strings."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    def to_pandas(self) -> Any:
        """Convert to a data frame, one row a candidate. Raises ``ConfigError`` where pandas is not installed."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ConfigError("a plan's to_pandas() needs pandas: pip install pandas, or use to_dict()") from error
        return pandas.DataFrame(list(self.rows()))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Iterate over each candidate's figures, flat."""
        for place, each in enumerate(self.candidates, 1):
            yield {
                "rank": place,
                "placement": each.placement,
                "method": each.method,
                "devices": devices_in_words(each.devices),
                "exact": each.exact,
                "score": each.score,
                **{f"goodput_{rule}": each.goodput.get(rule) for rule in SLO_RULES},
                "bound": each.bound,
                **({"screened": each.screened, "gap": each.gap} if self.stand_ins else {}),
                "bottleneck": each.bottleneck,
                "price": each.price,
                **_knobs(each.settings),
            }

    def _table(self) -> Table:
        listed = list(self.candidates[:SHOWN])
        if self.paper is not None and not any(is_same_candidate(each, self.paper) for each in listed):
            listed.append(self.paper)
        screened = ("screened", "gap") if self.stand_ins else ()
        header = ("", "method", "score", *SLO_RULES, "bound", *screened, "limited by")
        return Table(header, [_cells(self, each) for each in listed])

    def _lines(self) -> list[str]:
        more = len(self.candidates) - SHOWN
        lines = [f"{more} more candidates: plan.candidates"] if more > 0 else []
        return [*lines, *list_prices(self.priced), *(f"note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        return "\n".join([headline(self), as_text(self._table()), *self._lines()])

    def _repr_html_(self) -> str:
        said = [f"<p>{escape(line)}</p>" for line in (headline(self), *self._lines())]
        return "".join([said[0], as_html(self._table()), *said[1:]])


def _knobs(settings: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    return {f"set_{name}": value for name, value in settings.items()}


def _cells(plan: Plan, each: Candidate) -> tuple[str, ...]:
    mark = " (Algorithm 2)" if plan.paper is not None and is_same_candidate(each, plan.paper) else ""
    mixed, knobs = arrangement(each), "".join(f" {name}={value}" for name, value in each.settings.items())
    return (
        each.placement + (f" ({mixed})" if mixed else "") + knobs + mark,
        each.method,
        format_figure(each.score) if each.exact else "" if plan.stand_ins else "lower",
        *(format_figure(each.goodput.get(rule)) for rule in SLO_RULES),
        "" if each.bound is None else format_figure(each.bound),
        *((format_figure(each.screened), "" if each.gap is None else f"{each.gap:+.1%}") if plan.stand_ins else ()),
        each.bottleneck if plan.met else "",
    )
