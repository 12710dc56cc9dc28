"""LinkedTransport: what transports have in common whose peers are reached by links, one for each of a peer's pools."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from trinity.errors import HandshakeError, LayoutMismatch, PeerLost
from trinity.memory.block_memory import BlockMemory
from trinity.transport.link import Link, LinkedRemote, Stoppable


class LentPool(NamedTuple):
    """A peer's pool as its descriptor says, and what makes a link to it."""

    peer: str
    blocks: int
    block_bytes: int
    link: Callable[[], Link]


class LinkedTransport:
    """Attaches to pools that peers lend, and lends by a thread of its own, ``_lender``.

    A transport adds ``publish`` and ``_lent``, which reads a descriptor (``msgspec.DecodeError`` where it is none).
    Every read ends within ``timeout_s`` seconds, with ``TransferTimeout`` if need be.
    """

    scheme = ""

    def __init__(self, *, timeout_s: float = 30.0) -> None:
        self.timeout_s = timeout_s
        self.closed = False
        self._lender: Stoppable | None = None
        self._remotes: weakref.WeakSet[LinkedRemote] = weakref.WeakSet()

    async def attach(self, descriptor: bytes, into: BlockMemory) -> LinkedRemote:
        try:
            lent = self._lent(descriptor, into)
        except msgspec.DecodeError as error:
            raise HandshakeError(f"not a descriptor of {self.scheme}: {error}", self.scheme) from error
        if lent.block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {lent.block_bytes} bytes, ours {into.block_bytes}")
        if self.closed:
            raise PeerLost("this end has been closed", self.scheme, lent.peer)
        remote = LinkedRemote(self.scheme, lent.peer, lent.blocks, into, self.timeout_s, lent.link)
        self._remotes.add(remote)
        await remote.link()
        return remote

    def _lent(self, descriptor: bytes, into: BlockMemory) -> LentPool:
        raise NotImplementedError

    async def aclose(self) -> None:
        self.closed = True
        for remote in list(self._remotes):
            await remote.aclose()
        if self._lender is not None:
            self._lender.stop()
            await asyncio.to_thread(self._lender.join)
        self._lender = None
        self._remotes.clear()
