"""A transport of your own: blocks over TCP. It keeps the contract of every transport, and tokens stay the same.

python examples/custom_transport.py DIR          serves the checkpoint in DIR over it
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import sys
from collections.abc import Sequence
from secrets import compare_digest, token_hex

import torch

import trinity
from trinity.errors import HandshakeError, LayoutMismatch, PeerLost
from trinity.transport import BlockMemory, ByteRange, CopyPlan, check_block_numbers, check_read, view_units


class TcpTransport:
    """The source answers on a port of this host; whoever has the secret in the descriptor may read."""

    scheme = "tcp"

    def __init__(self) -> None:
        self._open: list[tuple[socket.socket, asyncio.Task[None]]] = []

    def publish(self, memory: BlockMemory) -> bytes:
        port, secret = socket.create_server(("127.0.0.1", 0)), token_hex()
        self._open.append((port, asyncio.ensure_future(serve(port, secret, memory))))
        return json.dumps([port.getsockname()[1], secret, memory.block_bytes, memory.blocks]).encode()

    async def attach(self, descriptor: bytes, into: BlockMemory) -> TcpRemote:
        try:
            port, secret, block_bytes, blocks = json.loads(descriptor)
        except (ValueError, TypeError) as error:
            raise HandshakeError("not the descriptor of a tcp pool", self.scheme) from error
        if block_bytes != into.block_bytes:
            raise LayoutMismatch(f"the peer's blocks have {block_bytes} bytes, ours {into.block_bytes}")
        return TcpRemote(port, secret, blocks, into)

    async def aclose(self) -> None:
        for port, task in self._open:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            port.close()


async def serve(port: socket.socket, secret: str, memory: BlockMemory) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        shown, blocks, units, offset, length, size = json.loads(await reader.readline() or '["", [], [], 0, 0, 1]')
        if compare_digest(shown, secret):
            writer.write(memory.generation(blocks).to_bytes(8, "big"))
            writer.write(view_units(memory.tensor, size)[units, offset : offset + length].cpu().numpy().tobytes())
        writer.close()

    async with await asyncio.start_server(answer, sock=port, limit=1 << 24) as server:
        await server.serve_forever()


class TcpRemote:
    def __init__(self, port: int, secret: str, blocks: int, into: BlockMemory) -> None:
        self._port, self._secret, self._blocks, self._into = port, secret, blocks, into

    async def read(self, source: Sequence[int], target: Sequence[int], within: ByteRange = None) -> int:
        plan = check_read("tcp", source, self._blocks, target, self._into, within)
        _, data = await self._ask([], plan)
        if data:  # all at once: a cancelled read writes nothing later
            arrived = torch.frombuffer(data, dtype=torch.uint8).view(-1, plan.length).to(self._into.device)
            ours = view_units(self._into.tensor, plan.unit_bytes)
            ours[list(plan.target), plan.offset : plan.offset + plan.length] = arrived
        return plan.bytes

    async def generation(self, source: Sequence[int]) -> int:
        check_block_numbers("tcp", "source", source, self._blocks)
        return (await self._ask(list(source), CopyPlan([], [], 0, 0, self._into.block_bytes)))[0]

    async def _ask(self, blocks: list[int], plan: CopyPlan) -> tuple[int, bytearray]:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
            with contextlib.closing(writer):
                writer.write(json.dumps([self._secret, blocks, list(plan.source), *plan[2:]]).encode() + b"\n")
                said = await reader.readexactly(8 + plan.bytes)
        except (OSError, EOFError) as error:
            raise PeerLost(f"the peer at port {self._port} is gone", "tcp") from error
        return int.from_bytes(said[:8], "big"), bytearray(said[8:])

    async def aclose(self) -> None:
        """Every read has had its own connection."""


async def main(model: str) -> None:
    async with trinity.Pipeline(model, "1P1D", connector=TcpTransport()) as pipe:
        output = await pipe.complete(trinity.Request("Hello", max_tokens=16))
        print(output.text, output.transfers, sep="\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python examples/custom_transport.py DIR, the directory of a checkpoint")
    asyncio.run(main(sys.argv[1]))
