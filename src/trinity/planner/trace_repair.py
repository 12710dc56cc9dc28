"""Makes a recorded trace one to plan on: whole outputs, no idle gaps; tells what was changed, and what none serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from trinity.costs.model_shape import ModelShape
from trinity.planner.resample import DrawnTrace
from trinity.simulation.rate_sweep import prepare_requests
from trinity.traces.cut_short import count_cut_short, fill_cut_outputs
from trinity.traces.trace import Trace

LEAST_GAP_S = 60.0  # of a pause between two arrivals that may be left out
GAP_TIMES = 20  # means of the shorter gaps: at steady traffic one of 5e8 is as long
LEAST_SHORTER = 0.5  # of all gaps that are shorter than a pause
LEAST_SHORT, LEAST_KEPT = 0.2, 0.5  # of the gaps, up to a minute, and of the time, in longer ones: kept pauses are said


def prepare_recorded(trace: Trace, model: ModelShape, share: float | None) -> DrawnTrace:
    """Sort a trace by arrival, fill in outputs that were cut short and leave out idle gaps; return it with notes.

    ``share``: of the requests that must be in time; None where no rate has to hold.
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
        idle = left_s / (whole[-1].timestamp - whole[0].timestamp) * 1000
        notes.append(
            f"Idle gaps of {left_s:,.0f} s together ({idle:.0%} of the trace's time) were left out: rates are those "
            "while requests come."
        )
    if kept := measure_kept_pauses(busy):
        notes.append(
            f"Gaps of more than {LEAST_GAP_S:g} s take {kept:.0%} of the trace's time and were kept, because the "
            "others do not tell what a usual gap is: rates are means over them, and bursts come faster. Cut the trace "
            "to the time that you plan for."
        )
    return DrawnTrace(busy, (*notes, *describe_refused(busy, model, share)))


def leave_out_gaps(trace: Trace) -> tuple[Trace, float]:
    """Shorten idle gaps of a sorted trace to the mean of its other gaps; return it, and the seconds left out.

    A gap is idle if it is longer than a minute and than ``GAP_TIMES`` the mean of all shorter ones, which are at least
    half of all; so are those that are longer. An hour in which nothing comes would otherwise divide the rate at which a
    placement is said to serve.
    """
    gaps = _gaps(trace)
    usual, least = _find_pauses(gaps)
    if least is None:
        return trace, 0.0
    rows, moved = [trace[0]], 0.0
    for row, gap in zip(list(trace)[1:], gaps, strict=True):
        moved += gap - usual if gap >= least else 0.0
        rows.append(row.request_at(max(0.0, row.timestamp - moved)))
    made = Trace(rows)
    made.report = trace.report
    return made, moved / 1000


def _gaps(trace: Trace) -> list[float]:
    return [after.timestamp - before.timestamp for before, after in pairwise(trace)]


def _find_pauses(gaps: Sequence[float]) -> tuple[float, float | None]:
    """Find (mean of the usual gaps, the shortest idle one) in ms; None where none is idle.

    Upwards, each with those that are strictly shorter: pauses of about equal length do not hide one another.
    """
    shorter, total = 0, 0.0
    for gap, count in sorted(Counter(gaps).items()):
        enough = shorter and shorter >= LEAST_SHORTER * len(gaps)
        if enough and gap > 1000 * LEAST_GAP_S and gap * shorter > GAP_TIMES * total:
            return total / shorter, gap if total else None  # where all others are 0 there is no usual gap
        shorter, total = shorter + count, total + gap * count
    return 0.0, None


def measure_kept_pauses(trace: Trace) -> float:
    """Measure the share of a sorted trace's time in gaps above a minute, where they look like pauses between bursts.

    0.0 where they are not most of the time, or are those of slow and steady traffic: there few gaps are shorter than a
    minute, and none is much shorter than the others.
    """
    gaps = _gaps(trace)
    long = [gap for gap in gaps if gap > 1000 * LEAST_GAP_S]
    short, whole = len(gaps) - len(long), sum(gaps)
    if not long or short < LEAST_SHORT * len(gaps) or sum(long) < LEAST_KEPT * whole:
        return 0.0
    return sum(long) / whole if fmean(long) * short > GAP_TIMES * (whole - sum(long)) else 0.0


def describe_refused(trace: Trace, model: ModelShape, share: float | None) -> tuple[str, ...]:
    """Say how many requests the model can never take, and why; empty where it takes all.

    ``share``: of the requests that must be in time, where they decide whether a rate holds; else None.
    """
    why = Counter(job.refused for job in prepare_requests(trace, model).jobs if job.refused)
    if not why:
        return ()
    total, count = len(trace), sum(why.values())
    listed = ", ".join(f"{each:,} {reason}" for reason, each in why.items())
    decide = ""
    if share is not None and (total - count) / total < share:  # as trials compare
        decide = (
            f" That is more than the {100 * (1 - share):.3g}% that may be late, so no placement meets the SLO on this "
            "trace: leave these requests out, or plan for a model that takes them."
        )
    return (
        f"{count:,} of {total:,} requests ({count / total:.1%}) can never be served by {model.name} and count as not "
        f"in time: {listed}.{decide}",
    )
