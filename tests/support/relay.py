"""A relay between two ends of a control channel over TCP, which may alter what it passes on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

from trinity.remote.channel.channel import MORE, Address

GREETING, PROOF, SIZE, TAG = 39, 32, 4, 16  # bytes on the wire, in the order of a connection
UP, DOWN = "client to server", "server to client"


def keep(direction: str, number: int, frame: bytes) -> list[bytes]:
    """Pass every frame on as it is."""
    return [frame]


@dataclass
class Relay:
    """``alter`` is given each frame whole, with its size and tags, and returns those to pass on in its place."""

    target: Address
    alter: Callable[[str, int, bytes], list[bytes]] = keep
    start: Callable[[str, bytes], bytes] = lambda direction, greeting: greeting
    seen: dict[str, list[bytes]] = field(default_factory=lambda: {UP: [], DOWN: []})
    begun: dict[str, bytes] = field(default_factory=dict)  # greeting and proof of each direction

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(self.target.host, self.target.port)
        ways = ((UP, reader, there[1]), (DOWN, there[0], writer))
        tasks = [asyncio.ensure_future(self._pass(*way)) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in (there[1], writer):
                end.transport.abort()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pass(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, OSError):
            greeting = self.start(way, await reader.readexactly(GREETING))
            writer.write(greeting)
            proof = await reader.readexactly(PROOF)
            self.begun[way] = greeting + proof
            writer.write(proof)
            while True:
                head = await reader.readexactly(SIZE + TAG)
                frame = head + await reader.readexactly((int.from_bytes(head[:SIZE], "big") & ~MORE) + TAG)
                self.seen[way].append(frame)
                for each in self.alter(way, len(self.seen[way]), frame):
                    writer.write(each)


@asynccontextmanager
async def relay(made: Relay) -> AsyncIterator[Address]:
    """The address at which ``made`` takes connections."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        with suppress(OSError, asyncio.CancelledError):
            await made.serve(reader, writer)
        writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield Address("tcp", host="127.0.0.1", port=server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await server.wait_closed()
