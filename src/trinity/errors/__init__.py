"""Errors: one tree of all that trinity raises; each message says what is wrong and what to do next.

::

    TrinityError
    ├── ConfigError (ValueError)      the pipeline cannot be built with these settings
    │   ├── PlacementError            a placement is malformed or lacks a stage
    │   ├── LayoutMismatch            two instances disagree about model, dtype or block layout
    │   ├── UnknownName               no such transport, policy or stage: lists the known ones
    │   ├── UnsupportedModel          the model has no adapter, or layers that a paged cache cannot serve
    │   └── TraceError                a bad row in a trace (``.line``)
    │       └── TraceTooShort         a trace is too short for an answer (``.needed_s``)
    ├── RequestError                  one request cannot be served (``.request_id``); others continue
    │   ├── RequestTooLarge           it can never fit the context or a block pool
    │   ├── BadMedia                  an image (video, audio) is corrupt, missing, too many or too large
    │   ├── Overloaded                the waiting queue is full
    │   ├── DeadlineExceeded          its deadline passed before its last token (``.output``)
    │   ├── StageError                a stage raised an error on it (``.stage``)
    │   ├── PoisonRequest             instances die while they have it, alone as well (``.instances``)
    │   ├── MigrationError            its blocks could not be moved (``.source .target .kind``)
    │   └── MoveError                 it decodes on where it is (``.reason``)
    ├── TransportError                a transport failed (``.scheme .peer``)
    │   ├── TransportUnavailable      the transport cannot run here
    │   ├── HandshakeError            the peer has the wrong identity, version or secret
    │   ├── OfferRefused              the peer refused an offer or a read (``.reason``)
    │   ├── PeerLost                  the connection to the peer is lost
    │   ├── TransferTimeout           a transfer took longer than its limit
    │   └── IntegrityError            blocks or messages arrived with other content than they were sent with
    ├── ChangeRefused                 the placement cannot be changed just now
    └── ClosedError                   the pipeline, stream or transport is closed
"""

from __future__ import annotations

import re
import reprlib
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

LONGEST_SHOWN = 200  # characters of a wrong value in a message
MOST_MESSAGE = 4000  # characters of a message
DISTRIBUTION = "trinity-epd"  # on the package index, where `trinity` is another project

_repr_first = reprlib.Repr()  # a whole repr of what a client sent may have hundreds of megabytes
for _name in ("maxdict", "maxlist", "maxtuple", "maxset", "maxfrozenset", "maxstring", "maxother", "maxlong"):
    setattr(_repr_first, _name, LONGEST_SHOWN)

_LONG_WORD = re.compile(rf"(\S{{{LONGEST_SHOWN - 3}}})\S{{4,}}")


def pip_install(extra: str) -> str:
    """Return the command that installs an extra, for error messages: ``pip install 'trinity-epd[plot]'``."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def show(value: object) -> str:
    """Show a wrong value in a message: its ``repr``, cut where it is long, or its type where that fails."""
    try:
        if isinstance(value, dict | list | tuple | set | frozenset):
            text = _repr_first.repr(value)
        else:
            text = repr(value[: LONGEST_SHOWN + 1] if isinstance(value, str | bytes) else value)
    except Exception:  # a foreign object's own, or an int of more digits than Python prints
        return f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}... ({type(value).__name__})"


def shorten_message(text: str) -> str:
    """Cut each word of a message that is longer than ``LONGEST_SHOWN``, and a message longer than ``MOST_MESSAGE``."""
    if len(text) <= LONGEST_SHOWN:
        return text
    text = _LONG_WORD.sub(r"\1...", text[: 16 * MOST_MESSAGE])
    return text if len(text) <= MOST_MESSAGE else f"{text[: MOST_MESSAGE - 3]}..."


class TrinityError(Exception):
    """Base of every error that trinity raises on purpose. All can be pickled, to be passed between processes.

    Whatever came from outside, a message is at most 4,000 characters long, and a word of it 200.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*(shorten_message(each) if isinstance(each, str) else each for each in args))

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore_error, (type(self), self.args), dict(self.__dict__)


class ConfigError(TrinityError, ValueError):
    """The pipeline cannot be built with these settings."""


class PlacementError(ConfigError):
    """A placement is malformed, or lacks a stage that the model needs."""


class LayoutMismatch(ConfigError):
    """Two instances disagree about the model, the dtype or the block layout."""


class UnknownName(ConfigError):
    """No such transport, policy or stage."""

    def __init__(self, what: str, name: str, known: Iterable[str], hint: str = "") -> None:
        listed = ", ".join(sorted(known)) or "none"
        super().__init__(f"unknown {what} {show(name)}; known: {listed}.{' ' + hint if hint else ''}")
        self.what, self.name = what, name


class UnsupportedModel(ConfigError):
    """The model has no adapter, or has layers that a paged cache cannot serve."""


class TraceError(ConfigError):
    """A trace has a bad row, at ``.line`` where known."""

    def __init__(self, message: str, line: int | None = None) -> None:
        super().__init__(message if line is None else f"line {line}: {message}")
        self.line = line


class TraceTooShort(TraceError):
    """A trace is too short for an answer; ``.needed_s`` is the length that would do, in seconds."""

    def __init__(self, message: str, needed_s: float) -> None:
        super().__init__(message)
        self.needed_s = needed_s


