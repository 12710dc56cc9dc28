"""shm: pools in sealed memory files; a peer on the same host maps them and pulls.

A peer opens the file through /proc/<pid>/fd, which the kernel allows to the same user only, and maps it read-only. A
mapping outlives its owner: a read that has begun ends with the bytes that were there, and whether they still mean
something is the lease's and the control channel's business.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec
import numpy as np

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost, TransportUnavailable
from trinity.memory import BlockMemory
from trinity.transport.base import check_blocks, finish, runs

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
INLINE_BYTES = 256 * 1024  # below this a copy costs less than the hop to a thread


class Descriptor(msgspec.Struct, frozen=True):
    """Where a pool is. ``started`` tells a process from a later one with the same number."""

    process: int
    started: int
    file: int
    block_bytes: int
    blocks: int


class ShmTransport:
    """Pulls blocks out of a peer's mapped pool: one copy, no message."""

    scheme = "shm"

    def __init__(self) -> None:
        self._remotes: list[ShmRemote] = []
        self._lent: list[BlockMemory] = []

    def publish(self, memory: BlockMemory) -> bytes:
        if memory.file is None:
            text = "shm needs a pool in a memory file: make it with BlockMemory(..., shared=True)"
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
        self._remotes.append(remote)
        return remote

    async def aclose(self) -> None:
        for remote in self._remotes:
            await remote.aclose()
        for memory in self._lent:
            memory.close()
        self._remotes.clear()
        self._lent.clear()


class ShmRemote:
    """A peer's pool, mapped read-only."""

    def __init__(self, peer: Descriptor, theirs: np.ndarray, into: BlockMemory) -> None:
        self._peer, self._into = peer, into
        self._theirs: np.ndarray | None = theirs
        self._ours = into.words.numpy().view(np.uint8).reshape(into.blocks, into.block_bytes)

    async def read(self, source: Sequence[int], target: Sequence[int]) -> int:
        check_blocks("shm", source, self._peer.blocks, target, self._into)
        if self._theirs is None or not alive(self._peer):
            raise PeerLost(
                f"process {self._peer.process} has closed its pool or is gone", "shm", str(self._peer.process)
            )
        moved = len(source) * self._peer.block_bytes
        if moved <= INLINE_BYTES:
            copy_rows(self._theirs, source, self._ours, target)
        else:
            await finish(asyncio.to_thread(copy_rows, self._theirs, source, self._ours, target))
        return moved

    async def aclose(self) -> None:
        self._theirs = None  # the mapping goes with its last reader


def copy_rows(theirs: np.ndarray, source: Sequence[int], ours: np.ndarray, target: Sequence[int]) -> None:
    """Copy rows pairwise, run by run; numpy lets go of the interpreter's lock for each."""
    for start, to, length in runs(source, target):
        np.copyto(ours[to : to + length], theirs[start : start + length])


def mapped(peer: Descriptor) -> np.ndarray:
    """A peer's pool as [blocks, block_bytes] uint8, read-only. Raises ``PeerLost``, ``HandshakeError``."""
    size = peer.blocks * peer.block_bytes
    try:
        file = os.open(f"/proc/{peer.process}/fd/{peer.file}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise PeerLost(f"the pool of process {peer.process} cannot be opened: {error}", "shm") from error
    try:
        _check_file(file, size, peer)
        return np.frombuffer(mmap.mmap(file, size, prot=mmap.PROT_READ), np.uint8).reshape(
            peer.blocks, peer.block_bytes
        )
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
