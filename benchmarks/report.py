"""Results of benchmarks, and their forms: printed tables, JSON, Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

LINES_DEEP = 4  # of published JSON: result, tables, table, rows


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
        lines = ["| " + " | ".join(escaped(cells)) + " |" for cells in (self.header, ruler, *self.rows)]
        return "\n".join([f"{self.title}:", "", *lines])


def escaped(cells: Sequence[str]) -> list[str]:
    """Cells of a row of Markdown."""
    return [cell.replace("|", "\\|") for cell in cells]


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
        parts += [f"{verdict(aim)}: {aim.what}: {aim.measured} (aim {aim.aim})" for aim in self.aims]
        return "\n\n".join([*parts, *self.notes])

    def markdown(self) -> str:
        parts = [f"## {self.title}", self.method, *(table.markdown() for table in self.tables)]
        return "\n\n".join([*parts, *self.notes])


def verdict(aim: Aim) -> str:
    return {True: "met", False: "FELL SHORT", None: "open"}[aim.met]


def publish(result: Result, facts: dict[str, Any], folder: Path) -> Path:
    """Write ``<folder>/<name>.json`` for the documents: what a reader sees, without ``values``, a line for each row."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(_by_lines({"machine": facts, **asdict(replace(result, values={}))}) + "\n", encoding="utf-8")
    return path


def _by_lines(value: Any, depth: int = 0) -> str:
    """JSON with a line for each member down to rows of tables, so that changes of figures show as such."""
    flat = json.dumps(value, ensure_ascii=False)
    if depth == LINES_DEEP or not isinstance(value, dict | list) or not value:
        return flat
    named = list(value.items()) if isinstance(value, dict) else [(None, each) for each in value]
    if depth > 1 and not any(isinstance(each, dict | list) for _, each in named):
        return flat
    inner = [("" if name is None else f"{json.dumps(name)}: ") + _by_lines(each, depth + 1) for name, each in named]
    opened, closed = flat[0], flat[-1]
    pad = " " * (depth + 1)
    return opened + "\n" + ",\n".join(pad + each for each in inner) + "\n" + pad[1:] + closed


def save(result: Result, facts: dict[str, Any], folder: Path) -> Path:
    """Write ``<folder>/<name>.json``: the machine's facts and everything in the result."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    path.write_text(json.dumps({"machine": facts, **asdict(result)}, indent=2) + "\n", encoding="utf-8")
    return path


def load(path: Path) -> tuple[Result, dict[str, Any]]:
    """Read what ``save`` wrote: the result and the machine's facts."""
    held = json.loads(path.read_text(encoding="utf-8"))
    facts = held.pop("machine")
    tables = [Table(each["title"], tuple(each["header"]), each["rows"]) for each in held.pop("tables")]
    return Result(tables=tables, aims=[Aim(**each) for each in held.pop("aims")], **held), facts


def machine_line(facts: dict[str, Any]) -> str:
    """The facts in one line."""
    machine = f"{facts['date']}, {facts['cpu']}, {facts['cores']} cores, {facts['memory_gib']} GiB"
    versions = ", ".join(f"{name} {facts[name]}" for name in ("python", "torch", "transformers", "git"))
    return f"{machine}, {facts['threads']} thread, {versions}, foreign CPU load {facts['foreign_load']:.0%}"
