"""LoadOrder: instances of one stage in the order of their predicted seconds, kept up as these change."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from trinity.core.routing.stage_peers import Slots, StagePeers, bits_of

FEW = 16  # instances of which each is looked at, rather than all seconds in order


class LoadOrder:
    """Finds the least loaded of any set of instances without a look at each of them.

    ``seconds(name)``: predicted for this stage, no NaN. ``changed(name)`` must be called when it may be another.
    """

    def __init__(self, peers: StagePeers, slots: Slots, seconds: Callable[[str], float]) -> None:
        self._names = {slots.bit(peer.name): peer.name for peer in peers}
        self._bits = {name: bit for bit, name in self._names.items()}
        self._read = seconds
        self._seconds: dict[int, float] = {}
        self._ties: dict[float, int] = {}  # sets of those with the same seconds
        self._order: list[float] = []  # these seconds, ascending
        self._stale = set(self._bits)

    def changed(self, name: str) -> None:
        if name in self._bits:
            self._stale.add(name)

    def least(self, among: int) -> int:
        """Those of a set, not empty, with the fewest seconds."""
        while self._stale:
            self._place(self._stale.pop())
        if among.bit_count() <= FEW:
            return self._least_of_few(among)
        return next(found for each in self._order if (found := self._ties[each] & among))

    def _least_of_few(self, among: int) -> int:
        least = min(self._seconds[bit] for bit in bits_of(among))
        return self._ties[least] & among

    def _place(self, name: str) -> None:
        """Move an instance to where its present seconds belong."""
        bit, now = self._bits[name], self._read(name)
        before = self._seconds.get(bit)
        if before == now:
            return
        if before is not None:
            self._ties[before] ^= bit
            if not self._ties[before]:
                del self._ties[before], self._order[bisect_left(self._order, before)]
        self._seconds[bit] = now
        if now not in self._ties:
            self._ties[now] = 0
            insort(self._order, now)
        self._ties[now] |= bit
