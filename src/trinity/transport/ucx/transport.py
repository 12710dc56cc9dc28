"""ucx: a peer's serving thread sends blocks over UCX, by ucxx; between hosts, or processes of one.

Install it with ``pip install "ucxx-cu13==0.52.*"``. Peers that die are noticed, which leaves UCX its lanes over
TCP and, where there is one, RDMA. By default it uses the loopback interface alone: for a peer on another host, set
UCX_NET_DEVICES to a network device in every process, on a network that only hosts you trust can reach.
"""

from __future__ import annotations

import msgspec

from trinity.memory.block_memory import BlockMemory
from trinity.transport.linked import LentPool, LinkedTransport
from trinity.transport.ucx.link import UcxLink
from trinity.transport.ucx.protocol import Descriptor, load_api
from trinity.transport.ucx.source import Lender


class UcxTransport(LinkedTransport):
    """Asks a peer for blocks and receives them in place.

    Every read ends within ``timeout_s`` seconds, with ``TransferTimeout`` if need be. Raises ``TransportUnavailable``
    where ucxx is not installed. The first use in a process takes a second.
    """

    scheme = "ucx"
    _lender: Lender | None

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        load_api()
        super().__init__(timeout_s=timeout_s)

    def publish(self, memory: BlockMemory) -> bytes:
        if self._lender is None:
            self._lender = Lender()
        return msgspec.msgpack.encode(self._lender.lend(memory))

    def _lent(self, descriptor: bytes, into: BlockMemory) -> LentPool:
        peer = msgspec.msgpack.decode(descriptor, type=Descriptor)
        return LentPool(peer.name, peer.blocks, peer.block_bytes, lambda: UcxLink(peer, into))
