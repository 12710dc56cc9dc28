"""What an instance does when time has passed: deadlines, leases, reports of its load."""

from __future__ import annotations

import heapq
from math import inf

from trinity.core.instance.lifecycle import end
from trinity.core.instance.loads import report
from trinity.core.instance.state import State, failure
from trinity.core.messages import Tick
from trinity.core.migration.leases import check_leases


def next_timer(s: State) -> float | None:
    """When a Tick is due."""
    due = s.report_at
    if s.lease_check < due and (s.outgoing or s.incoming or s.fetches):
        due = s.lease_check
    while s.deadlines:
        at, request = s.deadlines[0]
        state = s.requests.get(request)
        if state is not None and state.deadline == at and state.ending is None:
            due = min(due, at)
            break
        heapq.heappop(s.deadlines)
    return due if due < inf else None


def tick(s: State, event: Tick, now: float) -> None:
    """Whatever is due."""
    _end_late(s, now)
    if now >= s.lease_check:
        check_leases(s, now)
    if now >= s.report_at:
        report(s, now)


def _end_late(s: State, now: float) -> None:
    """The front end ends a request at its deadline; where no word of that comes, it ends here all the same."""
    while s.deadlines and s.deadlines[0][0] <= now:
        due, request = heapq.heappop(s.deadlines)
        state = s.requests.get(request)
        if state is not None and state.deadline == due:
            text = f"the deadline passed while the request was at {s.settings.name}"
            end(s, state, now, "error", failure("DeadlineExceeded", text))
