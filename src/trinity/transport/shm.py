"""shm: pools in sealed memory files; a peer on the same host maps them and pulls.

A peer opens the file through /proc/<pid>/fd, which the kernel allows to the same user only, and maps it read-only. A
mapping outlives its owner: a read that has begun ends with the bytes that were there, and whether they still mean
something is the lease's and the control channel's business.
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
from trinity.transport.base import Within, check_numbers, check_read, copy

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Descriptor(msgspec.Struct, frozen=True):
    """Where a pool is. ``started`` tells a process from a later one with the same number."""

    process: int
    started: int
    file: int
    block_bytes: int
    blocks: int

    @property
    def size(self) -> int:
        return self.blocks * self.block_bytes


class ShmTransport:
    """Pulls blocks out of a peer's mapped pool: one copy, no message."""

    scheme = "shm"
    network = False

    def __init__(self) -> None:
        self._remotes: weakref.WeakSet[ShmRemote] = weakref.WeakSet()
        self._lent: list[BlockMemory] = []

    def publish(self, memory: BlockMemory) -> bytes:
        if memory.file is None or memory.raw is None:
            text = "shm needs a pool of the CPU in a memory file: make it with BlockMemory(..., shared=True)"
            raise TransportUnavailable(text, self.scheme)
        process = os.getpid()
        self._lent.append(memory)
        return msgspec.msgpack.encode(
            Descriptor(process, start_time(process), memory.file, memory.block_bytes, memory.blocks)
        )

    async def attach(self, descriptor: bytes, into: BlockMemory) -> ShmRemote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=Descriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not an shm descriptor: {error}", self.scheme) from error
        if peer.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {peer.block_bytes} bytes, ours {into.block_bytes}")
        remote = ShmRemote(peer, mapped(peer), into)
        self._remotes.add(remote)
        return remote

    async def aclose(self) -> None:
        for remote in list(self._remotes):
            await remote.aclose()
        for memory in self._lent:
            memory.close()
        self._remotes.clear()
        self._lent.clear()


class ShmRemote:
    """A peer's pool, mapped read-only."""

    def __init__(self, peer: Descriptor, file: np.ndarray, into: BlockMemory) -> None:
        self._peer, self._into = peer, into
        self._file: np.ndarray | None = file
        if into.raw is None:
            raise TransportUnavailable("shm copies into pools of the CPU alone; use another transport here", "shm")
        self._ours = into.raw
        self._life = Life(peer)

    async def read(self, source: Sequence[int], target: Sequence[int], within: Within = None) -> int:
        piece = check_read("shm", source, self._peer.blocks, target, self._into, within)
        theirs = self._mapped()[: self._peer.size].reshape(self._peer.blocks, self._peer.block_bytes)
        return await copy(self._ours, theirs, target, source, piece)

    async def generation(self, source: Sequence[int]) -> int:
        check_numbers("shm", "source", source, self._peer.blocks)
        theirs = self._mapped()[generations_at(self._peer.size) :].view(np.int64)
        return int(theirs[list(source)].max()) if source else 0

    def _mapped(self) -> np.ndarray:
        if self._file is None or not self._life.lasts():
            raise PeerLost(
                f"process {self._peer.process} has closed its pool or is gone", "shm", str(self._peer.process)
            )
        return self._file

    async def aclose(self) -> None:
        self._file = None  # the mapping goes with its last reader
        self._life.close()


class Life:
    """Whether a peer's process lives, asked of the kernel in a microsecond: its entry in /proc takes twenty."""

    def __init__(self, peer: Descriptor) -> None:
        self._peer = peer
        self._poll: select.poll | None = None
        self._closing: Callable[[], object] = lambda: None
        with suppress(OSError):  # an old kernel, a sandbox: its entry will do
            self._open(os.pidfd_open(peer.process))

    def _open(self, process: int) -> None:
        self._closing = weakref.finalize(self, os.close, process)
        if alive(self._peer):  # and not a later process with its number
            self._poll = select.poll()
            self._poll.register(process, select.POLLIN)

    def close(self) -> None:
        """Twice is once."""
        self._closing()

    def lasts(self) -> bool:
        return alive(self._peer) if self._poll is None else not self._poll.poll(0)


def mapped(peer: Descriptor) -> np.ndarray:
    """A peer's memory file as bytes, read-only. Raises ``PeerLost``, ``HandshakeError``."""
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


def _check_file(file: int, size: int, peer: Descriptor) -> None:
    """The file must be what its owner says, and unable to shrink under us."""
    with suppress(OSError):
        if fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS and os.fstat(file).st_size == size:
            if not alive(peer):
                raise PeerLost(f"process {peer.process} is gone, and its number is in use again", "shm")
            return
    raise HandshakeError(f"what process {peer.process} offers is no sealed memory file of {size} bytes", "shm")


def start_time(process: int) -> int:
    """When a process started, in clock ticks since boot; 0 where it is gone."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0
    fields = stat.rpartition(")")[2].split()
    return 0 if fields[0] in "ZX" else int(fields[19])


def alive(peer: Descriptor) -> bool:
    return start_time(peer.process) == peer.started
