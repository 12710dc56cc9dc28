"""StagePeers: instances among which one is chosen, with what is the same for many choices computed once.

A set of instances is a whole number, which has the bit of each: of 256 instances two sets are intersected in 50 ns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Self

from trinity.core.messages import PeerUp, Work
from trinity.core.routing.stage_needs import InstanceKind, kind_of, needs

SPARE_SLOTS = 64  # beside two of each instance: numbers of those that are gone, before all are numbered anew


class Slots:
    """Numbers of instances, in the order in which they came: one that comes back is a new one."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._next = 0

    def add(self, name: str) -> bool:
        """Number an instance, unless it has a number. Returns True where all have other numbers now."""
        if name in self._slots:
            return False
        self._slots[name] = self._next
        self._next += 1
        if self._next <= 2 * len(self._slots) + SPARE_SLOTS:
            return False
        self._slots = {each: number for number, each in enumerate(self._slots)}
        self._next = len(self._slots)
        return True

    def drop(self, name: str) -> None:
        self._slots.pop(name, None)

    def bit(self, name: str) -> int:
        """The set of this instance alone; the empty one of an instance that is not known."""
        slot = self._slots.get(name)
        return 0 if slot is None else 1 << slot


class StagePeers(tuple[PeerUp, ...]):
    """Instances in order, which may be looked at as any tuple, and as sets of them."""

    _slots: Slots

    @classmethod
    def of(cls, peers: Iterable[PeerUp], slots: Slots) -> Self:
        """Take these instances, which must be in the order of their slots, and stay that while this is in use."""
        made = cls(peers)
        made._slots = slots
        return made

    @cached_property
    def _at(self) -> dict[int, PeerUp]:
        return {self._slots.bit(peer.name): peer for peer in self}

    @cached_property
    def mask(self) -> int:
        """All of them."""
        return sum(self._at)

    @cached_property
    def ids(self) -> frozenset[int]:
        """The objects, by which it is told whether a policy chose one of them."""
        return frozenset(map(id, self))

    @cached_property
    def by_host(self) -> dict[str, int]:
        """Sets of those on each host, the first one's first."""
        found: dict[str, int] = {}
        for bit, peer in self._at.items():
            found[peer.host] = found.get(peer.host, 0) | bit
        return found

    @cached_property
    def by_kind(self) -> dict[InstanceKind, int]:
        """Sets of those that need the same of a request."""
        found: dict[InstanceKind, int] = {}
        for bit, peer in self._at.items():
            found[kind_of(peer)] = found.get(kind_of(peer), 0) | bit
        return found

    @cached_property
    def _least(self) -> dict[InstanceKind, dict[str, int]]:
        """The smallest pool of each kind of block, by kind of instance; one that is lacking is 0."""
        found: dict[InstanceKind, dict[str, int]] = {}
        for peer in self:
            least = found.setdefault(kind_of(peer), dict(peer.pools))
            for name in {*least, *peer.pools}:
                least[name] = min(least.get(name, 0), peer.pools.get(name, 0))
        return found

    @cached_property
    def returning(self) -> bool:
        """True where one may send preempted requests back."""
        return any(peer.returns for peer in self)

    def all_fit(self, letter: str, work: Work) -> bool:
        """True where the pools of each could ever hold the request at this stage: most requests fit everywhere."""
        for kind, least in self._least.items():
            for name, count in needs(letter, work, *kind).items():
                if count > least.get(name, 0):
                    return False
        return True

    def select(self, mask: int) -> StagePeers:
        """Select those of a set, in order."""
        if mask == self.mask:
            return self
        return StagePeers.of([self._at[bit] for bit in bits_of(mask & self.mask)], self._slots)

    def nth(self, mask: int, number: int) -> PeerUp:
        """The one that comes after ``number`` others of a set."""
        return self._at[nth_bit(mask, number)]

    def host_of(self, mask: int) -> str:
        """The host that all of a set are on; "" where there are several."""
        if len(self.by_host) == 1:
            return next(iter(self.by_host))
        first = self._at[mask & -mask].host
        return first if not mask & ~self.by_host[first] else ""


def bits_of(mask: int) -> Iterator[int]:
    """Yield the bits of a set, the lowest first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def nth_bit(mask: int, number: int) -> int:
    """The bit of a set above ``number`` others of it, found by halves. Raises ``ValueError`` where there is none."""
    if not 0 <= number < mask.bit_count():
        raise ValueError(f"a set of {mask.bit_count()} has no number {number}")
    low, width = 0, mask.bit_length()
    while width > 1:
        half = width // 2
        below = mask & ((1 << half) - 1)
        count = below.bit_count()
        if number < count:
            mask, width = below, half
        else:
            mask, width, low, number = mask >> half, width - half, low + half, number - count
    return 1 << low
