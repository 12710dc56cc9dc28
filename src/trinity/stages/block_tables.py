"""Block tables of the requests of a batch on the host: of any lengths, one behind the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


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
