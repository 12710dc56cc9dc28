"""ReadReport: what reading a file of a trace found, assumed and left out."""

from __future__ import annotations

import msgspec


class ReadReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of reading a trace file.

    ``units``: units of the file's times. ``imputed``: fields that the format does not record, and their
    substitutes. ``unordered``: rows found out of order and sorted. ``skipped``: bad rows left out; ``problems`` quotes
    the first few.
    """

    format: str
    units: str
    rows: int
    imputed: dict[str, str] = {}
    unordered: int = 0
    skipped: int = 0
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"{self.rows:,} rows of format {self.format} ({self.units})"]
        lines += [f"imputed {name}: {how}" for name, how in self.imputed.items()]
        lines += [f"{self.unordered:,} rows out of order, put in order"] if self.unordered else []
        lines += [f"{self.skipped:,} bad rows skipped, such as {self.problems[0]}"] if self.problems else []
        return "\n".join(lines)
