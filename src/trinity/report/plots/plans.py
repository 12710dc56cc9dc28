"""Plots of plans: attainment, goodput over ratios, best methods over SLOs, utilisation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trinity.errors import ConfigError
from trinity.placement import METHODS, Placement
from trinity.planner import Candidate, Plan
from trinity.planner.plan import UNITS, devices_in_words, format_figure
from trinity.report.plots.drawing import (
    RED,
    SERIES,
    STAGE_COLOURS,
    add_colour_legend,
    add_notes,
    draw_message,
    label_axes,
    log_if_wide,
    new_figure,
    series_colour,
    series_marker,
)
from trinity.report.plots.style import use_style
from trinity.stage_kinds import stage_of
from trinity.traces.goodput import SHARE, RatePoint
from trinity.traces.trace import SLORule

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_MOST_CELLS = 16  # instances up to which the cells of a heat map show their values
_METHOD_COLOURS = dict(zip((*METHODS, "P+D", "PD"), (*SERIES[:5], SERIES[1], SERIES[0]), strict=True))
_UNKNOWN = "#EEEEEE"
_FEW_CURVES = 7  # number of curves up to which the legend fits inside the axes
_ZOOM = 0.25  # of the highest rate that held; lower rates are left out where they all held


# ---------------------------------------------------------------- attainment against rate


@use_style
def plot_attainment(
    shown: Plan | Mapping[str, Sequence[RatePoint]], *, rule: SLORule | None = None, share: float = SHARE, most: int = 6
) -> Figure:
    """Plot attainment against rate, with the share that must be reached (TriInfer figure 9).

    shown: a plan, of which the ``most`` best candidates and Algorithm 2's choice are drawn, or points by name.
    rule (SLO rule, None): None takes the plan's, or "guard".
    share (0.9): share of requests that must be in time.
    most (candidates, 6): number of candidates drawn.

    Hollow points are rates at which completions did not keep up with arrivals.
    """
    if isinstance(shown, Plan):
        rule, title, named = rule or shown.rule, f"Attainment against rate\n{_of(shown)}", _curves(shown, most)
    else:
        rule, title, named = rule or "guard", "Attainment against rate", dict(shown)
    curves = {name: sorted(points, key=lambda point: point.rate) for name, points in named.items() if points}
    picture = new_figure(7.5, 4.8)
    if not curves:
        return draw_message(picture, title, "No rate was tried.")
    axes = picture.add_subplot()
    for place, (name, points) in enumerate(curves.items()):
        _curve(axes, name, points, rule, place)
    axes.axhline(100 * share, color="black", linestyle="--", linewidth=1, label=f"{share:.0%} must be in time")
    label_axes(axes, title, "request rate (requests/s)", f"attainment (% of requests, rule {rule})")
    axes.set_ylim(-2, 103)
    every = [point for points in curves.values() for point in points]
    least = _least_shown(every, rule, share)
    log_if_wide(axes, "x", [point.rate for point in every if point.rate >= least])
    if least:
        axes.set_xlim(left=least)
    axes.grid(True)
    if len(curves) <= _FEW_CURVES:
        axes.legend(loc="best", fontsize=9)
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9)
    left_out = [f"Left out: rates below {least:.3g} requests/s, all at {share:.0%} or more."] if least else []
    add_notes(picture, [*_attainment_notes(curves, rule, share), *left_out])
    return picture


def _least_shown(points: Sequence[RatePoint], rule: SLORule, share: float) -> float:
    """Lowest rate that needs to be shown; 0 for all of them."""
    held = [point.rate for point in points if point.attainment[rule] >= share]
    least = _ZOOM * max(held, default=0.0)
    lower = [point for point in points if point.rate < least]
    return least if lower and all(point.attainment[rule] >= share for point in lower) else 0.0


def _curves(plan: Plan, most: int) -> dict[str, Sequence[RatePoint]]:
    listed = [each for each in plan.candidates if each.attainment][:most]
    if plan.paper is not None and plan.paper.attainment and all(_name(each) != _name(plan.paper) for each in listed):
        listed.append(plan.paper)
    return {_label_candidate(plan, each): each.attainment for each in listed}


def _curve(axes: Axes, name: str, points: Sequence[RatePoint], rule: SLORule, place: int) -> None:
    rates, shares = [point.rate for point in points], [100 * point.attainment[rule] for point in points]
    shade, sign = series_colour(place), series_marker(place)
    axes.plot(rates, shares, color=shade, linewidth=1.5, marker=sign, markersize=5, label=name)
    shaky = [at for at, point in enumerate(points) if not point.stable]
    if shaky:
        where = [rates[at] for at in shaky], [shares[at] for at in shaky]
        axes.plot(*where, linestyle="none", marker=sign, markersize=5, markerfacecolor="white", markeredgecolor=shade)


def _attainment_notes(curves: Mapping[str, Sequence[RatePoint]], rule: SLORule, share: float) -> list[str]:
    lines = []
    below = [name for name, points in curves.items() if max(point.attainment[rule] for point in points) < share]
    if below:
        lines.append(f"Below {share:.0%} at every rate tried: {', '.join(below)}.")
    if any(not point.stable for points in curves.values() for point in points):
        lines.append("Hollow: completions did not keep up with arrivals.")
    return lines


def _name(each: Candidate) -> str:
    return each.placement + "".join(f" {name}={value}" for name, value in each.settings.items())


def _label_candidate(plan: Plan, each: Candidate) -> str:
    is_paper = plan.paper is not None and _name(plan.paper) == _name(each)
    return _name(each) + (" (Algorithm 2)" if is_paper else "")


def _of(plan: Plan) -> str:
    bounds = "" if plan.slo is None else f", {_bounds(plan.slo.ttft, plan.slo.tbt)}"
    return f"{plan.model} on {devices_in_words(plan.devices)}{bounds}"


def _bounds(ttft: float, tbt: float) -> str:
    return f"TTFT {ttft:g} s, TBT {tbt:g} s"


# ---------------------------------------------------------------- goodput over ratios


@use_style
def plot_ratios(plan: Plan, *, rule: SLORule | None = None) -> Figure:
    """Plot heat maps of the score, or the goodput by ``rule``, of every method and ratio with the best one's instances.

    Placements with three groups (E+P+D) form a triangle over the counts of the first two groups; each other method has
    a row over the count of its first group. Grey cells were not searched to the end and show an upper bound. Of several
    candidates for one placement the best is shown.
    """
    count = plan.best.instances
    cells: dict[str, Candidate] = {}
    for each in plan.candidates:
        if each.instances == count:
            cells.setdefault(each.placement, each)
    heat = _Heat(plan, cells, rule)
    shapes = {name: Placement.parse(name) for name in cells}
    three = {name: each for name, each in shapes.items() if len(each.groups) == 3}
    few = {name: each for name, each in shapes.items() if len(each.groups) < 3}
    methods = sorted({each.method for each in few.values()})
    parts = [(_triangle, three, count - 2)] * bool(three) + [(_rows, few, len(methods))] * bool(few)
    picture = new_figure(1.8 + 0.75 * min(count, _MOST_CELLS), 1.9 + 0.48 * sum(min(size, 16) for _, _, size in parts))
    panels = picture.subplots(len(parts), 1, squeeze=False, height_ratios=[size + 1 for _, _, size in parts])
    for (draw, shown, _), axes in zip(parts, panels[:, 0], strict=True):
        draw(heat, axes, shown)
    picture.suptitle(f"{heat.name}, over ratios\n{_of(plan)}", fontsize=11)
    heat.legend(picture, list(panels[:, 0]))
    return picture


class _Heat:
    """Cells of a heat map with one colour scale, for the plan's score or the goodput by a rule."""

    def __init__(self, plan: Plan, cells: Mapping[str, Candidate], rule: SLORule | None) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        self.plan, self.cells, self.count = plan, cells, plan.best.instances
        found = {name: each.score if rule is None else each.goodput.get(rule) for name, each in cells.items()}
        self.values = {name: value for name, value in found.items() if value is not None and cells[name].exact}
        self.bounded = rule is not None or plan.objective == "goodput"  # bounds are of goodput
        shown = "goodput" if self.bounded else plan.objective.replace("_", " ")
        by = rule or (plan.rule if plan.slo is not None else None)
        self.name = shown.capitalize() + (f", rule {by}" if by else "")
        self.unit = UNITS["goodput" if self.bounded else plan.objective]
        self.label = f"{shown} ({self.unit})"
        self.most = max(self.values.values(), default=0) or 1
        self.scale = ScalarMappable(Normalize(0, self.most), "viridis")

    def cell(self, axes: Axes, x: float, y: float, name: str) -> None:
        from matplotlib.patches import Rectangle

        value = self.values.get(name)
        shade = _UNKNOWN if value is None else self.scale.cmap(value / self.most)
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=shade, edgecolor="white", gid=name))
        if self.count <= _MOST_CELLS:
            dark = value is not None and value < 0.6 * self.most
            axes.text(x, y, self._figure(name), ha="center", va="center", fontsize=8, color="w" if dark else "k")
        for chosen, line in ((self.plan.paper, ":"), (self.plan.best, "-")):
            if chosen is not None and chosen.placement == name:
                edge: Any = {"facecolor": "none", "edgecolor": RED, "linestyle": line, "linewidth": 2.5, "zorder": 3}
                axes.add_patch(Rectangle((x - 0.46, y - 0.46), 0.92, 0.92, **edge))

    def _figure(self, name: str) -> str:
        value, bound = self.values.get(name), self.cells[name].bound
        if value is None:
            return "?" if bound is None or not self.bounded else f"≤ {bound:.3g}"
        return f"{value:.3g}" if value else "none"

    def legend(self, picture: Figure, panels: list[Axes]) -> None:
        picture.colorbar(self.scale, ax=panels, label=self.label, shrink=0.8)
        lines = [f"Outlined: the plan's choice, {self.plan.best.placement}"]
        if self.plan.paper is not None:
            lines[0] += f"; dotted: Algorithm 2's own, {self.plan.paper.placement}"
        if len(self.values) < len(self.cells):
            lines.append(
                "Grey: not searched to the end, ≤ is what it cannot exceed (strategy='exhaustive' searches all)"
            )
        if not all(self.values.values()):
            lines.append('"none": at no rate were enough requests in time')
        add_notes(picture, [f"{line}." for line in lines])


