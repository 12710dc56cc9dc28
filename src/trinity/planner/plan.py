"""Plan: which disaggregation method and ratio to run, what every candidate reached, and why the best one is best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from trinity.errors import ConfigError
from trinity.placement import Placement
from trinity.planner.explain import arrangement, devices_in_words, explained, figure, headline, same
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
    """One placement and what was found of it.

    ``devices``: names, one for each of ``Placement.parse(placement).instances()``, in that order; empty where they are
    the plan's and all equal. ``score`` is in the
    plan's objective, higher is better; ``goodput`` in requests a second by rule. Where not ``exact``, both are empty,
    and all that is known is that neither can exceed ``bound`` (requests/s; None: no bound): by what its stages take,
    or because it failed at that rate. ``nominal``: requests/s that its instances' stage times add up to.

    ``attainment`` is what was seen at each rate, ascending. ``bottleneck``: the letter of the stage that limits it.
    ``utilisation``: share of the time that an instance works for each stage at the goodput. ``memory``: bytes of
    "weights" and of the pools "image" and "kv", and the highest share of each that was held ("image_peak",
    "kv_peak"), by instance. ``spread``: the goodput by the plan's rule on each of the plan's ``seeds``.
    ``price``: of an hour of all its devices. ``settings``: knobs that a wider search has set. ``screened``: its goodput
    by the screening engine, in a plan whose settings that engine had stand-ins for; ``goodput``, ``score`` and all that
    is seen at them are then the cores', of those that were replayed on them.
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

    @property
    def gap(self) -> float | None:
        """How much more the cores reach than the screening engine, as a share of that; None where one is unknown."""
        reached = next(iter(self.goodput.values()), None)
        return None if not self.screened or reached is None else reached / self.screened - 1

    @property
    def instances(self) -> int:
        return Placement.parse(self.placement).size

    def best_attainment(self, rule: str) -> float | None:
        """The highest attainment seen at any rate."""
        return max((point.attainment[rule] for point in self.attainment), default=None)


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What a planner found. ``candidates`` are sorted best first; ``paper`` is Algorithm 2's own choice.

    ``slo`` is None where the objective has none. ``met`` is False where no candidate meets the SLO at any rate: then
    ``best`` has the highest attainment seen. ``runs`` counts the replays of the search, ``more_runs`` those of
    Algorithm 2 after it and behind the figures of both choices; ``seeds`` are those of the redrawn traces behind
    ``spread``; ``notes`` say what was done otherwise than asked. ``engine``: "compiled" or "python", where the search
    ran on the settings that were asked for; "screening" where ``stand_ins`` ("depth=2 by 1") took their place, and the
    best were replayed on the cores with the settings themselves: ``core_runs`` times ``core_requests`` requests.
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
    seeds: tuple[int, ...] = ()
    runs: int = 0
    more_runs: int = 0
    met: bool = True
    engine: str = ""
    notes: tuple[str, ...] = ()
    stand_ins: tuple[str, ...] = ()
    core_runs: int = 0
    core_requests: int = 0

    @property
    def placement(self) -> str:
        """What to run: ``Pipeline(model, placement=plan)`` does."""
        return self.best.placement

    def explain(self) -> str:
        """In words: what to run, by how much it is better, what limits it, how sure that is."""
        return explained(self)

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(self)))

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read what ``save`` wrote. Raises ``ConfigError`` where it is no plan."""
        try:
            return msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(f"{path} holds no plan of trinity: {error}; write one with plan.save(path)") from error

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, numbers and strings."""
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(self))
        return plain

    def to_pandas(self) -> Any:
        """One row a candidate. Raises ``ConfigError`` where pandas is not installed."""
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ConfigError("a plan's to_pandas() needs pandas: pip install pandas, or use to_dict()") from error
        return pandas.DataFrame(list(self.rows()))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Each candidate's figures, flat."""
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
        if self.paper is not None and not any(same(each, self.paper) for each in listed):
            listed.append(self.paper)
        screened = ("screened", "gap") if self.stand_ins else ()
        header = ("", "method", "score", *SLO_RULES, "bound", *screened, "limited by")
        return Table(header, [_cells(self, each) for each in listed])

    def _lines(self) -> list[str]:
        more = len(self.candidates) - SHOWN
        lines = [f"{more} more candidates: plan.candidates"] if more > 0 else []
        return [*lines, *(f"note: {note}" for note in self.notes)]

    def __str__(self) -> str:
        return "\n".join([headline(self), as_text(self._table()), *self._lines()])

    def _repr_html_(self) -> str:
        said = [f"<p>{escape(line)}</p>" for line in (headline(self), *self._lines())]
        return "".join([said[0], as_html(self._table()), *said[1:]])


def _knobs(settings: Mapping[str, str | int | float]) -> dict[str, str | int | float]:
    return {f"set_{name}": value for name, value in settings.items()}


def _cells(plan: Plan, each: Candidate) -> tuple[str, ...]:
    mark = " (Algorithm 2)" if plan.paper is not None and same(each, plan.paper) else ""
    mixed, knobs = arrangement(each), "".join(f" {name}={value}" for name, value in each.settings.items())
    return (
        each.placement + (f" ({mixed})" if mixed else "") + knobs + mark,
        each.method,
        figure(each.score) if each.exact else "" if plan.stand_ins else "lower",
        *(figure(each.goodput.get(rule)) for rule in SLO_RULES),
        "" if each.bound is None else figure(each.bound),
        *((figure(each.screened), "" if each.gap is None else f"{each.gap:+.1%}") if plan.stand_ins else ()),
        each.bottleneck,
    )
