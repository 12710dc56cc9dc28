"""Block copies and digests: by the compiled extension if it is built, else by numpy and torch with equal results.

A pool is contiguous [blocks, ...]: a numpy array, or a tensor on any device. Here each of its rows is a block of bytes.
The extension (csrc/) is optional: `pip install` builds it if it finds a C++ compiler. If it also finds nvcc, the
extension has a gather for GPUs. That gather has been compiled but never run, for want of a GPU: its tests skip there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trinity.errors import ConfigError
from trinity.memory.devices import use_copy_stream

if TYPE_CHECKING:
    import torch

API = 1  # version of the extension that this file calls
DIGEST_STEP, DIGEST_MIX = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # csrc/blocks/digest.cpp has the definition
LOW_HALF = (1 << 32) - 1
SLICE_WORDS = 1 << 16  # words per pass of the fallback, so that its temporaries stay in the CPU's cache

Numbers: TypeAlias = "npt.NDArray[np.int64]"
Rows: TypeAlias = "npt.NDArray[np.uint8]"
Pool: TypeAlias = "npt.NDArray[Any] | torch.Tensor"
Blocks: TypeAlias = "Sequence[int] | Numbers"
Within: TypeAlias = "tuple[int, int] | None"  # (offset, length) in bytes of each block; None: all of it

extension: Any = None
try:
    from trinity import _native
except ImportError as error:
    missing = f"the extension is not built ({error}); `pip install` builds it where a C++ compiler is found"
else:
    missing = f"the extension is of another version of trinity ({_native.API}, not {API}): install trinity again"
    extension = _native if _native.API == API else None

if extension is not None:
    try:
        extension.instructions()
    except ValueError as error:  # of the environment's TRINITY_ISA
        raise ConfigError(str(error)) from error


def has_extension() -> bool:
    """Tell if the compiled extension does the work."""
    return extension is not None


def describe() -> str:
    """Name in words the code that does the work here."""
    if extension is None:
        return f"numpy and torch: {missing}"
    return f"csrc ({extension.instructions()}{', CUDA' if extension.CUDA else ''})"


def copy_blocks(
    target: Pool,
    source: Pool,
    target_blocks: Blocks,
    source_blocks: Blocks,
    within: Within = None,
    *,
    threads: int = 1,
) -> int:
    """Copy ``source_blocks`` of one pool into ``target_blocks`` of another, pairwise; returns the bytes moved.

    ``within=(offset, length)`` copies only ``length`` bytes of each block, from byte ``offset``. Each run of
    consecutive blocks is one copy; large ones bypass the cache. ``threads`` share copies of more than 1 MiB. The
    interpreter's lock is released. Raises ``ConfigError`` before any byte moves if a number is out of range, a target
    block is named twice or is also a source, or the pools' blocks differ in size.
    """
    targets, sources = _numbers(target_blocks), _numbers(source_blocks)
    if len(targets) != len(sources):
        raise ConfigError(f"{len(sources)} source blocks for {len(targets)} target blocks: one of each is needed")
    if _on_device(target) or _on_device(source):
        with use_copy_stream(_tensor(source).device, _tensor(target).device):
            return _copy_tensors(_tensor(target), _tensor(source), targets, sources, within)
    target_rows, source_rows = _rows(target), _rows(source)
    offset, length = _piece(within, _block_bytes(target_rows, source_rows))
    if not target_rows.flags.writeable:
        raise ConfigError("the target pool is read-only: copy into a pool of your own")
    _check_apart(target_rows, source_rows, targets, sources)
    if extension is None:
        _copy_arrays(target_rows, source_rows, targets, sources, offset, length)
        return len(targets) * length
    try:
        extension.copy_blocks(
            target_rows.ctypes.data,
            len(target_rows),
            source_rows.ctypes.data,
            len(source_rows),
            targets,
            sources,
            target_rows.shape[1],
            offset,
            length,
            threads,
        )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return len(targets) * length


def compute_digests(source: Pool, blocks: Blocks, within: Within = None) -> list[int]:
    """Compute one signed 64-bit digest of each block, or of its bytes ``within`` (offset, length); not cryptographic.

    It changes with any changed, moved or missing word, and with the number of bytes. For a pool on a GPU it is computed
    there. Raises ``ConfigError`` if a number or a piece is out of range.
    """
    numbers = _numbers(blocks)
    if _on_device(source):
        with use_copy_stream(_tensor(source).device):
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


# ---------------------------------------------------------------- arguments


def _numbers(blocks: Blocks) -> Numbers:
    try:
        found = np.asarray(blocks, dtype=np.int64)
    except (OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"block numbers must be whole numbers: {error}") from error
    if found.size and found.ndim != 1:
        raise ConfigError(f"block numbers must be one row of numbers, got shape {found.shape}")
    return np.ascontiguousarray(found).reshape(-1)


def _rows(pool: Pool) -> Rows:
    """View the pool as uint8 [blocks, block_bytes]; never a copy."""
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


def _block_bytes(target_rows: Any, source_rows: Any) -> int:
    if target_rows.shape[1] != source_rows.shape[1]:
        raise ConfigError(
            f"blocks of {source_rows.shape[1]} bytes do not fit into blocks of {target_rows.shape[1]} bytes"
        )
    return int(target_rows.shape[1])


def _piece(within: Within, block_bytes: int) -> tuple[int, int]:
    offset, length = (0, block_bytes) if within is None else within
    if offset < 0 or length < 0 or offset + length > block_bytes or not block_bytes:
        raise ConfigError(f"{length} bytes from byte {offset} are not within blocks of {block_bytes} bytes")
    return offset, length


def _check_numbers(what: str, numbers: Numbers, blocks: int) -> None:
    if numbers.size and (numbers.min() < 0 or numbers.max() >= blocks):
        raise ConfigError(f"{what} blocks {numbers.min()} to {numbers.max()} are not all in a pool of {blocks}")


def _check_target(targets: Numbers, blocks: int) -> None:
    _check_numbers("target", targets, blocks)
    if len(np.unique(targets)) != len(targets):
        raise ConfigError("a target block is named twice")


def _check_apart(target_rows: Rows, source_rows: Rows, targets: Numbers, sources: Numbers) -> None:
    """Refuse blocks that are both read and written: the result would depend on the order of the copies."""
    if not np.may_share_memory(target_rows, source_rows):
        return
    same = target_rows.ctypes.data == source_rows.ctypes.data and target_rows.shape == source_rows.shape
    if not same or np.intersect1d(targets, sources).size:
        raise ConfigError("source and target blocks overlap in memory: copy between pools, or between other blocks")


# ---------------------------------------------------------------- without the extension


def _copy_arrays(
    target_rows: Rows, source_rows: Rows, targets: Numbers, sources: Numbers, offset: int, length: int
) -> None:
    """Copy run by run; numpy releases the interpreter's lock for each."""
    _check_numbers("source", sources, len(source_rows))
    _check_target(targets, len(target_rows))
    if not len(targets):
        return
    breaks = np.flatnonzero((np.diff(targets) != 1) | (np.diff(sources) != 1)) + 1
    piece = slice(offset, offset + length)
    for first, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(targets)], strict=True):
        target, source, count = int(targets[first]), int(sources[first]), end - first
        np.copyto(target_rows[target : target + count, piece], source_rows[source : source + count, piece])


