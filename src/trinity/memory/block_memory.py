"""BlockMemory: the memory behind one pool of blocks, typed rows for stages; ranges of bytes that transports read."""

from __future__ import annotations

import math
import mmap
import os
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from msgspec import Struct

from trinity.core.messages import Pull
from trinity.core.transfers import should_cut
from trinity.errors import ConfigError
from trinity.memory.devices import wait_for_default_stream

if TYPE_CHECKING:
    import torch

GENERATION_BYTES = 8
HUGE_FROM_BYTES = 4 << 20
ByteRange: TypeAlias = "tuple[int, int] | Strided | None"  # (offset, length), runs at equal distances, or all bytes


@dataclass(frozen=True)
class BlockShape:
    """Shape of one block.

    - ``kind``: "image", "kv" or "state".
    - ``shape``: [rows, width] for images; [layers, 2, kv_heads, rows, head_dim] for KV (block-major, head-major);
      [bytes] for the states of one request.
    - ``dtype``: torch's, or numpy's where no tensor is ever made of the blocks (emulated stages).
    """

    kind: str
    shape: tuple[int, ...]
    dtype: Any

    @property
    def rows(self) -> int:
        """Rows of a block: tokens of KV, rows of features; the states of a request are one."""
        return self.shape[-2] if len(self.shape) > 1 else 1

    @cached_property
    def block_bytes(self) -> int:
        size: int = self.dtype.itemsize
        for extent in self.shape:
            size *= extent
        return size


