"""Plots of served requests: timelines, latencies, ranks of deployments, time by span."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import mean, median
from typing import TYPE_CHECKING, Any

from trinity.errors import ConfigError
from trinity.metrics import SPANS, Metrics
from trinity.report.plots.drawing import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
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
from trinity.simulation.simulator import Replay
from trinity.stage_kinds import stage_of
from trinity.timeline import Slice, Timeline
from trinity.traces.trace import COMPLETE, SLO, ServedRequest, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Replays = Mapping[str, Mapping[float, Replay]]  # by deployment and rate (requests/s)
ServedTraffic = Mapping[str, Metrics | Trace | Mapping[str, float]]  # by deployment; spans in seconds by name

_SEVERAL = "several stages in one step"
_KINDS = {
    **{stage_of(letter).name: colour for letter, colour in STAGE_COLOURS.items()},
    _SEVERAL: PINK,
    "migration": GREY,
}
_SHADES = ("#F7D9A0", ORANGE, "#F3C9DF", "#A6CDE6", BLUE, PINK, "#A3DCCB", GREEN)
_SPAN_COLOURS = dict(zip(SPANS, _SHADES, strict=True))
_SIMULATED = "From replays in the simulator."
_MOST_DOTS = 1500  # dots of one deployment at one rate
_FEW_SLICES = 500  # slices or dots up to which they are drawn as vectors
_GOLDEN = (math.sqrt(5) - 1) / 2  # spreads any number of dots evenly


# ---------------------------------------------------------------- timeline


@use_style
def plot_timeline(
    shown: Replay | Timeline | Iterable[Slice], *, start_s: float = 0.0, end_s: float = math.inf, title: str = ""
) -> Figure:
    """Plot a timeline of every instance, with a bar for each step and migration, from ``start_s`` to ``end_s``.

    Seconds count from the first slice. ``Timeline.of(replay.timeline).save(path)`` writes the same for Perfetto.
    """
    if not start_s < end_s:
        raise ConfigError(f"start_s must be before end_s, got {start_s} to {end_s}")
    slices = _slices(shown)
    origin = min((each.start_s for each in slices), default=0.0)
    seen = [each for each in slices if each.start_s + each.duration_s - origin > start_s]
    seen = [each for each in seen if each.start_s - origin < end_s]
    title = title or "Timeline of instances"
    if not seen:
        why = "Nothing ran in this time." if slices else "Nothing was recorded: replay with record=True."
        return draw_message(new_figure(7.5, 2.0), title, why)
    instances = sorted({each.instance for each in slices}, key=[each.instance for each in slices].index)
    instances.sort(key=lambda name: (name.rstrip("0123456789"), len(name), name))
    picture = new_figure(10, 1.7 + 0.42 * len(instances))
    axes = picture.add_subplot()
    used = _bars(axes, seen, instances, origin)
    last = max(each.start_s + each.duration_s for each in slices) - origin
    axes.set_xlim(max(0.0, start_s), min(end_s, last))
    axes.set_ylim(len(instances) - 0.5, -0.5)
    axes.set_yticks(range(len(instances)), instances)
    label_axes(axes, title, "time since the first step (s)", "instance")
    add_colour_legend(axes, {kind: shade for kind, shade in _KINDS.items() if kind in used}, **_BESIDE)
    add_notes(picture, _timeline_notes(slices, last, start_s, end_s))
    return picture


_BESIDE: Any = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0), "fontsize": 9}


def _slices(shown: Replay | Timeline | Iterable[Slice]) -> list[Slice]:
    if isinstance(shown, Replay):
        return list(shown.timeline)
    return list(shown.slices() if isinstance(shown, Timeline) else shown)


def _bars(axes: Axes, seen: Sequence[Slice], instances: Sequence[str], origin: float) -> set[str]:
    """Draw one collection for each instance, lane and kind, with an instance's lanes below each other."""
    lanes: dict[str, list[str]] = {}
    spans: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for each in seen:
        known = lanes.setdefault(each.instance, [])
        if each.lane not in known:
            known.append(each.lane)
        spans.setdefault((each.instance, each.lane, _kind(each)), []).append((each.start_s - origin, each.duration_s))
    for (instance, lane, kind), where in spans.items():
        ordered = sorted(lanes[instance], key=lambda name: (name == "migration", name))
        height = 0.86 / len(ordered)
        top = instances.index(instance) - 0.43 + height * ordered.index(lane)
        edge = 0.8 if kind == "migration" else 0  # they are short: without an edge most would not be seen
        bars = axes.broken_barh(where, (top, height), color=_KINDS[kind], linewidth=edge, gid=f"{instance} {kind}")
        bars.set_rasterized(len(seen) > _FEW_SLICES)
    return {kind for _, _, kind in spans}


