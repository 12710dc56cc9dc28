"""BuddyCluster: a virtual cluster whose front ends keep journals of each other's requests, and adopt them.

A request is sent to an instance once its buddy has said that it knows of it. Tokens are told every ``FLUSH_S``, and
journals arrive in order. With a front end those of its last journals go that were on their way, all behind a moment
that is drawn; its buddy hears of the end behind what did arrive.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from support.virtual.cluster import RequestRecord, VirtualCluster
from support.virtual.conversation import label_reader
from trinity.core.frontend import Deliver, End
from trinity.core.frontend.journal import Closing, Journal, JournalKeeper, JournalWriter, Kept, Opening, may_be_adopted
from trinity.core.frontend.messages import Adopt
from trinity.core.instance.state import Settings
from trinity.core.messages import Sampled, Submit, Value

FLUSH_S = 0.05


class JournalArrival(NamedTuple):
    """To a buddy's shell: a journal of another front end, sent at this time."""

    writer: str
    journal: Journal
    sent: float


class JournalFlush(NamedTuple):
    """To a front end's shell: tell the buddy what is new."""


class RequestKnown(NamedTuple):
    """To a front end's shell: its buddy knows of the request that this event begins."""

    event: Submit | Adopt


class FrontendLost(NamedTuple):
    """To a buddy's shell: the channel to this front end has ended."""

    name: str


class Adoption(NamedTuple):
    """A request that a front end has adopted: whose it was, its key there, its reader's label here, tokens known."""

    owner: str
    key: str
    label: str
    known: int


class BuddyCluster(VirtualCluster):
    """A ``VirtualCluster`` with ``buddies``: the adopter of each front end's requests, by name; none for the others.

    ``adoptions`` has those that were adopted, ``given_up`` those that had outlived too many front ends.
    """

    def __init__(self, instances: Sequence[Settings], *, buddies: Mapping[str, str], **fields: Any) -> None:
        super().__init__(instances, **fields)
        self.buddies = dict(buddies)
        self.adoptions: list[Adoption] = []
        self.given_up: list[Kept] = []
        self._writers = {name: JournalWriter() for name in self.buddies}
        self._keepers = {name: JournalKeeper() for name in {*self.buddies, *self.buddies.values()}}
        self._given: dict[tuple[str, str], list[Sampled]] = {}  # to the reader, by front end and key
        self._heard: dict[str, float] = {}  # when the last journal of each arrives
        self._lost_since: dict[str, float] = {}
        self._flushing: set[str] = set()

    def take(self, number: int, name: str, event: Any) -> Value | None:
        taken: Any = super().take(number, name, event)
        if isinstance(taken, Submit) and name in self._writers:
            self._begin_request(name, taken)
        elif isinstance(taken, RequestKnown):
            return taken.event
        elif isinstance(taken, JournalFlush):
            self._flushing.discard(name)
            self._flush(name)
        elif isinstance(taken, JournalArrival):
            if taken.sent < self._lost_since.get(taken.writer, taken.sent + 1):
                self._keepers[name].take(taken.writer, taken.journal, self.now)
        elif isinstance(taken, FrontendLost):
            self._adopt_all(name, taken.name)
        else:
            kept: Value | None = taken
            return kept
        return None

    def _begin_request(self, name: str, submit: Submit) -> None:
        key = submit.work.request
        self._note(name, Opening(key=key, reader=key, work=submit.work), [], submit)

    def _note(self, name: str, opening: Opening, given: list[Sampled], behind: Submit | Adopt) -> None:
        """Tell the buddy of a request, and go on with it once that one has answered."""
        self._given[name, opening.key] = given
        self._writers[name].begin(opening, given, self.now)
        self._flush(name)
        answered = self._heard[name] + self.durations.message(self.draw, self.buddies[name], name)
        self.post(answered, name, RequestKnown(behind))

    def _flush(self, name: str) -> None:
        """Send what is new, and do so again in a while as long as there may be more."""
        writer, buddy = self._writers[name], self.buddies[name]
        journal = writer.take(self.now)
        if journal is not None:
            arrival = self.now + self.durations.message(self.draw, name, buddy)
            self._heard[name] = max(arrival, self._heard.get(name, 0.0))
            self.post(self._heard[name], buddy, JournalArrival(name, journal, self.now))
        if writer.behind and name not in self._flushing:
            self._flushing.add(name)
            self.post(self.now + FLUSH_S, name, JournalFlush())

    def deliver(self, name: str, command: Deliver) -> None:
        super().deliver(name, command)
        if (name, command.request) in self._given:
            self._given[name, command.request].append(command.sampled)

    def end(self, name: str, command: End) -> None:
        super().end(name, command)
        if name in self._writers:
            self._writers[name].end(Closing(command.request, command.reason, command.failure))
            self._flush(name)

    def _lose_frontend(self, name: str) -> None:
        super()._lose_frontend(name)
        if name in self.buddies:
            self._lost_since[name] = self.now - self.lives.draw.choice([-1.0, 0.0, 0.05, 0.2])
            heard = max(self.now, self._heard.get(name, 0.0)) + self.lives.draw.uniform(0.0, self.lives.news_s)
            self.post(heard, self.buddies[name], FrontendLost(name))

    def _adopt_all(self, name: str, lost: str) -> None:
        fit, unfit = may_be_adopted(self._keepers[name].lose(lost, self.now))
        self.given_up += unfit
        for kept in fit:
            if kept.closing is None:
                self._adopt(name, lost, kept)

    def _adopt(self, name: str, lost: str, kept: Kept) -> None:
        opening = kept.opening
        key = f"{opening.key}@{lost}"
        label = label_reader(name, key)
        given = list(kept.sampled)
        self.outcomes[label] = RequestRecord(opening.work, self.now, [each.token for each in given])
        self.adoptions.append(Adoption(lost, opening.key, label, len(given)))
        adoption = kept.make_adoption(key, self.now)
        if name not in self._writers:
            self.post(self.now, name, adoption)
            return
        work = replace(adoption.work, outputs=0)
        again = Opening(key=key, reader=opening.reader, work=work, adoptions=opening.adoptions + 1)
        self._note(name, again, given, adoption)
