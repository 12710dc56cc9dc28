"""Timers of an instance: deadlines, leases and load reports."""

from __future__ import annotations

import heapq
from math import inf

from trinity.core.instance.lifecycle import end
from trinity.core.instance.loads import report
from trinity.core.instance.state import State, failure
from trinity.core.messages import Tick
from trinity.core.migration.leases import check_leases


def next_timer(s: State) -> float | None:
    """Clock time at which a Tick is due; None for never."""
    due = s.report_at
    if s.lease_check < due and (s.outgoing or s.incoming or s.fetches or s.prefix_fetches):
        due = s.lease_check
    while s.deadlines:
        at, request = s.deadlines[0]
        state = s.requests.get(request)
        if state is not None and state.deadline == at and state.ending is None:
            due = min(due, at)
            break
        heapq.heappop(s.deadlines)
    return due if due < inf else None


def handle_tick(s: State, event: Tick, now: float) -> None:
    """End late requests, check leases and report the load, whichever is due."""
    _end_late(s, now)
    if now >= s.lease_check:
        check_leases(s, now)
    if now >= s.report_at:
        report(s, now)


def _end_late(s: State, now: float) -> None:
    """End requests past their deadline, in case no Cancel comes from the front end."""
    while s.deadlines and s.deadlines[0][0] <= now:
        due, request = heapq.heappop(s.deadlines)
        state = s.requests.get(request)
        if state is not None and state.deadline == due:
            text = f"the deadline passed while the request was at {s.settings.name}"
            end(s, state, now, "error", failure("DeadlineExceeded", text))
