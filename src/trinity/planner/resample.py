"""Draws a longer trace from one that is too short to plan on, and notes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from trinity.errors import TraceTooShort
from trinity.traces import resample
from trinity.traces.trace import Trace

LEAST_TO_DRAW = 100  # requests that a trace must have to draw others from it
MOST_DRAWN = 1_000_000  # requests; a thousand instances that serve 20 requests/s each need half of these in 20 s
_SPARE = 1.5  # times what was missing: a search goes up by a quarter at a time, and others may go beyond
_LEAST_SPARE = 1.05  # where more would be too many
_TRIES = 8

Result = TypeVar("Result")


class DrawnTrace(NamedTuple):
    """A trace to plan on, with notes on how it was made."""

    trace: Trace
    notes: tuple[str, ...]


def plan_on_long_enough(recorded: DrawnTrace, seed: int, allowed: bool, plan: Callable[[DrawnTrace], Result]) -> Result:
    """Run ``plan`` on this trace or, where it is too short, on more requests like its own.

    Raises ``TraceTooShort`` where that is not ``allowed``, for a trace of fewer than 100 requests, and where more than
    a million would be needed.
    """
    drawn = recorded
    for _ in range(_TRIES):
        try:
            return plan(drawn)
        except TraceTooShort as error:
            if not allowed:
                raise
            drawn = _longer(recorded, drawn.trace, seed, error)
    return plan(drawn)


def _longer(recorded: DrawnTrace, tried: Trace, seed: int, error: TraceTooShort) -> DrawnTrace:
    trace = recorded.trace
    if len(trace) < LEAST_TO_DRAW:
        raise TraceTooShort(
            f"{error}. From {len(trace):,} requests no others can be drawn: that takes at least {LEAST_TO_DRAW}",
            error.needed_s,
        ) from error
    span = (max(row.timestamp for row in tried) - min(row.timestamp for row in tried)) / 1000
    if not span:
        raise error
    needed = error.needed_s / span * len(tried)
    count = math.ceil(_LEAST_SPARE * needed)
    if count <= MOST_DRAWN:
        count = min(MOST_DRAWN, math.ceil(_SPARE * needed))
    else:
        raise TraceTooShort(
            f"{error}. That would take {count:,} requests, more than the {MOST_DRAWN:,} that are drawn at most: is the "
            "SLO as long as you meant?",
            error.needed_s,
        ) from error
    return DrawnTrace(
        resample(trace, count, seed=seed),
        (
            *recorded.notes,
            f"The trace of {len(trace):,} requests is too short for an answer at these rates: planned on {count:,} "
            f"requests drawn from it (10 s stretches at random, seed {seed}).",
        ),
    )
