"""Digest of a block's bytes, in numpy and in torch with the same result; csrc/blocks/digest.cpp has the definition."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

DIGEST_STEP, DIGEST_MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93
LOW_HALF = (1 << 32) - 1
SLICE_WORDS = 1 << 16  # words per pass in numpy, so that its temporaries stay in the CPU's cache

WordArray: TypeAlias = "npt.NDArray[np.uint64]"


def digest_array(piece: npt.NDArray[np.uint8]) -> int:
    """Compute the digest of a row of bytes, a slice of words at a time."""
    length = len(piece)
    whole = piece[: length - length % 8]
    words = np.frombuffer(whole.tobytes() if whole.ctypes.data % 8 else whole, np.dtype("<u8"))
    tail = np.frombuffer(piece[length - length % 8 :].tobytes().ljust(8, b"\0"), np.dtype("<u8"))
    total = 0
    for first in range(0, len(words), SLICE_WORDS):
        total += _sum_words(words[first : first + SLICE_WORDS], first)
    if length % 8:
        total += _sum_words(tail, len(words))
    return finish_digests(np.array([total % (1 << 64)], np.uint64), length)[0]


def finish_digests(sums: WordArray, length: int) -> list[int]:
    """Turn sums of mixed words of pieces of ``length`` bytes into signed digests."""
    values = _mix(sums + np.uint64(length * DIGEST_STEP % (1 << 64)))
    found: list[int] = values.view(np.int64).tolist()
    return found


def _sum_words(words: WordArray, first: int) -> int:
    x = np.arange(first + 1, first + 1 + len(words), dtype=np.uint64)
    x *= np.uint64(DIGEST_STEP)
    x += words
    return int(_mix(x).sum(dtype=np.uint64))


def _mix(x: WordArray) -> WordArray:
    """Mix words in place."""
    x ^= x >> np.uint64(32)
    x *= np.uint64(DIGEST_MIX)
    x ^= x >> np.uint64(32)
    return x


def sum_tensor_words(pieces: torch.Tensor) -> torch.Tensor:
    """Sum the mixed words of each row of uint8 [pieces, length]: int64 [pieces].

    int64 wraps as uint64 does, and a mask makes its shifts logical.
    """
    library: Any = sys.modules["torch"]
    count, length = pieces.shape
    x: torch.Tensor = library.zeros((count, -(-length // 8)), dtype=library.int64, device=pieces.device)
    x.view(library.uint8)[:, :length] = pieces
    x += library.arange(1, x.shape[1] + 1, device=pieces.device) * _as_signed(DIGEST_STEP)
    x ^= (x >> 32) & LOW_HALF
    x *= _as_signed(DIGEST_MIX)
    x ^= (x >> 32) & LOW_HALF
    return x.sum(1)


def _as_signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