def _kind(each: Slice) -> str:
    if each.lane == "migration":
        return "migration"
    name = each.name.rpartition(" ")[2]
    return name if name in _KINDS else _SEVERAL


def _timeline_notes(slices: Sequence[Slice], last: float, start_s: float, end_s: float) -> list[str]:
    made = {each.name.partition(" ")[0] for each in slices} & {"simulated", "emulated"}
    lines = [f"All steps are {' or '.join(sorted(made))}, none was computed by a model."] if made else []
    if start_s > 0 or end_s < last:
        lines.append(f"Shown are {max(0.0, start_s):g} s to {min(end_s, last):g} s of {last:.4g} s.")
    return lines


# ---------------------------------------------------------------- latencies


@use_style
def plot_scatter(runs: Replays, slo: SLO | None = None) -> Figure:
    """Plot TTFT and TPOT of every request by rate and deployment, with medians as bars (EPD-Serve figure 16).

    TPOT is the mean gap between the tokens of a request; an output of one token has none. A note counts the requests
    that were not served. Raises ``ConfigError`` where there is nothing to show.
    """
    rates = _rates(runs)
    picture = new_figure(max(7.5, 1.5 + 0.45 * len(runs) * len(rates)), 6.2)
    upper, lower = picture.subplots(2, 1, sharex=True)
    bounds = (None, None) if slo is None else (slo.ttft, slo.tbt)
    _dots(upper, runs, rates, _ttft, bounds[0])
    _dots(lower, runs, rates, _tpot, bounds[1])
    label_axes(upper, "TTFT and TPOT of every request", "", "TTFT (s)")
    label_axes(lower, "", "request rate (requests/s)", "TPOT (s)")
    lower.set_xticks(range(len(rates)), [f"{rate:.4g}" for rate in rates])
    add_colour_legend(upper, {name: series_colour(place) for place, name in enumerate(runs)}, **_BESIDE)
    dashed = [] if slo is None else [f"Dashed: the SLO's bounds, TTFT {slo.ttft:g} s and TBT {slo.tbt:g} s."]
    add_notes(picture, [f"{_SIMULATED} Black bars: medians.", *dashed, *_missing(runs), *_thinned(runs)])
    return picture


def _rates(runs: Replays) -> list[float]:
    rates = sorted({rate for each in runs.values() for rate in each})
    if not rates:
        raise ConfigError("there is nothing to show: give replays by deployment and rate")
    return rates


