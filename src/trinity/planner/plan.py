"""Plan: the disaggregation method and ratio to run, the figures of every candidate, and why the best one is best."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from trinity.errors import ConfigError
from trinity.errors.arguments import check_call
from trinity.errors.files import name_file, read_regular_file, write_file
from trinity.placement import Placement
from trinity.planner.prices import PRICED_ROWS, PricedSteps, format_ms, list_prices
from trinity.stage_kinds import stage_of
from trinity.tables import Table, as_html, as_text
from trinity.traces.goodput import RatePoint
from trinity.traces.statistics import TraceStatistics
from trinity.traces.trace import SLO, SLO_RULES, SLORule

Strategy = Literal["race", "paper", "exhaustive", "bayesian"]
Objective = Literal["goodput", "goodput_per_cost", "fewest_instances", "throughput", "effective_throughput"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
SHOWN = 12  # candidates that a printed plan lists

UNITS = {
    "goodput": "requests/s",
    "goodput_per_cost": "requests per unit of price",
    "fewest_instances": "requests/s",
    "throughput": "requests/s",
    "effective_throughput": "tokens/s a device in time",
}


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


def format_figure(value: float | None) -> str:
    """Format a figure with four digits; "" for None."""
    return "" if value is None else f"{value:.4g}"


def devices_in_words(devices: Sequence[str]) -> str:
    """Format device names as "4 x H100 + 4 x L40S"."""
    return " + ".join(f"{count} x {name}" for name, count in Counter(devices).items())


def arrangement(each: Candidate) -> str:
    """Format the roles of each device as "2EP: H100, 1D: H100, 1D: L40S"; "" where all devices are equal."""
    if len(set(each.devices)) < 2:
        return ""
    roles = [own for _, own in Placement.parse(each.placement).instances()]
    runs = groupby(zip(roles, each.devices, strict=True))
    return ", ".join(f"{len(list(run))}{own}: {device}" for (own, device), run in runs)


def format_score(plan: Plan, each: Candidate) -> str:
    return f"{format_figure(each.score)} {UNITS[plan.objective]}"


def is_same_candidate(one: Candidate, other: Candidate) -> bool:
    """Check if both are the same placement on the same devices with the same settings."""
    return (one.placement, one.devices, one.settings) == (other.placement, other.devices, other.settings)


def headline(plan: Plan) -> str:
    """Return one line that says what to run."""
    on = devices_in_words(plan.best.devices or plan.devices)
    if not plan.met:
        best = plan.best.best_attainment(plan.rule)
        reached = "" if best is None else f"; the best attainment is {best:.1%}, of {plan.best.placement}"
        return f"No candidate for {plan.model} on {on} meets the SLO at any rate{reached}."
    by = f" by the rule {plan.rule!r}" if plan.slo is not None else ""
    mixed = arrangement(plan.best)
    on = f"{on} ({mixed})" if mixed else on
    return (
        f"Run {plan.best.placement} ({plan.best.method}) for {plan.model} on {on}: {format_score(plan, plan.best)}{by}."
    )


def explain_plan(plan: Plan) -> str:
    """Return the sentences, one a line."""
    return "\n".join(_sentences(plan))


def _sentences(plan: Plan) -> Iterator[str]:
    yield headline(plan)
    if not plan.met:
        yield from _unmet_lines(plan)
    if plan.slo is not None:
        yield f"SLO: first token within {plan.slo.ttft:g} s, {plan.slo.tbt:g} s between tokens."
    trace = plan.trace
    shares = [("images", trace.image_share), ("videos", trace.video_share), ("audio", trace.audio_share)]
    having = ", ".join(f"{share:.0%} of them with {kind}" for kind, share in shares if share or kind == "images")
    yield f"Planned on {trace.requests:,} requests, {having}."
    yield from list_prices(plan.priced)
    if plan.met:
        yield from _compare_lines(plan)
        yield from _spread_lines(plan)
    yield from _longer_lines(plan.best)
    yield from _confirmation_lines(plan)
    if plan.met:
        yield from _limit_lines(plan.best)
    yield from _search_lines(plan)
    yield from plan.notes if plan.met else ()


def _unmet_lines(plan: Plan) -> Iterator[str]:
    """Say why no placement would do: requests that the model never takes, or steps longer than the SLO's bounds."""
    yield from plan.notes
    if plan.slo is None:
        return
    for each in plan.priced:
        bounds = ((each.encode_s + each.prefill_s, plan.slo.ttft), (each.decode_s, plan.slo.tbt))
        words = ("to the first token of a mean prompt", f"for a decode of {PRICED_ROWS} requests")
        for (needed, bound), what in zip(bounds, words, strict=True):
            if needed > bound:
                has = f"{each.device} needs {format_ms(needed)} {what}"
                yield f"What limits it: {has}, and the SLO is {format_ms(bound)}."


