"""nixl: a peer's pool is read by NIXL over UCX: over shared memory on one host, RDMA or TCP between hosts.

Install it with ``pip install --no-deps nixl-cu13==1.5.1``. UCX chooses the lanes; UCX_TLS narrows the choice. By
default it uses the loopback interface alone: for a peer on another host, set UCX_NET_DEVICES to a network device in
every process, on a network that only hosts you trust can reach, because UCX does not authenticate peers.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence

import msgspec

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost
from trinity.memory import BlockMemory
from trinity.transport.base import check_blocks
from trinity.transport.nixl_agent import Descriptor, Lender, Link, load_api, region_of


class NixlTransport:
    """Pulls blocks out of a peer's pool by one-sided reads.

    Every read ends within ``timeout_s`` seconds, with ``TransferTimeout`` if need be. Raises ``TransportUnavailable``
    where nixl is not installed. The first agent of a process takes half a second.
    """

    scheme = "nixl"

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        load_api()
        self.timeout_s = timeout_s
        self.closed = False
        self._lender: Lender | None = None
        self._memories: list[BlockMemory] = []  # what is registered must not be freed
        self._remotes: weakref.WeakSet[NixlRemote] = weakref.WeakSet()

    def publish(self, memory: BlockMemory) -> bytes:
        pool = region_of(memory)
        if self._lender is None:
            self._lender = Lender(pool)
        metadata = self._lender.lend(pool)
        self._memories.append(memory)
        return msgspec.msgpack.encode(Descriptor(self._lender.name, metadata, pool))

    async def attach(self, descriptor: bytes, into: BlockMemory) -> NixlRemote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=Descriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not a nixl descriptor: {error}", self.scheme) from error
        if peer.pool.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {peer.pool.block_bytes} bytes, ours {into.block_bytes}")
        remote = NixlRemote(self, peer, into)
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


class NixlRemote:
    """A peer's pool. After a failed read the next one connects anew."""

    def __init__(self, transport: NixlTransport, peer: Descriptor, into: BlockMemory) -> None:
        self._transport, self._peer, self._into = transport, peer, into
        self._link: Link | None = None
        self._linking = asyncio.Lock()
        self._closed = False

    async def read(self, source: Sequence[int], target: Sequence[int]) -> int:
        check_blocks("nixl", source, self._peer.pool.blocks, target, self._into)
        link = await self.link()
        if source:
            await link.read(source, target, self._transport.timeout_s)
        return len(source) * self._peer.pool.block_bytes

    async def link(self) -> Link:
        """The connection that is in use, made where there is none."""
        async with self._linking:
            if self._closed or self._transport.closed:
                raise PeerLost("this end has been closed", "nixl", self._peer.agent)
            if self._link is None or self._link.failure is not None:
                await self._leave()
                self._link = Link(self._peer, self._into)
            await self._link.open()
            return self._link

    async def _leave(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.stop()
            await asyncio.to_thread(link.join)

    async def aclose(self) -> None:
        self._closed = True
        await self._leave()

    def __del__(self) -> None:
        if self._link is not None:
            self._link.stop()
