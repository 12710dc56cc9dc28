"""A forger on the line: he rewrites blocks so that the digest without a key, whose formula is public, stays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from support.wrapped_transports import WrappedTransport
from trinity.memory.block_memory import BlockMemory
from trinity.transport.shm import ShmTransport

STEP, WRAP = 0x9E3779B97F4A7C15, 1 << 64  # csrc/blocks/digest.cpp


def forge(memory: BlockMemory, blocks: Sequence[int], at: int = 0) -> None:
    """Exchange what words ``at`` and the next of each block add to its digest, by content and place: the sum stays."""
    assert memory.raw is not None
    words = memory.raw.view(np.uint64)
    for block in blocks:
        first, second = int(words[block, at]), int(words[block, at + 1])
        words[block, at : at + 2] = (second + STEP) % WRAP, (first - STEP) % WRAP


def forging_network() -> WrappedTransport:
    """Make a transport that counts as a network, on which somebody forges each KV block."""

    def alter(memory: BlockMemory, blocks: Sequence[int]) -> None:
        if memory.kind == "kv":
            forge(memory, blocks)

    made = WrappedTransport(ShmTransport(), after=alter)
    made.scheme, made.network = "forged", True
    return made
