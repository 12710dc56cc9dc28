"""cuda_ipc: pools on GPUs of one host, mapped by peers and copied from device to device.

The source exports the allocation that contains its pool. A target opens it once, and copies on a stream that waits for
no lane: its own, or for many runs that of the GPU's copies, in one kernel. A source's blocks are written before they
are offered, a target's are free of queued writes before they are reserved (decision 0048). Before every read it asks
the source over a Unix socket for a sign of life, after it for generations; if the socket closes,
the source is gone. Pools come from torch's caching allocator, which gives a pool of more than 10 MiB one cudaMalloc of
its own. Memory that cannot be exported (expandable segments, stream-ordered) is refused by ``publish``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
from collections.abc import Sequence
from contextlib import suppress
from hmac import compare_digest
from typing import Any

import msgspec
import numpy as np

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost, TransportUnavailable
from trinity.memory.block_memory import BlockMemory
from trinity.memory.cuda_driver import LIBRARY, CudaDriver
from trinity.memory.device_blocks import copy_by_address
from trinity.transport.base import (
    MAX_REQUEST_BYTES,
    ByteRange,
    CopyPlan,
    Remote,
    check_block_numbers,
    check_read,
    find_runs,
    wait_for_copy,
)
from trinity.transport.inproc import InprocTransport

MANY_RUNS = 8  # of a copy by a kernel: the driver takes some microseconds of the host for each
COPY_POLL_S = 0.001  # between two looks for copies still running when a remote is closed


class CudaIpcDescriptor(msgspec.Struct, frozen=True):
    """A published pool: the handle of its allocation, its offset there in bytes, and the socket of its source."""

    process: int
    inproc: bytes
    handle: bytes
    offset: int
    block_bytes: int
    blocks: int
    socket: str
    secret: bytes


class GenerationRequest(msgspec.Struct, frozen=True):
    """Target to source: report the highest generation of these blocks."""

    secret: bytes
    blocks: list[int]


def device_of(memory: BlockMemory) -> int:
    """Return the ordinal of the pool's GPU. Raises ``TransportUnavailable`` if it is in CPU memory."""
    if memory.gpu is None:
        text = f"cuda_ipc moves blocks between GPUs, and the {memory.kind} pool is in memory of the host: use shm"
        raise TransportUnavailable(text, "cuda_ipc")
    return memory.gpu


def address_of(memory: BlockMemory) -> int:
    """Return the address of a pool's first byte."""
    return memory.tensor.data_ptr() if memory.raw is None else int(memory.raw.ctypes.data)


class CudaIpcTransport:
    """Copies blocks out of a peer's GPU pool. Raises ``TransportUnavailable`` if there is no NVIDIA driver."""

    scheme = "cuda_ipc"
    network = False

    def __init__(self, library: str = LIBRARY) -> None:
        self.driver = CudaDriver(library)
        self._inproc = InprocTransport()
        self._sources: list[CudaIpcSource] = []
        self._remotes: list[CudaIpcRemote] = []
        self._withdrawn: list[asyncio.Task[None]] = []

    def publish(self, memory: BlockMemory) -> bytes:
        source = CudaIpcSource(self.driver, memory, self._inproc.publish(memory))
        self._sources.append(source)
        return msgspec.msgpack.encode(source.descriptor)

    def withdraw(self, memory: BlockMemory) -> None:
        """Let go of a published pool, in a task that ``aclose`` awaits."""
        self._inproc.withdraw(memory)
        for source in [each for each in self._sources if each.memory is memory]:
            self._sources.remove(source)
            self._withdrawn.append(asyncio.get_running_loop().create_task(source.aclose()))

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Remote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=CudaIpcDescriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not a cuda_ipc descriptor: {error}", self.scheme) from error
        if peer.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {peer.block_bytes} bytes, ours {into.block_bytes}")
        if peer.process == os.getpid():  # the driver refuses to open a handle in the process that made it
            return await self._inproc.attach(peer.inproc, into)
        remote = CudaIpcRemote(self.driver, peer, into)
        await remote.open()
        self._remotes.append(remote)
        return remote

    async def aclose(self) -> None:
        for remote in self._remotes:
            await remote.aclose()
        for source in self._sources:
            await source.aclose()
        await asyncio.gather(*self._withdrawn)
        await self._inproc.aclose()
        self._remotes.clear()
        self._sources.clear()


