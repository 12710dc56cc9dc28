"""Company: an instance that is reserved has nothing but the one request that runs alone, whoever knows of that."""

from __future__ import annotations

from collections.abc import Iterable

from trinity.core.instance.state import State, failure
from trinity.core.messages import FRONTEND, NOWHERE, Failure, PeerEmpty, PeerReserved, Work


def handle_peer_reserved(s: State, event: PeerReserved, now: float) -> None:
    """Route past an instance that is reserved, or no longer. This one says so as soon as it is empty.

    The first front end alone has requests run alone; the others hear from the instance that one does.
    """
    s.router.reserve(event)
    if event.name == s.settings.name:
        s.reserved_as = event.number if event.reserved else None
        s.said_empty = False
        tell_reserved(s, [each for each in s.frontends if each != FRONTEND])
        say_empty(s)


def tell_reserved(s: State, names: Iterable[str]) -> None:
    """Tell front ends whether this instance is reserved."""
    own = s.settings
    for each in names:
        s.send(each, PeerReserved(own.name, own.epoch, s.reserved_as is not None))


def drop_reservations(s: State) -> None:
    """Let anyone go anywhere: the front end that had requests run alone is lost."""
    s.router.reserved.clear()
    if s.reserved_as is not None:
        s.reserved_as, s.said_empty = None, False
        tell_reserved(s, s.frontends)


def say_empty(s: State) -> None:
    """Tell the front end, once, that nothing is here and that nothing but what runs alone will be."""
    own = s.settings
    if s.reserved_as is not None and not (s.said_empty or s.requests or s.outgoing or s.skipped_encodes):
        s.said_empty = True
        s.send(FRONTEND, PeerEmpty(own.name, own.epoch, s.reserved_as))


def nowhere(s: State, letter: str) -> Failure:
    """Failure of a request whose next stage no instance has just now."""
    text = f"no instance with stage {letter} is up just now"
    return failure("MigrationError", text, source=s.settings.name, cause=NOWHERE)


def untaken(s: State, target: str) -> Failure:
    """Failure of a request that its target did not take, as it is not in touch with the owner just now."""
    text = f"instance {target} is not in touch with the request's front end just now"
    return failure("MigrationError", text, source=s.settings.name, target=target, cause=NOWHERE)


def find_company(s: State, work: Work) -> Failure | None:
    """Find a reason why this request, which is here already, may not be beside what else is or was to be here.

    It goes back to the front end, which makes a pause: who sent it had not heard of what is reserved.
    """
    if not work.alone and s.reserved_as is None:
        return None
    alone, own = work.is_alone_at(s.settings.roles), s.settings.name
    empty = s.said_empty and len(s.requests) == 1
    if alone is (s.reserved_as is not None) and (empty or not alone):
        return None
    why = "it is to run alone" if alone else "another is to run alone there"
    text = f"instance {own} did not take the request, as {why}"
    return failure("MigrationError", text, source=own, cause=NOWHERE)