def _triangle(heat: _Heat, axes: Axes, shown: Mapping[str, Placement]) -> None:
    for name, placement in shown.items():
        heat.cell(axes, placement.groups[1].count, placement.groups[0].count, name)
    first, second, third = next(iter(shown.values())).groups
    method = "+".join(group.roles for group in (first, second, third))
    _set_frame(axes, heat.count, heat.count - 2, heat.count - 2)
    label_axes(axes, "", f"{second.roles} instances", f"{first.roles} instances")
    axes.set_title(f"{method}, the other instances are {third.roles}", fontsize=10, loc="left")


def _rows(heat: _Heat, axes: Axes, shown: Mapping[str, Placement]) -> None:
    methods = sorted({each.method for each in shown.values()}, key=[*_METHOD_COLOURS].index)
    for name, placement in shown.items():
        heat.cell(axes, placement.groups[0].count, methods.index(placement.method) + 1, name)
    _set_frame(axes, heat.count, heat.count, len(methods))
    axes.set_yticks(range(1, len(methods) + 1), methods)
    label_axes(axes, "", "instances of the first group", "method")


def _set_frame(axes: Axes, width: int, columns: int, rows: int) -> None:
    """Make panels equally wide, with ticks along their cells."""
    step = 1 + (width - 1) // _MOST_CELLS
    axes.set_xlim(0.4, width + 0.6)
    axes.set_ylim(rows + 0.6, 0.4)
    axes.set_xticks(range(1, columns + 1, step))
    axes.set_yticks(range(1, rows + 1, step))