def _dots(
    axes: Axes,
    runs: Replays,
    rates: Sequence[float],
    value: Callable[[ServedRequest], float | None],
    bound: float | None,
) -> None:
    width = 0.8 / len(runs)
    everything = []
    for place, (name, by_rate) in enumerate(runs.items()):
        xs: list[float] = []
        ys: list[float] = []
        for rate, replay in by_rate.items():
            left = rates.index(rate) - 0.4 + place * width
            values = [found for each in replay.outcomes if (found := value(each)) is not None]
            kept = values[:: 1 + len(values) // _MOST_DOTS]
            xs += [left + width * (0.1 + 0.8 * (n * _GOLDEN % 1)) for n in range(len(kept))]
            ys += kept
            if values:
                axes.plot([left + 0.05 * width, left + 0.95 * width], [median(values)] * 2, color="black", linewidth=2)
        dots: Any = {"s": 5, "alpha": 0.4, "linewidths": 0, "rasterized": len(xs) > _FEW_SLICES}
        axes.scatter(xs, ys, color=series_colour(place), gid=name, **dots)
        everything += ys
    if bound is not None:
        axes.axhline(bound, color="black", linestyle="--", linewidth=1)
    log_if_wide(axes, "y", everything)
    for edge in range(1, len(rates)):
        axes.axvline(edge - 0.5, color="#DDDDDD", linewidth=1)
    axes.set_xlim(-0.5, len(rates) - 0.5)
    axes.grid(True, axis="y")


def _ttft(each: ServedRequest) -> float | None:
    return each.ttft_s if each.finish_reason in COMPLETE else None


def _tpot(each: ServedRequest) -> float | None:
    return mean(each.itl_s) if each.finish_reason in COMPLETE and each.itl_s else None


def _missing(runs: Replays) -> list[str]:
    lines = []
    for name, by_rate in runs.items():
        for rate, replay in sorted(by_rate.items()):
            reasons = Counter(each.finish_reason for each in replay.outcomes if each.finish_reason not in COMPLETE)
            if reasons:
                counted = ", ".join(f"{number:,} {reason or 'unfinished'}" for reason, number in reasons.items())
                lines.append(f"Not served by {name} at {rate:.4g} requests/s: {counted} of {len(replay.outcomes):,}.")
    return lines


def _thinned(runs: Replays) -> list[str]:
    most = max(len(replay.outcomes) for by_rate in runs.values() for replay in by_rate.values())
    return [] if most <= _MOST_DOTS else [f"Of more than {_MOST_DOTS:,} requests every second, third, ... is drawn."]


# ---------------------------------------------------------------- ranks


_SAME = 1.01  # factor within which values count as equal


def _mean(replay: Replay, value: Callable[[ServedRequest], float | None]) -> float:
    found = [seconds for each in replay.outcomes if (seconds := value(each)) is not None]
    return mean(found) if found else 0.0


_AXES: dict[str, Callable[[Replay], float]] = {  # lower is better
    "mean TTFT": lambda replay: _mean(replay, _ttft),
    "mean TPOT": lambda replay: _mean(replay, _tpot),
    "throughput": lambda replay: replay.duration_s / sum(each.finish_reason in COMPLETE for each in replay.outcomes),
}


@use_style
def plot_radar(runs: Replays) -> Figure:
    """Plot ranks of deployments by mean TTFT, mean TPOT and throughput, a radar for each rate (EPD-Serve figure 17).

    The outermost ring is rank 1, the best; values within 1 % of each other share a rank. Throughput is completions a
    second until the last one. A deployment that served nothing at a rate has no rank there, as a note says.
    """
    rates = _rates(runs)
    across = min(3, len(rates))
    down = math.ceil(len(rates) / across)
    picture = new_figure(max(6.5, 3.7 * across + 1.2), 3.4 * down + 0.7)
    panels = list(picture.subplots(down, across, squeeze=False, subplot_kw={"projection": "polar"}).flat)
    unranked = []
    for axes, rate in zip(panels, rates, strict=False):
        served = {name: each[rate] for name, each in runs.items() if rate in each and _has_completed(each[rate])}
        unranked += [f"{name} at {rate:.4g}" for name, each in runs.items() if rate in each and name not in served]
        _radar(axes, {name: _ranks(served)[name] for name in served}, list(runs), len(runs))
        axes.set_title(f"{rate:.4g} requests/s", pad=12)
    for axes in panels[len(rates) :]:
        axes.set_axis_off()
    picture.suptitle("Rank by TTFT, TPOT and throughput: 1, outermost, is best\n", fontsize=11)
    _radar_legend(picture, list(runs))
    without = [f"Served nothing, so without a rank: {', '.join(unranked)}."] if unranked else []
    add_notes(picture, [_SIMULATED, *without])
    return picture


def _has_completed(replay: Replay) -> bool:
    return any(each.finish_reason in COMPLETE for each in replay.outcomes)


def _ranks(served: Mapping[str, Replay]) -> dict[str, list[int]]:
    """Rank the deployments by each axis."""
    values = {name: [value(replay) for value in _AXES.values()] for name, replay in served.items()}
    return {
        name: [1 + sum(_SAME * other[place] < own[place] for other in values.values()) for place in range(len(own))]
        for name, own in values.items()
    }


def _radar(axes: Axes, ranks: Mapping[str, Sequence[int]], names: Sequence[str], worst: int) -> None:
    angles = [2 * math.pi * place / len(_AXES) for place in range(len(_AXES))]
    for name, found in ranks.items():
        place = names.index(name)
        away = [worst + 1 - rank for rank in found]
        style: Any = {
            "color": series_colour(place),
            "marker": series_marker(place),
            "alpha": 0.8,
            "linewidth": 1.6,
            "markersize": 6,
        }
        axes.plot([*angles, angles[0]], [*away, away[0]], label=name, **style)
    axes.set_theta_offset(math.pi / 2)  # type: ignore[attr-defined]
    axes.set_rlabel_position(60)  # type: ignore[attr-defined]
    axes.tick_params(axis="x", pad=15)
    axes.set_xticks(angles, list(_AXES))
    axes.set_ylim(0, worst + 0.3)
    axes.set_yticks(range(1, worst + 1), [str(worst + 1 - ring) for ring in range(1, worst + 1)], fontsize=8)


def _radar_legend(picture: Figure, names: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], color=series_colour(n), marker=series_marker(n), label=name) for n, name in enumerate(names)
    ]
    picture.legend(handles=lines, loc="outside right upper", fontsize=9)


