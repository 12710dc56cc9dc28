"""cuda_ipc: pools on GPUs of one host, mapped by peers and copied from device to device.

The source exports the allocation that its pool is in. A target opens it once, and asks over a Unix socket before every
read: the source records an event on its default stream, behind which the target's copies wait. The end of the socket
is the end of the source. Pools are torch's: of its caching allocator, which has a pool of more than 10 MiB to itself in
one cudaMalloc; what cannot be exported (expandable segments, stream-ordered memory) is refused when it is published.
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

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost, TransportError, TransportUnavailable
from trinity.memory.block_memory import BlockMemory
from trinity.transport.base import Remote, Within, check_numbers, check_read, finish, runs
from trinity.transport.cuda_ipc.driver import LIBRARY, Driver
from trinity.transport.inproc import InprocTransport

MOST_BYTES = 1 << 24  # of a question
PAUSE_S = 0.001


class Descriptor(msgspec.Struct, frozen=True):
    """A pool: the handle of its allocation, its offset in it, and where its source answers."""

    process: int
    inproc: bytes
    handle: bytes
    event: bytes
    offset: int
    block_bytes: int
    blocks: int
    socket: str
    secret: bytes


class Ask(msgspec.Struct, frozen=True):
    """Target to source: record the event, and tell the generation of these blocks."""

    secret: bytes
    blocks: list[int]


def device_of(memory: BlockMemory) -> int:
    """The ordinal of the pool's device. Raises ``TransportUnavailable`` for a pool that is on none."""
    if memory.raw is not None:
        text = f"cuda_ipc moves blocks between GPUs, and the {memory.kind} pool is in memory of the host: use shm"
        raise TransportUnavailable(text, "cuda_ipc")
    return memory.tensor.get_device()


def address_of(memory: BlockMemory) -> int:
    return memory.tensor.data_ptr() if memory.raw is None else int(memory.raw.ctypes.data)


class CudaIpcTransport:
    """Copies blocks out of a peer's GPU pool. Raises ``TransportUnavailable`` where there is no NVIDIA driver."""

    scheme = "cuda_ipc"
    network = False

    def __init__(self, library: str = LIBRARY) -> None:
        self.driver = Driver(library)
        self._inproc = InprocTransport()
        self._sources: list[Source] = []
        self._remotes: list[CudaIpcRemote] = []

    def publish(self, memory: BlockMemory) -> bytes:
        source = Source(self.driver, memory, self._inproc.publish(memory))
        self._sources.append(source)
        return msgspec.msgpack.encode(source.descriptor)

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Remote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=Descriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not a cuda_ipc descriptor: {error}", self.scheme) from error
        if peer.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {peer.block_bytes} bytes, ours {into.block_bytes}")
        if peer.process == os.getpid():  # the driver refuses to open a handle where it was made
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
        await self._inproc.aclose()
        self._remotes.clear()
        self._sources.clear()


class Source:
    """A pool that is lent, and the socket on which it is spoken for."""

    def __init__(self, driver: Driver, memory: BlockMemory, inproc: bytes) -> None:
        self._driver, self._memory, self._device = driver, memory, device_of(memory)
        driver.use(self._device)
        base, _ = driver.allocation(address_of(memory))
        self._event, event = driver.make_event()
        name = f"trinity-cuda-{os.getpid()}-{secrets.token_hex(8)}"
        self.descriptor = Descriptor(
            process=os.getpid(),
            inproc=inproc,
            handle=driver.export(base),
            event=event,
            offset=address_of(memory) - base,
            block_bytes=memory.block_bytes,
            blocks=memory.blocks,
            socket=name,
            secret=secrets.token_bytes(16),
        )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind(f"\0{name}")  # of no file, and gone with its process
        self._socket.listen()
        self._peers: set[asyncio.StreamWriter] = set()
        self._serving = asyncio.get_running_loop().create_task(self._serve(), name=name)

    async def _serve(self) -> None:
        async with await asyncio.start_unix_server(self._answer, sock=self._socket, limit=MOST_BYTES) as server:
            await server.serve_forever()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._peers.add(writer)
        try:
            with suppress(OSError, EOFError, msgspec.DecodeError):
                while True:
                    ask = msgspec.msgpack.decode(await receive(reader), type=Ask)
                    if not compare_digest(ask.secret, self.descriptor.secret):
                        return
                    self._driver.use(self._device)
                    self._driver.record(self._event)
                    writer.write(self._memory.generation(ask.blocks).to_bytes(8, "big"))
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
        with suppress(TransportError):
            self._driver.use(self._device)
            self._driver.drop_event(self._event)


