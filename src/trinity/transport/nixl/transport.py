"""nixl: a peer's pool is read by NIXL over UCX: over shared memory on one host, RDMA or TCP between hosts.

Install it with ``pip install --no-deps nixl-cu13==1.5.1``. UCX chooses the lanes; UCX_TLS narrows the choice. By
default it uses the loopback interface alone: for a peer on another host, set UCX_NET_DEVICES to a network device in
every process, on a network that only hosts you trust can reach, because UCX does not authenticate peers.
"""

from __future__ import annotations

import msgspec

from trinity.memory.block_memory import BlockMemory
from trinity.transport.linked import LentPool, LinkedTransport
from trinity.transport.nixl.agent import Descriptor, NixlLink, generations_of, load_api, region_of
from trinity.transport.nixl.push import NixlPushLink
from trinity.transport.nixl.source import Lender


class NixlTransport(LinkedTransport):
    """Pulls blocks out of a peer's pool by one-sided reads.

    Every read ends within ``timeout_s`` seconds, with ``TransferTimeout`` if need be. Raises ``TransportUnavailable``
    where nixl is not installed. The first agent of a process takes half a second.
    """

    scheme = "nixl"
    make_link: type[NixlLink] = NixlLink
    _lender: Lender | None

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        load_api()
        super().__init__(timeout_s=timeout_s)
        self._memories: list[BlockMemory] = []  # what is registered must not be freed

    def publish(self, memory: BlockMemory) -> bytes:
        pool, generations = region_of(memory), generations_of(memory)
        if self._lender is None:
            self._lender = Lender(pool)
        metadata = self._lender.lend(pool, generations)
        self._memories.append(memory)
        return msgspec.msgpack.encode(Descriptor(self._lender.name, metadata, pool, generations))

    def _lent(self, descriptor: bytes, into: BlockMemory) -> LentPool:
        peer = msgspec.msgpack.decode(descriptor, type=Descriptor)
        return LentPool(peer.agent, peer.pool.blocks, peer.pool.block_bytes, lambda: self.make_link(peer, into))

    async def aclose(self) -> None:
        await super().aclose()
        self._memories.clear()


class NixlPushTransport(NixlTransport):
    """Has the peer write. Pools and peers are those of ``NixlTransport``: each target chooses for itself."""

    scheme = "nixl-push"
    make_link = NixlPushLink
