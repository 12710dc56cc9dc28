"""Rows by when they were first heard of, running and refused ones too, and their demand by ticks of time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice

import msgspec

from trinity.costs.demand import Demand, sum_by_stage
from trinity.stage_kinds import DECODE, all_letters
from trinity.traces.survival import RUNNING, OutputSurvival, observe
from trinity.traces.trace import Trace, TraceRow

KEEP_S = 3600.0  # of traffic that is remembered; after a longer silence all starts anew
KEEP_ROWS = 100_000
OLDER_ROWS = 20_000  # that tell of output lengths beside the recent ones


class HeardRow:
    """A row, which is replaced as its request goes on, and when it was heard of first (s)."""

    __slots__ = ("at_s", "row")

    def __init__(self, row: TraceRow, at_s: float) -> None:
        self.row, self.at_s = row, at_s


class ArrivalBook:
    """Rows of the last hour in the order in which they were heard of, each request once.

    A row with the id of a running one is what became of that.
    """

    def __init__(self) -> None:
        self._heard: deque[HeardRow] = deque(maxlen=KEEP_ROWS)
        self._running: dict[str, HeardRow] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def clear(self) -> None:
        """Forget all rows."""
        self._heard.clear()
        self._running.clear()

    def add(self, row: TraceRow, now: float) -> HeardRow | None:
        """Add a row that is heard of at ``now`` (s); None where it only replaces that of a running request."""
        known = self._running.get(row.request_id) if row.request_id else None
        if known is not None:
            known.row = row
            if row.finish_reason != RUNNING:
                del self._running[row.request_id]
            return None
        heard = HeardRow(row, now)
        self._drop_old(now)
        self._heard.append(heard)
        if row.finish_reason == RUNNING:
            self._running[row.request_id] = heard
        return heard

    def _drop_old(self, now: float) -> None:
        while self._heard and (self._heard[0].at_s < now - KEEP_S or len(self._heard) == KEEP_ROWS):
            gone = self._heard.popleft().row
            if gone.finish_reason == RUNNING:
                self._running.pop(gone.request_id, None)

    def survival(self, since_s: float, older_since_s: float) -> OutputSurvival:
        """Estimate output lengths by the rows heard of since ``since_s`` (s).

        What these lack is told by those before, since ``older_since_s`` (s).
        """
        recent = [heard.row for heard in self._since(since_s)]
        older = islice(self._since(older_since_s), len(recent), len(recent) + OLDER_ROWS)
        return OutputSurvival(map(observe, recent), (observe(heard.row) for heard in older))

    def expected_since(self, since_s: float) -> Trace:
        """Make a trace of the rows heard of since ``since_s`` (s), by arrival, with the outputs expected of them.

        None before tells of these: outputs may be others since.
        """
        survival = self.survival(since_s, since_s)
        rows = sorted((heard.row for heard in self._since(since_s)), key=lambda row: row.timestamp)
        return Trace(fill_row(row, survival) for row in rows)

    def count_since(self, since_s: float) -> int:
        """Count the rows heard of since ``since_s`` (s)."""
        return sum(1 for _ in self._since(since_s))

    def _since(self, since_s: float) -> Iterator[HeardRow]:
        """Iterate over the rows heard of since then, the latest first."""
        for heard in reversed(self._heard):
            if heard.at_s < since_s:
                return
            yield heard


def fill_row(row: TraceRow, survival: OutputSurvival) -> TraceRow:
    """Make a row to replay, without measurements, with the output expected of it where it is not known."""
    request = row.request_at(row.timestamp)
    if not row.is_cut_short:
        return request
    return msgspec.structs.replace(request, output_length=survival.fill(row), finish_reason="")


class DemandTick:
    """Demand of the rows that came in one tick: known of those that ended, expected of the others.

    ``seconds``: stage seconds by letter, as last estimated. ``expecting``: rows of which the output is not known.
    """

    __slots__ = ("_known", "expecting", "seconds")

    def __init__(self) -> None:
        self._known = dict.fromkeys(all_letters(), 0.0)
        self.expecting: list[HeardRow] = []
        self.seconds = self._known

    def add(self, heard: HeardRow, demand: Demand) -> None:
        """Count a row. What a prompt and its images ask for is known at once."""
        seconds = demand.of(heard.row)
        if heard.row.is_cut_short:
            self.expecting.append(heard)
            seconds = {**seconds, DECODE.letter: 0.0}
        self._known = self.seconds = sum_by_stage((self._known, seconds))

    def estimate(self, demand: Demand, survival: OutputSurvival) -> None:
        """Estimate ``seconds`` anew: what has ended is known, of the others so many tokens are expected."""
        ended = [heard.row for heard in self.expecting if not heard.row.is_cut_short]
        if ended:
            self.expecting = [heard for heard in self.expecting if heard.row.is_cut_short]
            self._known = self._add_decode(sum(demand.of(row)[DECODE.letter] for row in ended))
        self.seconds = self._known
        if self.expecting:
            self.seconds = self._add_decode(_expected_decode(demand, [heard.row for heard in self.expecting], survival))

    def _add_decode(self, seconds: float) -> dict[str, float]:
        return {**self._known, DECODE.letter: self._known[DECODE.letter] + seconds}

    def settle(self) -> None:
        """Take what is expected as known, whatever will become of it."""
        self._known, self.expecting = self.seconds, []


def _expected_decode(demand: Demand, rows: list[TraceRow], survival: OutputSurvival) -> float:
    """Decode seconds expected of rows, all priced as their mean: steps cost in proportion to rows and contexts."""
    outputs = [survival.fill(row) for row in rows]
    share = 1 / len(rows)
    mean = TraceRow(
        timestamp=0,
        input_length=round(sum(row.input_length for row in rows) * share),
        output_length=round(sum(outputs) * share),
    )
    return demand.of(mean)[DECODE.letter] * len(rows)
