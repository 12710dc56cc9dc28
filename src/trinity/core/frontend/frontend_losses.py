"""Losses of instances as they concern a request: which life of one it was at, and who else has something of it."""

from __future__ import annotations

from collections.abc import Sequence

from trinity.core.frontend.frontend_request import Death, FrontendRequest, Life
from trinity.core.messages import KV, Failure, Finished, Moved
from trinity.core.routing import Router


def lives_on(router: Router, life: Life) -> bool:
    """True while this life of an instance lasts, as far as is known."""
    peer = router.peers.get(life.name)
    return peer is not None and peer.epoch == life.epoch


def is_planned(lost: Life | None, router: Router) -> bool:
    """True for a life that was ended so that its instance begins anew with other roles."""
    return lost is not None and router.replaced.get(lost.name) == lost.epoch


def find_loss(entry: FrontendRequest, router: Router) -> Life | None:
    """The lost instance that a request is at, or that alone has tokens of it; None where it is not lost.

    An instance's words come in order, and those that were cut off were its last ones: after its end all is heard of it
    that ever will be. What it gave to others is heard from them (``Moved``, ``Gone``).
    """
    if entry.waits:
        return None
    last = max(entry.hops)
    place = entry.hops[last]
    if entry.finished is None and not lives_on(router, place):
        return None if may_come_back(entry, last, router) else place
    owing = () if entry.aborted else [life for life, end in entry.senders if entry.delivered < end]
    lost = next((life for life in owing if not lives_on(router, life)), None)
    return None if lost is not None and _has_yet_to_say(entry, place, lost, router) else lost


def _has_yet_to_say(entry: FrontendRequest, place: Life, lost: Life, router: Router) -> bool:
    """True where the instance that a request is at will say what it has of it, after the loss of the one before.

    It hears of that as well. It ends what had not come as a whole, and says first which blocks it keeps. One to which
    all had come goes on, and its own tokens tell that those of the lost one will not come. Where the source of the lost
    one offers it once more meanwhile, two would go on with one life: nobody waits then.
    """
    speaks = not entry.passed and place != lost and place.name not in router.suspects and not is_planned(lost, router)
    return speaks and entry.finished is None and not entry.early


def may_come_back(entry: FrontendRequest, last: int, router: Router) -> bool:
    """True of a request at a lost instance whose source may still have all that it was to get there.

    That one will say so (``Moved``), or that it is gone (``Gone``): it hears of the loss as well. Who has tokens from
    the lost instance, or is to run alone, does not wait for that.
    """
    source = entry.hops.get(last - 1)
    if source is None or not lives_on(router, source) or source.name in router.suspects:
        return False
    first = not entry.aborted and not entry.work.attempt and not entry.work.alone
    prefilled = entry.prefilled is not None and entry.prefilled[:2] == source
    return first and entry.let_go != entry.hops[last] and entry.delivered <= entry.base + prefilled


def is_passed_by(entry: FrontendRequest, event: Moved, router: Router) -> bool:
    """True where a source has a request again of which another instance that is up has spoken at the same hop.

    The lost target had moved it there, and its Release was cut off.
    """
    there = entry.hops.get(event.hop)
    return there is not None and there.name != event.to and not event.source and lives_on(router, there)


def was_given_back(entry: FrontendRequest, life: Life, router: Router) -> bool:
    """True where a lost instance had this request, and its source has it again or may have.

    Where it only waited and was passed on nothing of it can have been the cause.
    """
    last = max(entry.hops, default=0)
    hops = [hop for hop, place in entry.hops.items() if place == life and hop not in entry.waited_at]
    back = any(entry.hops.get(hop - 1, life) == entry.hops.get(hop + 1) for hop in hops)
    return back or (last in hops and entry.finished is None and may_come_back(entry, last, router))


def end_of_loss(entry: FrontendRequest, lost: Life, router: Router) -> Finished:
    """The end that a loss leaves a request with, where it does not go on."""
    peer = router.lost.get(lost.name) or router.peers.get(lost.name)
    text = f"instance {lost.name} was lost while the request was there; send it again"
    return Finished(
        request=entry.work.request,
        attempt=entry.work.attempt,
        reason="error",
        failure=Failure("StageError", text, {"stage": peer.roles if peer is not None else ""}),
        count=entry.delivered,
        route=entry.route,
    )


def find_death(entry: FrontendRequest, finished: Finished, router: Router) -> Death | None:
    """The death of an instance that had a request, in whose step it may have been: of ``alone`` nothing is known yet.

    A target may say first that its source is lost, which was still encoding or prefilling what it offered.
    """
    life, why = entry.lost, finished.failure
    if life is None and why is not None and why.fields.get("cause") == "PeerLost":
        places = [hop for hop in sorted(entry.hops) if entry.hops[hop].name == why.fields.get("source")]
        life = entry.hops[places[-1]] if places else None
    if life is None or is_planned(life, router):
        return None
    peer = router.lost.get(life.name) or router.peers.get(life.name)
    return Death(life, peer.roles if peer is not None else "", entry.delivered, False, read=entry.lost is None)


def may_be_prefilled(entry: FrontendRequest, finished: Finished, router: Router) -> bool:
    """True where a life that a loss ends may have come to its prefill. One that was at encoders alone has not.

    Of one whose instance with stage P died before a token was out nobody knows: what it may have done counts as done.
    """
    why = finished.failure.fields if finished.failure is not None else {}
    if entry.delivered or "prefill" in finished.spans or why.get("kind") == KV:
        return True
    known = [router.peers.get(life.name) or router.lost.get(life.name) for life in entry.hops.values()]
    return entry.lost is not None and any("P" in peer.roles for peer in known if peer is not None)


def refuse_poison(deaths: Sequence[Death]) -> Failure:
    """Refusal of a request of which these instances died."""
    names = ", ".join(death.life.name for death in deaths)
    text = f"{len(deaths)} instances died while they had this request ({names}), the last with nothing beside it"
    return Failure("PoisonRequest", f"{text}; do not send it again unchanged", {"instances": names})


def whom_to_cancel(entry: FrontendRequest, router: Router) -> list[str]:
    """The first instance of a request, from which a Cancel follows it; past a lost one, all of them that are up."""
    up = [life.name for life in entry.hops.values() if lives_on(router, life)]
    if len(up) == len(entry.hops):
        return [entry.first]
    return sorted(set(up), key=entry.route.index)
