"""Fills in the outputs of rows that were cut short when they were recorded: their own length is not what was wanted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

import msgspec

from trinity.traces.trace import Trace, TraceRow


def count_cut_short(rows: Iterable[TraceRow]) -> int:
    """Count the rows that were cancelled, refused or failed, or ran into a deadline."""
    return sum(row.is_cut_short for row in rows)


def fill_cut_outputs(trace: Trace) -> Trace:
    """Replace the output of each row that was cut short by the one expected of it; the trace itself where none was.

    Expected is the mean of the trace's whole outputs that are longer than what the row had made (the mean residual
    life), and no more than its ``max_tokens``. Where no whole output is longer, it is ``max_tokens`` or what was made.
    """
    rows = list(trace)
    if not any(row.is_cut_short for row in rows):
        return trace
    whole = sorted(row.output_length for row in rows if not row.is_cut_short)
    sums = [0, *accumulate(whole)]

    def expected(row: TraceRow) -> int:
        at = bisect_right(whole, row.output_length)
        longer = len(whole) - at
        most = row.max_tokens or 0
        if not longer:
            return max(1, row.output_length, most)
        mean = round((sums[-1] - sums[at]) / longer)
        return max(1, row.output_length, min(mean, most) if most else mean)

    filled = Trace(
        msgspec.structs.replace(row.request_at(row.timestamp), output_length=expected(row), finish_reason="")
        if row.is_cut_short
        else row
        for row in rows
    )
    filled.report = trace.report
    return filled
