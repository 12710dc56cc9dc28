"""Block tables of the requests of a batch: on the host, one behind the other, and copied to the device, by slot."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


def upload(values: np.ndarray | Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``values`` on ``device``.

    Copies to a GPU go through pinned memory, which torch keeps until the copy has ended: the call returns at once, and
    the caller may change ``values``.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values)) if isinstance(values, np.ndarray) else values
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device, dtype)
    return tensor.to(dtype).pin_memory().to(device, non_blocking=True)


@dataclass(frozen=True, slots=True, eq=False)
class BlockTables:
    """Block tables of n requests.

    - ``blocks`` (int32): all tables, one behind the other.
    - ``ends`` (int64 [n]): where each ends in ``blocks``.
    - ``counts`` (int64 [n]): blocks of each.
    """

    blocks: np.ndarray
    ends: np.ndarray
    counts: np.ndarray

    @classmethod
    def join(cls, tables: AnyTables) -> BlockTables:
        """Join tables [n]; those that are joined are returned as they are."""
        if isinstance(tables, BlockTables):
            return tables
        counts = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables))
        blocks = np.concatenate(tables) if len(tables) else counts
        return cls(blocks.astype(np.int32, copy=False), counts.cumsum(), counts)

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter(np.split(self.blocks, self.ends[:-1]) if len(self) else [])

    def take(self, places: np.ndarray, rows: slice = slice(None)) -> np.ndarray:
        """Return the blocks at ``places`` [k, width] of the tables of ``rows``, int32; beyond an end, the last block.

        So no row ever reads another request's block.
        """
        ends = self.ends[rows, None]
        found: np.ndarray = self.blocks[np.minimum(ends - self.counts[rows, None] + places, ends - 1)]
        return found


AnyTables = BlockTables | Sequence[np.ndarray] | np.ndarray  # an array is [n, width]


_START, _ROOM, _SENT = range(3)
_LEAST_ROOM = 16
_FIRST_ROOM = 1 << 12


class DeviceTables:
    """Block tables by slot. Each lies in a piece of one memory, a power of two of blocks, with room to grow.

    A slot's table may only grow until it is released.
    """

    def __init__(self, device: torch.device) -> None:
        self._memory = torch.zeros(_FIRST_ROOM, dtype=torch.int32, device=device)
        self._used = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # pieces by size
        self._pieces = np.zeros((3, 0), dtype=np.int64)  # by slot: start, room, blocks that were sent

    def release(self, slots: Iterable[int]) -> None:
        """Forget the tables of these slots."""
        for slot in slots:
            if slot < self._pieces.shape[1] and self._pieces[_ROOM, slot]:
                self._free[int(self._pieces[_ROOM, slot])].append(int(self._pieces[_START, slot]))
                self._pieces[:, slot] = 0

    @torch.inference_mode()
    def select(self, slots: np.ndarray | None, tables: BlockTables) -> Tensor:
        """Return the tables [n, longest], int32, of these slots, and keep them; None: of no slots, they are not kept.

        What lies beyond a table's end is any block of the cache.
        """
        if slots is None:
            slots = np.arange(len(tables))
            self.release(slots.tolist())
            try:
                return self.select(slots, tables)
            finally:
                self.release(slots.tolist())
        lacking = int(slots.max(initial=-1)) + 1 - self._pieces.shape[1]
        if lacking > 0:
            self._pieces = np.pad(self._pieces, ((0, 0), (0, max(lacking, self._pieces.shape[1]))))
        changed = np.flatnonzero(self._pieces[_SENT, slots] < tables.counts)
        places, blocks = [tables.ends[:0]], [tables.blocks[:0]]
        for at in changed.tolist():
            slot, count, end = int(slots[at]), int(tables.counts[at]), int(tables.ends[at])
            start, sent = self._make_room(slot, count)
            places.append(np.arange(start + sent, start + count))
            blocks.append(tables.blocks[end - count + sent : end])
        numbers = (self._pieces[_START, slots], np.concatenate(places), np.concatenate(blocks))
        given = upload(np.concatenate(numbers, dtype=np.int32), self._memory.device)
        starts, there, values = torch.split(given, [len(part) for part in numbers])
        if len(values):
            self._memory.index_copy_(0, there.long(), values)
        self._pieces[_SENT, slots[changed]] = tables.counts[changed]
        across = torch.arange(int(tables.counts.max(initial=0)), dtype=torch.int32, device=given.device)
        index = (starts[:, None] + across).clamp_(max=len(self._memory) - 1)
        return self._memory.index_select(0, index.view(-1)).view(index.shape)

    def _make_room(self, slot: int, count: int) -> tuple[int, int]:
        """Give a slot a piece that ``count`` blocks fit into; returns where it starts, and how many were sent there."""
        start, room, sent = self._pieces[:, slot].tolist()
        if room < count:
            self.release([slot])
            room = max(_LEAST_ROOM, 1 << (count - 1).bit_length())
            before, start = start, self._take_piece(room)
            if sent:
                self._memory[start : start + sent].copy_(self._memory[before : before + sent])
            self._pieces[:, slot] = start, room, sent
        return start, sent

    def _take_piece(self, room: int) -> int:
        if self._free[room]:
            return self._free[room].pop()
        start, held = self._used, self._memory
        if start + room > len(held):
            self._memory = held.new_zeros(max(start + room, 2 * len(held)))
            self._memory[: len(held)].copy_(held)
        self._used += room
        return start
