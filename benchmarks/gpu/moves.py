"""Migrations between pools on one GPU: within a process, and from another one by cuda_ipc."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.model import synchronize
from benchmarks.transfers.probe import pool
from benchmarks.transfers.transports import Medium, ask, process
from trinity.transport import make_transport

WORDS = 8  # bytes of one


@dataclass
class Move:
    """Reads of ``blocks`` blocks: seconds of each, and of one copy of as many bytes in one piece on the device."""

    what: str
    medium: str
    blocks: int
    bytes: int
    seconds: list[float]
    one_piece_s: float

    @property
    def p95_s(self) -> float:
        return sorted(self.seconds)[round(0.95 * (len(self.seconds) - 1))]


def measure(device: str, medium: str, cases: list[tuple[str, int, int]], reads: int, one_piece: float) -> list[Move]:
    """``cases``: what, its blocks, bytes of a block. ``one_piece``: bytes/s of a copy, read and written together.

    Raises ``RuntimeError`` where other blocks came than were lent.
    """
    found = []
    for what, blocks, block_bytes in cases:
        order = {"pools": [[2 * blocks, block_bytes]], "device": device}
        with ExitStack() as stack:
            descriptor = None
            if medium != "inproc":
                lender = stack.enter_context(process("lend", Medium(medium, medium)))
                descriptor = bytes.fromhex(ask(lender, order, f"the lender over {medium}")[0])
            seconds = asyncio.run(_reads(device, medium, blocks, block_bytes, descriptor, reads))
        size = blocks * block_bytes
        found.append(Move(what, medium, blocks, size, seconds, 2 * size / one_piece))
    return found


async def _reads(
    device: str, medium: str, blocks: int, block_bytes: int, descriptor: bytes | None, reads: int
) -> list[float]:
    """``descriptor`` None: of a pool of this process."""
    transport, ours = make_transport(medium), pool(2 * blocks, block_bytes, 0, device)
    own = pool(2 * blocks, block_bytes, 7, device) if descriptor is None else None
    remote = await transport.attach(transport.publish(own) if own is not None else descriptor or b"", ours)
    seconds = [await _read(remote, 2 * blocks, blocks, ours) for _ in range(reads + 1)]
    await transport.aclose()
    return seconds[1:]


async def _read(remote: Any, there: int, blocks: int, ours: Any) -> float:
    draw = random.Random(blocks)
    source, target = (draw.sample(range(there), blocks) for _ in range(2))
    started = time.perf_counter()
    await remote.read(source, target)
    synchronize(str(ours.tensor.device))
    spent = time.perf_counter() - started
    words = ours.block_bytes // WORDS
    first = torch.tensor(source, device=ours.tensor.device)[:, None] * words + 7
    if not torch.equal(ours.tensor[target][:, :1], first):
        raise RuntimeError("other blocks came than were lent")
    return spent
