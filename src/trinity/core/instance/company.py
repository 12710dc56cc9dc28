"""Company: an instance that is reserved has nothing but the one request that runs alone, whoever knows of that."""

from __future__ import annotations

from trinity.core.instance.state import State, failure
from trinity.core.messages import FRONTEND, NOWHERE, Failure, PeerEmpty, PeerReserved, Work


def handle_peer_reserved(s: State, event: PeerReserved, now: float) -> None:
    """Route past an instance that is reserved, or no longer. This one says so as soon as it is empty."""
    s.router.reserve(event)
    if event.name == s.settings.name:
        s.reserved_as = event.number if event.reserved else None
        s.said_empty = False
        say_empty(s)


def say_empty(s: State) -> None:
    """Tell the front end, once, that nothing is here and that nothing but what runs alone will be."""
    own = s.settings
    if s.reserved_as is not None and not (s.said_empty or s.requests or s.outgoing or s.skipped_encodes):
        s.said_empty = True
        s.send(FRONTEND, PeerEmpty(own.name, own.epoch, s.reserved_as))


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