def _compare_lines(plan: Plan) -> Iterator[str]:
    rival = next((each for each in plan.candidates[1:] if each.exact and each.score), None)
    for each, name in ((plan.paper, "Algorithm 2's own choice"), (rival, "the next best that was searched to the end")):
        if each is None or not each.score or not plan.best.score:
            continue
        if is_same_candidate(each, plan.best):
            yield f"It is {name} too."
        elif each.score <= plan.best.score:  # else a note says what is wrong with it
            more = plan.best.score / each.score
            yield f"That is {more:.2f} times {name}, {each.placement} ({format_score(plan, each)})."


def _confirmation_lines(plan: Plan) -> Iterator[str]:
    """Name the stand-ins of the search, and the goodput of the best on the cores with the true settings."""
    if not plan.stand_ins:
        return
    yield f"The search ran on the screening engine, with {', '.join(plan.stand_ins)}."
    best, runs = plan.best, f"{plan.core_runs} replays of {plan.core_requests:,} requests"
    if best.gap is not None and best.screened:
        reached = f"{format_figure(best.screened * (1 + best.gap))} requests/s, where the screening engine has"
        gap = f"{format_figure(best.screened)} ({best.gap:+.1%})"
        yield f"On the cores that serve, with the settings themselves ({runs}), it reaches {reached} {gap}."


def _spread_lines(plan: Plan) -> Iterator[str]:
    spread = plan.best.spread
    if spread:
        yield (
            f"On {len(spread)} redrawn trace(s) (seeds {', '.join(map(str, plan.seeds))}) its goodput is "
            f"{format_figure(min(spread))} to {format_figure(max(spread))} requests/s."
        )


def _longer_lines(best: Candidate) -> Iterator[str]:
    if best.longer_steps:
        rates = ", ".join(f"{format_figure(rate)} with {factor - 1:.0%}" for factor, rate in best.longer_steps)
        yield f"With steps longer than these costs at the same budgets, in requests/s: {rates}."


def _limit_lines(best: Candidate) -> Iterator[str]:
    if not best.bottleneck:
        return
    busy = _busiest(best)
    share = f", {busy:.0%} busy at that rate" if busy else ""
    yield f"What limits it: {stage_of(best.bottleneck).name} ({best.bottleneck}){share}."
    for kind, name in (("kv", "KV cache"), ("image", "image cache")):
        peaks = [held[f"{kind}_peak"] for held in best.memory.values() if f"{kind}_peak" in held]
        if peaks:
            yield f"Its fullest {name} was {max(peaks):.0%} held."


def _busiest(best: Candidate) -> float:
    """Average the busy share of the instances that serve the bottleneck stage, over all of their stages."""
    serving = [name for name, roles in Placement.parse(best.placement).instances() if best.bottleneck in roles]
    shares = [sum(best.utilisation[name].values()) for name in serving if name in best.utilisation]
    return sum(shares) / len(shares) if shares else 0.0


def _search_lines(plan: Plan) -> Iterator[str]:
    exact = sum(each.exact for each in plan.candidates)
    rest = len(plan.candidates) - exact
    more = f", and {plan.more_runs} for Algorithm 2 and the figures of the best" if plan.more_runs else ""
    yield f"Strategy {plan.strategy!r}: {plan.runs} replays over {len(plan.candidates)} candidates{more}."
    if rest and plan.stand_ins:
        yield f"{rest} have no score of their own: the screening engine or the cores have them behind."
    elif rest:
        yield f"{rest} were not searched to the end: each failed at the rate of a better one, or cannot reach it."
