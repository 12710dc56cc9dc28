"""Copies and digests of blocks of one GPU: by Triton in one launch each, else by torch.

Triton's kernels are run once per device on a small random pool and compared with numpy before they are used: a kernel
that compiles is no proof.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from trinity.memory.devices import gpu_number, use_copy_stream, use_device
from trinity.memory.digest_function import digest_array, finish_digests, sum_tensor_words

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("trinity")

BYTES_SUMMED_AT_ONCE = 64 << 20  # gathered at once for digests in torch

UnitNumbers: TypeAlias = "npt.NDArray[np.int64]"


class DeviceBlocks(Protocol):
    """Copies and digests of blocks on one device. Numbers and ranges are checked before it is called."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, units: torch.Tensor, offset: int, length: int) -> None:
        """Copy bytes [offset, offset + length) of blocks of ``source`` to ``target``, both uint8 [blocks, bytes].

        ``units`` (int64 [2, n], on the target's device): blocks of the target, and of the source. The copy is queued on
        the current stream.
        """
        ...

    def digest(self, rows: torch.Tensor, units: torch.Tensor, offset: int, length: int) -> list[int]:
        """Compute a digest of bytes [offset, offset + length) of each block ``units`` (int64 [n]) of ``rows``."""
        ...


class TorchBlocks:
    """``DeviceBlocks`` in torch; the pools of a copy may be on different devices."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, units: torch.Tensor, offset: int, length: int) -> None:
        """See ``DeviceBlocks.copy``."""
        first, end = offset, offset + length
        if all(size % 8 == 0 for size in (offset, length, target.shape[1], target.data_ptr(), source.data_ptr())):
            int64 = sys.modules["torch"].int64  # index copies of int64 are the fastest
            target, source, first, end = target.view(int64), source.view(int64), first // 8, end // 8
        pieces = source[units[1].to(source.device), first:end]
        target[:, first:end].index_copy_(0, units[0], pieces.to(target.device))

    def digest(self, rows: torch.Tensor, units: torch.Tensor, offset: int, length: int) -> list[int]:
        """See ``DeviceBlocks.digest``."""
        at_once, found = max(1, BYTES_SUMMED_AT_ONCE // max(1, length)), list[int]()
        for first in range(0, len(units), at_once):
            sums = sum_tensor_words(rows[units[first : first + at_once], offset : offset + length])
            found += finish_digests(sums.cpu().numpy().view(np.uint64), length)
        return found


def copy_on_device(target: torch.Tensor, source: torch.Tensor, numbers: UnitNumbers, offset: int, length: int) -> None:
    """Copy pieces of blocks, of which at least one pool is on a GPU; see ``DeviceBlocks.copy``."""
    units = upload_numbers(numbers, target.device)
    with use_device(target.device):
        _choose_for(target, source).copy(target, source, units, offset, length)


def digest_on_device(rows: torch.Tensor, numbers: UnitNumbers, offset: int, length: int) -> list[int]:
    """Compute digests of pieces of blocks on a GPU; see ``DeviceBlocks.digest``."""
    units = upload_numbers(numbers, rows.device)
    with use_device(rows.device):
        return _choose_for(rows, rows).digest(rows, units, offset, length)


def gather_on_device(rows: torch.Tensor, numbers: UnitNumbers, offset: int, length: int) -> npt.NDArray[np.uint8]:
    """Gather pieces of blocks of one GPU, in one kernel, and copy them to the host: uint8 [blocks, length].

    Runs on the current stream, and is done on return.
    """
    library: Any = sys.modules["torch"]
    units, dtype, size = upload_numbers(numbers, rows.device), library.uint8, 1
    if all(each % 8 == 0 for each in (offset, length, rows.shape[1], rows.data_ptr())):
        dtype, size = library.int64, 8
    with use_device(rows.device):
        pieces = rows.view(dtype)[:, offset // size : (offset + length) // size].index_select(0, units)
        found: npt.NDArray[np.uint8] = pieces.view(library.uint8).cpu().numpy()
    return found


def warm_up_blocks(device: object) -> None:
    """Choose what copies and digests blocks of a GPU, and compile all of its kernels; nothing for a CPU."""
    number = gpu_number(device)
    if number is None:
        return
    import torch

    with use_copy_stream(number):
        choose_blocks(torch.device("cuda", number))


def copy_by_address(
    device: object, target: int, source: int, numbers: UnitNumbers, unit_bytes: int, piece: tuple[int, int]
) -> bool:
    """Copy pieces (offset, length) of units between two addresses that ``device`` can read, such as a peer's pool.

    ``numbers``: see ``DeviceBlocks.copy``. The copy runs on the device's copy stream and is done on return. Returns
    False, and copies nothing, if no kernel here can do it.
    """
    library: Any = sys.modules["torch"]
    place = library.device(device)
    with use_copy_stream(place):
        blocks: Any = choose_blocks(place)
        if isinstance(blocks, TorchBlocks):
            return False
        blocks.copy_addresses(target, source, upload_numbers(numbers, place), unit_bytes, piece)
    return True


def upload_numbers(numbers: UnitNumbers, device: torch.device) -> torch.Tensor:
    """Return ``numbers`` on ``device``; a GPU takes them from pinned memory, without the host waiting for it."""
    tensor: torch.Tensor = sys.modules["torch"].from_numpy(np.ascontiguousarray(numbers))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _choose_for(target: torch.Tensor, source: torch.Tensor) -> DeviceBlocks:
    if target.device.type != "cuda" or target.device != source.device:
        return TorchBlocks()
    return choose_blocks(target.device)


@cache
def choose_blocks(device: torch.device) -> DeviceBlocks:
    """Return the fastest way that is right on ``device``."""
    if find_spec("triton") is None:
        return TorchBlocks()
    fault = find_block_fault(device)
    if fault is not None:
        logger.warning("copies and digests on %s are torch's: %s", device, fault)
        return TorchBlocks()
    from trinity.memory.triton_blocks import TritonBlocks

    return TritonBlocks()


def find_block_fault(device: torch.device, blocks: DeviceBlocks | None = None) -> str | None:
    """Return why ``blocks`` (None: Triton's) must not serve pools on ``device``; None if they may."""
    try:
        if blocks is None:
            from trinity.memory.triton_blocks import TritonBlocks

            blocks = TritonBlocks()
        faults = list(_faults(blocks, device))
    except Exception as error:  # a kernel that does not compile, a driver that does not load it
        return f"Triton's kernels fail on this machine: {type(error).__name__}: {str(error)[:300]}"
    return f"Triton's kernels give wrong {' and '.join(faults)} on this machine" if faults else None


def _faults(blocks: DeviceBlocks, device: torch.device) -> Iterator[str]:
    """Yield what differs from numpy on small random pools, in words and in bytes."""
    torch, noise = sys.modules["torch"], np.random.default_rng(20)
    for unit, offset, length in ((40960, 64, 40000), (4104, 8, 4088), (4099, 3, 1030)):
        target, source = noise.integers(0, 256, (2, 7, unit), dtype=np.uint8)
        numbers = np.stack((noise.permutation(7)[:5], noise.permutation(7)[:5])).astype(np.int64)
        there, ours = (torch.from_numpy(each).to(device, copy=True) for each in (source, target))
        units = upload_numbers(numbers, device)
        blocks.copy(ours, there, units, offset, length)
        target[numbers[0], offset : offset + length] = source[numbers[1], offset : offset + length]
        if not np.array_equal(ours.cpu().numpy(), target):
            yield f"copies of {length} bytes"
        wanted = [digest_array(source[number, offset : offset + length]) for number in numbers[1]]
        if blocks.digest(there, units[1], offset, length) != wanted:
            yield f"digests of {length} bytes"
