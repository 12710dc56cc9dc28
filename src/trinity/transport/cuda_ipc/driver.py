"""The few calls of the CUDA driver that IPC needs, by ctypes: nothing to link, nothing needed where there is no GPU."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from trinity.errors import HandshakeError, PeerLost, TransportError, TransportUnavailable

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE
LAZY_PEER_ACCESS = 1
INTERPROCESS_EVENT = 2 | 4  # CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS
OWN_STREAM = 1  # CU_STREAM_NON_BLOCKING
UNAVAILABLE = {2, 3, 34, 35, 100, 101, 801, 802, 803, 804, 999}  # no memory, no driver, no device, not supported
UNFIT = {1, 201, 208, 217, 400}  # a handle that is none, of this process, of a device that is out of reach
LOST = {4, 700, 709, 715, 718, 719}  # memory that went away under us


class Handle(ctypes.Structure):
    """CUipcMemHandle and CUipcEventHandle."""

    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)

    @classmethod
    def of(cls, data: bytes) -> Handle:
        return cls.from_buffer_copy(data.ljust(HANDLE_BYTES, b"\0")[:HANDLE_BYTES])


class Driver:
    """The driver's calls, each error one of ours. Raises ``TransportUnavailable`` where there is no driver."""

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
            raise failed(name, code, self._name(code))

    def _name(self, code: int) -> str:
        said = ctypes.c_char_p()
        if self._library.cuGetErrorName(code, ctypes.byref(said)) or said.value is None:
            return "an unknown error"
        return said.value.decode()

    def use(self, device: int) -> None:
        """Make the device's primary context, which torch uses too, that of the calling thread."""
        with self._lock:
            if device not in self._contexts:
                number, made = ctypes.c_int(), ctypes.c_void_p()
                self._call("cuDeviceGet", ctypes.byref(number), device)
                self._call("cuDevicePrimaryCtxRetain", ctypes.byref(made), number)
                self._contexts[device] = made
        self._call("cuCtxSetCurrent", self._contexts[device])

    def allocation(self, address: int) -> tuple[int, int]:
        """(base, size in bytes) of the allocation that an address is in. Raises where it cannot be exported."""
        able = ctypes.c_int()
        place = ctypes.c_uint64(address)
        self._call("cuPointerGetAttribute", ctypes.byref(able), LEGACY_IPC_CAPABLE, place)
        if not able.value:
            text = (
                "the pool's memory cannot be exported: it is of torch's expandable segments or of a stream-ordered "
                "allocator; unset PYTORCH_CUDA_ALLOC_CONF (PYTORCH_ALLOC_CONF), or use another transport"
            )
            raise TransportUnavailable(text, "cuda_ipc")
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), place)
        return base.value, size.value

    def export(self, base: int) -> bytes:
        handle = Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base))
        return bytes(handle)

    def open(self, handle: bytes) -> int:
        """The address of another process's allocation here."""
        address = ctypes.c_uint64()
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), Handle.of(handle), LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def make_event(self) -> tuple[Any, bytes]:
        """An event, and the handle by which another process opens it."""
        event, handle = ctypes.c_void_p(), Handle()
        self._call("cuEventCreate", ctypes.byref(event), INTERPROCESS_EVENT)
        self._call("cuIpcGetEventHandle", ctypes.byref(handle), event)
        return event, bytes(handle)

    def open_event(self, handle: bytes) -> Any:
        event = ctypes.c_void_p()
        self._call("cuIpcOpenEventHandle", ctypes.byref(event), Handle.of(handle))
        return event

    def record(self, event: Any) -> None:
        """On the default stream, behind all that it and the streams that wait for it were given so far."""
        self._call("cuEventRecord", event, ctypes.c_void_p(0))

    def drop_event(self, event: Any) -> None:
        self._call("cuEventDestroy_v2", event)

    def make_stream(self) -> Any:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), OWN_STREAM)
        return stream

    def drop_stream(self, stream: Any) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def wait_for(self, stream: Any, event: Any) -> None:
        self._call("cuStreamWaitEvent", stream, event, 0)

    def copy(self, to: int, start: int, size: int, stream: Any) -> None:
        sized = ctypes.c_size_t(size)
        self._call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(to), ctypes.c_uint64(start), sized, stream)

    def finish(self, stream: Any) -> None:
        """Wait, with the interpreter's lock let go, until the stream has done all it was given."""
        self._call("cuStreamSynchronize", stream)


def failed(call: str, code: int, name: str) -> TransportError:
    text = f"{call} failed: {name} ({code})"
    if code in UNAVAILABLE:
        return TransportUnavailable(text, "cuda_ipc")
    if code in UNFIT:
        return HandshakeError(text, "cuda_ipc")
    if code in LOST:
        return PeerLost(text, "cuda_ipc")
    return TransportError(text, "cuda_ipc")
