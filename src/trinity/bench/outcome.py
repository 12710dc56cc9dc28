"""Reports of a run: tables for a reader, JSON for a program, a figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity.bench.machine import MAX_FOREIGN_SHARE
from trinity.bench.measure import Burst, SweepPoint, compare_rounds, select_undisturbed
from trinity.bench.search import EngineGoodput, Goal, Trial, countable_trials, goodput_ratio
from trinity.bench.servers import EngineSpec
from trinity.tables import Table, as_text, distribution


def sweep_table(swept: dict[str, Sequence[SweepPoint]]) -> Table:
    """Table of settings by engine, with the share in time where there was a trial."""
    each_one = [(name, each) for name, settings in swept.items() for each in settings]
    rows = [
        (
            name,
            describe_setting(each),
            *((f"{each.per_cpu_s:.2f}", f"{each.per_s:.2f}") if not each.problem else ("-", "-")),
        )
        for name, each in each_one
    ]
    columns: tuple[str, ...] = ("sweep of tokens a step", "tokens", "req/CPU s", "req/s")
    if all(each.attained is None for _, each in each_one):
        return Table(columns, rows)
    shares = ["-" if each.attained is None else f"{each.attained:.0%}" for _, each in each_one]
    return Table((*columns, "in time"), [(*row, share) for row, share in zip(rows, shares, strict=True)])


def describe_setting(each: SweepPoint | EngineSpec) -> str:
    """Describe a setting in words: searched budgets take the place of tokens."""
    slo, threads = each.options.get("slo"), each.options.get("threads_of", {})
    budget = f"searched for {slo[0]:g} s, {slo[1] * 1e3:g} ms" if slo else f"{each.tokens}"
    return ", ".join([budget, *(f"{roles} x {count} threads" for roles, count in threads.items())])


def cpu_table(found: dict[str, list[Burst]], ours: str, exact: dict[str, int], checked: int) -> Table:
    """Table of requests per CPU second, median with lowest and highest, and trinity's over each, round by round."""
    rows = []
    for name, bursts in found.items():
        kept, quiet = select_undisturbed(bursts)
        seen = distribution(each.per_cpu_s for each in kept) or {}
        low = min(each.per_cpu_s for each in kept)
        middle, least, most = compare_rounds(found[ours], bursts)
        rows.append(
            (
                name + ("" if quiet else " (disturbed)"),
                f"{seen['p50']:.2f} ({low:.2f} to {seen['max']:.2f})",
                "" if name == ours else f"{middle:.2f} ({least:.2f} to {most:.2f})",
                f"{exact[name]} of {checked}" if name in exact else "not checked",
            )
        )
    return Table(("engine", "requests per CPU second", f"{ours} / engine", "tokens of generate()"), rows)


def goodput_table(found: Sequence[EngineGoodput], goals: Sequence[Goal], engines: Sequence[str], against: str) -> Table:
    """Table of goodput by engine and SLO under both rules, and over that of the engine ``against``."""
    cells = {(each.engine, each.goal): each for each in found}
    rows = []
    for slo in dict.fromkeys(goal.slo for goal in goals):
        for engine in engines:
            own = [cells[engine, goal.key].describe() for goal in goals if goal.slo == slo]
            over = [goodput_ratio(found, goal.key, engine, against) for goal in goals if goal.slo == slo]
            shown = ["" if engine == against or each is None else _ratio_text(each) for each in over]
            rows.append((f"{slo.ttft:.3g} s, {slo.tbt * 1e3:.3g} ms: {engine}", *own, *shown))
    rules = [goal.rule for goal in goals if goal.slo == goals[0].slo]
    return Table(
        ("TTFT, TBT: engine", *(f"{rule}, req/s" for rule in rules), *(f"{r} / {against}" for r in rules)), rows
    )


def _ratio_text(ratio: tuple[float, float, float]) -> str:
    return f"{ratio[0]:.2f} ({ratio[1]:.2f} to {ratio[2]:.2f})"


def trials_table(trials: Sequence[Trial]) -> Table:
    """Table of all trials: their results, and whether they count."""
    rows = [
        (
            f"{each.engine} at {each.rate:.3g} req/s, seed {each.seed}",
            f"{each.requests}",
            f"{each.failed}",
            _percentiles(each.ttft_s),
            _percentiles(each.tbt_s),
            f"{each.late_p95_s * 1e3:.0f}",
            f"{each.cpu_s / each.wall_s:.2f}",
            _verdict(each),
        )
        for each in sorted(trials, key=lambda each: (each.engine, each.seed, each.rate))
    ]
    header = ("trial", "judged", "failed", "TTFT ms p50/90/95/99", "TBT ms p50/90/95/99", "client late p95 ms")
    return Table((*header, "CPUs", "counts"), rows)


def _percentiles(seen: dict[str, float] | None) -> str:
    return "/".join(f"{seen[each] * 1e3:.0f}" for each in ("p50", "p90", "p95", "p99")) if seen else "-"


def _verdict(each: Trial) -> str:
    if each.is_late:
        return "INVALID: client late"
    return f"discarded: others {each.foreign:.0%}" if each.foreign > MAX_FOREIGN_SHARE else "yes"


def render_text(tables: Sequence[Table], notes: Sequence[str] = ()) -> str:
    return "\n\n".join([*map(as_text, tables), *notes])


def save_json(path: str | Path, content: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def plot_trials(trials: Sequence[Trial], goals: Sequence[Goal], path: str | Path) -> None:
    """Plot attainment over the rate: an axis for each goal, a line for each engine, a point for each valid trial."""
    from trinity.report.plots.style import use_style

    use_style(_draw_trials)(trials, goals, path)


def _draw_trials(trials: Sequence[Trial], goals: Sequence[Goal], path: str | Path) -> None:
    from matplotlib.figure import Figure

    from trinity.report.plots.drawing import series_colour, series_marker

    figure = Figure(figsize=(4.2 * len(goals), 3.4), layout="constrained")
    axes = figure.subplots(1, len(goals), squeeze=False)[0]
    engines = list(dict.fromkeys(each.engine for each in trials))
    for goal, axis in zip(goals, axes, strict=True):
        for number, engine in enumerate(engines):
            points = sorted(
                (each.rate, each.attainment[goal.key]) for each in countable_trials(trials) if each.engine == engine
            )
            style = {"color": series_colour(number), "marker": series_marker(number)}
            axis.plot(*zip(*points, strict=True), label=engine, **style)
        axis.axhline(0.9, color="black", linewidth=0.8, linestyle=":")
        axis.set(
            title=f"TTFT {goal.slo.ttft:g} s, TBT {goal.slo.tbt:g} s, {goal.rule}", xlabel="requests/s", ylim=(0, 1.05)
        )
    axes[0].set_ylabel("share in time")
    axes[0].legend(fontsize=8)
    figure.savefig(path)
