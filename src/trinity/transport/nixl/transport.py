"""nixl: the target reads a peer's pool by NIXL over UCX: shared memory on one host, RDMA or TCP between hosts.

Install it with ``pip install --no-deps nixl-cu13==1.5.1``. UCX chooses the network transports; UCX_TLS
narrows the choice. By default it uses only the loopback interface: for a peer on another host, set UCX_NET_DEVICES to
a network device in every process, on a network that only trusted hosts can reach, because UCX does not authenticate
peers.
"""

from __future__ import annotations

import msgspec

from trinity.memory.block_memory import BlockMemory
from trinity.transport.link_transport import LinkTransport, PeerPool
from trinity.transport.nixl.agent import NixlDescriptor, NixlLink, generations_region, load_nixl, pool_region
from trinity.transport.nixl.push import NixlPushLink
from trinity.transport.nixl.source import NixlSource
from trinity.transport.ucx_environment import check_network


class NixlTransport(LinkTransport):
    """Pulls blocks out of a peer's pool by one-sided reads.

    - ``timeout_s`` (seconds, 30): a read that takes longer fails with ``TransferTimeout``.
    - ``trusted_network`` (False): allow UCX_NET_DEVICES beyond the loopback interface, whose hosts are all trusted.

    Raises ``ConfigError`` where that is not said, ``TransportUnavailable`` if nixl is not installed.
    The first agent of a process takes half a second.
    """

    scheme = "nixl"
    make_link: type[NixlLink] = NixlLink
    _source: NixlSource | None

    def __init__(self, *, timeout_s: float = 30.0, trusted_network: bool = False) -> None:
        check_network(self.scheme, trusted_network)
        load_nixl()
        super().__init__(timeout_s=timeout_s)
        self._memories: list[BlockMemory] = []  # keeps registered memory alive

    def prepare(self) -> None:
        """Make the agent of pools in this host's memory, which takes half a second."""
        if self._source is None:
            self._source = NixlSource()

    def publish(self, memory: BlockMemory) -> bytes:
        pool, generations = pool_region(memory), generations_region(memory)
        if self._source is None:
            self._source = NixlSource(pool.gpu)
        metadata = self._source.register(pool, generations)
        self._memories.append(memory)
        return msgspec.msgpack.encode(
            NixlDescriptor(self._source.name, metadata, pool, generations, self._source.key.value)
        )

    def withdraw(self, memory: BlockMemory) -> None:
        """Let go of a published pool: its memory is registered no more."""
        if self._source is not None:
            self._source.withdraw(pool_region(memory), generations_region(memory))
        self._memories = [each for each in self._memories if each is not memory]

    def _parse_descriptor(self, descriptor: bytes, into: BlockMemory) -> PeerPool:
        peer = msgspec.msgpack.decode(descriptor, type=NixlDescriptor)
        return PeerPool(peer.agent, peer.pool.blocks, peer.pool.block_bytes, lambda: self.make_link(peer, into))

    async def aclose(self) -> None:
        await super().aclose()
        self._memories.clear()


class NixlPushTransport(NixlTransport):
    """Has the source write the blocks. It publishes as ``NixlTransport`` does, so each target chooses between the two.

    - ``timeout_s``, ``trusted_network``: as ``NixlTransport`` has them.
    """

    scheme = "nixl-push"
    make_link = NixlPushLink
