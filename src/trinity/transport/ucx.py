"""ucx: a peer's serving thread sends blocks over UCX, by ucxx; between hosts, or processes of one.

Install it with ``pip install "ucxx-cu13==0.52.*"``. Peers that die are noticed, which leaves UCX its lanes over
TCP and, where there is one, RDMA. By default it uses the loopback interface alone: for a peer on another host, set
UCX_NET_DEVICES to a network device in every process, on a network that only hosts you trust can reach.
"""

from __future__ import annotations

import asyncio
import weakref

import msgspec

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost
from trinity.memory import BlockMemory
from trinity.transport.link import LinkedRemote
from trinity.transport.ucx_link import UcxLink
from trinity.transport.ucx_source import Lender
from trinity.transport.ucx_wire import Descriptor, load_api


class UcxTransport:
    """Asks a peer for blocks and receives them in place.

    Every read ends within ``timeout_s`` seconds, with ``TransferTimeout`` if need be. Raises ``TransportUnavailable``
    where ucxx is not installed. The first use in a process takes a second.
    """

    scheme = "ucx"

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        load_api()
        self.timeout_s = timeout_s
        self.closed = False
        self._lender: Lender | None = None
        self._remotes: weakref.WeakSet[LinkedRemote] = weakref.WeakSet()

    def publish(self, memory: BlockMemory) -> bytes:
        if self._lender is None:
            self._lender = Lender()
        return msgspec.msgpack.encode(self._lender.lend(memory))

    async def attach(self, descriptor: bytes, into: BlockMemory) -> LinkedRemote:
        try:
            peer = msgspec.msgpack.decode(descriptor, type=Descriptor)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not an ucx descriptor: {error}", self.scheme) from error
        if peer.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {peer.block_bytes} bytes, ours {into.block_bytes}")
        if self.closed:
            raise PeerLost("this end has been closed", self.scheme, peer.name)
        remote = LinkedRemote(self.scheme, peer.name, peer.blocks, into, self.timeout_s, lambda: UcxLink(peer, into))
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
