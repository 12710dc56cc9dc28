"""Values between the front end's core and its shell: what readers do and get, and inputs to be made again."""

from __future__ import annotations

from typing import Any

import msgspec

from trinity.core.messages import Failure, Finished, Sampled, Value, Work


class Abort(Value, frozen=True):
    """User to front end: end this request. ``reason``: cancelled (the reader left) or stop (a stop string matched)."""

    request: str
    reason: str


class Prepared(Value, frozen=True):
    """Shell to front end: inputs were made once more for this life, or could not be; ``contents``: of its media."""

    life: str
    inputs: tuple[Any, ...] = ()
    contents: tuple[str, ...] = ()
    failure: Failure | None = None
    input_bytes: int = 0


class MoveRequest(Value, frozen=True):
    """User to front end: have this request, which decodes, go on at instance ``to``. Answered by one MoveEnd."""

    request: str
    to: str


class MoveEnd(Value, frozen=True):
    """Front end to user: the request is where it was to move to, or why it is not."""

    request: str
    failure: Failure | None = None


class Deliver(Value, frozen=True):
    """Front end to reader: the next token of a request, in order, once."""

    request: str
    index: int
    sampled: Sampled


class Prepare(Value, frozen=True):
    """Front end to shell: make the inputs of this request's media once more, for this life; Prepared answers."""

    request: str
    life: str


class FormerLife(Value, frozen=True):
    """A life of a request that a loss ended.

    ``tokens``: those that its reader had by then, of all lives. ``seconds``: from its start to its end. ``alone``: it
    ran with nothing beside it, as instances had died of it or of its neighbours before.
    """

    why: str
    tokens: int
    seconds: float
    route: tuple[str, ...] = ()
    spans: dict[str, float] = msgspec.field(default_factory=dict)
    alone: bool = False


class Adopt(Value, frozen=True):
    """Shell to front end: go on with this request of a front end that was lost, whose reader has had ``tokens``.

    ``work.request``: its name here, which no other has. ``unread``: its inputs are to be prepared first. ``former``:
    its life there.
    """

    work: Work
    tokens: tuple[int, ...]
    inputs: tuple[Any, ...]
    input_bytes: int
    unread: bool
    former: FormerLife


class End(Value, frozen=True):
    """Front end to reader: the end of a request. ``reason``: stop, length, cancelled, deadline or error.

    ``attempts``: how often it was sent to its first stage. ``former``: its lives that ended early. ``recomputed``:
    positions that were prefilled because of that. ``lives``: how many of its lives were sent to an instance.
    """

    request: str
    reason: str
    failure: Failure | None = None
    finished: Finished | None = None
    attempts: int = 1
    former: tuple[FormerLife, ...] = ()
    recomputed: int = 0
    lives: int = 1
