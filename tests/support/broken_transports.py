"""Transports that break the contract, each in one way, with what check_transport must say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from support.wrapped_transports import WrappedTransport, zero_after_read
from trinity.errors import HandshakeError, OfferRefused, TransportError
from trinity.memory.block_memory import BlockMemory
from trinity.transport.base import ByteRange, Remote, Strided, Transport
from trinity.transport.inproc import InprocTransport


@dataclass
class Broken:
    """What it does, and the words by which the contract's check must find it out."""

    make: Callable[[], Transport]
    found: str


class Altered(InprocTransport):
    """Attaches with a remote of its own around inproc's."""

    def __init__(self, remote: Callable[[Remote], Remote]) -> None:
        super().__init__()
        self.remote = remote

    async def attach(self, descriptor: bytes, into: BlockMemory) -> Any:
        return self.remote(await super().attach(descriptor, into))


class Plain:
    """Passes everything on."""

    def __init__(self, inner: Remote) -> None:
        self.inner = inner

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        return await self.inner.read(source, target, within)

    async def generation(self, source: Sequence[int]) -> int:
        return await self.inner.generation(source)

    async def aclose(self) -> None:
        await self.inner.aclose()


class WholeBlocks(Plain):
    """Ignores ``within``, and says what was asked for."""

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        moved = await self.inner.read(source, target)
        return moved if within is None else len(source) * within[1]


class FirstPiece(Plain):
    """Ignores the offset of ``within``."""

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        return await self.inner.read(source, target, within and (0, within[1]))


class FirstRun(Plain):
    """Moves the first of several runs of a block, and says that all came."""

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        if not isinstance(within, Strided):
            return await self.inner.read(source, target, within)
        return within.runs * await self.inner.read(source, target, (within.offset, within.length))


class AlwaysZero(Plain):
    async def generation(self, source: Sequence[int]) -> int:
        await self.inner.generation(source)
        return 0


class Remembered(Plain):
    """Asks for each generation once."""

    def __init__(self, inner: Remote) -> None:
        super().__init__(inner)
        self.known: dict[tuple[int, ...], int] = {}

    async def generation(self, source: Sequence[int]) -> int:
        if tuple(source) not in self.known:
            self.known[tuple(source)] = await self.inner.generation(source)
        return self.known[tuple(source)]


class FirstGeneration(Plain):
    """Looks at one block of many."""

    async def generation(self, source: Sequence[int]) -> int:
        return await self.inner.generation(source[:1])


class Swallowing(Plain):
    """Whatever goes wrong, it says that all went well."""

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        try:
            return await self.inner.read(source, target, within)
        except (OfferRefused, TransportError):
            return len(source)


class Leaving(Plain):
    """A cancelled reader leaves while the copy goes on."""

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        return await asyncio.shield(asyncio.ensure_future(self._later(source, target, within)))

    async def _later(self, source: Sequence[int], target: Sequence[int], within: ByteRange) -> int:
        await asyncio.sleep(0.001)
        return await self.inner.read(source, target, within)


class Lenient(InprocTransport):
    """Takes whatever it is given for a descriptor."""

    async def attach(self, descriptor: bytes, into: BlockMemory):  # type: ignore[no-untyped-def]
        try:
            return await super().attach(descriptor, into)
        except HandshakeError:
            return None


class Forgetful(InprocTransport):
    """Goes on serving after it was closed."""

    async def aclose(self) -> None:
        return None


def swap(memory: BlockMemory, blocks: Sequence[int]) -> None:
    memory.tensor[list(blocks)] = memory.tensor[list(reversed(blocks))]


def truncate(memory: BlockMemory, blocks: Sequence[int]) -> None:
    if len(blocks):
        memory.tensor[blocks[-1]] = -1.0


def overrun(memory: BlockMemory, blocks: Sequence[int]) -> None:
    memory.tensor[(max(blocks, default=0) + 1) % memory.blocks] = 5.0


CONTENT = "the target's blocks are not what was asked for"
BROKEN: dict[str, Broken] = {
    "wrong order": Broken(lambda: WrappedTransport(after=swap), CONTENT),
    "silent truncation": Broken(lambda: WrappedTransport(after=truncate), CONTENT),
    "wrong block": Broken(lambda: WrappedTransport(after=overrun), CONTENT),
    "late write after cancel": Broken(lambda: Altered(Leaving), "after a cancelled read"),
    "read fails": Broken(lambda: WrappedTransport(fail=lambda kind, count: True), "fails on purpose"),
    "swallowed error": Broken(lambda: Altered(Swallowing), "must raise a TransportError"),
    "zeroed": Broken(lambda: zero_after_read("kv"), CONTENT),
    "within ignored": Broken(lambda: Altered(WholeBlocks), "within"),
    "offset ignored": Broken(lambda: Altered(FirstPiece), "within"),
    "stride ignored": Broken(lambda: Altered(FirstRun), "Strided"),
    "stale generation": Broken(lambda: Altered(AlwaysZero), r"generation\(\[3\]\) said 0"),
    "generation remembered": Broken(lambda: Altered(Remembered), "it is 1099511627776"),
    "generation of one block": Broken(lambda: Altered(FirstGeneration), r"generation\(\[4, 3, 17\]\) said 0"),
    "garbage accepted": Broken(Lenient, "must raise HandshakeError"),
    "serves when closed": Broken(Forgetful, "from a closed peer"),
}
