"""Cached content: which instances have which blocks, as they reported it, by the key of a block.

One look-up of a key tells of all instances, so that a request's keys are made and looked up once, however many
instances there are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trinity.core.messages import KV, MediaSpan, PeerLoad, PeerUp, Work
from trinity.core.prefix_cache import DIGEST, Key, each_prefix_key, media_keys
from trinity.core.routing.stage_peers import InstanceKind, Slots, StagePeers, kind_of
from trinity.stage_kinds import block_kinds, features_of, roles_of, stages_on


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
