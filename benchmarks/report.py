"""What a benchmark hands back, and its three forms: printed tables, JSON, a page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Table:
    """Rows of text under a header; the first column is left-aligned, the others right."""

    title: str
    header: Sequence[str]
    rows: list[list[str]]

    def text(self) -> str:
        lines = [list(self.header), *self.rows]
        widths = [max(len(line[column]) for line in lines) for column in range(len(self.header))]
        padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
        return "\n".join([self.title, *("  " + "  ".join(cells).rstrip() for cells in padded)])

    def markdown(self) -> str:
        ruler = ["---", *["---:"] * (len(self.header) - 1)]
        lines = ["| " + " | ".join(cells) + " |" for cells in (self.header, ruler, *self.rows)]
        return "\n".join([f"{self.title}:", "", *lines])


@dataclass
class Aim:
    """A figure that was asked for and what was measured. ``met`` None: not decided by this run."""

    what: str
    aim: str
    measured: str
    met: bool | None


@dataclass
class Result:
    """One benchmark's outcome. ``method`` says how it was measured; ``notes`` what a reader must know besides.

    ``values`` has every figure as plain numbers, ready for JSON.
    """

    name: str
    title: str
    method: str
    tables: list[Table] = field(default_factory=list)
    aims: list[Aim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        parts = [f"== {self.title}", self.method, *(table.text() for table in self.tables)]
        parts += [f"{_verdict(aim)}: {aim.what}: {aim.measured} (aim {aim.aim})" for aim in self.aims]
        return "\n\n".join([*parts, *self.notes])

    def markdown(self) -> str:
        parts = [f"## {self.title}", self.method, *(table.markdown() for table in self.tables)]
        return "\n\n".join([*parts, *self.notes])


def _verdict(aim: Aim) -> str:
    return {True: "met", False: "FELL SHORT", None: "open"}[aim.met]


def save(result: Result, facts: dict[str, Any], folder: Path) -> Path:
    """Write ``<folder>/<name>.json``: the machine's facts and everything in the result."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(json.dumps({"machine": facts, **asdict(result)}, indent=2) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> tuple[Result, dict[str, Any]]:
    """What ``save`` wrote: the result and the machine's facts."""
    held = json.loads(path.read_text(encoding="utf-8"))
    facts = held.pop("machine")
    tables = [Table(each["title"], tuple(each["header"]), each["rows"]) for each in held.pop("tables")]
    return Result(tables=tables, aims=[Aim(**each) for each in held.pop("aims")], **held), facts


def page(results: Sequence[tuple[Result, dict[str, Any]]], missing: Sequence[str] = ()) -> str:
    """docs/performance.md: the aims first, met or not, then each benchmark; ``missing`` are those without figures."""
    aims = [[aim.what, aim.aim, aim.measured, _verdict(aim)] for result, _ in results for aim in result.aims]
    intro = (
        "# Performance\n\nWritten by `make bench ARGS=--write-docs` from what it measured; do not edit it by hand. "
        "CPU times are thread or process CPU time, not wall time, on one intra-op thread; figures are medians. "
        "No time is asserted in a test. Each table names its commit: later ones may have changed what it measures."
    )
    if missing:
        intro += f"\n\n**Without figures, because they have not run to their end: {', '.join(missing)}.**"
    parts = [intro, "## Aims", Table("Aims and figures", ("what", "aim", "measured", ""), aims).markdown()]
    parts += [f"{result.markdown()}\n\n_{machine_line(facts)}_" for result, facts in results]
    return "\n\n".join(parts) + "\n"


def machine_line(facts: dict[str, Any]) -> str:
    """The facts in one line."""
    machine = f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "transformers", "git"))
    return f"{machine}, {facts['threads']} thread, {versions}, foreign CPU load {facts['foreign_load']:.0%}"