# ---------------------------------------------------------------- time by span


@use_style
def plot_breakdown(served: ServedTraffic) -> Figure:
    """Plot the mean time of a request in each of its eight spans, a bar for each deployment (TriInfer figure 11).

    ``served``: by deployment, a pipeline's ``metrics`` or ``trace``, of which completed requests count, or spans in
    seconds by name. Labels state the share of the two migrations, which are often too short to see. Raises
    ``ConfigError`` where nothing was served.
    """
    found = {name: _spans(name, each) for name, each in served.items()}
    if not found:
        raise ConfigError("there is nothing to show: give metrics, a trace or spans by deployment")
    picture = new_figure(9.5, 2.2 + 0.5 * len(found))
    axes = picture.add_subplot()
    left = [0.0] * len(found)
    for span in SPANS:
        widths = [1000 * spans[span] for spans in found.values()]
        axes.barh(range(len(found)), widths, left=left, color=_SPAN_COLOURS[span], label=_title(span))
        left = [low + width for low, width in zip(left, widths, strict=True)]
    for place, (total, spans) in enumerate(zip(left, found.values(), strict=True)):
        moved = 1000 * (spans["ep_migration"] + spans["pd_migration"]) / total if total else 0.0
        axes.text(total, place, f" {total:,.4g} ms, migrations {moved:.1%}", va="center", fontsize=8)
    axes.set_yticks(range(len(found)), list(found))
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, 1.35 * max(*left, 1e-9))
    label_axes(axes, "Where a request's time goes", "mean time of a request (ms)", "deployment")
    picture.legend(loc="outside right upper", fontsize=9)
    emulated = [name for name, each in served.items() if _emulated(each)]
    add_notes(picture, [f"Emulated, not computed: {', '.join(emulated)}."] if emulated else [])
    return picture


def _emulated(served: Metrics | Trace | Mapping[str, float]) -> bool:
    if isinstance(served, Metrics):
        return bool(served.summary()["emulated"])
    return isinstance(served, Trace) and any(row.emulated for row in served)


def _title(span: str) -> str:
    first, second = span.split("_") if "_" in span else (span, "")
    return f"{first.upper() if len(first) == 2 else first} {second}".strip()


def _spans(name: str, served: Metrics | Trace | Mapping[str, float]) -> dict[str, float]:
    if isinstance(served, Metrics):
        found = served.summary()["spans_s"] or {}
    elif isinstance(served, Trace):
        done = [row.spans for row in served if row.finish_reason in COMPLETE]
        found = {span: mean(spans.get(span, 0.0) for spans in done) for span in SPANS} if done else {}
    else:
        found = dict(served)
    unknown = sorted(set(found) - set(SPANS))
    if unknown:
        raise ConfigError(f"spans of {name} that are none: {', '.join(unknown)}; they are {', '.join(SPANS)}")
    if not found:
        raise ConfigError(f"nothing was served by {name}: there is no time to show")
    return {span: found.get(span, 0.0) for span in SPANS}
