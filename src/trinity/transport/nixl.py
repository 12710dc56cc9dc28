"""nixl: a peer's pool is read by NIXL over UCX: over shared memory on one host, RDMA or TCP between hosts.

Install it with ``pip install --no-deps nixl-cu13==1.5.1``. UCX chooses the lanes; UCX_TLS narrows the choice. By
default it uses the loopback interface alone: for a peer on another host, set UCX_NET_DEVICES to a network device in
every process, on a network that only hosts you trust can reach, because UCX does not authenticate peers.
"""

from __future__ import annotations

import asyncio
import weakref

import msgspec

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost
from trinity.memory import BlockMemory
from trinity.transport.link import LinkedRemote
from trinity.transport.nixl_agent import Descriptor, NixlLink, generations_of, load_api, region_of
from trinity.transport.nixl_push import NixlPushLink
from trinity.transport.nixl_source import Lender


class NixlRemote(LinkedRemote):
    """A peer's pool, read by nixl."""


class NixlTransport:
    """Pulls blocks out of a peer's pool by one-sided reads.

    Every read ends within ``timeout_s`` seconds, with ``TransferTimeout`` if need be. Raises ``TransportUnavailable``
    where nixl is not installed. The first agent of a process takes half a second.
    """

    scheme = "nixl"
    make_link: type[NixlLink] = NixlLink

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        load_api()
        self.timeout_s = timeout_s
        self.closed = False
        self._lender: Lender | None = None
        self._memories: list[BlockMemory] = []  # what is registered must not be freed
        self._remotes: weakref.WeakSet[NixlRemote] = weakref.WeakSet()

    def publish(self, memory: BlockMemory) -> bytes:
        pool, generations = region_of(memory), generations_of(memory)
        if self._lender is None:
            self._lender = Lender(pool)
        metadata = self._lender.lend(pool, generations)
        self._memories.append(memory)
        return msgspec.msgpack.encode(Descriptor(self._lender.name, metadata, pool, generations))

    async def attach(self, descriptor: bytes, into: BlockMemory) -> NixlRemote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=Descriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not a nixl descriptor: {error}", self.scheme) from error
        if peer.pool.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {peer.pool.block_bytes} bytes, ours {into.block_bytes}")
        if self.closed:
            raise PeerLost("this end has been closed", self.scheme, peer.agent)
        named = (self.scheme, peer.agent, peer.pool.blocks)
        remote = NixlRemote(*named, into, self.timeout_s, lambda: self.make_link(peer, into))
        self._remotes.add(remote)
        await remote.link()
        return remote

    async def aclose(self) -> None:
        self.closed = True
        for remote in list(self._remotes):
            await remote.aclose()
        if self._lender is not None:
            self._lender.stop()
            await asyncio.to_thread(self._lender.join)
        self._lender = None
        self._remotes.clear()
        self._memories.clear()


class NixlPushTransport(NixlTransport):
    """Has the peer write. Pools and peers are those of ``NixlTransport``: each target chooses for itself."""

    scheme = "nixl-push"
    make_link = NixlPushLink
