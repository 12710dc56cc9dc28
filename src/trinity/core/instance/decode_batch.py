"""Columns: the tokens of requests that decode together, one column a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from trinity.core.messages import Emit, Sampled

MAX_COLUMNS = 16  # columns, before they are written to the requests they belong to


@dataclass(slots=True)
class DecodeMember:
    """A request that takes part: it has ``start`` tokens beside the count of columns, and ends at ``last`` of those.

    ``read``: the count of columns up to which it was asked for its tokens.
    """

    attempt: int
    start: int
    last: int
    stops: frozenset[int]
    read: int


class DecodeBatch:
    """What decode steps gave, for the requests that have a row in each of them.

    Behind a forward no cache has anything of a request's state, and to look at it is most of what a decision takes. So
    a step's tokens stay here, beside what one has to know of every row, and are written to the requests when somebody
    asks for them, when a request leaves, or when there are ``MAX_COLUMNS`` columns.
    """

    def __init__(self) -> None:
        self.rows: tuple[str, ...] = ()  # of the last column
        self.count = 0  # columns so far
        self._members: dict[str, DecodeMember] = {}
        self._kept: list[tuple[tuple[str, ...], tuple[Sampled, ...]]] = []  # the last ones, with their rows
        self._counted: Counter[int] = Counter()
        self._stops: frozenset[int] = frozenset()
        self._attempts: tuple[int, ...] = ()
        self._starts: tuple[int, ...] = ()
        self._due = 0  # the count of columns at which a row ends by its length, or all are written

    @property
    def members(self) -> Collection[str]:
        return self._members.keys()

    def changes(self, rows: tuple[str, ...]) -> tuple[list[str], list[str]]:
        """Who has to ``join``, and who has to ``leave``, before the next column can have these rows."""
        there = set(rows)
        return [each for each in rows if each not in self._members], [
            each for each in self._members if each not in there
        ]

    def join(self, request: str, attempt: int, tokens: int, most: int, stops: frozenset[int]) -> None:
        """It has so many tokens, and ends with ``most``, or with one of ``stops``."""
        start = tokens - self.count
        self._members[request] = DecodeMember(attempt, start, most - start, stops, self.count)
        self._counted.update(stops)

    def leave(self, request: str) -> None:
        self._counted.subtract(self._members.pop(request).stops)
        self.rows = ()
        if not self._members:
            self._kept.clear()

    def arrange(self, rows: tuple[str, ...]) -> None:
        """The next columns have these rows, all of them members, and there is no other."""
        members = [self._members[each] for each in rows]
        self.rows = rows
        self._counted = +self._counted
        self._stops = frozenset(self._counted)
        self._attempts = tuple([each.attempt for each in members])
        self._starts = tuple([each.start for each in members])
        self._plan()

    def add_column(self, sampled: Mapping[str, Sampled]) -> tuple[Emit, bool]:
        """The next column: what is emitted, and whether there is more to do: to look for ``ends`` and ``full``. Raises
        ``KeyError`` for a row that nothing was sampled for."""
        rows, count = self.rows, self.count
        chosen = tuple(map(sampled.__getitem__, rows))
        self._kept.append((rows, chosen))
        self.count = count + 1
        more = count + 1 >= self._due or (self._stops and not self._stops.isdisjoint([each.token for each in chosen]))
        return Emit(rows, self._attempts, self._starts, chosen, count), bool(more)

    def ends(self) -> list[tuple[str, str]]:
        """Which requests the last column ends, and why."""
        found = []
        for request, sampled in zip(*self._kept[-1], strict=True):
            member = self._members[request]
            if sampled.token in member.stops or self.count >= member.last:
                found.append((request, "stop" if sampled.token in member.stops else "length"))
        return found

    def ends_none_within(self, steps: int) -> bool:
        """Whether surely no row of the last column ends by its length within so many further columns."""
        return self.count + steps < self._due

    def num_tokens(self, request: str) -> int:
        """How many a member has."""
        return self.count + self._members[request].start

    def new_tokens(self, request: str) -> list[int]:
        """A member's tokens since it was asked last."""
        member, found = self._members[request], list[int]()
        seen, at = tuple[str, ...](), 0
        for rows, sampled in self._kept[len(self._kept) + member.read - self.count :]:
            if rows is not seen:
                seen, at = rows, rows.index(request)
            found.append(sampled[at].token)
        member.read = self.count
        return found

    def full(self) -> bool:
        """Whether all members are to be asked for their tokens, and ``clear`` called."""
        return len(self._kept) >= MAX_COLUMNS

    def clear(self) -> None:
        """Every member was asked."""
        self._kept.clear()
        self._plan()

    def _plan(self) -> None:
        """When there is more to do than to take a column."""
        ends = min([each.last for each in self._members.values()], default=0)
        self._due = min(ends, self.count + MAX_COLUMNS - len(self._kept))