class Opened:
    """Allocations of other processes that are open here, each once: the driver would give the same address again."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[int, int]] = {}  # by handle: address, users

    def open(self, driver: Driver, handle: bytes) -> int:
        address, users = self._known.get(handle) or (driver.open(handle), 0)
        self._known[handle] = (address, users + 1)
        return address

    def close(self, driver: Driver, handle: bytes) -> None:
        address, users = self._known[handle]
        if users > 1:
            self._known[handle] = (address, users - 1)
        else:
            del self._known[handle]
            driver.close(address)


_opened = Opened()


class CudaIpcRemote:
    """A pool of another process, open on our device."""

    def __init__(self, driver: Driver, peer: Descriptor, into: BlockMemory) -> None:
        self._driver, self._peer, self._into, self._device = driver, peer, into, device_of(into)
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._asking = asyncio.Lock()
        self._copying = 0
        self._address = 0
        self._event: Any = None
        self._stream: Any = None

    async def open(self) -> None:
        """Reach the source, then open its memory and its event. Raises ``PeerLost``, ``HandshakeError``."""
        try:
            self._reader, self._writer = await asyncio.open_unix_connection(f"\0{self._peer.socket}")
        except OSError as error:
            raise self._lost() from error
        try:
            await self._ask([])
            self._driver.use(self._device)
            self._address = _opened.open(self._driver, self._peer.handle)
            self._event = self._driver.open_event(self._peer.event)
            self._stream = self._driver.make_stream()
        except BaseException:
            await self.aclose()
            raise

    async def read(self, source: Sequence[int], target: Sequence[int], within: Within = None) -> int:
        piece = check_read("cuda_ipc", source, self._peer.blocks, target, self._into, within)
        await self._ask([])
        if source:
            self._copying += 1
            try:
                await finish(asyncio.to_thread(self._copy, source, target, piece))
            finally:
                self._copying -= 1
        return len(source) * piece[1]

    async def generation(self, source: Sequence[int]) -> int:
        check_numbers("cuda_ipc", "source", source, self._peer.blocks)
        return await self._ask(list(source))

    async def _ask(self, blocks: list[int]) -> int:
        """Have the event recorded; the generation of these blocks. A cancelled question ends the connection."""
        async with self._asking:
            if self._reader is None or self._writer is None or self._writer.is_closing():
                raise self._lost()
            try:
                send(self._writer, msgspec.msgpack.encode(Ask(self._peer.secret, blocks)))
                return int.from_bytes(await self._reader.readexactly(8), "big")
            except (OSError, EOFError) as error:
                self._writer.transport.abort()
                raise self._lost() from error
            except BaseException:
                self._writer.transport.abort()  # its answer must not pass for that of the next
                raise

    def _copy(self, source: Sequence[int], target: Sequence[int], piece: tuple[int, int]) -> None:
        driver, size = self._driver, self._peer.block_bytes
        driver.use(self._device)
        driver.wait_for(self._stream, self._event)
        theirs, ours = self._address + self._peer.offset, address_of(self._into)
        try:
            for start, to, length in parts(source, target, piece, size):
                driver.copy(ours + to * size + piece[0], theirs + start * size + piece[0], length, self._stream)
        finally:
            driver.finish(self._stream)

    def _lost(self) -> PeerLost:
        return PeerLost(f"process {self._peer.process} has closed its pool or is gone", "cuda_ipc", self._peer.socket)

    async def aclose(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            with suppress(OSError):
                await self._writer.wait_closed()
        self._reader = self._writer = None
        while self._copying:  # what is asked of the driver needs the memory still
            await asyncio.sleep(PAUSE_S)
        self._driver.use(self._device)
        stream, self._stream = self._stream, None
        event, self._event = self._event, None
        address, self._address = self._address, 0
        if stream is not None:
            self._driver.drop_stream(stream)
        if event is not None:
            self._driver.drop_event(event)
        if address:
            _opened.close(self._driver, self._peer.handle)


def parts(
    source: Sequence[int], target: Sequence[int], piece: tuple[int, int], block_bytes: int
) -> list[tuple[int, int, int]]:
    """(source block, target block, bytes) of each copy: a run of whole blocks is one."""
    if piece == (0, block_bytes):
        return [(start, to, length * block_bytes) for start, to, length in runs(source, target)]
    return [(start, to, piece[1]) for start, to in zip(source, target, strict=True)]


async def receive(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    if size > MOST_BYTES:
        raise OSError(f"a question of {size} bytes")
    return await reader.readexactly(size)


def send(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(len(data).to_bytes(4, "big") + data)