# ---------------------------------------------------------------- the best method over SLOs


@use_style
def plot_best_method(plans: Iterable[Plan]) -> Figure:
    """Plot the best method under each SLO: a cell for each plan, over TBT and TTFT bounds (TriInfer figure 6).

    A cell shows the placement and its goodput by the plan's rule, or that none met the SLO. Raises ``ConfigError``
    where there is no plan, one has no SLO, or two have the same.
    """
    found: dict[tuple[float, float], Plan] = {}
    for plan in plans:
        if plan.slo is None:
            raise ConfigError("a plan without an SLO has no place in a plot over SLOs: leave it out")
        if (plan.slo.ttft, plan.slo.tbt) in found:
            raise ConfigError(f"two plans have the SLO {_bounds(plan.slo.ttft, plan.slo.tbt)}: give one for each SLO")
        found[plan.slo.ttft, plan.slo.tbt] = plan
    if not found:
        raise ConfigError("a plot of the best method over SLOs needs at least one plan")
    ttfts, tbts = sorted({ttft for ttft, _ in found}), sorted({tbt for _, tbt in found})
    picture = new_figure(2.4 + 1.15 * max(3, len(tbts)), 2.2 + 0.62 * len(ttfts))
    axes = picture.add_subplot()
    used: dict[str, str] = {}
    for (ttft, tbt), plan in found.items():
        _choice(axes, tbts.index(tbt), ttfts.index(ttft), plan, used)
    axes.set_xlim(-0.5, len(tbts) - 0.5)
    axes.set_ylim(-0.5, len(ttfts) - 0.5)
    axes.set_xticks(range(len(tbts)), [f"{tbt:g}" for tbt in tbts])
    axes.set_yticks(range(len(ttfts)), [f"{ttft:g}" for ttft in ttfts])
    first = next(iter(found.values()))
    title = f"Best method by SLO\n{first.model} on {devices_in_words(first.devices)}"
    label_axes(axes, title, "TBT bound (s)", "TTFT bound (s)")
    add_colour_legend(axes, used, loc="center left", bbox_to_anchor=(1.01, 0.5), title="method")
    add_notes(picture, ["In each cell: placement, and goodput in requests/s. Blank: not planned."])
    return picture


