"""Block copies and digests: by the compiled extension if it is built, else by numpy and torch with equal results.

A pool is contiguous [blocks, ...]: a numpy array, or a tensor on any device. Here each of its rows is a block of bytes.
The extension (csrc/) is optional: `pip install` builds it if it finds a C++ compiler. Pools on a GPU are copied and
summed there (``device_blocks.py``).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from trinity.errors import ConfigError
from trinity.memory.block_memory import view_units
from trinity.memory.device_blocks import copy_on_device, digest_on_device, gather_on_device
from trinity.memory.devices import use_copy_stream
from trinity.memory.digest_function import digest_array

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("trinity")
API = 1  # version of the extension that this file calls
READ_AT_ONCE = 64 << 20  # bytes of blocks on a GPU

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
    if os.environ.get("TRINITY_AMX") == "0" and "TRINITY_ISA" not in os.environ:
        logger.warning("TRINITY_AMX=0 means nothing any more: set TRINITY_ISA=avx512 for kernels without AMX")


def has_extension() -> bool:
    """Tell if the compiled extension does the work."""
    return extension is not None


def describe() -> str:
    """Name in words the code that does the work here."""
    if extension is None:
        return f"numpy and torch: {missing}"
    return f"csrc ({extension.instructions()})"


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
        return [digest_array(rows[number, offset : offset + length]) for number in numbers]
    found = np.empty(len(numbers), np.int64)
    try:
        extension.digests(rows.ctypes.data, len(rows), numbers, rows.shape[1], offset, length, found)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    result: list[int] = found.tolist()
    return result


def read_blocks(source: Pool, blocks: Blocks, within: Within = None) -> Iterator[Rows]:
    """Yield the bytes of each block, or those ``within`` (offset, length) of it, in memory of the host, to be read.

    Blocks on a GPU are gathered by one kernel and copied once, on its copy stream, ``READ_AT_ONCE`` bytes at a time.
    Raises ``ConfigError`` if a number or a piece is out of range.
    """
    numbers = _numbers(blocks)
    rows: Any = _bytes(source) if not isinstance(source, np.ndarray) and _on_device(source) else _rows(source)
    offset, length = _piece(within, rows.shape[1])
    _check_numbers("source", numbers, len(rows))
    if isinstance(rows, np.ndarray):
        yield from (rows[number, offset : offset + length] for number in numbers)
        return
    at_once = max(1, READ_AT_ONCE // max(1, length))
    for first in range(0, len(numbers), at_once):
        with use_copy_stream(rows.device):
            found = gather_on_device(rows, numbers[first : first + at_once], offset, length)
        yield from found


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
    copy_on_device(target_rows, source_rows, np.stack((targets, sources)), offset, length)
    return len(targets) * length


def _tensor_digests(rows: torch.Tensor, numbers: Numbers, within: Within) -> list[int]:
    offset, length = _piece(within, rows.shape[1])
    _check_numbers("source", numbers, len(rows))
    return digest_on_device(rows, numbers, offset, length)


class PoolCopier:
    """Copies blocks of the pool ``source`` into ``target``; both stay where they are as long as this is used.

    Of two pools of the host, apart in memory, numpy is asked for nothing but the numbers: that takes 2 µs a copy where
    ``copy_blocks`` takes 9, of the 50 µs in which 1 MiB moves. All others go through ``copy_blocks``.
    """

    def __init__(self, target: Pool, source: Pool) -> None:
        self.target, self.source = target, source
        self.on_host = isinstance(target, np.ndarray) and isinstance(source, np.ndarray)
        self._addresses: tuple[int, int] | None = None
        if isinstance(target, np.ndarray) and isinstance(source, np.ndarray) and has_extension():
            apart = target.flags.c_contiguous and source.flags.c_contiguous and not np.may_share_memory(target, source)
            if apart and target.flags.writeable:
                self._addresses = target.ctypes.data, source.ctypes.data

    def copy(self, unit_bytes: int, targets: Blocks, sources: Blocks, piece: tuple[int, int]) -> None:
        """Copy ``piece``, (offset, length) in bytes, of units ``sources`` into ``targets``, pairwise.

        Both pools count as units of ``unit_bytes``. Raises ``ConfigError`` as ``copy_blocks`` does.
        """
        target, source = self.target, self.source
        if self._addresses is None or extension is None or len(targets) != len(sources):
            units = view_units(target, unit_bytes), view_units(source, unit_bytes)
            copy_blocks(*units, targets, sources, piece)
            return
        (to, at), numbers = self._addresses, [np.asarray(each, np.int64) for each in (targets, sources)]
        sizes = target.nbytes // unit_bytes, source.nbytes // unit_bytes
        try:
            extension.copy_blocks(to, sizes[0], at, sizes[1], *numbers, unit_bytes, *piece, 1)
        except ValueError as error:
            raise ConfigError(str(error)) from error
