"""Isolation: one request at a time runs alone, on instances that are reserved for it, to see whether they die of it.

Reserved is a life of an instance, the next one of an instance that is away included: that comes up empty. The router
of every instance and of the front end knows (``PeerReserved``) and sends others past it; an instance takes a request
that runs alone only while it has no other, and no other beside it (``trinity.core.instance.front_ends``).
"""

from __future__ import annotations

from collections.abc import Mapping

from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.suspicion import Life
from trinity.core.messages import PeerEmpty, PeerReserved, PeerUp, Send, Value, Work
from trinity.core.routing.router import Router
from trinity.stage_kinds import DECODE, PREFILL, path_of

AWAY_S = 10.0  # for an instance that is away, before one that others are at is emptied for it
EMPTY_POLL_S = 0.1  # between two looks at whether an instance has become empty


def stages_of(work: Work) -> str:
    """Letters of the stages that a request may come to: its prefill looks for a D even where one token is left."""
    path = path_of(work)
    return path + DECODE.letter if path.endswith(PREFILL.letter) and work.max_tokens > 1 else path


class Isolation:
    """Reserves instances for ``ward``, the id of the request that runs alone or is to be next ("" for none).

    - ``places``: first epochs that are reserved, by instance.
    - ``said``: messages to every instance, in order. ``lifted``: others may go there again, and have not been told.
    """

    def __init__(self, router: Router, entries: Mapping[str, FrontendRequest]) -> None:
        self._router, self._entries = router, entries
        self.ward = ""
        self.places: dict[str, int] = {}
        self.said: list[PeerReserved] = []
        self.lifted = False
        self._empty: dict[str, int] = {}  # epochs of the places that have said so
        self._numbers: dict[str, int] = {}  # of the reservations
        self._count = 0

    def admits(self, entry: FrontendRequest, now: float) -> bool:
        """Reserve all that a request needs, unless another one runs alone; True once all of that is empty."""
        if self.ward not in ("", entry.id):
            return False
        work = entry.work
        fitting = {letter: list(self._router.holding(letter, work)) for letter in stages_of(work)}
        missing = [letter for letter in path_of(work) if not fitting[letter] and letter not in work.alone]
        if missing:  # nothing is kept empty meanwhile; what nobody could ever hold is refused
            self.lift(entry)
            return not any(any(self._router.holding(letter, work, lost=True)) for letter in missing)
        self.ward = entry.id
        taken, wanted = self._count_others(entry), dict[str, int]()
        for letter, found in fitting.items():
            if letter in work.alone or all(work.is_alone_at(peer.roles) for peer in found):
                able = {peer.name for lost in (False, True) for peer in self._router.holding(letter, work, lost)}
                place = None if able & wanted.keys() else self._choose(letter, entry, found, taken, now)
                if place is not None:
                    wanted[place.name] = place.epoch
        self._reserve(wanted)
        return all(name in self._router.peers and self._is_empty(name) for name in wanted)

    def _choose(
        self, letter: str, entry: FrontendRequest, fitting: list[PeerUp], taken: Mapping[str, int], now: float
    ) -> Life | None:
        """An instance that is empty, else the next life of one that is away, else the one that is emptied soonest."""
        order = sorted(fitting, key=lambda peer: (taken.get(peer.name, 0), peer.name not in self.places, peer.name))
        if order and not taken.get(order[0].name):
            return Life(order[0].name, order[0].epoch)
        away = list(self._router.holding(letter, entry.work, lost=True))
        if away and (not order or now < entry.suspicion.died_at + AWAY_S):
            last = entry.suspicion.deaths[-1].life.name
            chosen = min(away, key=lambda peer: (peer.name != last, peer.name))
            return Life(chosen.name, chosen.epoch + 1)
        held = [peer for peer in order if peer.name in self.places] or order
        return Life(held[0].name, held[0].epoch) if held else None

    def _count_others(self, entry: FrontendRequest) -> dict[str, int]:
        """Count the other requests that are at each instance, as far as is known."""
        found: dict[str, int] = {}
        for other in self._entries.values():
            place = other.place
            if place is not None and other is not entry:
                peer = self._router.peers.get(place.name)
                found[place.name] = found.get(place.name, 0) + (peer is not None and peer.epoch == place.epoch)
        return found

    def _roles(self, name: str) -> str:
        peer = self._router.peers.get(name) or self._router.lost.get(name)
        return peer.roles if peer is not None else ""

    def _is_empty(self, name: str) -> bool:
        return self._empty.get(name) == self._router.peers[name].epoch

    def _reserve(self, wanted: dict[str, int]) -> None:
        changed = [PeerReserved(name, at, False) for name, at in self.places.items() if wanted.get(name) != at]
        for name, at in wanted.items():
            if self.places.get(name) != at:
                self._count += 1
                self._numbers[name] = self._count
                changed.append(PeerReserved(name, at, True, self._count))
        for each in changed:
            self._router.reserve(each)
            self._empty.pop(each.name, None)
            self.lifted = self.lifted or not each.reserved
        self.said += changed
        self.places = wanted

    def reservations(self) -> list[PeerReserved]:
        """List what an instance that has come up has to hear: it may have heard what was meant for its former life."""
        over = [PeerReserved(name, 0, False) for name in self._numbers if name not in self.places]
        return over + [PeerReserved(name, at, True, self._numbers[name]) for name, at in self.places.items()]

    def note_empty(self, event: PeerEmpty) -> None:
        """Take an instance's word that nothing but what runs alone is or will be there."""
        if event.name in self.places and self._numbers[event.name] == event.number:
            self._empty[event.name] = event.epoch

    def announce(self) -> list[Value]:
        """Tell every instance what is reserved and what no longer is, before all else that follows from it."""
        said, self.said = self.said, []
        return [Send(name, message) for message in said for name in self._router.peers]

    def empty_places(self, entry: FrontendRequest) -> frozenset[Life]:
        """Find the lives of instances that have said that they are empty, for a request that is sent to run alone."""
        if entry.id != self.ward:
            return frozenset()
        said = {Life(name, at) for name, at in self._empty.items() if entry.work.is_alone_at(self._roles(name))}
        return frozenset(said)

    def lift(self, entry: FrontendRequest) -> None:
        """Let others go where this request ran alone."""
        if self.ward == entry.id:
            self._reserve({})
            self.ward, self.lifted = "", True
