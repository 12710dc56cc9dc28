"""PoisonDetector: counts deaths of instances that a request may have caused, late ones too, and refuses the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.frontend_request import FrontendRequest, is_planned, lives_on, was_given_back
from trinity.core.frontend.suspicion import Death, Life
from trinity.core.messages import Failure, Finished, PeerUp
from trinity.core.routing.router import Router


class PoisonDetector:
    """Counts deaths against those of the ``requests`` (by id) that may have caused them."""

    def __init__(self, router: Router, requests: Mapping[str, FrontendRequest], failures: FailurePolicy) -> None:
        self._router, self._requests = router, requests
        self.failures = failures

    def count_death(self, entry: FrontendRequest, finished: Finished, now: float) -> Failure | None:
        """Count the death of an instance that had a request. Returns a refusal once it was its own doing."""
        death = _find_death(entry, finished, self._router)
        suspicion, up = entry.suspicion, partial(lives_on, self._router)
        if death is None or not self.failures.recoveries or suspicion.clears(death, up, now):
            return None
        suspicion.note_death(death._replace(alone=death.life in suspicion.alone_at), now)
        source = entry.hops.get(max(entry.hops) - 1)
        if source is not None and entry.delivered == entry.base:  # it may have been filling what it had offered
            self._count_if_lost(entry, source, source in suspicion.alone_at, now)
        return self.find_refusal(entry)

    def find_refusal(self, entry: FrontendRequest) -> Failure | None:
        """Refuse a request whose own doing the deaths were. What they cost its neighbours is not counted to these."""
        deaths = entry.suspicion.poison_deaths(self.failures)
        if not deaths:
            return None
        for other in self._requests.values():
            if other is not entry:
                other.pardon({each.life for each in deaths})
        return _refuse_poison(deaths)

    def count_lost(self, entry: FrontendRequest, lost: PeerUp, now: float) -> None:
        """Count the loss of an instance where it is not what ends a life of the request.

        A former life may have been there, or its present one, which its source has again.
        """
        life = Life(lost.name, lost.epoch)
        if life not in entry.hops.values():
            entry.suspicion.note_late_death(life, lost.roles, entry.delivered, now)
        if was_given_back(entry, life, self._router):
            death = Death(life, lost.roles, entry.delivered, life in entry.suspicion.alone_at)
            entry.suspicion.note_death(death, now)

    def trace(self, entry: FrontendRequest, name: str, place: Life, now: float) -> bool:
        """Note where a former life of a request has been: nobody knew, and that instance may have died of it.

        False where ``name`` is none of its former lives, or nothing is new.
        """
        if name not in entry.names or place in entry.hops.values():
            return False
        alone = place in entry.suspicion.alone_before
        entry.suspicion.leave_behind({place: alone}, now)
        self._count_if_lost(entry, place, alone, now)
        return True

    def _count_if_lost(self, entry: FrontendRequest, place: Life, alone: bool, now: float) -> None:
        """Count the death of a life of an instance that is known, where it was not the end of a life of the request."""
        lost = self._router.lost.get(place.name)
        if lost is not None and lost.epoch == place.epoch and self._router.replaced.get(place.name) != place.epoch:
            entry.suspicion.leave_behind({place: alone}, now)
            entry.suspicion.note_late_death(place, lost.roles, entry.delivered, now)


def _find_death(entry: FrontendRequest, finished: Finished, router: Router) -> Death | None:
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


def _refuse_poison(deaths: Sequence[Death]) -> Failure:
    """Refusal of a request of which these instances died."""
    names = ", ".join(death.life.name for death in deaths)
    text = f"{len(deaths)} instances died while they had this request ({names}), the last with nothing beside it"
    return Failure("PoisonRequest", f"{text}; do not send it again unchanged", {"instances": names})
