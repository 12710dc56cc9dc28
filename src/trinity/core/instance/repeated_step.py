"""RepeatedStep: answers the end of a decode step that the next one repeats, as most do.

Between two events nothing of a core changes. So once a step is decided it is known whether the one behind it has the
same rows, for as long as no other event comes and no row ends. A forward leaves nothing of the core in the CPU's
caches: an answer takes as long as it touches functions and objects, and this one touches few (decision 0062).
"""

from __future__ import annotations

from collections import deque
from operator import attrgetter

from trinity.core.instance.lanes import StepInFlight
from trinity.core.instance.state import State
from trinity.core.instance.timers import next_timer
from trinity.core.messages import Emit, Send, Step, Stepped, Value

_token = attrgetter("token")


class RepeatedStep:
    """Decode steps in flight on a lane, behind which the same rows decode again.

    It holds until the core handles any event that it does not ``answer``.

    - ``due``: the core's next timer (clock time, None for never), which does not change meanwhile.
    """

    __slots__ = (
        *("_s", "_columns", "_flight", "_rates", "_owner"),
        *("_id", "_lane", "_rows", "_attempts", "_starts", "_stops", "_ends", "due"),
    )

    def __init__(self, s: State, flight: deque[StepInFlight]) -> None:
        first, columns = flight[0].step, s.decode_batch
        self._s, self._flight, self._columns, self._rates = s, flight, columns, s.rates
        self._id, self._lane, self._rows = first.id, first.lane, columns.rows
        self._attempts, self._starts, self._stops = columns.attempts, columns.starts, columns.stops
        self._owner = columns.owner
        self._ends = columns.due - len(flight)
        self.due = next_timer(s)

    def answer(self, event: Stepped) -> list[Value] | None:
        """Return the commands of ``handle_stepped`` and ``pump``; None, and nothing has changed, where these must."""
        columns, rows, flight = self._columns, self._rows, self._flight
        count = columns.count
        if event.id != self._id or count >= self._ends or event.failed or event.lane != self._lane:
            return None
        try:
            chosen = tuple(map(event.sampled.__getitem__, rows))
        except KeyError:
            return None
        if self._stops and not self._stops.isdisjoint(map(_token, chosen)):
            return None
        columns.keep(chosen)
        self._rates.learn_decodes(len(rows), event.seconds)
        s: State = self._s
        s.steps += 1
        step = Step(s.steps, event.lane, (), (), rows)
        flight.rotate(-1)
        flight[-1].step = step
        self._id = flight[0].step.id
        if not self._owner:
            return [*[Send(owner, emit) for owner, emit in columns.emits(chosen, count).items()], step]
        return [Send(self._owner, Emit(rows, self._attempts, self._starts, chosen, count)), step]


def find_repeated(s: State) -> RepeatedStep | None:
    """Find the decode steps in flight that the next one repeats; None where something else comes first.

    It does where nothing waits or ends, no block table grows, every row is among those that decode, and none but these
    steps are in flight.
    """
    if s.before_decode or s.waiting_offers or s.leaving or s.grows or s.new_decodes or not s.decode_batch.rows:
        return None
    if s.leading:
        return None
    flights = [flight for flight in s.lanes.values() if flight]
    if len(flights) != 1 or len(flights[0]) != s.depth:
        return None
    rows = s.decode_batch.rows
    if any(running.step.decodes != rows or running.step.prefills or running.step.encodes for running in flights[0]):
        return None
    return RepeatedStep(s, flights[0]) if tuple(s.decoding) == rows else None
