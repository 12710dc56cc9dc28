"""FrontendDeaths: which deaths of instances may have been a request's own doing, and who is refused for them."""

from __future__ import annotations

from abc import abstractmethod
from functools import partial

from trinity.core.frontend.frontend_adoption import FrontendAdoption
from trinity.core.frontend.frontend_losses import find_death, lives_on, refuse_poison, was_given_back
from trinity.core.frontend.frontend_request import Death, FrontendRequest, Life
from trinity.core.frontend.move_requests import drop_move
from trinity.core.life_names import id_of
from trinity.core.messages import NOWHERE, Failure, Finished, PeerUp


class FrontendDeaths(FrontendAdoption):
    """Part of ``FrontendCore``: counts deaths, the late ones too."""

    @abstractmethod
    def _settle(self, entry: FrontendRequest, now: float) -> None:
        """End the request, or send it on, where it has an end."""

    def _count_death(self, entry: FrontendRequest, finished: Finished, now: float) -> Failure | None:
        """Count the death of an instance that had a request. Returns a refusal once it was its own doing."""
        death = find_death(entry, finished, self.router)
        if death is None or not self.failures.recoveries or entry.clears(death, partial(lives_on, self.router), now):
            return None
        entry.note_death(death._replace(alone=death.life in entry.alone_at), now)
        source = entry.hops.get(max(entry.hops) - 1)
        if source is not None and entry.delivered == entry.base:  # it may have been filling what it had offered
            self._count_if_lost(entry, source, source in entry.alone_at, now)
        return self._find_refusal(entry)

    def _find_refusal(self, entry: FrontendRequest) -> Failure | None:
        """Refuse a request whose own doing the deaths were. What they cost its neighbours is not counted to these."""
        deaths = entry.poison_deaths(self.failures)
        if not deaths:
            return None
        for other in self.entries.values():
            if other is not entry:
                other.pardon({each.life for each in deaths})
        return refuse_poison(deaths)

    def _count_lost(self, entry: FrontendRequest, lost: PeerUp, now: float) -> None:
        """Count the loss of an instance where it is not what ends a life of the request.

        A former life may have been there, or its present one, which its source has again.
        """
        life = Life(lost.name, lost.epoch)
        if life not in entry.hops.values():
            entry.note_late_death(life, lost.roles, now)
        if was_given_back(entry, life, self.router):
            entry.note_death(Death(life, lost.roles, entry.delivered, life in entry.alone_at), now)
        self._conclude_from(entry, now)

    def _conclude_from(self, entry: FrontendRequest, now: float) -> None:
        """Refuse a request for deaths that were told late, or call it back where it is to run alone and does not."""
        if entry.aborted or entry.ended or not self.failures.recoveries:
            return
        why = self._find_refusal(entry)
        if why is not None:
            self._out += drop_move(entry)
            self._give_up(entry, why)
        elif entry.is_suspect(self.failures) and not (entry.waits or entry.work.alone or entry.finished):
            name, attempt = entry.work.request, entry.work.attempt
            alone = Failure("MigrationError", "it is to run alone from now on", {"cause": NOWHERE})
            entry.finished = Finished(
                request=name, attempt=attempt, reason="error", failure=alone, count=entry.delivered
            )
            there = [entry.hops[hop] for hop in sorted(entry.hops)[-2:]]
            self._settle(entry, now)
            entry.leave_behind(dict.fromkeys(there, False), now)

    def _trace(self, name: str, place: Life, now: float) -> None:
        """Note where a former life of a request has been: nobody knew, and that instance may have died of it."""
        entry = self.entries.get(id_of(name))
        if entry is None or name not in entry.names or place in entry.hops.values():
            return
        alone = place in entry.alone_before
        entry.leave_behind({place: alone}, now)
        self._count_if_lost(entry, place, alone, now)
        self._conclude_from(entry, now)

    def _count_if_lost(self, entry: FrontendRequest, place: Life, alone: bool, now: float) -> None:
        """Count the death of a life of an instance that is known, where it was not the end of a life of the request."""
        lost = self.router.lost.get(place.name)
        if lost is not None and lost.epoch == place.epoch and self.router.replaced.get(place.name) != place.epoch:
            entry.leave_behind({place: alone}, now)
            entry.note_late_death(place, lost.roles, now)
