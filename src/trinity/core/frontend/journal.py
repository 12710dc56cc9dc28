"""Journal: what a front end tells its buddy of its requests, so that this one can go on with them when it dies.

``JournalWriter`` is the front end's side, ``JournalKeeper`` the buddy's. Neither has a clock, a socket or a tensor. The
sampler counts: noise depends on a request's seed and the index of a token alone. So the opening must be with the buddy
before a token is out, and tokens may come later: those that it has not heard of are computed again (decision 0088).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any

from msgspec.structs import replace

from trinity.core.frontend.messages import Adopt, FormerLife
from trinity.core.values import Failure, Sampled, Value, Work

MOST_ADOPTIONS = 2  # of a request: a front end that it kills takes this many buddies with it, and no more
OPENING_BYTES, TOKEN_BYTES = 4096, 64  # of memory that an opening and each of its tokens take, roughly and at most
ADOPTED_WHY = "its front end was lost"


class Opening(Value, frozen=True, kw_only=True):
    """A request as its buddy must know it: all but its tokens.

    - ``key``: the name that it has at its front end, and no other one there. ``reader``: its reader's id for it.
    - ``work``: as it was submitted, with its seed; ``work.deadline_s`` is what was left when this was sent.
    - ``note``: what the shell needs besides, opaque here.
    - ``inputs``, ``input_bytes``: of its media, where they go along; ``unread``: they do not, and must be prepared.
    - ``tokens``: how many it had from a front end before. ``adoptions``: how many front ends it has outlived.
    """

    key: str
    reader: str
    work: Work
    note: bytes = b""
    inputs: tuple[Any, ...] = ()
    input_bytes: int = 0
    unread: bool = False
    adoptions: int = 0


class JournalPages(Value, frozen=True):
    """Tokens of a request that have been given to its reader, from index ``start`` on.

    ``sampled``: the same with their log-probabilities, where these were asked for.
    """

    key: str
    start: int
    tokens: tuple[int, ...]
    sampled: tuple[Sampled, ...] = ()


class Closing(Value, frozen=True):
    """End of a request, as its reader was told."""

    key: str
    reason: str
    failure: Failure | None = None


class Journal(Value, frozen=True, kw_only=True):
    """Front end to its buddy: what is new since the journal before; ``number`` counts them.

    - ``whole``: it has all; what the buddy had of this front end is void.
    - ``dropped``: keys of requests whose readers have left. ``closed``: the front end ends, and nothing is to go on.
    """

    number: int
    openings: tuple[Opening, ...] = ()
    pages: tuple[JournalPages, ...] = ()
    closings: tuple[Closing, ...] = ()
    dropped: tuple[str, ...] = ()
    whole: bool = False
    closed: bool = False


class JournalKept(Value, frozen=True):
    """Buddy to front end: this journal and all before it are with me."""

    number: int


class JournalStart(Value, frozen=True):
    """Front end to its buddy, first: its ``life``, a draw that no other has, and what it serves on (``instances``).

    ``model``: the fingerprint of what its instances have loaded, weights and precision included: with others a request
    would go on with other tokens.
    """

    life: str
    model: str
    instances: tuple[str, ...]


# ---------------------------------------------------------------- the front end's side


@dataclass(slots=True)
class _Told:
    """A request whose buddy is kept informed; ``sampled`` grows as its reader gets tokens."""

    opening: Opening
    sampled: Sequence[Sampled]
    deadline: float
    sent: int = 0


class JournalWriter:
    """Says what a buddy has not heard of yet. ``most_bytes``: of notes and inputs that are kept for it.

    Nothing is done for a token as it comes: ``take`` looks at the tokens that readers have.
    """

    def __init__(self, most_bytes: float = inf) -> None:
        self.most_bytes = most_bytes
        self.bytes = self.number = 0
        self.open: dict[str, _Told] = {}
        self._openings: dict[str, None] = {}
        self._closings: list[Closing] = []
        self._pages: list[JournalPages] = []
        self._dropped: list[str] = []
        self._whole = True

    @property
    def behind(self) -> bool:
        """True while a request is open, or something of one that has ended is still to be said."""
        return bool(self.open or self._closings or self._dropped or self._pages)

    def begin(self, opening: Opening, sampled: Sequence[Sampled], now: float) -> None:
        """Tell of a request. ``sampled``: the list to which its tokens are added as its reader gets them.

        Beyond the bound it is told of without its inputs, and then not at all.
        """
        if opening.inputs and self.bytes + _held_bytes(opening) > self.most_bytes:
            opening = replace(opening, inputs=(), input_bytes=0, unread=True)
        if self.bytes + _held_bytes(opening) > self.most_bytes:
            return
        self.bytes += _held_bytes(opening)
        left = opening.work.deadline_s
        self.open[opening.key] = _Told(opening, sampled, inf if left is None else now + left)
        self._openings[opening.key] = None

    def end(self, closing: Closing) -> None:
        """Tell how a request ended, behind its last tokens. One that its reader left is dropped."""
        told = self.open.get(closing.key)
        if told is None or closing.reason == "cancelled" or self._is_unsaid(closing.key):
            self.drop(closing.key)
            return
        self._pages += _write_pages(told)
        self._closings.append(closing)
        self._remove(closing.key)

    def drop(self, key: str) -> None:
        """Have a request forgotten: its reader wants no more of it."""
        if key in self.open:
            self._dropped += [] if self._is_unsaid(key) else [key]
            self._remove(key)

    def _is_unsaid(self, key: str) -> bool:
        return self._whole or key in self._openings

    def _remove(self, key: str) -> None:
        self.bytes -= _held_bytes(self.open.pop(key).opening)
        self._openings.pop(key, None)

    def begin_again(self) -> None:
        """Have the next journal say all: the buddy is out of reach. Nothing piles up meanwhile."""
        self._whole = True
        self._openings = dict.fromkeys(self.open)
        self._pages, self._closings, self._dropped = [], [], []
        for each in self.open.values():
            each.sent = 0
        self.number = 0

    def take(self, now: float, *, tokens: bool = True) -> Journal | None:
        """Take what is new; None for nothing. ``tokens``: also of requests that go on, each of which is looked at."""
        openings = tuple(_reduce_deadline(self.open[key], now) for key in self._openings)
        going_on = self.open.values() if tokens else ()
        pages = [*self._pages, *(page for told in going_on for page in _write_pages(told))]
        if not (openings or pages or self._closings or self._dropped or self._whole):
            return None
        self.number += 1
        journal = Journal(
            number=self.number,
            openings=openings,
            pages=tuple(pages),
            closings=tuple(self._closings),
            dropped=tuple(self._dropped),
            whole=self._whole,
        )
        self._openings, self._whole = {}, False
        self._pages, self._closings, self._dropped = [], [], []
        return journal


def _held_bytes(opening: Opening) -> int:
    return len(opening.note) + opening.input_bytes


def _reduce_deadline(told: _Told, now: float) -> Opening:
    """Return the opening with the time that is left."""
    if told.deadline == inf:
        return told.opening
    return replace(told.opening, work=replace(told.opening.work, deadline_s=max(0.0, told.deadline - now)))


def _write_pages(told: _Told) -> list[JournalPages]:
    start, told.sent = told.sent, len(told.sampled)
    new = told.sampled[start : told.sent]
    if not new:
        return []
    scored = told.opening.work.sampling.logprobs is not None
    return [JournalPages(told.opening.key, start, tuple(each.token for each in new), tuple(new) if scored else ())]


# ---------------------------------------------------------------- the buddy's side


@dataclass(slots=True)
class Kept:
    """A request of another front end. ``deadline``, ``ended`` are clock times; ``closing``: how it ended."""

    opening: Opening
    deadline: float = inf
    sampled: list[Sampled] = field(default_factory=list)
    closing: Closing | None = None
    ended: float = inf

    @property
    def bytes(self) -> int:
        """Memory that it takes, about."""
        own = len(self.opening.note) + self.opening.input_bytes + OPENING_BYTES
        return own + TOKEN_BYTES * (len(self.opening.work.prompt) + len(self.sampled))

    def make_adoption(self, name: str, now: float) -> Adopt:
        """Make the event by which a front end goes on with it, under this name of its own."""
        left = None if self.deadline == inf else max(0.0, self.deadline - now)
        opening, tokens = self.opening, tuple(each.token for each in self.sampled)
        work = replace(opening.work, request=name, deadline_s=left, outputs=len(tokens), alone="")
        return Adopt(
            work, tokens, opening.inputs, opening.input_bytes, opening.unread, FormerLife(ADOPTED_WHY, len(tokens), 0.0)
        )


class JournalKeeper:
    """Requests of the front ends whose buddy this one is, by the life of each and their keys.

    - ``most_bytes``: of all; beyond them the oldest that have ended are forgotten, then inputs are not kept, and then
      new requests are not.
    - ``keep_s`` (seconds): how long one that has ended is kept for a reader that did not get all of it.
    """

    def __init__(self, most_bytes: float = inf, keep_s: float = inf) -> None:
        self.most_bytes, self.keep_s = most_bytes, keep_s
        self.bytes = self.refused = 0
        self.lives: dict[str, dict[str, Kept]] = {}

    def knows(self, reader: str) -> bool:
        """True of a request that a front end has which is not lost."""
        return any(kept.opening.reader == reader for known in self.lives.values() for kept in known.values())

    def take(self, life: str, journal: Journal, now: float) -> None:
        """Take in what a front end says. Raises ``ValueError`` for pages that do not follow those before."""
        if journal.whole or journal.closed:
            self.forget(life)
        if journal.closed:
            return
        known = self.lives.setdefault(life, {})
        for opening in journal.openings:
            self._open(known, opening, now)
        for page in journal.pages:
            self._write(known, page)
        for closing in journal.closings:
            if closing.key in known:
                known[closing.key].closing, known[closing.key].ended = closing, now
        for key in journal.dropped:
            self._forget(known, key)

    def _open(self, known: dict[str, Kept], opening: Opening, now: float) -> None:
        left = opening.work.deadline_s
        kept = Kept(opening, inf if left is None else now + left)
        self._make_room(kept.bytes)
        if self.bytes + kept.bytes > self.most_bytes and opening.inputs:
            kept.opening = replace(opening, inputs=(), input_bytes=0, unread=True)
        if self.bytes + kept.bytes > self.most_bytes or opening.key in known:
            self.refused += 1
            return
        self.bytes += kept.bytes
        known[opening.key] = kept

    def _write(self, known: dict[str, Kept], page: JournalPages) -> None:
        kept = known.get(page.key)
        if kept is None:  # there was no room for it
            return
        if page.start != len(kept.sampled):
            raise ValueError(f"tokens of {page.key!r} from {page.start} on follow {len(kept.sampled)}")
        new = page.sampled or tuple(map(Sampled, page.tokens))
        kept.sampled += new
        self.bytes += TOKEN_BYTES * len(new)

    def _make_room(self, wanted: int) -> None:
        """Forget requests that have ended, those that did so first, as far as that is needed."""
        if self.bytes + wanted <= self.most_bytes:
            return
        over = [(kept.ended, life, key) for life, known in self.lives.items() for key, kept in known.items()]
        for ended, life, key in sorted(over):
            if ended == inf or self.bytes + wanted <= self.most_bytes:
                return
            self._forget(self.lives[life], key)

    def expire(self, now: float) -> None:
        """Forget requests that ended long ago."""
        for known in self.lives.values():
            for key in [key for key, kept in known.items() if kept.ended + self.keep_s <= now]:
                self._forget(known, key)

    def _forget(self, known: dict[str, Kept], key: str) -> None:
        kept = known.pop(key, None)
        self.bytes -= kept.bytes if kept is not None else 0

    def forget(self, life: str) -> None:
        """Forget all of a front end: it has ended well, or says all again."""
        for key in list(self.lives.get(life, ())):
            self._forget(self.lives[life], key)
        self.lives.pop(life, None)

    def lose(self, life: str, now: float) -> list[Kept]:
        """Take out all requests of a front end that was lost, the oldest first."""
        self.expire(now)
        found = sorted(self.lives.get(life, {}).values(), key=lambda each: each.opening.work.number)
        self.forget(life)
        return found


def may_be_adopted(kept: Iterable[Kept]) -> tuple[list[Kept], list[Kept]]:
    """Part requests that may go on from those that have outlived too many front ends, which may die of them."""
    fit: tuple[list[Kept], list[Kept]] = ([], [])
    for each in kept:
        fit[each.opening.adoptions >= MOST_ADOPTIONS].append(each)
    return fit
