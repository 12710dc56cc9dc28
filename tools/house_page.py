"""The table of docs/house.md: a row for each figure, a column for each tree. It is the first table of the page."""

from __future__ import annotations

from collections.abc import Mapping

Cells = Mapping[str, str]


def _table(page: str) -> tuple[int, list[list[str]]]:
    """Line at which the first table begins, and its rows as cells; raises ``ValueError`` where there is none."""
    lines = page.splitlines()
    first = next((number for number, line in enumerate(lines) if line.startswith("|")), None)
    if first is None:
        raise ValueError("the page has no table")
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return first, rows


def read_column(page: str, column: str) -> dict[str, str]:
    """Cells of ``column`` by the first cell of their row; raises ``ValueError`` where there is no such column."""
    heads, _, *rows = _table(page)[1]
    if column not in heads:
        raise ValueError(f"the table has no column {column!r}: {', '.join(heads)}")
    return {row[0]: row[heads.index(column)] for row in rows}


def write_column(page: str, column: str, cells: Cells) -> str:
    """Put ``cells``, by the first cell of their row, into ``column``; raises ``ValueError`` where one has no row."""
    if missing := set(cells) - set(read_column(page, column)):
        raise ValueError(f"the table has no row {', '.join(sorted(missing))}")
    first, rows = _table(page)
    at = rows[0].index(column)
    lines = page.splitlines()
    for number, row in enumerate(rows):
        if row[0] in cells:
            lines[first + number] = f"| {' | '.join([*row[:at], cells[row[0]], *row[at + 1 :]])} |"
    return "\n".join(lines) + "\n"
