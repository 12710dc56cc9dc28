"""Transports that delay, corrupt or fail reads of a real one: for controls, and for tests of failures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from trinity.errors import PeerLost
from trinity.memory.block_memory import BlockMemory
from trinity.transport.base import ByteRange, Remote, Transport
from trinity.transport.inproc import InprocTransport

AfterRead = Callable[[BlockMemory, Sequence[int]], None]


class WrappedTransport:
    """Wraps a transport and changes every read: a delay before it, a function after it, or a failure in its place.

    - ``inner`` (``InprocTransport()``): the transport that moves the blocks.
    - ``delay_s`` (seconds, 0): delay before each read.
    - ``after`` (none): called with the target's memory and blocks after each read.
    - ``fail`` (none): ``fail(kind, count)`` returns True where the count-th read of a kind raises ``PeerLost``.
    """

    def __init__(
        self,
        inner: Transport | None = None,
        *,
        delay_s: float = 0.0,
        after: AfterRead | None = None,
        fail: Callable[[str, int], bool] | None = None,
    ) -> None:
        self.inner = inner or InprocTransport()
        self.scheme, self.network = self.inner.scheme, getattr(self.inner, "network", True)
        self.shared = getattr(self.inner, "shared", False)
        self.delay_s, self.after, self.fail = delay_s, after, fail
        self.reads: dict[str, int] = {}

    def publish(self, memory: BlockMemory) -> bytes:
        return self.inner.publish(memory)

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Remote:
        return _WrappedRemote(self, await self.inner.attach(descriptor, into), into)

    async def aclose(self) -> None:
        await self.inner.aclose()


class _WrappedRemote:
    def __init__(self, transport: WrappedTransport, inner: Remote, into: BlockMemory) -> None:
        self._transport, self._inner, self._into = transport, inner, into

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        asked, kind = self._transport, self._into.kind
        asked.reads[kind] = asked.reads.get(kind, 0) + 1
        if asked.fail is not None and asked.fail(kind, asked.reads[kind]):
            raise PeerLost(f"read {asked.reads[kind]} of {kind} blocks fails on purpose", asked.scheme)
        if asked.delay_s:
            await asyncio.sleep(asked.delay_s)
        moved = await self._inner.read(source, target, within)
        if asked.after is not None:
            asked.after(self._into, target)
        return moved

    async def generation(self, source: Sequence[int]) -> int:
        return await self._inner.generation(source)

    async def aclose(self) -> None:
        await self._inner.aclose()


def zero_after_read(kind: str) -> WrappedTransport:
    """Make a transport that zeroes the blocks of one kind after each read: the tokens must change."""

    def zero(memory: BlockMemory, blocks: Sequence[int]) -> None:
        if memory.kind == kind:
            memory.tensor[list(blocks)] = 0

    return WrappedTransport(after=zero)
