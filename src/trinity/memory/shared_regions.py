"""Regions: memory that several processes of a host read, written once; a file descriptor holds it.

On a CPU a region is a sealed memory file, on a GPU an allocation of the driver's virtual memory management. Either
lasts as long as one descriptor or one mapping of it is left, in whatever process: no process owns it, and none can take
it from another, however it ends (decision 0057).
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import math
import mmap
import os
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from trinity.errors import TransportError
from trinity.memory.cuda_driver import CudaDriver
from trinity.memory.devices import gpu_number, lock_recording, use_device, wait_for_default_stream

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("trinity")
ALIGNMENT = 64  # bytes: of a CPU's cache line, and more than any kernel here asks for
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SharedRegion(Protocol):
    """Memory of a device that other processes may open by ``file``; whoever makes it writes it once."""

    file: int
    size: int

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """Copy a tensor of any device to byte ``offset``."""

    def seal(self) -> None:
        """End the writing: what is written is there for everybody, and stays."""

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the bytes from ``offset`` on as a tensor, which keeps the mapping; only to be read."""


def can_share(device: object) -> bool:
    """Tell if processes can share memory of a device: by a trial, so that all processes of a host answer alike."""
    number = gpu_number(device)
    fault = _find_fault(number)
    if fault is not None:
        logger.warning("processes share no weights on %s: %s", "the CPU" if number is None else f"cuda:{number}", fault)
    return fault is None


@cache
def _find_fault(gpu: int | None) -> str | None:
    """Return why a device's memory cannot be shared: write some, and read it by another mapping."""
    import torch

    try:
        if gpu is not None and not _load_driver().shares_memory(gpu):
            return "its driver hands out no file descriptors of memory"
        values = torch.arange(1024)
        made = make_region(gpu, values.nbytes)
        made.write(0, values)
        made.seal()
        found = open_region(gpu, made.file, made.size).view(0, (len(values),), values.dtype)
        return None if torch.equal(found.cpu(), values) else "another mapping of its memory has other bytes"
    except Exception as error:  # of a driver, or of torch, that this has never met
        return f"{type(error).__name__}: {str(error)[:300]}"


def make_region(device: object, size: int) -> SharedRegion:
    """Make a region to be written. Raises ``OSError``, ``TransportError`` if there is no such memory."""
    number = gpu_number(device)
    return HostRegion.make(size) if number is None else DeviceRegion.make(number, size)


def open_region(device: object, file: int, size: int) -> SharedRegion:
    """Open the region that a descriptor holds; it stays the caller's. Raises as ``make_region``."""
    number, own = gpu_number(device), os.dup(file)
    return HostRegion.open(own, size) if number is None else DeviceRegion(number, own, size)


class HostRegion:
    """A memory file. After ``seal`` the system lets nobody write to it, not even who made it.

    Its pages are mapped read-only from the first on, so that a write to a tensor of it ends the process.
    """

    def __init__(self, file: int, size: int, writing: int | None = None) -> None:
        self.file, self.size, self._writing = file, size, -1
        weakref.finalize(self, os.close, file)
        self._end_writing: Callable[[], object] = lambda: None
        self._bytes = _map_pages(file, size)
        if writing is not None:  # is the caller's to close until all else is there
            self._writing, self._end_writing = writing, weakref.finalize(self, os.close, writing)

    @classmethod
    def make(cls, size: int) -> HostRegion:
        """Make a region of zeros."""
        writing = os.memfd_create("trinity-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(writing, size)
            return cls(os.open(f"/proc/self/fd/{writing}", os.O_RDONLY | os.O_CLOEXEC), size, writing)
        except BaseException:
            os.close(writing)
            raise

    @classmethod
    def open(cls, file: int, size: int) -> HostRegion:
        """Open another process's region. Raises ``OSError`` if it is not sealed, or of another size."""
        made = cls(file, size)
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS != _SEALS or os.fstat(file).st_size != size:
            raise OSError(f"the descriptor is none of a sealed memory file of {size} bytes")
        return made

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """See ``SharedRegion.write``."""
        import torch

        left: Any = memoryview(cast(Any, tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
        while left:
            count = os.pwrite(self._writing, left, offset)
            left, offset = left[count:], offset + count

    def seal(self) -> None:
        """See ``SharedRegion.seal``."""
        fcntl.fcntl(self._writing, fcntl.F_ADD_SEALS, _SEALS)
        self._end_writing()

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``SharedRegion.view``."""
        return _view(self._bytes, offset, shape, dtype)


def _map_pages(file: int, size: int) -> torch.Tensor:
    """Map a file read-only: uint8 [size]. ctypes hides that from torch, which would warn of it for every tensor."""
    import torch

    class Pages(ctypes.c_uint8 * size):  # type: ignore[misc]
        mapped: mmap.mmap

    mapped = mmap.mmap(file, size, prot=mmap.PROT_READ)
    pages = Pages.from_address(np.frombuffer(mapped, np.uint8).ctypes.data)
    pages.mapped = mapped  # which lives as long as the tensor
    return torch.frombuffer(pages, dtype=torch.uint8)


class DeviceRegion:
    """Memory of a GPU. The driver maps it to be written too: that nobody does is trinity's rule alone."""

    def __init__(self, gpu: int, file: int, size: int) -> None:
        self.file, self.size, self._gpu = file, size, gpu
        weakref.finalize(self, os.close, file)
        with use_device(gpu):
            self._bytes = _make_device_tensor(_MappedMemory(gpu, file, size), gpu)

    @classmethod
    def make(cls, gpu: int, size: int) -> DeviceRegion:
        """Allocate a region, whose bytes may be anything."""
        driver = _load_driver()
        with use_device(gpu), driver.use(gpu):
            return cls(gpu, *driver.create_memory(gpu, size))

    def write(self, offset: int, tensor: torch.Tensor) -> None:
        """See ``SharedRegion.write``."""
        self.view(offset, tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def seal(self) -> None:
        """See ``SharedRegion.seal``."""
        wait_for_default_stream(self._gpu)

    def view(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``SharedRegion.view``."""
        return _view(self._bytes, offset, shape, dtype)


class _MappedMemory:
    """A mapping of a GPU's memory, in the form from which torch makes tensors; it ends with the last of them."""

    def __init__(self, gpu: int, file: int, size: int) -> None:
        driver = _load_driver()
        with driver.use(gpu):
            address = driver.map_memory(gpu, file, size)
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}
        weakref.finalize(self, _unmap, driver, gpu, address, size).atexit = False


def _unmap(driver: CudaDriver, gpu: int, address: int, size: int) -> None:
    with suppress(TransportError), lock_recording(gpu), driver.use(gpu):  # a context that failed takes its memory along
        driver.unmap_memory(address, size)


def _make_device_tensor(memory: Any, gpu: int) -> torch.Tensor:
    import torch

    return torch.as_tensor(memory, device=f"cuda:{gpu}")


def _view(data: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return data[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


@cache
def _load_driver() -> CudaDriver:
    return CudaDriver()
