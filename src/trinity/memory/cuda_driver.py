"""CUDA driver calls that sharing between processes needs, by ctypes: nothing to link, nothing needed without a GPU.

Pools are exported whole, as torch has allocated them (CUDA IPC); their owner must outlive all readers. Weights lie in
allocations of the driver's virtual memory management, whose descriptors each hold the memory (decision 0057).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from trinity.errors import HandshakeError, PeerLost, TransportError, TransportUnavailable

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
LAZY_PEER_ACCESS = 1
OWN_STREAM = 1  # CU_STREAM_NON_BLOCKING
PINNED, ON_DEVICE, FILE_DESCRIPTOR, READ_AND_WRITE = 1, 1, 1, 3  # of CUmemAllocationProp and CUmemAccessDesc
SHARES_MEMORY = (102, 103)  # device attributes: virtual memory management, handles that are file descriptors
UNAVAILABLE_CODES = {2, 3, 34, 36, 46, 100, 101, 801, 802, 803, 804, 999}  # no memory, driver or device, not supported
BAD_HANDLE_CODES = {
    1,
    201,
    208,
    217,
    400,
}  # an invalid handle, one of this process, or of a device that cannot be reached
LOST_CODES = {4, 700, 709, 715, 718, 719}  # memory that was freed by its owner


class IpcHandle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)

    @classmethod
    def of(cls, data: bytes) -> IpcHandle:
        """Make a handle from its bytes."""
        return cls.from_buffer_copy(data.ljust(HANDLE_BYTES, b"\0")[:HANDLE_BYTES])


class Location(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int))


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp, with its flags as one number."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, device: int) -> AllocationProperties:
        """Describe memory of a device that other processes can open."""
        return cls(PINNED, FILE_DESCRIPTOR, Location(ON_DEVICE, device), None, 0)


class Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", Location), ("flags", ctypes.c_int))


class CudaDriver:
    """Calls of the CUDA driver; each error is a ``TransportError``, ``TransportUnavailable`` if there is no driver."""

    def __init__(self, library: str = LIBRARY) -> None:
        try:
            self._library = ctypes.CDLL(library)
        except OSError as error:
            raise TransportUnavailable(f"cuda_ipc needs the driver of an NVIDIA GPU: {error}", "cuda_ipc") from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        self._call("cuInit", 0)

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            code: int = getattr(self._library, name)(*arguments)
        except AttributeError as error:
            raise TransportUnavailable(f"the driver has no {name}: {error}", "cuda_ipc") from error
        if code:
            raise make_driver_error(name, code, self._name(code))

    def _name(self, code: int) -> str:
        said = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(said)) or said.value is None:
            return "an unknown error"
        return said.value.decode()

    @contextmanager
    def use(self, device: int) -> Iterator[None]:
        """Make the device's primary context, torch's too, the calling thread's in the ``with`` block; then as before.

        The thread's current device is that of its context: an event loop's thread must not keep another one's.
        """
        self._call("cuCtxPushCurrent_v2", self._context(device))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _context(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                number, made = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(number), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(made), number)
                self._contexts[device] = made
            return self._contexts[device]

    def allocation(self, address: int) -> tuple[int, int]:
        """Find (base, size in bytes) of the allocation that contains an address.

        Raises ``TransportUnavailable`` if the allocation cannot be exported.
        """
        able = ctypes.c_int()
        place = ctypes.c_uint64(address)
        self._call("cuPointerGetAttribute", ctypes.byref(able), LEGACY_IPC_CAPABLE, place)
        if not able.value:
            text = (
                "the pool's memory cannot be exported: it comes from torch's expandable segments or a stream-ordered "
                "allocator; unset PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF), or use another transport"
            )
            raise TransportUnavailable(text, "cuda_ipc")
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), place)
        return base.value, size.value

    def export(self, base: int) -> bytes:
        """Make the handle by which another process opens an allocation."""
        handle = IpcHandle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """Open another process's allocation; return its address in this process."""
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), IpcHandle.of(handle), LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        """Close an allocation of another process."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def shares_memory(self, device: int) -> bool:
        """Tell if memory of a device can be handed to other processes as a file descriptor."""
        found, number = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(number), device)
        for attribute in SHARES_MEMORY:
            self._call("cuDeviceGetAttribute", ctypes.byref(found), attribute, number)
            if not found.value:
                return False
        return True

    def create_memory(self, device: int, size: int) -> tuple[int, int]:
        """Allocate at least ``size`` bytes; return a file descriptor that holds them, and their number."""
        kind, grain, none = AllocationProperties.of(device), ctypes.c_size_t(), ctypes.c_uint64(0)
        self._call("cuMemGetAllocationGranularity", ctypes.byref(grain), ctypes.byref(kind), 0)
        whole = -(-size // grain.value) * grain.value
        handle, file = ctypes.c_uint64(), ctypes.c_int(-1)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(whole), ctypes.byref(kind), none)
        try:
            self._call("cuMemExportToShareableHandle", ctypes.byref(file), handle, FILE_DESCRIPTOR, none)
        finally:
            self._call("cuMemRelease", handle)  # the descriptor holds the memory
        return file.value, whole

    def map_memory(self, device: int, file: int, size: int) -> int:
        """Map the memory that a descriptor of ``create_memory`` holds; return its address in this process."""
        handle = ctypes.c_uint64()
        self._call("cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(file), FILE_DESCRIPTOR)
        try:
            return self._map(device, handle, size)
        finally:
            self._call("cuMemRelease", handle)  # the mapping holds the memory

    def _map(self, device: int, handle: ctypes.c_uint64, size: int) -> int:
        address, whole, none = ctypes.c_uint64(), ctypes.c_size_t(size), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), none, none)
        with ExitStack() as undo:
            undo.callback(self._call, "cuMemAddressFree", address, whole)
            self._call("cuMemMap", address, whole, ctypes.c_size_t(0), handle, none)
            undo.callback(self._call, "cuMemUnmap", address, whole)
            access = Access(Location(ON_DEVICE, device), READ_AND_WRITE)
            self._call("cuMemSetAccess", address, whole, ctypes.byref(access), ctypes.c_size_t(1))
            undo.pop_all()
        return address.value

    def unmap_memory(self, address: int, size: int) -> None:
        """Wait for the device, and take back a mapping of ``map_memory``."""
        place, whole = ctypes.c_uint64(address), ctypes.c_size_t(size)
        self._call("cuCtxSynchronize")
        self._call("cuMemUnmap", place, whole)
        self._call("cuMemAddressFree", place, whole)

    def make_stream(self) -> Any:
        """Make a stream that does not wait for the default one."""
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), OWN_STREAM)
        return stream

    def drop_stream(self, stream: Any) -> None:
        """Destroy a stream."""
        self._call("cuStreamDestroy_v2", stream)

    def copy(self, to: int, start: int, size: int, stream: Any) -> None:
        """Begin to copy ``size`` bytes between device addresses."""
        sized = ctypes.c_size_t(size)
        self._call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(start), sized, stream)

    def finish(self, stream: Any) -> None:
        """Block until the stream has done all its work; the interpreter's lock is released meanwhile."""
        self._call("cuStreamSynchronize", stream)


def make_driver_error(call: str, code: int, name: str) -> TransportError:
    """Build the error for a failed driver call: unavailable, a bad handle, a lost peer, or a transport error."""
    text = f"{call} failed: {name} ({code})"
    if code in UNAVAILABLE_CODES:
        return TransportUnavailable(text, "cuda_ipc")
    if code in BAD_HANDLE_CODES:
        return HandshakeError(text, "cuda_ipc")
    if code in LOST_CODES:
        return PeerLost(text, "cuda_ipc")
    return TransportError(text, "cuda_ipc")
