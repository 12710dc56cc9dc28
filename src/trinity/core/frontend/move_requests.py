"""Moves of decodes as the front end sees them: which may be asked for, and which have come about."""

from __future__ import annotations

from trinity.core.frontend.frontend_request import FrontendRequest, Life
from trinity.core.frontend.messages import MoveEnd, MoveRequest
from trinity.core.messages import Failure, Move, Moved, NotMoved, Send, Value
from trinity.core.resumption import Prefilled
from trinity.core.routing import Router


def begin_move(entries: dict[str, FrontendRequest], router: Router, event: MoveRequest) -> list[Value]:
    """Ask the instance of a request to hand it on, or answer why not."""
    entry = entries.get(event.request)
    problem = _find_instance_problem(router, event.to) or _find_problem(entry, router, event.to)
    if problem is not None or entry is None:
        return [MoveEnd(event.request, problem)]
    entry.moving = event.to
    return [
        Send(entry.hops[max(entry.hops)].name, Move(entry.work.request, entry.work.attempt, event.to, entry.work.owner))
    ]


def _refused(reason: str, text: str) -> Failure:
    return Failure("MoveError", text, {"reason": reason})


def _find_instance_problem(router: Router, to: str) -> Failure | None:
    peer = router.peers.get(to)
    if peer is not None:
        return None if "D" in peer.roles else _refused("no decode", f"instance {to} ({peer.roles}) has no stage D")
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
    if not any(each.name == to for each in router.fitting("D", entry.work)):
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