def _array_digest(piece: Rows) -> int:
    """Compute the digest of csrc/blocks/digest.cpp, a slice of words at a time."""
    length = len(piece)
    whole = piece[: length - length % 8]
    words = np.frombuffer(whole.tobytes() if whole.ctypes.data % 8 else whole, np.dtype("<u8"))
    tail = np.frombuffer(piece[length - length % 8 :].tobytes().ljust(8, b"\0"), np.dtype("<u8"))
    total = 0
    for first in range(0, len(words), SLICE_WORDS):
        total += _sum_words(words[first : first + SLICE_WORDS], first)
    if length % 8:
        total += _sum_words(tail, len(words))
    value = (total + length * DIGEST_STEP) % (1 << 64)
    value ^= value >> 32
    value = value * DIGEST_MIX % (1 << 64)
    value ^= value >> 32
    return value - (1 << 64) if value >> 63 else value


def _sum_words(words: npt.NDArray[np.uint64], first: int) -> int:
    x = np.arange(first + 1, first + 1 + len(words), dtype=np.uint64)
    x *= np.uint64(DIGEST_STEP)
    x += words
    x ^= x >> np.uint64(32)
    x *= np.uint64(DIGEST_MIX)
    x ^= x >> np.uint64(32)
    return int(x.sum(dtype=np.uint64))