def _choice(axes: Axes, x: int, y: int, plan: Plan, used: dict[str, str]) -> None:
    from matplotlib.patches import Rectangle

    method = plan.best.method if plan.met else "none meets it"
    shade = used.setdefault(method, _METHOD_COLOURS.get(method, "#BBBBBB") if plan.met else _UNKNOWN)
    axes.add_patch(
        Rectangle(
            (x - 0.5, y - 0.5), 1, 1, facecolor=shade, alpha=0.75 if plan.met else 1, edgecolor="white", gid=method
        )
    )
    reached = plan.best.goodput.get(plan.rule)
    if plan.met:
        words = plan.best.placement + (f"\n{format_figure(reached)}" if reached is not None else "")
    else:
        best = plan.best.best_attainment(plan.rule)
        words = "none" if best is None else f"none: {best:.0%}\nat best"
    axes.text(x, y, words, ha="center", va="center", fontsize=8)


# ---------------------------------------------------------------- utilisation


@use_style
def plot_utilisation(each: Candidate) -> Figure:
    """Plot the share of the time that each instance of a candidate spends in its stages, at its goodput."""
    title = f"Time at work, {each.placement}"
    names = list(each.utilisation)
    picture = new_figure(7.5, 1.6 + 0.28 * max(2, len(names)))
    if not names:
        return draw_message(picture, title, "No replay at a goodput: nothing is known of it.")
    axes = picture.add_subplot()
    left = [0.0] * len(names)
    for stage, shade in STAGE_COLOURS.items():
        shares = [100 * each.utilisation[name].get(stage, 0.0) for name in names]
        if any(shares):
            label = f"{stage_of(stage).name} ({stage})"
            axes.barh(range(len(names)), shares, left=left, color=shade, label=label)
        left = [low + share for low, share in zip(left, shares, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, max(100.0, *left))
    label_axes(axes, title, "share of the time at work (%)", "instance")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return picture
