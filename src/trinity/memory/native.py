"""Copies and digests of paged blocks: the compiled extension where it is built, numpy and torch with the same results.

A pool is [blocks, ...], contiguous: a numpy array, or a tensor on any device; its rows are blocks of bytes here. The
extension (csrc/) is optional: `pip install` builds it where a C++ compiler is found. Where nvcc is found too it has a
gather for GPUs, which has been compiled but never run, for want of a GPU: its tests skip without one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trinity.errors import ConfigError

if TYPE_CHECKING:
    import torch

API = 1  # of the extension that this file calls
STEP, MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # csrc/digest.cpp has the definition
HALF = (1 << 32) - 1
SLICE_WORDS = 1 << 16  # the fallback's digests go through the cache, not through temporary blocks in memory

Numbers: TypeAlias = "npt.NDArray[np.int64]"
Rows: TypeAlias = "npt.NDArray[np.uint8]"
Pool: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
Blocks: TypeAlias = "Sequence[int] | Numbers"
Within: TypeAlias = "tuple[int, int] | None"

extension: Any = None
try:
    from trinity import _native
except ImportError as error:
    missing = f"the extension is not built ({error}); `pip install` builds it where a C++ compiler is found"
else:
    missing = f"the extension is of another version of trinity ({_native.API}, not {API}): install trinity again"
    extension = _native if _native.API == API else None


def available() -> bool:
    """Whether the compiled extension does the work."""
    return extension is not None


def describe() -> str:
    """What does the work here, in words."""
    if extension is None:
        return f"numpy and torch: {missing}"
    return f"csrc ({extension.instructions()}{', CUDA' if extension.CUDA else ''})"


def copy_blocks(
    target: Pool, source: Pool, target_blocks: Blocks, source_blocks: Blocks, within: Within = None, *, threads: int = 1
) -> int:
    """Copy ``source_blocks`` of one pool into ``target_blocks`` of another, pairwise; returns the bytes moved.

    ``within=(offset, length)`` copies so many bytes of each block, from that byte on. Runs of consecutive blocks are
    one copy; large ones bypass the cache. ``threads`` share copies of more than 1 MiB. The interpreter's lock is
    released. Raises ``ConfigError`` before a byte moves where a number is out of range, a target block is named twice
    or is read as well, or the pools' blocks differ in size.
    """
    to, start = _numbers(target_blocks), _numbers(source_blocks)
    if len(to) != len(start):
        raise ConfigError(f"{len(start)} source blocks for {len(to)} target blocks: one of each is needed")
    if _on_device(target) or _on_device(source):
        return _copy_tensors(_tensor(target), _tensor(source), to, start, within)
    ours, theirs = _rows(target), _rows(source)
    offset, length = _piece(within, _block_bytes(ours, theirs))
    if not ours.flags.writeable:
        raise ConfigError("the target pool is read-only: copy into a pool of your own")
    _check_apart(ours, theirs, to, start)
    if extension is None:
        _copy_arrays(ours, theirs, to, start, offset, length)
        return len(to) * length
    try:
        extension.copy_blocks(
            ours.ctypes.data,
            len(ours),
            theirs.ctypes.data,
            len(theirs),
            to,
            start,
            ours.shape[1],
            offset,
            length,
            threads,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return len(to) * length


def digests(source: Pool, blocks: Blocks, within: Within = None) -> list[int]:
    """One signed 64-bit digest for each block, or for the piece (offset, length) of it; not cryptographic.

    A changed, moved or missing word changes it; so does the number of bytes. Where the pool is on a GPU it is computed
    there. Raises ``ConfigError`` for numbers or pieces out of range.
    """
    numbers = _numbers(blocks)
    if _on_device(source):
        return _tensor_digests(_bytes(_tensor(source)), numbers, within)
    rows = _rows(source)
    offset, length = _piece(within, rows.shape[1])
    if extension is None:
        _check_numbers("source", numbers, len(rows))
        return [_array_digest(rows[number, offset : offset + length]) for number in numbers]
    found = np.empty(len(numbers), np.int64)
    try:
        extension.digests(rows.ctypes.data, len(rows), numbers, rows.shape[1], offset, length, found)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    result: list[int] = found.tolist()
    return result


# ---------------------------------------------------------------- what is asked for


def _numbers(blocks: Blocks) -> Numbers:
    try:
        found = np.asarray(blocks, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"block numbers must be whole numbers: {error}") from error
    if found.size and found.ndim != 1:
        raise ConfigError(f"block numbers must be one row of numbers, got shape {found.shape}")
    return np.ascontiguousarray(found).reshape(-1)


def _rows(pool: Pool) -> Rows:
    """The pool as [blocks, block_bytes] uint8: a view, never a copy."""
    array: npt.NDArray[Any] = pool if isinstance(pool, np.ndarray) else _bytes(pool).numpy()
    if array.ndim < 1 or not array.flags.c_contiguous:
        raise ConfigError(f"a pool is [blocks, ...] and contiguous, got shape {array.shape}, strides {array.strides}")
    if array.dtype == np.uint8 and array.ndim == 2:
        return array
    return array.reshape(len(array), -1).view(np.uint8) if array.size else np.empty((len(array), 0), np.uint8)


def _on_device(pool: Pool) -> bool:
    return not isinstance(pool, np.ndarray) and pool.device.type != "cpu"


def _tensor(pool: Pool) -> torch.Tensor:
    if isinstance(pool, np.ndarray):
        converted: torch.Tensor = sys.modules["torch"].from_numpy(pool)
        return converted
    return pool


def _bytes(pool: torch.Tensor) -> torch.Tensor:
    if not pool.is_contiguous() or pool.ndim < 1:
        raise ConfigError(f"a pool is [blocks, ...] and contiguous, got {tuple(pool.shape)}, strides {pool.stride()}")
    return pool.view(len(pool), -1).view(sys.modules["torch"].uint8)


def _block_bytes(ours: Any, theirs: Any) -> int:
    if ours.shape[1] != theirs.shape[1]:
        raise ConfigError(f"blocks of {theirs.shape[1]} bytes do not fit into blocks of {ours.shape[1]} bytes")
    return int(ours.shape[1])


def _piece(within: Within, block_bytes: int) -> tuple[int, int]:
    offset, length = (0, block_bytes) if within is None else within
    if offset < 0 or length < 0 or offset + length > block_bytes or not block_bytes:
        raise ConfigError(f"{length} bytes from byte {offset} are not within blocks of {block_bytes} bytes")
    return offset, length


def _check_numbers(what: str, numbers: Numbers, blocks: int) -> None:
    if numbers.size and (numbers.min() < 0 or numbers.max() >= blocks):
        raise ConfigError(f"{what} blocks {numbers.min()} to {numbers.max()} of a pool of {blocks}")


def _check_target(to: Numbers, blocks: int) -> None:
    _check_numbers("target", to, blocks)
    if len(np.unique(to)) != len(to):
        raise ConfigError("a target block is named twice")


def _check_apart(ours: Rows, theirs: Rows, to: Numbers, start: Numbers) -> None:
    """Within one pool no block may be read and written: what arrives would depend on the order."""
    if not np.may_share_memory(ours, theirs):
        return
    same = ours.ctypes.data == theirs.ctypes.data and ours.shape == theirs.shape
    if not same or np.intersect1d(to, start).size:
        raise ConfigError("source and target blocks overlap in memory: copy between pools, or between other blocks")


# ---------------------------------------------------------------- without the extension


def _copy_arrays(ours: Rows, theirs: Rows, to: Numbers, start: Numbers, offset: int, length: int) -> None:
    """Run by run; numpy lets go of the interpreter's lock for each."""
    _check_numbers("source", start, len(theirs))
    _check_target(to, len(ours))
    if not len(to):
        return
    breaks = np.flatnonzero((np.diff(to) != 1) | (np.diff(start) != 1)) + 1
    piece = slice(offset, offset + length)
    for first, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(to)], strict=True):
        target, source, count = int(to[first]), int(start[first]), end - first
        np.copyto(ours[target : target + count, piece], theirs[source : source + count, piece])


