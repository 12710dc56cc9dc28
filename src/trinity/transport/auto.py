"""auto: every pool is published by every transport that its owner has; a reader takes the best one of both sides.

Within a process: inproc. Between GPUs of one host: cuda_ipc. On one host: shm. Between hosts: nixl, or ucx if nixl is
not installed. Never both, because each brings a copy of UCX, and the second one in a process cannot track memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from trinity.errors import ConfigError, HandshakeError, LayoutMismatch, TransportUnavailable
from trinity.memory.block_memory import BlockMemory
from trinity.transport.base import ByteRange, Remote, Transport, withdraw
from trinity.transport.cuda_ipc.transport import CudaIpcTransport
from trinity.transport.inproc import InprocTransport
from trinity.transport.nixl.transport import NixlTransport
from trinity.transport.shm import ShmTransport
from trinity.transport.ucx.transport import UcxTransport

logger = logging.getLogger("trinity")
BETWEEN_HOSTS: dict[str, Callable[..., Transport]] = {"nixl": NixlTransport, "ucx": UcxTransport}
SAME_HOST: dict[str, Callable[[], Transport]] = {
    "inproc": InprocTransport,
    "cuda_ipc": CudaIpcTransport,
    "shm": ShmTransport,
}


class AutoDescriptor(msgspec.Struct, frozen=True):
    """A published pool: its host, its process, and its descriptor for every scheme that can reach it."""

    host: str
    process: int
    pools: dict[str, bytes]


def identify_host() -> str:
    """Return an identity shared by processes that can map each other's memory: boot id and pid namespace."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return f"process {os.getpid()}"  # not Linux: assume that no other process can be reached


class AutoTransport:
    """Picks for each peer the best transport that both sides have, and logs it.

    - ``schemes`` (transports by name, best first; None: all of trinity's): those to choose from.
    - ``trusted_network`` (False): as ``NixlTransport`` has it, for those that leave the host.

    A transport that cannot run here, may not (a network that nobody said to trust), or cannot reach this pool, is left
    out. Raises ``TransportUnavailable``, with the reason of each, if none remains.
    """

    scheme = "auto"
    network = True

    def __init__(
        self, schemes: Mapping[str, Callable[[], Transport]] | None = None, *, trusted_network: bool = False
    ) -> None:
        far: dict[str, Callable[[], Transport]] = {
            name: partial(make, trusted_network=trusted_network) for name, make in BETWEEN_HOSTS.items()
        }
        self._schemes = {**SAME_HOST, **far} if schemes is None else schemes
        self._transports: dict[str, Transport] = {}
        self._unavailable: dict[str, str] = {}

    def publish(self, memory: BlockMemory) -> bytes:
        pools: dict[str, bytes] = {}
        for scheme in self._schemes:
            with self._record_unavailable(scheme):
                pools[scheme] = self._transport(scheme, memory).publish(memory)
            if scheme not in pools:
                logger.debug("%s cannot publish the %s pool: %s", scheme, memory.kind, self._unavailable[scheme])
        if not pools:
            raise self._no_transport(f"the {memory.kind} pool")
        return msgspec.msgpack.encode(AutoDescriptor(identify_host(), os.getpid(), pools))

    def prepare(self) -> None:
        """Prepare every transport that can be and runs here."""
        for scheme in self._schemes:
            with self._record_unavailable(scheme):
                getattr(self._transport(scheme), "prepare", lambda: None)()

    def withdraw(self, memory: BlockMemory) -> None:
        """Let go of a published pool in every transport that has it."""
        for transport in self._transports.values():
            withdraw(transport, memory)

    async def attach(self, descriptor: bytes, into: BlockMemory) -> AutoRemote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=AutoDescriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not a descriptor of auto: {error}", self.scheme) from error
        for scheme in self._schemes:
            if scheme in peer.pools and self._reaches(scheme, peer):
                with self._record_unavailable(scheme):
                    remote = await self._transport(scheme, into).attach(peer.pools[scheme], into)
                    logger.info("%s blocks of process %d are read by %s", into.kind, peer.process, scheme)
                    return AutoRemote(remote, scheme)
        raise self._no_transport(f"process {peer.process}, which has {', '.join(peer.pools)}")

    def _reaches(self, scheme: str, peer: AutoDescriptor) -> bool:
        if scheme not in SAME_HOST:
            return True
        near = peer.host == identify_host()
        return near and (scheme != "inproc" or peer.process == os.getpid())

    def _transport(self, scheme: str, memory: BlockMemory | None = None) -> Transport:
        if scheme == "cuda_ipc" and (memory is None or memory.raw is not None):
            raise TransportUnavailable("the pool is in CPU memory", scheme)
        others = [each for each in self._transports if each in BETWEEN_HOSTS and each != scheme]
        if scheme in BETWEEN_HOSTS and others:
            raise TransportUnavailable(f"this process uses {others[0]}, and cannot load a second copy of UCX", scheme)
        if scheme not in self._transports:
            self._transports[scheme] = self._schemes[scheme]()
        return self._transports[scheme]

    @contextmanager
    def _record_unavailable(self, scheme: str) -> Iterator[None]:
        """Suppress ``TransportUnavailable`` and ``ConfigError`` in the block; the text is kept as the reason."""
        try:
            yield
        except LayoutMismatch:
            raise
        except (TransportUnavailable, ConfigError) as error:
            self._unavailable[scheme] = str(error)

    def _no_transport(self, what: str) -> TransportUnavailable:
        why = "; ".join(f"{scheme}: {reason}" for scheme, reason in self._unavailable.items())
        return TransportUnavailable(f"no transport reaches {what} ({why})", self.scheme)

    async def aclose(self) -> None:
        for transport in self._transports.values():
            await transport.aclose()


class AutoHostTransport(AutoTransport):
    """auto among processes of one host: nothing listens on a network, and blocks need not be verified."""

    scheme = "auto-host"
    network = False

    def __init__(self, *, trusted_network: bool = False) -> None:
        super().__init__(SAME_HOST, trusted_network=trusted_network)


class AutoRemote:
    """A peer's pool, read by the transport named ``scheme``."""

    def __init__(self, remote: Remote, scheme: str) -> None:
        self._remote, self.scheme = remote, scheme

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        return await self._remote.read(source, target, within)

    async def generation(self, source: Sequence[int]) -> int:
        return await self._remote.generation(source)

    async def aclose(self) -> None:
        await self._remote.aclose()


def pick_scheme(scheme: str, addresses: Sequence[str | None]) -> str:
    """Pick "auto-host" for "auto" if all addresses are on this host; None stands for a socket file of this host."""
    elsewhere = any(address is not None and not address.startswith("unix:") for address in addresses)
    return "auto-host" if scheme == "auto" and not elsewhere else scheme
