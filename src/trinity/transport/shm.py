"""shm: pools in sealed memory files; peers on the same host map them and pull.

A peer opens the file through /proc/<pid>/fd, which the kernel allows only to the same user, and maps it read-only. A
mapping outlives its owner: a read that has begun finishes with the bytes that were there. Leases and the control
channel decide if those bytes are still valid.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import select
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost, TransportUnavailable
from trinity.memory.block_memory import GENERATION_BYTES, BlockMemory, generations_at
from trinity.memory.native import PoolCopier
from trinity.transport.base import ByteRange, check_block_numbers, check_read, run_copy

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class ShmDescriptor(msgspec.Struct, frozen=True):
    """A published pool: process and file descriptor. ``started`` tells a process from a later one with its number."""

    process: int
    started: int
    file: int
    block_bytes: int
    blocks: int

    @property
    def size(self) -> int:
        """Size of the pool in bytes."""
        return self.blocks * self.block_bytes


class ShmTransport:
    """Pulls blocks out of a peer's mapped pool: one copy, no message to the source."""

    scheme = "shm"
    network = False
    shared = True

    def __init__(self) -> None:
        self._remotes: weakref.WeakSet[ShmRemote] = weakref.WeakSet()
        self._published: list[BlockMemory] = []

    def publish(self, memory: BlockMemory) -> bytes:
        if memory.file is None or memory.raw is None:
            text = "shm needs a CPU pool in a memory file: make it with BlockMemory(..., shared=True)"
            raise TransportUnavailable(text, self.scheme)
        process = os.getpid()
        self._published.append(memory)
        return msgspec.msgpack.encode(
            ShmDescriptor(process, read_start_time(process), memory.file, memory.block_bytes, memory.blocks)
        )

    def withdraw(self, memory: BlockMemory) -> None:
        """Let go of a published pool; its memory file is closed with the pool."""
        self._published = [each for each in self._published if each is not memory]

    async def attach(self, descriptor: bytes, into: BlockMemory) -> ShmRemote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=ShmDescriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not an shm descriptor: {error}", self.scheme) from error
        if peer.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {peer.block_bytes} bytes, ours {into.block_bytes}")
        remote = ShmRemote(peer, map_pool(peer), into)
        self._remotes.add(remote)
        return remote

    async def aclose(self) -> None:
        for remote in list(self._remotes):
            await remote.aclose()
        for memory in self._published:
            memory.close()
        self._remotes.clear()
        self._published.clear()


class ShmRemote:
    """A peer's pool, mapped read-only."""

    def __init__(self, peer: ShmDescriptor, file: np.ndarray, into: BlockMemory) -> None:
        self._peer, self._into = peer, into
        self._file: np.ndarray | None = file
        if into.raw is None:
            raise TransportUnavailable(
                "shm copies only into CPU pools; use connector='cuda_ipc' or 'nixl' for pools on a GPU", "shm"
            )
        self._copier: PoolCopier | None = PoolCopier(into.raw, file[: peer.size])
        self._process = ProcessWatch(peer)

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        plan = check_read("shm", source, self._peer.blocks, target, self._into, within)
        self._bytes()
        assert self._copier is not None
        return await run_copy(self._copier, plan)

    async def generation(self, source: Sequence[int]) -> int:
        check_block_numbers("shm", "source", source, self._peer.blocks)
        theirs = self._bytes()[generations_at(self._peer.size) :].view(np.int64)
        return int(theirs[list(source)].max()) if source else 0

    def _bytes(self) -> np.ndarray:
        if self._file is None or not self._process.is_alive():
            raise PeerLost(
                f"process {self._peer.process} has closed its pool or is gone", "shm", str(self._peer.process)
            )
        return self._file

    async def aclose(self) -> None:
        self._file = self._copier = None  # the last reader releases the mapping
        self._process.close()


class ProcessWatch:
    """Watches if a peer's process lives, by a pidfd: one check takes a microsecond, reading /proc takes twenty."""

    def __init__(self, peer: ShmDescriptor) -> None:
        self._peer = peer
        self._poll: select.poll | None = None
        self._closing: Callable[[], object] = lambda: None
        with suppress(OSError):  # an old kernel or a sandbox: read /proc instead
            self._open(os.pidfd_open(peer.process))

    def _open(self, process: int) -> None:
        self._closing = weakref.finalize(self, os.close, process)
        if is_alive(self._peer):  # and not a later process with its number
            self._poll = select.poll()
            self._poll.register(process, select.POLLIN)

    def close(self) -> None:
        """Release the pidfd. Calling it twice does no harm."""
        self._closing()

    def is_alive(self) -> bool:
        """Tell whether the process still runs."""
        return is_alive(self._peer) if self._poll is None else not self._poll.poll(0)


def map_pool(peer: ShmDescriptor) -> np.ndarray:
    """Map a peer's memory file read-only, as bytes.

    Raises ``PeerLost`` if it is gone, ``HandshakeError`` if the file is not the one described.
    """
    size = generations_at(peer.size) + peer.blocks * GENERATION_BYTES
    try:
        file = os.open(f"/proc/{peer.process}/fd/{peer.file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PeerLost(f"the pool of process {peer.process} cannot be opened: {error}", "shm") from error
    try:
        _check_file(file, size, peer)
        return np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8)
    finally:
        os.close(file)


def _check_file(file: int, size: int, peer: ShmDescriptor) -> None:
    """Check that the file is the one described, and sealed so that it cannot shrink while it is mapped."""
    with suppress(OSError):
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS and os.fstat(file).st_size == size:
            if not is_alive(peer):
                raise PeerLost(f"process {peer.process} is gone, and its number is in use again", "shm")
            return
    raise HandshakeError(f"the pool of process {peer.process} is not a sealed memory file of {size} bytes", "shm")


def read_start_time(process: int) -> int:
    """Read the start time of a process, in clock ticks since boot; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def is_alive(peer: ShmDescriptor) -> bool:
    """Tell whether the process that published a pool still runs, by its entry in /proc."""
    return read_start_time(peer.process) == peer.started
