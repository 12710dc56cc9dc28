"""LinkTransport: common part of the transports that reach each pool of a peer by a link of its own."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost
from trinity.memory.block_memory import BlockMemory
from trinity.transport.link import Link, LinkRemote, Stoppable


class PeerPool(NamedTuple):
    """A peer's pool as its descriptor describes it. ``link`` makes a link to it."""

    peer: str
    blocks: int
    block_bytes: int
    link: Callable[[], Link]


class LinkTransport:
    """Attaches to pools of peers over links, and serves its own pools by a thread, ``_source``.

    A transport adds ``publish`` and ``_parse_descriptor``.

    - ``timeout_s`` (seconds, 30): a read that takes longer fails with ``TransferTimeout``.
    """

    scheme = ""

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.closed = False
        self._source: Stoppable | None = None
        self._remotes: weakref.WeakSet[LinkRemote] = weakref.WeakSet()

    async def attach(self, descriptor: bytes, into: BlockMemory) -> LinkRemote:
        try:
            pool = self._parse_descriptor(descriptor, into)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not a descriptor of {self.scheme}: {error}", self.scheme) from error
        if pool.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {pool.block_bytes} bytes, ours {into.block_bytes}")
        if self.closed:
            raise PeerLost(f"this {self.scheme} transport is closed", self.scheme, pool.peer)
        remote = LinkRemote(self.scheme, pool.peer, pool.blocks, into, self.timeout_s, pool.link)
        self._remotes.add(remote)
        await remote.link()
        return remote

    def _parse_descriptor(self, descriptor: bytes, into: BlockMemory) -> PeerPool:
        """Decode a descriptor. Raises ``msgspec.DecodeError`` if it is not one of this transport."""
        raise NotImplementedError

    async def aclose(self) -> None:
        self.closed = True
        for remote in list(self._remotes):
            await remote.aclose()
        if self._source is not None:
            self._source.stop()
            await asyncio.to_thread(self._source.join)
        self._source = None
        self._remotes.clear()