# ---------------------------------------------------------------- tensors, on a GPU as on a CPU


def _copy_tensors(
    target: torch.Tensor, source: torch.Tensor, targets: Numbers, sources: Numbers, within: Within
) -> int:
    target_rows, source_rows = _bytes(target), _bytes(source)
    offset, length = _piece(within, _block_bytes(target_rows, source_rows))
    _check_numbers("source", sources, len(source_rows))
    _check_target(targets, len(target_rows))
    if target_rows.data_ptr() == source_rows.data_ptr() and np.intersect1d(targets, sources).size:
        raise ConfigError("source and target blocks overlap in memory: copy between pools, or between other blocks")
    torch = sys.modules["torch"]
    into, out = (
        torch.from_numpy(each).to(pool.device) for each, pool in ((targets, target_rows), (sources, source_rows))
    )
    if (
        extension is not None
        and extension.CUDA
        and target_rows.device.type == "cuda"
        and target_rows.device == source_rows.device
    ):
        with torch.cuda.device(target_rows.device):
            stream = torch.cuda.current_stream(target_rows.device).cuda_stream
            pointers = (target_rows.data_ptr(), source_rows.data_ptr(), into.data_ptr(), out.data_ptr())
            extension.cuda_copy_blocks(*pointers, len(targets), target_rows.shape[1], offset, length, stream)
        return len(targets) * length
    if all(size % 8 == 0 for size in (offset, length, target_rows.shape[1])):  # index copies of int64 are the fastest
        target_rows, source_rows, first, end = (
            target_rows.view(torch.int64),
            source_rows.view(torch.int64),
            offset // 8,
            (offset + length) // 8,
        )
    else:
        first, end = offset, offset + length
    target_rows[:, first:end].index_copy_(0, into, source_rows[out, first:end].to(target_rows.device))
    return len(targets) * length


def _tensor_digests(rows: torch.Tensor, numbers: Numbers, within: Within) -> list[int]:
    """Compute the same digests in torch: int64 wraps as uint64 does, and a mask makes its shifts logical."""
    torch = sys.modules["torch"]
    offset, length = _piece(within, rows.shape[1])
    _check_numbers("source", numbers, len(rows))
    padded = -(-length // 8) * 8
    place = torch.arange(1, padded // 8 + 1, device=rows.device) * _signed(DIGEST_STEP)
    found: list[Any] = []
    for number in numbers.tolist():
        words = torch.zeros(padded, dtype=torch.uint8, device=rows.device)
        words[:length] = rows[number, offset : offset + length]
        total = _mixed(words.view(torch.int64) + place).sum()
        found.append(_mixed(total + _signed(length * DIGEST_STEP)))
    return torch.stack(found).tolist() if found else []


def _mixed(x: torch.Tensor) -> torch.Tensor:
    x = x ^ ((x >> 32) & LOW_HALF)
    x = x * _signed(DIGEST_MIX)
    return x ^ ((x >> 32) & LOW_HALF)


def _signed(value: int) -> int:
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value
