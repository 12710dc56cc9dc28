"""Front ends of an instance, several at once, each of which owns its requests; and the request that runs alone there.

An instance has requests only of front ends that it is in touch with. As one is lost, what it owned ends here, and
nobody else's does. Each instance hears of that itself, some later than others, and one that has begun anew may not be
in touch with a front end yet: what another instance still sends of such an owner is refused, and that one tells the
owner. So a front end of which one channel alone broke goes on with its requests, as after any loss.

Age is one total order everywhere: a request's number, then its name, which no other has. A front end counts on from the
highest number that it has heard of, its own or another's (``PeerLoad.newest``), as Lamport's clocks do (Lamport, CACM
21, 1978). So a front end that is new, or has little to do, is not for ever ahead of one that is busy.
"""

from __future__ import annotations

from collections.abc import Iterable

from trinity.core.instance.lifecycle import end
from trinity.core.instance.loads import load_of
from trinity.core.instance.request_state import REFUSED, UNTAKEN
from trinity.core.instance.state import State, failure
from trinity.core.messages import (
    FRONTEND,
    NOWHERE,
    Failure,
    Finished,
    Offer,
    PeerEmpty,
    PeerReserved,
    Release,
    Submit,
    Work,
)
from trinity.core.values import FrontendUp, NotTaken


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


def handle_frontend_up(s: State, event: FrontendUp, now: float) -> None:
    """Take in the requests of one more front end from now on, and report to it."""
    if event.name not in s.frontends:
        s.frontends.append(event.name)
        s.send(event.name, load_of(s))
        if s.reserved_as is not None:
            tell_reserved(s, [event.name])


def lose_frontend(s: State, name: str, now: float) -> None:
    """End the requests of a lost front end here, and drop what is remembered for it."""
    if name in s.frontends:
        s.frontends.remove(name)
    stones = [(each, stone.attempt) for each, stone in s.tombstones.items() if stone.owner == name]
    spared = [each.work for each in s.skipped_encodes.values() if each.work.owner == name]
    for request, attempt in [*stones, *((work.request, work.attempt) for work in spared)]:
        s.forget(request, attempt)
    why = f"instance {s.settings.name} lost touch with {name}, whose request it was"
    for state in [each for each in s.requests.values() if each.work.owner == name]:
        end(s, state, now, "error", failure("MigrationError", why, source=s.settings.name, cause="PeerLost"))
    if name == FRONTEND:
        drop_reservations(s)


def refuse_offer(s: State, offer: Offer) -> bool:
    """Refuse an offer of which the owner would hear nothing from here; False for all others."""
    if offer.work.owner in s.frontends:
        return False
    s.send(offer.source, Release(offer.id, REFUSED if offer.moves else UNTAKEN))
    return True


def refuse_submit(s: State, sent: Submit) -> bool:
    """Refuse, likewise, a request that another instance has passed on; False for all others."""
    if sent.work.owner in s.frontends:
        return False
    if sent.route:
        s.send(sent.route[-1], NotTaken(sent.work.request, sent.work.attempt))
    return True


def handle_not_taken(s: State, event: NotTaken, now: float) -> None:
    """Tell the owner of a request that was passed on and not taken in that it has ended."""
    stone = s.tombstones.get(event.request)
    if stone is not None and stone.attempt == event.attempt:
        why = untaken(s, stone.target)
        s.send(stone.owner, Finished(request=event.request, attempt=event.attempt, reason="error", failure=why))
