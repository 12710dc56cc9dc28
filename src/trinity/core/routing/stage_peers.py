"""Instances of one stage as sets: which can serve a request, the least loaded, and which of them have its blocks.

A set of instances is a whole number, which has the bit of each: of 256 instances two sets are intersected in 50 ns.

One look-up of a key tells of all instances, so that a request's keys are made and looked up once, however many
instances there are.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Self

from trinity.core.messages import KV, MediaSpan, PeerLoad, PeerUp, Work
from trinity.core.prefix_cache import DIGEST, Key, each_prefix_key, media_keys
from trinity.core.values import blocks_for
from trinity.stage_kinds import block_kinds, features_of, roles_of, stage_of, stages_on

SPARE_SLOTS = 64  # beside two of each instance: numbers of those that are gone, before all are numbered anew
InstanceKind = tuple[
    str, int, int
]  # roles, rows of an image block, rows of a KV block: they decide what a request needs
FEW = 16  # instances of which each is looked at, rather than all seconds in order


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

    slots: Slots

    @classmethod
    def of(cls, peers: Iterable[PeerUp], slots: Slots) -> Self:
        """Take these instances, which must be in the order of their slots, and stay that while this is in use."""
        made = cls(peers)
        made.slots = slots
        return made

    @cached_property
    def _at(self) -> dict[int, PeerUp]:
        return {self.slots.bit(peer.name): peer for peer in self}

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
        return StagePeers.of([self._at[bit] for bit in bits_of(mask & self.mask)], self.slots)

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


def kind_of(peer: PeerUp) -> InstanceKind:
    return peer.roles, peer.image_block_size, peer.kv_block_size


def fitting(letter: str, work: Work, peers: Iterable[PeerUp]) -> Iterator[PeerUp]:
    """Yield the instances with the stage whose pools could ever hold the request."""
    known: dict[InstanceKind, dict[str, int]] = {}
    for peer in peers:
        if letter in peer.roles:
            kind = kind_of(peer)
            need = known.get(kind)
            if need is None:
                need = known[kind] = needs(letter, work, *kind)
            for wanted, count in need.items():
                if count > peer.pools.get(wanted, 0):
                    break
            else:
                yield peer


def units_of(letter: str, work: Work) -> int:
    """Count the units that a request adds to a stage: visual tokens (E), prompt positions (P), a row (D)."""
    kind = stage_of(letter).work
    if kind == "media":
        return sum(span.tokens for span in work.media)
    return len(work.prompt) if kind == "prefill" else 1


def needs(letter: str, work: Work, roles: str, image_block_size: int, kv_block_size: int) -> dict[str, int]:
    """Blocks by kind that a request holds at stage ``letter`` (and at those that follow on the same instance)."""
    here = roles_of(stages_on(letter, roles, work.encode_only))
    need: dict[str, int] = {}
    for span in work.media if here.features else ():
        kind = features_of(span.kind)
        if kind in here.features:
            need[kind] = need.get(kind, 0) + blocks_for(span.tokens, image_block_size)
    if KV in here.kinds:
        need[KV] = blocks_for(kv_tokens(work, decodes=here.decodes), kv_block_size)
    return need


def kv_tokens(work: Work, decodes: bool) -> int:
    """KV entries to reserve: the text, and where decoding happens one for every output but the last."""
    return len(work.prompt) + (work.max_tokens - 1 if decodes else work.outputs)


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


class CachedContent:
    """Sets of instances (``StagePeers``) by kind of block and key, of which the first ``DIGEST`` bytes count."""

    def __init__(self) -> None:
        self._holders: dict[str, dict[int, int]] = {}  # keys as numbers: 512 of them are read in 10 us
        self._reporting: dict[str, int] = {}  # those that have any block of a kind
        self._said: dict[tuple[int, str], tuple[bytes, frozenset[int]]] = {}

    def take(self, bit: int, kind: str, said: bytes) -> None:
        """Take what an instance has of a kind: keys of ``DIGEST`` bytes, one behind the other; none for nothing."""
        before, old = self._said.get((bit, kind), (b"", frozenset()))
        if said == before:
            return
        keys = frozenset(memoryview(said)[: len(said) // DIGEST * DIGEST].cast("Q"))
        holders = self._holders.setdefault(kind, {})
        for key in old ^ keys:
            now = holders.get(key, 0) ^ bit
            if now:
                holders[key] = now
            else:
                del holders[key]
        self._said[bit, kind] = (said, keys)
        self._reporting[kind] = self._reporting.get(kind, 0) & ~bit | (bit if keys else 0)

    def drop(self, bit: int) -> None:
        """Forget what an instance had."""
        for kind in [kind for each, kind in self._said if each == bit]:
            self.take(bit, kind, b"")
            del self._said[bit, kind]

    def find_holders(self, kind: str, keys: Iterable[Key], among: int) -> int:
        """Those of a set that have something of a kind, and all of these keys."""
        holders, found = self._holders.get(kind, {}), among & self._reporting.get(kind, 0)
        for key in keys:
            if not found:
                break
            found &= holders.get(_number(key), 0)
        return found

    def split(self, kind: str, keys: Iterable[Key], among: int) -> Iterator[tuple[int, int]]:
        """Yield a set in parts: how many keys they have before the first that they lack, and which do."""
        holders, left, count = self._holders.get(kind, {}), among, 0
        for key in keys if left & self._reporting.get(kind, 0) else ():
            further = left & holders.get(_number(key), 0)
            if further != left:
                yield count, left ^ further
            left, count = further, count + 1
            if not left:
                return
        yield count, left


def _number(key: Key) -> int:
    """The first ``DIGEST`` bytes of a key, as a ``memoryview`` cast to numbers has them."""
    return int.from_bytes(key[:DIGEST], sys.byteorder)


class ReportedContent:
    """Tokens of a request that instances have cached, by the last report of each in ``loads``, read once asked of.

    Of a report that was taken ``note`` must be told, and ``drop`` of an instance that has none any more, before its
    slot is given up.
    """

    def __init__(self, slots: Slots, loads: Mapping[str, PeerLoad]) -> None:
        self._slots, self._loads = slots, loads
        self._content = CachedContent()
        self._unread = set(loads)

    def note(self, name: str) -> None:
        self._unread.add(name)

    def drop(self, name: str) -> None:
        self._unread.discard(name)
        self._content.drop(self._slots.bit(name))

    def cached_tokens(self, peer: PeerUp, letter: str, work: Work) -> int:
        """As ``Router.cached_tokens``."""
        return max(self._divide(kind_of(peer), self._slots.bit(peer.name), letter, work), default=0)

    def cached_prefix(self, peer: PeerUp, work: Work, text: Sequence[int]) -> int:
        """As ``Router.cached_prefix``."""
        self._read()
        keys = each_prefix_key(text, work.media, peer.kv_block_size, work.salt)
        return peer.kv_block_size * max(count for count, _ in self._content.split(KV, keys, self._slots.bit(peer.name)))

    def has_media(self, peer: PeerUp, work: Work) -> bool:
        """As ``Router.has_media``."""
        self._read()
        found = self._slots.bit(peer.name)
        for span in work.media:
            found = self._content.find_holders(features_of(span.kind), media_keys(span, peer.image_block_size), found)
        return not work.media or bool(found)

    def has_any(self, name: str, kind: str) -> bool:
        """True where an instance reported that it has any block of this kind."""
        self._read()
        return bool(self._content.find_holders(kind, (), self._slots.bit(name)))

    def most_cached(self, letter: str, work: Work, peers: StagePeers) -> int:
        """Those with the most ``cached_tokens``, as a set."""
        most = best = 0
        for kind, mask in peers.by_kind.items():
            for tokens, having in self._divide(kind, mask, letter, work).items():
                if tokens > most:
                    most, best = tokens, having
                elif tokens == most:
                    best |= having
        return best

    def find_holders(self, peers: StagePeers, span: MediaSpan, among: int) -> int:
        """Those of a set that said they have these features."""
        self._read()
        found, held = 0, features_of(span.kind)
        for (_, block, _), mask in peers.by_kind.items():
            found |= self._content.find_holders(held, media_keys(span, block), mask & among)
        return found

    def _read(self) -> None:
        while self._unread:
            name = self._unread.pop()
            for kind in block_kinds():
                self._content.take(self._slots.bit(name), kind, self._loads[name].cached.get(kind, b""))

    def _divide(self, kind: InstanceKind, mask: int, letter: str, work: Work) -> dict[int, int]:
        """Divide a set of instances of one kind by their ``cached_tokens``."""
        self._read()
        roles, image_block, kv_block = kind
        here, parts = roles_of(stages_on(letter, roles, work.encode_only)), {0: mask} if mask else {}
        if parts and KV in here.kinds:
            keys = each_prefix_key(work.prompt, work.media, kv_block, work.salt)
            parts = {count * kv_block: having for count, having in self._content.split(KV, keys, mask)}
        for span in work.media if parts and here.features else ():
            holders = self._content.find_holders(features_of(span.kind), media_keys(span, image_block), mask)
            parts = _divide_again(parts, holders, span.tokens)
        return parts


def _divide_again(parts: dict[int, int], having: int, tokens: int) -> dict[int, int]:
    """Divide sets by tokens once more: those ``having`` something have so many more."""
    found: dict[int, int] = {}
    for count, mask in parts.items():
        for total, part in ((count + tokens, mask & having), (count, mask & ~having)):
            if part:
                found[total] = found.get(total, 0) | part
    return found