class BlockMemory:
    """One allocation of ``blocks`` equal blocks, and one generation number for each block.

    - ``tensor``: [blocks, *shape], contiguous. A block of all layers is one contiguous piece.
    - ``raw``: the same memory as numpy uint8 [blocks, block_bytes]; None on a GPU. torch is imported only when a tensor
      is first used: emulated instances never import it.
    - ``words``: the same memory as int64 [blocks, block_bytes / 8], since index copies of int64 are torch's fastest on
      a CPU; uint8 if a block is not a multiple of 8 bytes.
    - ``generations``: int64 [blocks], initially zero. A source that takes blocks back from a reader raises their
      generations. A reader that sees a higher generation than it was promised drops the data.
    - ``file``: descriptor of a sealed memory file if ``shared``, else None. Other processes of this host can map it.
      CPU blocks begin at byte 0 and generations at ``generations_at``. GPU memory stays on the device; its file holds
      only the generations.

    Raises ``ConfigError`` if there is not enough memory.
    """

    def __init__(self, shape: BlockShape, blocks: int, device: str = "cpu", *, shared: bool = False) -> None:
        self.shape, self.blocks, self.device = shape, blocks, device
        self.file: int | None = None
        self.closed = False
        on_cpu = device.partition(":")[0] == "cpu"
        size = blocks * shape.block_bytes if on_cpu else 0
        self.generations_at = generations_at(size)
        total = self.generations_at + blocks * GENERATION_BYTES
        raw = self._shared(total) if shared else _untouched_zeros(total)
        self.generations = raw[self.generations_at :].view("int64")
        self.raw = raw[:size].reshape(blocks, shape.block_bytes) if on_cpu else None
        if not on_cpu:
            wait_for_default_stream(self.tensor.device)  # its zeros are there: who writes into it may know no stream

    @cached_property
    def tensor(self) -> torch.Tensor:
        import torch

        dtype = self.shape.dtype
        if self.raw is None:
            try:
                return torch.zeros((self.blocks, *self.shape.shape), dtype=dtype, device=self.device)
            except torch.OutOfMemoryError as error:
                size = self.blocks * self.block_bytes
                hint = "others may use it too: give pools= or memory_bytes=, or another device="
                raise ConfigError(f"{self.device} cannot hold a pool of {size:,} bytes ({error}); {hint}") from error
        return torch.from_numpy(self.raw.reshape(-1)).view(dtype).view(self.blocks, *self.shape.shape)

    @property
    def pool(self) -> np.ndarray | torch.Tensor:
        """Memory for block copies and digests: numpy on a CPU, a torch tensor only on a GPU."""
        return self.tensor if self.raw is None else self.raw

    @property
    def gpu(self) -> int | None:
        """Ordinal of the GPU that holds the blocks; None for memory of the host."""
        return self.tensor.get_device() if self.raw is None else None

    @property
    def kind(self) -> str:
        return self.shape.kind

    @property
    def block_bytes(self) -> int:
        return self.shape.block_bytes

    @property
    def words(self) -> torch.Tensor:
        return self.piece(0, self.block_bytes)

    def piece(self, offset: int, length: int) -> torch.Tensor:
        """View bytes ``offset`` to ``offset + length`` of every block: int64 [blocks, length / 8], or uint8."""
        import torch

        flat = self.tensor.view(self.blocks, math.prod(self.shape.shape)).view(torch.uint8)
        if self.block_bytes % 8 or offset % 8 or length % 8:
            return flat[:, offset : offset + length]
        return flat.view(torch.int64)[:, offset // 8 : (offset + length) // 8]

    def generation(self, blocks: Sequence[int]) -> int:
        """Return the highest current generation of ``blocks``; 0 if there are none."""
        return int(self.generations[list(blocks)].max()) if len(blocks) else 0

    def _shared(self, size: int) -> np.ndarray:
        import numpy as np

        self.file = create_sealed_file(f"trinity-{self.kind}", size)
        self._closing = weakref.finalize(self, os.close, self.file)
        return np.frombuffer(_map(self.file, size), dtype=np.uint8)

    def close(self) -> None:
        """End the pool's use and close its memory file; may be called twice. Mappings last as long as they are used."""
        self.closed = True
        if self.file is not None:
            self.file = None
            self._closing()


def generations_at(size: int) -> int:
    """Return the byte offset of the generations in the memory file of a pool of ``size`` bytes: the next whole page."""
    return -(-size // mmap.PAGESIZE) * mmap.PAGESIZE


def create_sealed_file(name: str, size: int) -> int:
    """Create a memory file of a fixed size and return its descriptor.

    Its size is sealed, because a peer that truncated it would kill this process with SIGBUS. Raises ``ConfigError`` if
    the system has no such memory to give.
    """
    import fcntl

    try:
        file = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        raise ConfigError(f"cannot create a memory file for a pool of {size:,} bytes: {error}") from error
    try:
        os.ftruncate(file, size)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except (OSError, OverflowError) as error:
        os.close(file)
        raise _no_room(size, error) from error
    return file


def _map(file: int, size: int, **flags: int) -> mmap.mmap | bytearray:
    """Map ``size`` bytes of a file, or of fresh memory (-1): no system maps none. Raises ``ConfigError``."""
    try:
        return mmap.mmap(file, size, **flags) if size else bytearray()
    except (OSError, OverflowError) as error:
        raise _no_room(size, error) from error


def _no_room(size: int, error: Exception) -> ConfigError:
    return ConfigError(f"cannot allocate a pool of {size:,} bytes: {error}; make the pools smaller")


def _untouched_zeros(size: int) -> np.ndarray:
    """Allocate ``size`` zero bytes whose pages cost no memory until written, so that unused blocks stay cheap.

    A mapping of their own: an allocator would clear those of a small pool, and keep them when the pool is gone. In huge
    pages where the system allows it, as numpy would.
    """
    import numpy as np

    if not hasattr(mmap, "MAP_PRIVATE"):
        try:
            return np.zeros(size, dtype=np.uint8)
        except (MemoryError, ValueError) as error:  # ValueError: more than an array can have
            raise _no_room(size, error) from error
    made = _map(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if isinstance(made, mmap.mmap) and hasattr(mmap, "MADV_HUGEPAGE") and size >= HUGE_FROM_BYTES:
        with suppress(OSError):  # advice only: a system without them refuses
            made.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(made, dtype=np.uint8)


class Strided(NamedTuple):
    """``runs`` runs of ``length`` bytes of each block, the first at byte ``offset``, ``stride`` bytes apart.

    ``stride`` divides the block, and a run does not cross a multiple of it. The first rows of a KV block
    [layers, 2, heads, rows, head_dim] are such runs: one for each layer, key or value, and head.
    """

    offset: int
    length: int
    stride: int
    runs: int


class FilledRanges(Struct, frozen=True):
    """Bytes of blocks that their rows fill: ``within`` (offset, length) of each, None for all of it.

    ``tails``: of the blocks that are not full, by place in the list of blocks, the range of their rows instead.
    """

    within: tuple[int, int] | None
    tails: Mapping[int, Strided]


class BlockRead(Struct, frozen=True):
    """Arguments of one ``Remote.read``."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    within: ByteRange

    @property
    def pieces(self) -> int:
        """Number of separate runs of bytes that the read moves."""
        if isinstance(self.within, Strided):
            return len(self.source) * self.within.runs
        return len(self.source) if self.within else len(list(find_runs(self.source, self.target)))


class PullRanges(Struct, frozen=True):
    """Bytes of a pull: its ``reads``, and the bytes of its blocks that digests cover. ``plan_pull`` computes both once.

    Reads and digests differ: a last block that is nearly full moves whole, and its digest covers its rows.
    """

    reads: tuple[BlockRead, ...]
    filled: FilledRanges

    @property
    def pieces(self) -> int:
        """Number of separate runs of bytes that the pull moves."""
        return sum([each.pieces for each in self.reads])


def plan_pull(memory: BlockMemory, pull: Pull) -> PullRanges:
    """Compute the byte ranges of a pull into ``memory``.

    One read of all blocks, or, where the last one has few rows (``should_cut``), one of those before it and one of its
    rows.
    """
    source, target, within = pull.source_blocks, pull.target_blocks, layer_byte_range(memory, pull.layers)
    if not pull.tail:
        return PullRanges((BlockRead(source, target, within),), FilledRanges(within, {}))
    tail = tail_byte_range(memory, within, pull.tail)
    filled = FilledRanges(within, {len(target) - 1: tail})
    if not should_cut(len(source), pull.tail, memory.shape.rows):
        return PullRanges((BlockRead(source, target, within),), filled)
    full, last = BlockRead(source[:-1], target[:-1], within), BlockRead(source[-1:], target[-1:], tail)
    return PullRanges((full, last) if full.source else (last,), filled)


def find_filled(memory: BlockMemory, layers: tuple[int, int] | None, tails: Mapping[int, int]) -> FilledRanges:
    """Find the filled bytes of ``layers`` (None: all) of blocks; ``tails``: rows of those not full, by place."""
    within = layer_byte_range(memory, layers)
    return FilledRanges(within, {place: tail_byte_range(memory, within, tail) for place, tail in tails.items()})


def layer_byte_range(memory: BlockMemory, layers: tuple[int, int] | None) -> tuple[int, int] | None:
    """Return (offset, length) in bytes of ``layers`` [first, end) in each block [layers, ...]; None: all of it."""
    if layers is None:
        return None
    each = memory.block_bytes // memory.shape.shape[0]
    return layers[0] * each, (layers[1] - layers[0]) * each


def tail_byte_range(memory: BlockMemory, within: tuple[int, int] | None, tail: int) -> Strided:
    """Return the first ``tail`` rows of ``within``, some layers (None: all), in a block [..., rows, width]."""
    offset, length = within or (0, memory.block_bytes)
    rows, width = memory.shape.shape[-2:]
    row_bytes = width * memory.shape.dtype.itemsize
    return Strided(offset, tail * row_bytes, rows * row_bytes, length // (rows * row_bytes))


def is_within(within: Strided, block_bytes: int) -> bool:
    """Tell if these runs lie in a block of ``block_bytes`` as ``Strided`` says."""
    offset, length, stride, runs = within
    if min(length, stride, runs) < 1 or offset < 0 or block_bytes % stride:
        return False
    return offset % stride + length <= stride and offset // stride + runs <= block_bytes // stride


def list_units(blocks: Sequence[int], within: Strided, block_bytes: int) -> list[int]:
    """List the numbers of the runs, counting a pool in units of ``within.stride`` bytes."""
    first, each = within.offset // within.stride, block_bytes // within.stride
    return [block * each + unit for block in blocks for unit in range(first, first + within.runs)]


def find_runs(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Yield (source, target, length) of the longest runs of blocks that are consecutive on both sides."""
    start = 0
    for index in range(1, len(source) + 1):
        broken = index == len(source) or (
            source[index] != source[index - 1] + 1 or target[index] != target[index - 1] + 1
        )
        if broken:
            yield source[start], target[start], index - start
            start = index


def view_units(pool: np.ndarray | torch.Tensor, unit_bytes: int) -> Any:
    """View a contiguous pool as uint8 [units, unit_bytes]; never a copy."""
    if isinstance(pool, np.ndarray):
        return pool.reshape(-1).view(np.uint8).reshape(-1, unit_bytes)
    return pool.view(-1).view(sys.modules["torch"].uint8).view(-1, unit_bytes)