class RequestError(TrinityError):
    """One request (``.request_id``) cannot be served; the others continue."""

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.request_id = request_id
        self.output: object | None = None


class RequestTooLarge(RequestError):
    """The request can never fit the model's context or a block pool."""


class BadMedia(RequestError):
    """An image (video, audio) is corrupt, missing, too many or too large."""


class Overloaded(RequestError):
    """The waiting queue is full: try again later or raise ``max_waiting``."""


class DeadlineExceeded(RequestError):
    """The request's deadline passed before its last token; ``.output`` has the tokens until then."""


class StageError(RequestError):
    """A stage (``.stage``, its letters) raised an error on the request."""

    def __init__(self, message: str, request_id: str = "", stage: str = "") -> None:
        super().__init__(message, request_id)
        self.stage = stage


class MigrationError(RequestError):
    """The request's blocks could not be moved; ``__cause__`` is the ``TransportError`` where known."""

    def __init__(self, message: str, request_id: str = "", source: str = "", target: str = "", kind: str = "") -> None:
        super().__init__(message, request_id)
        self.source, self.target, self.kind = source, target, kind


class MoveError(RequestError):
    """A decode was to move (``Stream.move``) and did not: nothing is lost, and it goes on. ``.reason`` says why.

    - "unknown", "lost", "no decode", "same", "too large": there is no such instance, it is not up, has no stage D, has
      the request already, or can never hold it.
    - "not decoding", "moving", "ended": the request has no token yet or is recomputed, moves already, or has ended.
    - "refused", "unpulled", "late": the instance has no room just now, could not pull the blocks, or took too long.
    """

    def __init__(self, message: str, request_id: str = "", reason: str = "") -> None:
        super().__init__(message, request_id)
        self.reason = reason


class ResumeError(RequestError):
    """A reader came back for a request (``Pipeline.resume``) and cannot go on with it here. ``.reason`` says why.

    - "unknown": nobody told this pipeline of it, or it has waited for its reader for too long: send it again.
    - "alive", "served here": the program that it was sent to lives, or it was sent to this one: read it there.
    - "taken", "ambiguous": another reader has come back for it, or several requests have this id.
    - "beyond": it never had a token of this index.
    """

    def __init__(self, message: str, request_id: str = "", reason: str = "") -> None:
        super().__init__(message, request_id)
        self.reason = reason


class PoisonRequest(RequestError):
    """Instances (``.instances``: their names, joined by ", ") died with the request, the last with nothing beside it.

    It is not tried again; sent again unchanged, it would do the same.
    """

    def __init__(self, message: str, request_id: str = "", instances: str = "") -> None:
        super().__init__(message, request_id)
        self.instances = instances


class TransportError(TrinityError):
    """A transport failed."""

    def __init__(self, message: str, scheme: str = "", peer: str = "") -> None:
        super().__init__(message)
        self.scheme, self.peer = scheme, peer


class TransportUnavailable(TransportError):
    """The transport cannot run here; the message names what is missing."""


class HandshakeError(TransportError):
    """The peer has the wrong identity, version or secret."""


class OfferRefused(TransportError):
    """The peer refused an offer or a read."""

    def __init__(self, message: str, reason: str = "", scheme: str = "", peer: str = "") -> None:
        super().__init__(message, scheme, peer)
        self.reason = reason


class PeerLost(TransportError):
    """The connection to the peer is lost."""


class TransferTimeout(TransportError):
    """A transfer took longer than its limit."""


class IntegrityError(TransportError):
    """Blocks, or messages between instances, arrived with other content than they were sent with."""


class ChangeRefused(TrinityError):
    """The placement cannot be changed just now: another change is under way, or an instance is away."""


class ClosedError(TrinityError):
    """The pipeline, stream or transport is closed."""


class TrinityWarning(UserWarning):
    """Something does not run as asked, and what to change; not an error, since requests are still served."""


def warn_caller(text: str) -> None:
    """Warn with a ``TrinityWarning`` that points to the line outside trinity which led here, however deep it is."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and f"{frame.f_globals.get('__name__')}.".startswith("trinity."):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, TrinityWarning, stacklevel=level)


def describe_error(error: BaseException, most: int = 1000) -> str:
    """Describe an error of foreign code as plain text of at most ``most`` characters, which any message can carry.

    Never raises, whatever the error's own text does.
    """
    kind = type(error).__name__
    try:
        said = str(error)
    except BaseException:  # its text is foreign code too
        said = "its text cannot be read"
    text = f"{kind}: {said[:most]}" if said else kind
    return text.encode("utf-8", "backslashreplace").decode()[:most]


@contextmanager
def own_errors(request_id: str, doing: str, passing: tuple[type[BaseException], ...] = ()) -> Iterator[None]:
    """Turn whatever foreign code raises, SystemExit and MemoryError too, into the request's own ``RequestError``.

    ``doing`` says what failed. trinity's own errors pass as they are, KeyboardInterrupt and those ``passing`` too.
    """
    own: tuple[type[BaseException], ...] = (TrinityError, KeyboardInterrupt, *passing)
    try:
        yield
    except own:
        raise
    except BaseException as error:
        raise RequestError(f"{doing} failed ({describe_error(error)})", request_id) from error


def _restore_error(kind: type[TrinityError], args: tuple[Any, ...]) -> TrinityError:
    """Restore a pickled error with its message, without calling its constructor, whose arguments are not kept."""
    return kind.__new__(kind, *args)