def _array_digest(piece: Rows) -> int:
    """The digest of csrc/digest.cpp, a slice of words at a time."""
    length = len(piece)
    whole = piece[: length - length % 8]
    words = np.frombuffer(whole.tobytes() if whole.ctypes.data % 8 else whole, np.dtype("<u8"))
    tail = np.frombuffer(piece[length - length % 8 :].tobytes().ljust(8, b"\0"), np.dtype("<u8"))
    total = 0
    for first in range(0, len(words), SLICE_WORDS):
        total += _sum_words(words[first : first + SLICE_WORDS], first)
    if length % 8:
        total += _sum_words(tail, len(words))
    value = (total + length * STEP) % (1 << 64)
    value ^= value >> 32
    value = value * MIX % (1 << 64)
    value ^= value >> 32
    return value - (1 << 64) if value >> 63 else value


def _sum_words(words: npt.NDArray[np.uint64], first: int) -> int:
    x = np.arange(first + 1, first + 1 + len(words), dtype=np.uint64)
    x *= np.uint64(STEP)
    x += words
    x ^= x >> np.uint64(32)
    x *= np.uint64(MIX)
    x ^= x >> np.uint64(32)
    return int(x.sum(dtype=np.uint64))


# ---------------------------------------------------------------- tensors, on a GPU as on a CPU