class CudaIpcSource:
    """A published pool, and the socket on which its requests are answered."""

    def __init__(self, driver: CudaDriver, memory: BlockMemory, inproc: bytes) -> None:
        self.memory = memory
        with driver.use(device_of(memory)):
            base, _ = driver.allocation(address_of(memory))
            handle = driver.export(base)
        name = f"trinity-cuda-{os.getpid()}-{secrets.token_hex(8)}"
        self.descriptor = CudaIpcDescriptor(
            process=os.getpid(),
            inproc=inproc,
            handle=handle,
            offset=address_of(memory) - base,
            block_bytes=memory.block_bytes,
            blocks=memory.blocks,
            socket=name,
            secret=secrets.token_bytes(16),
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{name}")  # an abstract address: no file, and gone with the process
        self._socket.listen()
        self._peers: set[asyncio.StreamWriter] = set()
        self._serving = asyncio.get_running_loop().create_task(self._serve(), name=name)

    async def _serve(self) -> None:
        async with await asyncio.start_unix_server(self._answer, sock=self._socket, limit=MAX_REQUEST_BYTES) as server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._peers.add(writer)
        try:
            with suppress(OSError, EOFError, msgspec.DecodeError):
                while True:
                    request = msgspec.msgpack.decode(await receive_frame(reader), type=GenerationRequest)
                    if not compare_digest(request.secret, self.descriptor.secret):
                        return
                    writer.write(self.memory.generation(request.blocks).to_bytes(8, "big"))
        finally:
            self._peers.discard(writer)
            writer.transport.abort()

    async def aclose(self) -> None:
        self._serving.cancel()
        for writer in list(self._peers):
            writer.transport.abort()
        await asyncio.gather(self._serving, return_exceptions=True)
        while self._peers:
            await asyncio.sleep(0)
        self._socket.close()


class OpenAllocations:
    """Allocations of other processes that are open here, counted: opening one twice gives the same address."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[int, int]] = {}  # by handle: address, users

    def open(self, driver: CudaDriver, handle: bytes) -> int:
        """Open an allocation, or count one more user of it; return its address."""
        address, users = self._known.get(handle) or (driver.open(handle), 0)
        self._known[handle] = (address, users + 1)
        return address

    def close(self, driver: CudaDriver, handle: bytes) -> None:
        """Count one user less; the last one closes the allocation."""
        address, users = self._known[handle]
        if users > 1:
            self._known[handle] = (address, users - 1)
        else:
            del self._known[handle]
            driver.close(address)


_open_allocations = OpenAllocations()


class CudaIpcRemote:
    """A pool of another process, opened on the local device."""

    def __init__(self, driver: CudaDriver, peer: CudaIpcDescriptor, into: BlockMemory) -> None:
        self._driver, self._peer, self._into, self._device = driver, peer, into, device_of(into)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._request_lock = asyncio.Lock()
        self._copying = 0
        self._address = 0
        self._stream: Any = None

    async def open(self) -> None:
        """Connect to the source, then open its memory. Raises ``PeerLost``, ``HandshakeError``."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(f"\0{self._peer.socket}")
        except OSError as error:
            raise self._peer_lost() from error
        try:
            await self._request([])
            with self._driver.use(self._device):
                self._address = _open_allocations.open(self._driver, self._peer.handle)
                self._stream = self._driver.make_stream()
        except BaseException:
            await self.aclose()
            raise

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        plan = check_read("cuda_ipc", source, self._peer.blocks, target, self._into, within)
        await self._request([])
        if source:
            self._copying += 1
            try:
                await wait_for_copy(asyncio.to_thread(self._copy, plan))
            finally:
                self._copying -= 1
        return plan.bytes

    async def generation(self, source: Sequence[int]) -> int:
        check_block_numbers("cuda_ipc", "source", source, self._peer.blocks)
        return await self._request(list(source))

    async def _request(self, blocks: list[int]) -> int:
        """Ask the source for the generation of ``blocks``; none is a sign of life.

        Raises ``PeerLost``. A cancellation closes the connection.
        """
        async with self._request_lock:
            if self._reader is None or self._writer is None or self._writer.is_closing():
                raise self._peer_lost()
            try:
                send_frame(self._writer, msgspec.msgpack.encode(GenerationRequest(self._peer.secret, blocks)))
                return int.from_bytes(await self._reader.readexactly(8), "big")
            except (OSError, EOFError) as error:
                self._writer.transport.abort()
                raise self._peer_lost() from error
            except BaseException:
                self._writer.transport.abort()  # its reply must not be taken for that of the next request
                raise

    def _copy(self, plan: CopyPlan) -> None:
        driver, size, offset = self._driver, plan.unit_bytes, plan.offset
        theirs, ours = self._address + self._peer.offset, address_of(self._into)
        runs = list_copies(plan)
        if len(runs) >= MANY_RUNS:
            units = np.array((plan.target, plan.source), np.int64)
            if copy_by_address(f"cuda:{self._device}", ours, theirs, units, size, plan.piece):
                return
        with driver.use(self._device):
            try:
                for start, to, length in runs:
                    driver.copy(ours + to * size + offset, theirs + start * size + offset, length, self._stream)
            finally:
                driver.finish(self._stream)

    def _peer_lost(self) -> PeerLost:
        return PeerLost(f"process {self._peer.process} has closed its pool or is gone", "cuda_ipc", self._peer.socket)

    async def aclose(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            with suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None
        while self._copying:  # copies in flight still need the memory
            await asyncio.sleep(COPY_POLL_S)
        stream, self._stream = self._stream, None
        address, self._address = self._address, 0
        with self._driver.use(self._device):
            if stream is not None:
                self._driver.drop_stream(stream)
            if address:
                _open_allocations.close(self._driver, self._peer.handle)


def list_copies(plan: CopyPlan) -> list[tuple[int, int, int]]:
    """List (source unit, target unit, bytes) of each copy: one for a run of whole units, else one a unit."""
    if plan.length == plan.unit_bytes:
        return [(start, to, count * plan.length) for start, to, count in find_runs(plan.source, plan.target)]
    return [(start, to, plan.length) for start, to in zip(plan.source, plan.target, strict=True)]


async def receive_frame(reader: asyncio.StreamReader) -> bytes:
    """Read one length-framed request. Raises ``OSError`` if it is too long, ``EOFError`` at the end."""
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MAX_REQUEST_BYTES:
        raise OSError(f"a request of {size} bytes is above the limit of {MAX_REQUEST_BYTES}")
    return await reader.readexactly(size)


def send_frame(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Queue one length-framed request."""
    writer.write(len(data).to_bytes(4, "big") + data)
