"""Formats tables as text and HTML, and computes percentiles."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import NamedTuple

PERCENTILES = (50, 90, 95, 99)


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Interpolate a percentile linearly, of at least one value in ascending order."""
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Compute mean, ``PERCENTILES`` and maximum; None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    shares = {f"p{percent}": percentile(ordered, percent) for percent in PERCENTILES}
    return {"mean": sum(ordered) / len(ordered), **shares, "max": ordered[-1]}


class Table(NamedTuple):
    """A header and rows of equally many cells; the first cell of a row is its name."""

    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


def as_text(table: Table) -> str:
    """Format with aligned columns: the first to the left, the others to the right."""
    lines = [table.header, *table.rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
    return "\n".join("  ".join(cells).rstrip() for cells in padded)


def as_html(table: Table) -> str:
    """Format as an HTML table with escaped cells."""
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.header)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def as_titled_html(title: str, *tables: Table) -> str:
    """Format a title and tables below it, all escaped, as a notebook shows an object."""
    return f"<p><b>{escape(title)}</b></p>{''.join(map(as_html, tables))}"
