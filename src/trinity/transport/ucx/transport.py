"""ucx: a thread of the source sends blocks over UCX, by ucxx, between hosts or between processes of one host.

Install it with ``pip install "ucxx-cu13==0.52.*"``. Noticing dead peers limits UCX to TCP and, if there is a device,
RDMA. By default it uses only the loopback interface: for a peer on another host, set UCX_NET_DEVICES to a network
device in every process, on a network that only trusted hosts can reach.
"""

from __future__ import annotations

import msgspec

from trinity.memory.block_memory import BlockMemory
from trinity.transport.link_transport import LinkTransport, PeerPool
from trinity.transport.ucx.link import UcxLink
from trinity.transport.ucx.protocol import UcxDescriptor, load_ucxx
from trinity.transport.ucx.source import UcxSource
from trinity.transport.ucx_environment import check_network


class UcxTransport(LinkTransport):
    """Requests blocks from a peer and receives them in place.

    - ``timeout_s`` (seconds, 30): a read that takes longer fails with ``TransferTimeout``.
    - ``trusted_network`` (False): allow UCX_NET_DEVICES beyond the loopback interface, whose hosts are all trusted.

    Raises ``ConfigError`` where that is not said, ``TransportUnavailable`` if ucxx is not installed.
    The first use in a process takes about a second.
    """

    scheme = "ucx"
    _source: UcxSource | None

    def __init__(self, *, timeout_s: float = 30.0, trusted_network: bool = False) -> None:
        check_network(self.scheme, trusted_network)
        load_ucxx()
        super().__init__(timeout_s=timeout_s)

    def prepare(self) -> None:
        """Start the thread that serves pools in this host's memory, with UCX in it, which takes a while."""
        if self._source is None:
            self._source = UcxSource()

    def publish(self, memory: BlockMemory) -> bytes:
        if self._source is None:
            self._source = UcxSource(memory.gpu)
        return msgspec.msgpack.encode(self._source.register(memory))

    def withdraw(self, memory: BlockMemory) -> None:
        """Let go of a published pool."""
        if self._source is not None:
            self._source.withdraw(memory)

    def _parse_descriptor(self, descriptor: bytes, into: BlockMemory) -> PeerPool:
        peer = msgspec.msgpack.decode(descriptor, type=UcxDescriptor)
        return PeerPool(peer.name, peer.blocks, peer.block_bytes, lambda: UcxLink(peer, into))
