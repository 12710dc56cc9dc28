"""auto: every pool is published under every scheme that its owner has; whoever reads it takes the best of both sides.

In one process: inproc. On GPUs of one host: cuda_ipc. On one host: shm. Else nixl, or ucx where nixl is not installed:
never both, because each brings a copy of UCX and the second in a process cannot keep track of memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from trinity.errors import HandshakeError, TransportUnavailable
from trinity.memory.block_memory import BlockMemory
from trinity.transport.base import Remote, Transport, Within
from trinity.transport.cuda_ipc.transport import CudaIpcTransport
from trinity.transport.inproc import InprocTransport
from trinity.transport.nixl.transport import NixlTransport
from trinity.transport.shm import ShmTransport
from trinity.transport.ucx.transport import UcxTransport

logger = logging.getLogger("trinity")
BETWEEN_HOSTS: dict[str, Callable[[], Transport]] = {"nixl": NixlTransport, "ucx": UcxTransport}
ON_A_HOST: dict[str, Callable[[], Transport]] = {
    "inproc": InprocTransport,
    "cuda_ipc": CudaIpcTransport,
    "shm": ShmTransport,
}


class Descriptor(msgspec.Struct, frozen=True):
    """Where a pool is, and its descriptor for every scheme that reaches it."""

    host: str
    process: int
    pools: dict[str, bytes]


def this_host() -> str:
    """What processes have in common that can map each other's memory: the boot and the space of process numbers."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"process {os.getpid()}"  # a system that does not say: nobody else is here


class AutoTransport:
    """Picks for each peer the best of ``schemes`` (best first) that both sides have, and logs which.

    A scheme that cannot run here, or not with this pool, is left out. Raises ``TransportUnavailable`` where none is
    left.
    """

    scheme = "auto"
    network = True

    def __init__(self, schemes: Mapping[str, Callable[[], Transport]] | None = None) -> None:
        self._schemes = {**ON_A_HOST, **BETWEEN_HOSTS} if schemes is None else schemes
        self._made: dict[str, Transport] = {}
        self._missing: dict[str, str] = {}

    def publish(self, memory: BlockMemory) -> bytes:
        pools: dict[str, bytes] = {}
        for scheme in self._schemes:
            with self._noting(scheme) as missing:
                pools[scheme] = self._transport(scheme, memory).publish(memory)
            if missing.why:
                logger.debug("%s is no way to the %s pool: %s", scheme, memory.kind, missing.why)
        if not pools:
            raise self._none_left(f"the {memory.kind} pool")
        return msgspec.msgpack.encode(Descriptor(this_host(), os.getpid(), pools))

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Chosen:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=Descriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not a descriptor of auto: {error}", self.scheme) from error
        for scheme in self._schemes:
            if scheme in peer.pools and self._reaches(scheme, peer):
                with self._noting(scheme):
                    remote = await self._transport(scheme, into).attach(peer.pools[scheme], into)
                    logger.info("%s blocks of process %d come by %s", into.kind, peer.process, scheme)
                    return Chosen(remote, scheme)
        raise self._none_left(f"process {peer.process}, which has {', '.join(peer.pools)}")

    def _reaches(self, scheme: str, peer: Descriptor) -> bool:
        if scheme not in ON_A_HOST:
            return True
        near = peer.host == this_host()
        return near and (scheme != "inproc" or peer.process == os.getpid())

    def _transport(self, scheme: str, memory: BlockMemory) -> Transport:
        if scheme == "cuda_ipc" and memory.raw is not None:
            raise TransportUnavailable("the pool is in memory of the host", scheme)
        others = [each for each in self._made if each in BETWEEN_HOSTS and each != scheme]
        if scheme in BETWEEN_HOSTS and others:
            raise TransportUnavailable(f"this process has {others[0]}, and one copy of UCX is enough", scheme)
        if scheme not in self._made:
            self._made[scheme] = self._schemes[scheme]()
        return self._made[scheme]

    def _noting(self, scheme: str) -> _Noting:
        return _Noting(self._missing, scheme)

    def _none_left(self, what: str) -> TransportUnavailable:
        why = "; ".join(f"{scheme}: {said}" for scheme, said in self._missing.items())
        return TransportUnavailable(f"no transport reaches {what} ({why})", self.scheme)

    async def aclose(self) -> None:
        for transport in self._made.values():
            await transport.aclose()


class AutoHostTransport(AutoTransport):
    """auto among processes of one host: nothing listens on a network, and nothing needs to be verified."""

    scheme = "auto-host"
    network = False

    def __init__(self) -> None:
        super().__init__(ON_A_HOST)


class _Noting:
    """Takes ``TransportUnavailable`` for an answer, and keeps why."""

    def __init__(self, missing: dict[str, str], scheme: str) -> None:
        self._missing, self._scheme = missing, scheme
        self.why = ""

    def __enter__(self) -> _Noting:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, TransportUnavailable):
            self.why = self._missing[self._scheme] = str(error)
            return True
        return False


class Chosen:
    """A peer's pool by the scheme that was chosen."""

    def __init__(self, remote: Remote, scheme: str) -> None:
        self._remote, self.scheme = remote, scheme

    async def read(self, source: Sequence[int], target: Sequence[int], within: Within = None) -> int:
        return await self._remote.read(source, target, within)

    async def generation(self, source: Sequence[int]) -> int:
        return await self._remote.generation(source)

    async def aclose(self) -> None:
        await self._remote.aclose()


def reaching(scheme: str, addresses: Sequence[str | None]) -> str:
    """The name to give to instances that are reached at these addresses (None: at a socket file of this host)."""
    beyond = any(address is not None and not address.startswith("unix:") for address in addresses)
    return "auto-host" if scheme == "auto" and not beyond else scheme
