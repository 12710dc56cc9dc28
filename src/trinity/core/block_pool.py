"""BlockPool: tracks the free, cached and held blocks of one kind, found by keys (``prefix_cache``), with LRU eviction.

Holds numbers only; the memory is in ``trinity.memory.block_memory``. A block is free, or cached with no reference
(matchable, evicted least recently used first), or held; references are holders, steps, leases and pins alike.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import chain, islice

from trinity.core.prefix_cache import DIGEST, Key

FEW_ENTRIES = 16  # of a heap that are not worth a look for those of runs that are gone


class FreeRuns:
    """Free block numbers as maximal runs, so that consecutive blocks are handed out together.

    A piece costs a binary search for its length and a heap for its number: logarithmic in the count of runs. Lengths
    that differ are few, since they add up to at most the pool: 362 of 65,536 blocks.
    """

    def __init__(self, blocks: int) -> None:
        self._end: dict[int, int] = {}
        self._start: dict[int, int] = {}
        self._lengths: list[int] = []  # of runs, ascending, each once
        self._same: dict[int, int] = {}  # count of runs by length
        self._starts: dict[int, list[int]] = {}  # heaps by length; entries of runs that are gone stay for a while
        self.count = blocks
        if blocks:
            self._insert(0, blocks)

    def take(self, count: int) -> list[int]:
        """Take ``count`` blocks in as few runs as possible; the caller has checked that there are enough."""
        taken: list[int] = []
        while len(taken) < count:
            left = count - len(taken)
            start, end = self._best(left)
            stop = min(end, start + left)
            self._remove(start, end)
            if stop < end:
                self._insert(stop, end)
            taken.extend(range(start, stop))
        self.count -= count
        return taken

    def give(self, blocks: Iterable[int]) -> None:
        """Return blocks; consecutive numbers are merged into one run."""
        start = end = -1
        for block in blocks:
            if block != end:
                self._give(start, end)
                start = block
            end = block + 1
        self._give(start, end)

    def _give(self, first: int, last: int) -> None:
        """Return [first, last), which may be empty."""
        if first == last:
            return
        start, end = first, last
        if start in self._start:
            start = self._start[start]
            self._remove(start, first)
        if end in self._end:
            after, end = end, self._end[end]
            self._remove(after, end)
        self._insert(start, end)
        self.count += last - first

    def runs(self) -> list[tuple[int, int]]:
        """[start, end) of each, in order."""
        return sorted(self._end.items())

    def _best(self, count: int) -> tuple[int, int]:
        """Find the shortest run of at least ``count`` blocks, or else the longest one; the first of several."""
        at = bisect_left(self._lengths, count)
        length = self._lengths[min(at, len(self._lengths) - 1)]
        starts = self._starts[length]
        while not self._is_run(starts[0], length):
            heappop(starts)
        return starts[0], starts[0] + length

    def _is_run(self, start: int, length: int) -> bool:
        return self._end.get(start) == start + length

    def _insert(self, start: int, end: int) -> None:
        length = end - start
        same = self._same.get(length, 0)
        if not same:
            insort(self._lengths, length)
            self._starts[length] = [start]
        else:
            starts = self._starts[length]
            if len(starts) > 2 * same + FEW_ENTRIES:  # most are of runs that are gone
                starts[:] = sorted({each for each in starts if self._is_run(each, length)})
            heappush(starts, start)
        self._same[length] = same + 1
        self._end[start], self._start[end] = end, start

    def _remove(self, start: int, end: int) -> None:
        length = end - start
        del self._end[start], self._start[end]
        self._same[length] -= 1
        if not self._same[length]:
            del self._same[length], self._starts[length], self._lengths[bisect_left(self._lengths, length)]


class BlockPool:
    """The ``size`` blocks of one kind on one instance, numbered from 0.

    For KV the cached ones are the prefix cache; for images, the encoder cache.
    """

    def __init__(self, kind: str, size: int) -> None:
        self.kind, self.size = kind, size
        self._free = FreeRuns(size)
        self._references = [0] * size
        self._key: dict[int, Key] = {}
        self._block: dict[Key, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self._changes = 0
        self._digest: tuple[int, int, bytes] = (0, 0, b"")

    @property
    def available(self) -> int:
        """Blocks available to an allocation: free ones, and cached ones without a reference."""
        return self._free.count + len(self._cached)

    @property
    def held(self) -> int:
        return self.size - self.available

    def references(self, block: int) -> int:
        """Holders, steps, leases and pins of a block."""
        return self._references[block]

    def published(self, block: int) -> bool:
        """True where the block's content can be matched."""
        return block in self._key

    @property
    def changes(self) -> int:
        """Count of changes of what can be matched."""
        return self._changes

    def contents(self) -> dict[int, Key]:
        """Key of each block that can be matched."""
        return self._key.copy()

    def fits(self, count: int, hits: Iterable[int] = ()) -> bool:
        """True where ``count`` new blocks are available beside the cached blocks ``hits``, which will be held."""
        return count <= self.available - sum(1 for block in hits if block in self._cached)

    def allocate(self, count: int) -> tuple[int, ...]:
        """Allocate ``count`` blocks with one reference each; the caller has checked ``fits``."""
        assert count <= self.available, f"pool {self.kind}: {count} blocks asked of {self.available}"
        self._evict(count - self._free.count)
        blocks = self._free.take(count)
        for block in blocks:
            self._references[block] = 1
        return tuple(blocks)

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a reference to each block."""
        for block in blocks:
            if not self._references[block]:
                assert block in self._cached, f"pool {self.kind}: block {block} is free and cannot be held"
                del self._cached[block]
            self._references[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each block. Without any, a published block stays cached, any other is free."""
        free: list[int] = []
        for block in blocks:
            assert self._references[block] > 0, f"pool {self.kind}: block {block} has no reference to drop"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._key:
                self._cached[block] = None
            else:
                free.append(block)
        self._free.give(free)

    def publish(self, block: int, key: Key) -> None:
        """Make the content of a held block matchable. The first block published under a key keeps it."""
        assert self._references[block], f"pool {self.kind}: block {block} is not held and has no content"
        if key not in self._block and block not in self._key:
            self._block[key], self._key[block] = block, key
            self._changes += 1

    def match(self, keys: Sequence[Key]) -> tuple[int, ...]:
        """Blocks of the longest prefix of ``keys`` that is here. Takes no reference."""
        found: list[int] = []
        for key in keys:
            block = self._block.get(key)
            if block is None:
                break
            found.append(block)
        return tuple(found)

    def digest(self, limit: int) -> bytes:
        """Summary of the cache for peers: the first ``DIGEST`` bytes of the keys of at most ``limit`` matchable blocks.

        Blocks in use come first, then cached ones, the most recent first. Recomputed only after a change.
        """
        changes, size, made = self._digest
        if (changes, size) != (self._changes, limit):
            used = (block for block in islice(reversed(self._key), 2 * limit) if self._references[block])
            blocks = islice(chain(used, reversed(self._cached)), limit)
            made = b"".join(self._key[block][:DIGEST] for block in blocks)
            self._digest = (self._changes, limit, made)
        return made

    def clear(self) -> None:
        """Forget all cached content."""
        self._evict(len(self._cached))
        self._block.clear()
        self._key.clear()
        self._changes += 1

    def _evict(self, count: int) -> None:
        """Free the ``count`` cached blocks that were used least recently; none below 1."""
        gone = sorted(self._cached.popitem(last=False)[0] for _ in range(count))
        for block in gone:
            del self._block[self._key.pop(block)]
        self._free.give(gone)  # in order, so that neighbours are merged before they become runs
        self.evictions += len(gone)
        self._changes += len(gone)

    def check(self) -> None:
        """Assert the invariants: every block is exactly one of free, cached and held."""
        following = cached = 0
        for start, end in (*self._free.runs(), (self.size, self.size)):
            assert start >= following, f"pool {self.kind}: block {start} is free twice"
            assert not any(self._references[start:end]), f"pool {self.kind}: one of {start}..{end} is free and held"
            for block in range(following, start):
                places = (block in self._cached, self._references[block] > 0)
                assert sum(places) == 1, f"pool {self.kind}: block {block}, which is not free, cached, held = {places}"
                cached += places[0]
            following = end
        assert cached == len(self._cached), f"pool {self.kind}: of {len(self._cached)} cached blocks some are free"
        assert all(self._block[key] == block for block, key in self._key.items())
        assert len(self._block) == len(self._key)
        assert all(block in self._key for block in self._cached)
