"""TritonBlocks: copies and digests of many blocks of one device, each in one launch."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from trinity.memory import block_kernels as kernels
from trinity.memory.digest_function import finish_digests

WORDS_AT_ONCE = 2048  # of one program of a copy: 16 KiB, eight loads of 16 bytes for each of 128 threads
DIGEST_WORDS_AT_ONCE, DIGEST_PASSES = 1024, 16  # a program of a digest reads 128 KiB
_GRAINS = ((8, 2), (8, 1), (1, 1))  # bytes of a word, words of a grain; best first


class Grains(NamedTuple):
    """Sizes in grains, and what a grain is: ``WORD`` bytes of a word, ``GRAIN`` words."""

    sizes: list[int]
    word: int
    grain: int


def split_into_grains(*sizes: int) -> Grains:
    """Count addresses and sizes in the largest grains that divide them all."""
    for word, grain in _GRAINS:
        if all(size % (word * grain) == 0 for size in sizes):
            break
    return Grains([size // (word * grain) for size in sizes], word, grain)


class TritonBlocks:
    """``DeviceBlocks`` by kernels of our own; both pools are on one device."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, units: torch.Tensor, offset: int, length: int) -> None:
        """See ``DeviceBlocks.copy``."""
        self.copy_addresses(target.data_ptr(), source.data_ptr(), units, target.shape[1], (offset, length))

    def copy_addresses(
        self, target: int, source: int, units: torch.Tensor, unit_bytes: int, piece: tuple[int, int]
    ) -> None:
        """Copy pieces (offset, length) of units between two addresses that the device of ``units`` can read.

        ``units``: see ``DeviceBlocks.copy``. The copy is queued on the current stream.
        """
        offset, length = piece
        (into, out, unit, held), word, grain = split_into_grains(target + offset, source + offset, unit_bytes, length)
        count = units.shape[1]
        slices = -(-held * grain // WORDS_AT_ONCE)
        if count and held:
            kernels.copy_pieces_kernel[(count * slices,)](
                *(into, out, units, count, unit, held, slices, word, grain, WORDS_AT_ONCE)
            )

    def digest(self, rows: torch.Tensor, units: torch.Tensor, offset: int, length: int) -> list[int]:
        """See ``DeviceBlocks.digest``."""
        (out, unit, held), word, grain = split_into_grains(rows.data_ptr() + offset, rows.shape[1], length)
        count, slices = len(units), max(1, -(-length // (8 * DIGEST_WORDS_AT_ONCE * DIGEST_PASSES)))
        sums = torch.empty((count, slices), dtype=torch.int64, device=rows.device)
        if count:
            kernels.digest_pieces_kernel[(count * slices,)](
                *(out, units, sums, unit, held, slices, word, grain, DIGEST_WORDS_AT_ONCE, DIGEST_PASSES)
            )
        return finish_digests(sums.cpu().numpy().view(np.uint64).sum(1, dtype=np.uint64), length)
