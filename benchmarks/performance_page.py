"""docs/performance.md out of docs/data: one page that says what is fast and what is not, then a short section each.

Tables of more than a few rows stay in the data; the site has a page with all of them for each benchmark.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.report import Aim, Result, Table, escaped, machine_line, verdict

Measured = tuple[Result, dict[str, Any]]  # a result, and facts of the machine
FEW_ROWS, FEW_TABLES, FEW_NOTES = 6, 1, 6  # that a section has
AIMS = ("what", "aim", "measured", "")
COMMON = ("cpu", "cores", "memory_gib", "threads", "python", "torch", "transformers")
INTRO = (
    "Written by `make bench ARGS=--write-docs` from [docs/data](data/), where everything is that was measured; do not "
    "edit it by hand. CPU times are thread or process CPU time, not wall time, on one intra-op thread; figures are "
    "medians. No time is asserted in a test. Each section names its commit: later ones may have changed what it "
    "measures."
)


def page(results: Sequence[Measured], missing: Sequence[str] = ()) -> str:
    """The whole page; ``missing`` are benchmarks without figures."""
    parts = ["# Performance", INTRO, _machines(results)]
    if missing:
        parts.append(f"**Without figures, because they have not run to their end: {', '.join(missing)}.**")
    parts += ["## What is fast, and what is not", *_first(results)]
    return "\n\n".join([*parts, *(section(result, facts) for result, facts in results)]) + "\n"


def section(result: Result, facts: dict[str, Any]) -> str:
    """One benchmark: its aims, its small tables, and where the rest is."""
    shown = [table for table in result.tables if len(table.rows) <= FEW_ROWS][:FEW_TABLES]
    notes = result.notes if len(result.notes) <= FEW_NOTES else []
    left = [each for each in result.tables if each not in shown]
    return "\n\n".join([*_parts(2, result, shown, notes), _where(result, facts, left, not notes)])


def whole(result: Result, facts: dict[str, Any]) -> str:
    """Everything that a benchmark has, as a page of its own."""
    return "\n\n".join([*_parts(1, result, result.tables, result.notes), f"_{machine_line(facts)}_"]) + "\n"


def _parts(level: int, result: Result, tables: Sequence[Table], notes: Sequence[str]) -> list[str]:
    aims = [_words(AIMS, [[*_said(aim), verdict(aim)] for aim in result.aims])] if result.aims else []
    return [f"{'#' * level} {result.title}", result.method, *aims, *(table.markdown() for table in tables), *notes]


def _first(results: Sequence[Measured]) -> list[str]:
    short = [[*_said(aim), facts["git"]] for result, facts in results for aim in _of(result, False)]
    met = [[_link(result), *_counted(result), facts["git"]] for result, facts in results if _of(result, True)]
    open_ones = sum(len(_of(result, None)) for result, _ in results)
    counted = f"{sum(len(_of(result, True)) for result, _ in results)} aims are met, {len(short)} are not"
    said = f"{counted}{f', and {open_ones} are open' if open_ones else ''}."
    fell = [_words(("what fell short", "aim", "measured", "commit"), short)] if short else []
    return [said, *fell, *([_words(("what was met", "aims met", "the first of them", "commit"), met)] if met else [])]


def _words(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of text, which reads from the left."""
    lines = (escaped(cells) for cells in (header, ["---"] * len(header), *rows))
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _of(result: Result, met: bool | None) -> list[Aim]:
    return [aim for aim in result.aims if aim.met is met]


def _said(aim: Aim) -> list[str]:
    return [aim.what, aim.aim, aim.measured]


def _counted(result: Result) -> tuple[str, str]:
    """Count the aims that were met, and name the first."""
    met = _of(result, True)
    return f"{len(met)} of {len(met) + len(_of(result, False))}", f"{met[0].what}: {met[0].measured} (aim {met[0].aim})"


def _link(result: Result) -> str:
    """To the section, by the name that its heading has."""
    kept = "".join(letter for letter in result.title.lower() if letter.isalnum() or letter in "-_ ")
    return f"[{result.title}](#{kept.strip().replace(' ', '-')})"


def _machines(results: Sequence[Measured]) -> str:
    """The machine, where all were measured on one."""
    found = dict.fromkeys(_machine(facts) for _, facts in results)
    return "Measured on: " + "; ".join(found) + "."


def _machine(facts: dict[str, Any]) -> str:
    cpu, cores, memory, threads, python, torch, transformers = (facts[name] for name in COMMON)
    versions = f"Python {python}, torch {torch}, transformers {transformers}"
    return f"{cpu}, {cores} cores, {memory} GiB, {threads} thread, {versions}"


def _where(result: Result, facts: dict[str, Any], left: Sequence[Table], notes_left: bool) -> str:
    """Say when it was measured, and add what only the data have."""
    more = [f"{table.title} ({len(table.rows)} rows)" for table in left]
    if notes_left and result.notes:
        more.append(f"{len(result.notes)} notes")
    said = f"{facts['date']}, git {facts['git']}, foreign CPU load {facts['foreign_load']:.0%}"
    return f"_{said}. [Everything measured](data/{result.name}.json){': ' + '; '.join(more) if more else ''}._"
