"""Makes a recorded trace one to plan on: whole outputs, no idle gaps; tells what was changed, and what none serves."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from trinity.costs.model_shape import ModelShape
from trinity.planner.resample import DrawnTrace
from trinity.simulation.rate_sweep import prepare_requests
from trinity.traces.cut_short import count_cut_short, fill_cut_outputs
from trinity.traces.trace import Trace

LEAST_GAP_S = 60.0  # of a pause between two arrivals that may be left out
GAP_TIMES = 20  # means of the other gaps: at steady traffic one of 5e8 is as long


def prepare_recorded(trace: Trace, model: ModelShape, share: float) -> DrawnTrace:
    """Sort a trace by arrival, fill in outputs that were cut short and leave out idle gaps; return it with notes.

    ``share``: of the requests that must be in time.
    """
    notes = []
    if cut := count_cut_short(trace):
        notes.append(
            f"{cut:,} of {len(trace):,} requests were cancelled, refused or failed when they were recorded: they are "
            "replayed with the outputs expected of them."
        )
    whole = Trace(fill_cut_outputs(trace).by_arrival())
    busy, left_s = leave_out_gaps(whole)
    if left_s:
        share = left_s / (whole[-1].timestamp - whole[0].timestamp) * 1000
        notes.append(
            f"Idle gaps of {left_s:,.0f} s together ({share:.0%} of the trace's time) were left out: rates are those "
            "while requests come."
        )
    return DrawnTrace(busy, (*notes, *describe_refused(busy, model, share)))


def leave_out_gaps(trace: Trace) -> tuple[Trace, float]:
    """Shorten idle gaps of a sorted trace to the mean of its other gaps; return it, and the seconds left out.

    A gap is idle if it is longer than a minute and than ``GAP_TIMES`` the mean of all shorter ones. An hour in which
    nothing comes would otherwise divide the rate at which a placement is said to serve.
    """
    stamps = [row.timestamp for row in trace]
    gaps = sorted(after - before for before, after in pairwise(stamps))
    rest = sum(gaps)
    while gaps and gaps[-1] > 1000 * LEAST_GAP_S:
        rest -= gaps[-1]
        if gaps[-1] * (len(gaps) - 1) <= GAP_TIMES * rest or rest <= 0:
            rest += gaps[-1]
            break
        gaps.pop()
    if len(gaps) == max(0, len(stamps) - 1):
        return trace, 0.0
    usual, longest, moved = sum(gaps) / len(gaps), gaps[-1], 0.0
    rows = [trace[0]] if stamps else []
    for row, gap in zip(list(trace)[1:], (b - a for a, b in pairwise(stamps)), strict=True):
        moved += max(0.0, gap - usual) if gap > longest else 0.0
        rows.append(row.request_at(max(0.0, row.timestamp - moved)))
    made = Trace(rows)
    made.report = trace.report
    return made, moved / 1000


def describe_refused(trace: Trace, model: ModelShape, share: float) -> tuple[str, ...]:
    """Say how many requests the model can never take, and why; empty where it takes all."""
    why = Counter(job.refused for job in prepare_requests(trace, model).jobs if job.refused)
    if not why:
        return ()
    total, count = len(trace), sum(why.values())
    listed = ", ".join(f"{each:,} {reason}" for reason, each in why.items())
    decide = (
        f" That is more than the {1 - share:.0%} that may be late, so no placement meets the SLO on this trace: leave "
        "these requests out, or plan for a model that takes them."
    )
    return (
        f"{count:,} of {total:,} requests ({count / total:.1%}) can never be served by {model.name} and count as not "
        f"in time: {listed}.{decide if count > (1 - share) * total else ''}",
    )
