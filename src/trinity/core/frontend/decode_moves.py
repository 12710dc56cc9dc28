"""DecodeMoves: moves decodes to other instances, on request and away from instances that leave.

Of the decodes at an instance that leaves some move, and some end there:

======================  ============================================================================================
event                   what follows
======================  ============================================================================================
an instance leaves      each decode there is judged: it moves where its pull is predicted to take less time than its
                        end (``DecodeMoves.find_gain``), at most ``MOST_AT_ONCE`` from one instance at a time
a decode comes there    it is judged as well; so are all again every ``JUDGE_AGAIN_S``: reports come, ends come nearer
one has moved           the next one goes
one has not             it is asked again after a pause, which grows fourfold each time; another target is preferred
no other takes it       it ends there, or is recovered after the drain, as it would be without this
it leaves no longer,    no more are asked; a move that is under way goes on
or its life ends
======================  ============================================================================================

Nothing here is needed for a right answer: a move is one that a reader might have asked for (decision 0078), and what
does not move is drained and recovered as ever (decision 0080).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import inf
from typing import NamedTuple

from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.messages import MoveEnd, MoveRequest
from trinity.core.frontend.resumption import Prefilled
from trinity.core.frontend.suspicion import Life
from trinity.core.messages import KV, Failure, Move, Moved, NotMoved, PeerUp, Send, Value
from trinity.core.routing.router import Router
from trinity.core.routing.stage_peers import needs
from trinity.core.values import blocks_for
from trinity.stage_kinds import DECODE, roles_of

JUDGE_AGAIN_S = 0.05  # between two looks at those that are left
MOST_AT_ONCE = 4  # moves from one instance: their pulls share its memory and its wire
ASK_AGAIN_S = 0.5  # after a move that did not come about
MESSAGES_S = 0.01  # of a move beside its pull: three messages, and the steps in flight
UNMEASURED_PULL_S = 0.1  # by a target that has not pulled KV yet


def is_empty(entries: Mapping[str, FrontendRequest], name: str) -> bool:
    """True where no request is at an instance, as far as the front end knows: one that leaves may end then."""
    return all(entry.holder != name for entry in entries.values())


class Ask(NamedTuple):
    """A move that was asked for: from where, to where, and the blocks that it takes there."""

    source: str
    target: str
    blocks: int


class Refusal(NamedTuple):
    """Moves of a request that did not come about: how many, the last target, and when it may be asked again."""

    times: int
    target: str
    until: float


class DecodeMoves:
    """``begin(event)`` asks for a move; ``leave(now)`` for those that instances which leave need.

    ``next_look`` is when ``leave`` wants to be called again.

    ``router``: knows who leaves, and what each reported. ``entries``: the requests of the front end, by id.
    """

    def __init__(self, router: Router, entries: Mapping[str, FrontendRequest]) -> None:
        self._router, self._entries = router, entries
        self._asked: dict[str, Ask] = {}
        self._refused: dict[str, Refusal] = {}
        self._due, self._waiting = -inf, False

    @property
    def next_look(self) -> float | None:
        """Clock time; None while nothing is at an instance that leaves."""
        return self._due if self._waiting and self._router.leaving else None

    def begin(self, event: MoveRequest) -> list[Value]:
        """Ask the instance of a request to hand it on, or answer why not."""
        entry = self._entries.get(event.request)
        problem = _find_instance_problem(self._router, event.to) or _find_problem(entry, self._router, event.to)
        if problem is not None or entry is None:
            return [MoveEnd(event.request, problem)]
        entry.moving = event.to
        move = Move(entry.work.request, entry.work.attempt, event.to, entry.work.owner)
        return [Send(entry.hops[max(entry.hops)].name, move)]

    def leave(self, now: float) -> list[Value]:
        """Have decodes leave instances that are to end, as far as that is sooner than their own end there."""
        return [command for move in self.choose(now) for command in self.begin(move)]

    def choose(self, now: float) -> list[MoveRequest]:
        """Judge each decode that is at an instance which leaves."""
        self._settle(now)
        if now < self._due:
            return []
        here = {entry.id: entry for entry in self._list_leaving()}
        self._refused = {each: refusal for each, refusal in self._refused.items() if each in here}
        self._due, self._waiting = now + JUDGE_AGAIN_S, bool(here or self._asked)
        chosen = []
        for entry in sorted(here.values(), key=lambda each: each.delivered - each.work.max_tokens):
            ask = self._judge(entry, now)
            if ask is not None:
                self._asked[entry.id] = ask
                chosen.append(MoveRequest(entry.id, ask.target))
        return chosen

    def look_now(self) -> None:
        """Judge all at the next call: an instance has begun to leave."""
        self._due = -inf

    def _settle(self, now: float) -> None:
        """Take note of moves that have been answered, whose places others may take."""
        for name, ask in list(self._asked.items()):
            entry = self._entries.get(name)
            if entry is not None and entry.moving:
                continue
            del self._asked[name]
            self._due = -inf
            if entry is not None and entry.place is not None and entry.place.name == ask.source:
                times = self._refused[name].times + 1 if name in self._refused else 1
                self._refused[name] = Refusal(times, ask.target, now + ASK_AGAIN_S * 4.0 ** (times - 1))

    def _list_leaving(self) -> Iterator[FrontendRequest]:
        """List the requests that decode at an instance which leaves."""
        for entry in self._entries.values():
            place = entry.place
            if place is None or place.name not in self._router.leaving or entry.finished or entry.aborted:
                continue
            peer = self._router.peers[place.name]
            if peer.epoch == place.epoch and roles_of(peer.roles).decodes and entry.delivered > entry.base:
                yield entry

    def _judge(self, entry: FrontendRequest, now: float) -> Ask | None:
        """Find where a request is to move; None where it is to stay for now."""
        refusal, source = self._refused.get(entry.id), entry.place
        assert source is not None
        under_way = sum(ask.source == source.name for ask in self._asked.values())
        if entry.moving or under_way >= MOST_AT_ONCE or (refusal is not None and now < refusal.until):
            return None
        last = refusal.target if refusal is not None else ""
        targets = [peer for peer in self._list_targets(entry) if self.find_gain(entry, peer) > 0.0]
        best = min(targets, key=lambda peer: (peer.name == last, -self._count_free(peer), peer.name), default=None)
        return None if best is None else Ask(source.name, best.name, _count_blocks(entry, best))

    def _list_targets(self, entry: FrontendRequest) -> Iterator[PeerUp]:
        """List the instances that go on serving and have room, by their last report and what is on the way."""
        avoided = self._router.leaving | self._router.suspects
        for peer in self._router.fitting(DECODE.letter, entry.work):
            if peer.name not in avoided and self._count_free(peer) >= _count_blocks(entry, peer):
                yield peer

    def _count_free(self, peer: PeerUp) -> float:
        load = self._router.loads.get(peer.name)
        promised = Counter({ask.target: 0 for ask in self._asked.values()})
        for ask in self._asked.values():
            promised[ask.target] += ask.blocks
        return (load.free.get(KV, 0) if load is not None else peer.pools.get(KV, 0)) - promised[peer.name]

    def find_gain(self, entry: FrontendRequest, target: PeerUp) -> float:
        """Predict the seconds by which a move to this target is through before the request ends where it is.

        Its end is reckoned from all the tokens that it may have, at the pace of the last report; a pull from what the
        target has measured. Where there is no report yet it stays.
        """
        assert entry.place is not None
        source, load = self._router.loads.get(entry.place.name), self._router.loads.get(target.name)
        if source is None:
            return 0.0
        token_s = max(known.get(DECODE.letter, 0.0) for known in (source.predicted_s, source.unit_s))
        pull_s = UNMEASURED_PULL_S
        if load is not None and load.pull_s is not None:
            blocks = blocks_for(len(entry.work.prompt) + entry.delivered, target.kv_block_size)
            pull_s = load.pull_s[0] + load.pull_s[1] * blocks
        return (entry.work.max_tokens - entry.delivered) * token_s - pull_s - MESSAGES_S


def _count_blocks(entry: FrontendRequest, target: PeerUp) -> int:
    """Count the KV blocks that a request takes at a target as it comes there."""
    if target.returns:
        return blocks_for(len(entry.work.prompt) + entry.delivered, target.kv_block_size)
    return needs(DECODE.letter, entry.work, target.roles, target.image_block_size, target.kv_block_size)[KV]


def _refused(reason: str, text: str) -> Failure:
    return Failure("MoveError", text, {"reason": reason})


def _find_instance_problem(router: Router, to: str) -> Failure | None:
    peer = router.peers.get(to)
    if peer is not None:
        text = f"instance {to} ({peer.roles}) has no stage {DECODE.letter}"
        return None if roles_of(peer.roles).decodes else _refused("no decode", text)
    if to in router.lost:
        return _refused("lost", f"instance {to} is not up just now")
    return _refused("unknown", f"there is no instance {to!r}; those up are {', '.join(sorted(router.peers))}")


def _find_problem(entry: FrontendRequest | None, router: Router, to: str) -> Failure | None:
    if entry is None or entry.aborted or entry.finished is not None:
        return _refused("ended", "the request has ended, or was never here")
    if entry.waits or entry.delivered == entry.base:
        return _refused("not decoding", "the request does not decode yet: it has no token")
    if entry.moving:
        return _refused("moving", f"the request is moving to {entry.moving} just now")
    if entry.hops[max(entry.hops)].name == to:
        return _refused("same", f"the request is at {to} already")
    if not any(each.name == to for each in router.fitting(DECODE.letter, entry.work)):
        return _refused("too large", f"the pools of {to} can never hold the request")
    return None


def note_moved(entry: FrontendRequest, event: Moved) -> list[Value]:
    """Note where a request has come to, and who sends the tokens before. Returns the end of its move, if it was one."""
    entry.hops[event.hop] = Life(event.to, event.epoch)
    if event.passed:
        entry.waited_at |= {event.hop - 1}
    if event.source:
        source = entry.hops[event.hop - 1] = Life(event.source, event.source_epoch)
        owing = [each for each in entry.senders if entry.delivered < each[1]]
        entry.senders = [*owing, (source, event.start or entry.base + 1)]
        if not event.start:
            entry.prefilled = Prefilled(*source, len(entry.work.prompt) + entry.base)
    if not event.start or event.to != entry.moving:
        return []
    entry.moving = ""
    return [MoveEnd(entry.id)]


def refuse_move(lives: dict[str, FrontendRequest], event: NotMoved) -> list[Value]:
    """End a move that its source gave up."""
    entry = lives.get(event.request)
    if entry is None or not entry.moving or entry.work.attempt != event.attempt:
        return []
    entry.moving = ""
    return [MoveEnd(entry.id, event.failure)]


def drop_move(entry: FrontendRequest) -> list[Value]:
    """End the move of a request that ends, or goes on from its first stage."""
    if not entry.moving:
        return []
    to, entry.moving = entry.moving, ""
    return [MoveEnd(entry.id, _refused("ended", f"the request ended, or goes on from its first stage: not at {to}"))]
