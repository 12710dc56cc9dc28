"""Lanes: their steps in flight, and the tokens of requests that decode together, one column per step."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import msgspec

from trinity.core.messages import FRONTEND, Emit, Sampled, Step
from trinity.core.scheduler import NOTHING, Outstanding

LANE_PARTS = {"joint": ("vision", "language"), "vision": ("vision",), "language": ("language",)}  # ``StageKind.part``
MAX_COLUMNS = 16  # columns kept before requests collect their tokens


class StepInFlight(msgspec.Struct):  # which makes one in less time than a dataclass
    """A step in flight on a lane."""

    step: Step
    requests: Collection[str]  # those with a row, in order: a replay must not depend on hashes
    written: float | None = None  # clock time at which the last layer of its prefills' KV was written

    @classmethod
    def of(cls, step: Step) -> StepInFlight:
        if not (step.encodes or step.prefills):
            return cls(step, step.decodes)
        rows = [row.request for row in step.encodes] + [row.request for row in step.prefills]
        return cls(step, dict.fromkeys([*rows, *step.decodes]))


Flights = dict[str, deque[StepInFlight]]  # of each lane, in the order in which they run


def count_in_flight(flights: Flights) -> Counter[str]:
    """Count for each request the steps in flight that have rows of it."""
    running = chain.from_iterable(flights.values())
    return Counter(chain.from_iterable(each.requests for each in running))


def outstanding(flights: Flights, own: str) -> Outstanding:
    """Largest count per stage among the steps in flight on the other lanes."""
    most = NOTHING
    for lane, flight in flights.items():
        if lane != own and flight:
            most = _most([most, *map(_counts, flight)])
    return most


def _counts(running: StepInFlight) -> Outstanding:
    step = running.step
    prefill = sum(row.length for row in step.prefills)
    return Outstanding(len(step.decodes), prefill, sum(row.span.tokens for row in step.encodes))


def _most(counts: Iterable[Outstanding]) -> Outstanding:
    return Outstanding(*(max(each) for each in zip(*counts, strict=True)))


@dataclass(slots=True)
class DecodeMember:
    """A request of the batch: it has ``start`` + column count tokens, and ends by length at column count ``last``.

    ``read``: column count up to which its tokens were collected.
    """

    attempt: int
    start: int
    last: int
    stops: frozenset[int]
    read: int
    owner: str


class OwnedRows(NamedTuple):
    """The rows of one front end among those that decode together, and their ``places`` there."""

    rows: tuple[str, ...]
    attempts: tuple[int, ...]
    starts: tuple[int, ...]
    places: tuple[int, ...]


class DecodeBatch:
    """Outputs of decode steps, for the requests that have a row in each.

    A forward evicts the requests' states from the CPU's caches, and reading them is most of the time of a decision. So
    tokens stay here, with what a decision must know of all rows. A request collects its tokens when they are read, when
    it leaves, or when there are ``MAX_COLUMNS`` columns (decision 0032).
    """

    def __init__(self) -> None:
        self.rows: tuple[str, ...] = ()  # of the last column
        self.count = 0  # columns so far
        self._members: dict[str, DecodeMember] = {}
        self._kept: list[tuple[tuple[str, ...], tuple[Sampled, ...]]] = []  # the last ones, with their rows
        self._counted: Counter[int] = Counter()
        self.stops: frozenset[int] = frozenset()  # of all members
        self.attempts: tuple[int, ...] = ()
        self.starts: tuple[int, ...] = ()
        self.owner = FRONTEND  # of all rows; "" where they have several
        self.owned: dict[str, OwnedRows] = {}  # by owner, where they have several
        self.due = 0  # the count of columns at which a row ends by its length, or all are written

    @property
    def members(self) -> Collection[str]:
        return self._members.keys()

    def changes(self, rows: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """List the requests that must ``join`` and those that must ``leave`` before a column has these rows."""
        there = set(rows)
        return [each for each in rows if each not in self._members], [
            each for each in self._members if each not in there
        ]

    def join(
        self, request: str, attempt: int, tokens: int, most: int, stops: frozenset[int], owner: str = FRONTEND
    ) -> None:
        """Add a request that has ``tokens`` outputs and ends at ``most`` outputs, or with a token of ``stops``."""
        start = tokens - self.count
        self._members[request] = DecodeMember(attempt, start, most - start, stops, self.count, owner)
        self._counted.update(stops)

    def leave(self, request: str) -> None:
        self._counted.subtract(self._members.pop(request).stops)
        self.rows = ()
        if not self._members:
            self._kept.clear()

    def arrange(self, rows: tuple[str, ...]) -> None:
        """Set the rows of the next columns: all members, in this order."""
        members = [self._members[each] for each in rows]
        self.rows = rows
        self._counted = +self._counted
        self.stops = frozenset(self._counted)
        self.attempts = tuple([each.attempt for each in members])
        self.starts = tuple([each.start for each in members])
        self._part(members)
        self._plan()

    def _part(self, members: list[DecodeMember]) -> None:
        """Part the rows by their owners."""
        owners = dict.fromkeys([each.owner for each in members])
        self.owner = next(iter(owners)) if len(owners) == 1 else ""
        self.owned = {} if self.owner else {each: self._rows_of(each, members) for each in owners}

    def _rows_of(self, owner: str, members: list[DecodeMember]) -> OwnedRows:
        places = tuple([place for place, each in enumerate(members) if each.owner == owner])
        columns = [tuple([column[place] for place in places]) for column in (self.attempts, self.starts)]
        return OwnedRows(tuple([self.rows[place] for place in places]), columns[0], columns[1], places)

    def emits(self, chosen: tuple[Sampled, ...], count: int) -> dict[str, Emit]:
        """Make what each owner hears of column ``count``, whose samples are ``chosen``."""
        if self.owner:
            return {self.owner: Emit(self.rows, self.attempts, self.starts, chosen, count)}
        return {
            owner: Emit(each.rows, each.attempts, each.starts, tuple([chosen[place] for place in each.places]), count)
            for owner, each in self.owned.items()
        }

    def add_column(self, sampled: Mapping[str, Sampled]) -> tuple[dict[str, Emit], bool]:
        """Add a step's samples. Returns the Emit of each owner, and True where ``ends`` and ``full`` are to be checked.

        Raises ``KeyError`` for a row without a sample.
        """
        rows, count, stops = self.rows, self.count, self.stops
        chosen = tuple(map(sampled.__getitem__, rows))
        self.keep(chosen)
        more = count + 1 >= self.due or (stops and not stops.isdisjoint([each.token for each in chosen]))
        return self.emits(chosen, count), bool(more)

    def keep(self, chosen: tuple[Sampled, ...]) -> None:
        """Keep a column of the samples of ``rows``, without a look at what it ends."""
        self._kept.append((self.rows, chosen))
        self.count += 1

    def ends(self) -> list[tuple[str, str]]:
        """List (request, reason) that the last column ends."""
        found = []
        for request, sampled in zip(*self._kept[-1], strict=True):
            member = self._members[request]
            if sampled.token in member.stops or self.count >= member.last:
                found.append((request, "stop" if sampled.token in member.stops else "length"))
        return found

    def ends_none_within(self, steps: int) -> bool:
        """True where no row can reach its length within ``steps`` more columns."""
        return self.count + steps < self.due

    def num_tokens(self, request: str) -> int:
        """Count the outputs of a member."""
        return self.count + self._members[request].start

    def new_tokens(self, request: str) -> list[int]:
        """Collect a member's tokens since the last call."""
        member, found = self._members[request], list[int]()
        seen, at = tuple[str, ...](), 0
        for rows, sampled in self._kept[len(self._kept) + member.read - self.count :]:
            if rows is not seen:
                seen, at = rows, rows.index(request)
            found.append(sampled[at].token)
        member.read = self.count
        return found

    def full(self) -> bool:
        """True where all members must collect their tokens before ``clear``."""
        return len(self._kept) >= MAX_COLUMNS

    def clear(self) -> None:
        """Drop the columns, after every member has collected its tokens."""
        self._kept.clear()
        self._plan()

    def _plan(self) -> None:
        """Compute the column count at which a row may end by its length, or the columns are full."""
        ends = min([each.last for each in self._members.values()], default=0)
        self.due = min(ends, self.count + MAX_COLUMNS - len(self._kept))