def _copy_tensors(target: torch.Tensor, source: torch.Tensor, to: Numbers, start: Numbers, within: Within) -> int:
    ours, theirs = _bytes(target), _bytes(source)
    offset, length = _piece(within, _block_bytes(ours, theirs))
    _check_numbers("source", start, len(theirs))
    _check_target(to, len(ours))
    if ours.data_ptr() == theirs.data_ptr() and np.intersect1d(to, start).size:
        raise ConfigError("source and target blocks overlap in memory: copy between pools, or between other blocks")
    torch = sys.modules["torch"]
    into, out = (torch.from_numpy(each).to(pool.device) for each, pool in ((to, ours), (start, theirs)))
    if extension is not None and extension.CUDA and ours.device.type == "cuda" and ours.device == theirs.device:
        with torch.cuda.device(ours.device):
            stream = torch.cuda.current_stream(ours.device).cuda_stream
            pointers = (ours.data_ptr(), theirs.data_ptr(), into.data_ptr(), out.data_ptr())
            extension.cuda_copy_blocks(*pointers, len(to), ours.shape[1], offset, length, stream)
        return len(to) * length
    if all(size % 8 == 0 for size in (offset, length, ours.shape[1])):  # index copies of int64 are the fastest
        ours, theirs, first, end = ours.view(torch.int64), theirs.view(torch.int64), offset // 8, (offset + length) // 8
    else:
        first, end = offset, offset + length
    ours[:, first:end].index_copy_(0, into, theirs[out, first:end].to(ours.device))
    return len(to) * length


def _tensor_digests(rows: torch.Tensor, numbers: Numbers, within: Within) -> list[int]:
    """The same in torch: int64 wraps as uint64 does, and a mask makes its shifts logical."""
    torch = sys.modules["torch"]
    offset, length = _piece(within, rows.shape[1])
    _check_numbers("source", numbers, len(rows))
    padded = -(-length // 8) * 8
    place = torch.arange(1, padded // 8 + 1, device=rows.device) * _signed(STEP)
    found: list[Any] = []
    for number in numbers.tolist():
        words = torch.zeros(padded, dtype=torch.uint8, device=rows.device)
        words[:length] = rows[number, offset : offset + length]
        total = _mixed(words.view(torch.int64) + place).sum()
        found.append(_mixed(total + _signed(length * STEP)))
    return torch.stack(found).tolist() if found else []


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = x ^ ((x >> 32) & HALF)
    x = x * _signed(MIX)
    return x ^ ((x >> 32) & HALF)


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value
