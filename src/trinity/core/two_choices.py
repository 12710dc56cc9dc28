"""TwoChoices: routing to the less loaded of two instances that are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from trinity.core.messages import PeerUp, Work


class Predicts(Protocol):
    """Predicts the seconds of work at a stage of an instance, as ``Router`` does."""

    def seconds(self, name: str, letter: str) -> float: ...


class TwoChoices:
    """The less loaded of two drawn ones (Azar, Broder, Karlin and Upfal, Balanced Allocations).

    Where many choose by the same reports, each would send to the same least loaded one until the next report. Drawn
    from a generator that is seeded by the ``first`` turn of each, so that no two draw in step.
    """

    informed, straight = True, False

    def __init__(self) -> None:
        self.begin(0)

    def begin(self, first: int) -> None:
        self._random = random.Random(first)

    def choose(self, letter: str, work: Work, peers: Sequence[PeerUp], router: Predicts) -> PeerUp:
        drawn = self._random.sample(peers, min(2, len(peers)))
        return min(drawn, key=lambda peer: router.seconds(peer.name, letter))
