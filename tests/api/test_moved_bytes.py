"""A migration moves the rows that hold something, and no more than a tenth besides; what it says is what moved.

The bytes of a row and the number of rows come from transformers: the checkpoint's config and its own processor.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import cache
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig, AutoProcessor

from support.checkpoint_files import checkpoint
from support.lender import ready
from support.pipeline_driver import ONE, TEXT, TWO, Case, all_tokens, picture, serving
from trinity.core.messages import Pull
from trinity.core.transfers import TransferPolicy, rows_moved, should_cut
from trinity.errors import PeerLost
from trinity.memory.block_memory import BlockMemory, BlockRead, BlockShape, FilledRanges, PullRanges, Strided, plan_pull
from trinity.transport.base import gather_or_cancel

FLOAT = 4
LONG = Case("<image>\n" + "One word, and another. " * 20, (5,))
CASES = (TEXT, ONE, TWO, LONG)
SETTINGS: dict[str, Any] = {"prefix_cache": False, "image_cache": False, "pools": {"image": 8, "kv": 128}}


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


@cache
def rows_of(case: Case) -> dict[str, int]:
    """Bytes of the rows of each kind that this request fills."""
    config = AutoConfig.from_pretrained(checkpoint("llava"))
    text = config.text_config
    token = text.num_hidden_layers * 2 * text.num_key_value_heads * text.head_dim * FLOAT
    processor = AutoProcessor.from_pretrained(checkpoint("llava"))
    images = [picture(seed) for seed in case.pictures] or None
    ids = np.asarray(processor(text=case.prompt, images=images)["input_ids"][0])
    image = int((ids == config.image_token_id).sum()) * text.hidden_size * FLOAT
    return {kind: size for kind, size in (("image", image), ("kv", len(ids) * token)) if size}


async def check_bytes(scheme: str, **settings: Any) -> None:
    async with serving("E+P+D", connector=scheme, **SETTINGS, **settings) as pipe:
        for case in CASES:
            output = await pipe.complete(case.request())
            assert output.token_ids == case.tokens
            moved: Counter[str] = Counter()
            for record in output.transfers:
                assert record["scheme"] == scheme
                moved[record["kind"]] += record["bytes"]
            assert set(moved) == set(rows_of(case))
            for kind, needed in rows_of(case).items():
                assert needed <= moved[kind] <= 1.1 * needed, f"{scheme}: {moved[kind]} bytes of {kind} for {needed}"


@pytest.mark.parametrize(
    ("scheme", "kv"),
    [("inproc", "off"), ("inproc", "layer"), ("shm", "off"), ("nixl", "layer"), ("nixl-push", "off"), ("ucx", "layer")],
)
async def test_a_migration_moves_what_is_needed(scheme: str, kv: Any) -> None:
    ready(scheme)
    await check_bytes(scheme, transfers=TransferPolicy(kv=kv), verify="always")


# ---------------------------------------------------------------- what a pull reads

KV = BlockMemory(BlockShape("kv", (3, 2, 2, 4, 8), np.dtype(np.float32)), 4)  # a row of a head has 32 bytes
IMAGE = BlockMemory(BlockShape("image", (16, 8), np.dtype(np.float32)), 4)


@pytest.mark.parametrize(
    ("memory", "layers", "blocks", "tail", "reads"),
    [
        (IMAGE, None, 2, 0, [((0, 1), None)]),
        (IMAGE, None, 1, 3, [((0,), Strided(0, 96, 512, 1))]),
        (IMAGE, None, 2, 15, [((0, 1), None)]),
        (IMAGE, None, 2, 1, [((0,), None), ((1,), Strided(0, 32, 512, 1))]),
        (KV, None, 1, 1, [((0,), Strided(0, 32, 128, 12))]),
        (KV, (1, 3), 2, 2, [((0,), (512, 1024)), ((1,), Strided(512, 64, 128, 8))]),
        (KV, (1, 3), 2, 0, [((0, 1), (512, 1024))]),
    ],
)
def test_reads_of_a_pull(
    memory: BlockMemory, layers: tuple[int, int] | None, blocks: int, tail: int, reads: list[Any]
) -> None:
    numbers = tuple(range(blocks))
    pull = Pull("P0:1", 0, "P0", memory.kind, "r", numbers, numbers, layers=layers, tail=tail)
    planned = plan_pull(memory, pull)
    assert list(planned.reads) == [BlockRead(source, source, within) for source, within in reads]
    assert planned.filled.within == (layers and (512 * layers[0], 512 * (layers[1] - layers[0])))
    assert set(planned.filled.tails) == ({blocks - 1} if tail else set())
    assert all(each.length == tail * 32 for each in planned.filled.tails.values())


@pytest.mark.parametrize(
    ("within", "pieces"), [(None, 2), ((0, 8), 3), (Strided(0, 32, 128, 12), 36), (Strided(0, 32, 128, 1), 3)]
)
def test_pieces_are_counted(within: Any, pieces: int) -> None:
    read = BlockRead((1, 2, 5), (3, 4, 0), within)
    assert read.pieces == pieces
    assert PullRanges((read, read), FilledRanges(None, {})).pieces == 2 * pieces


def test_rows_are_never_more_than_a_tenth_too_many() -> None:
    for rows in (1, 4, 16, 576):
        for filled in range(1, 5 * rows):
            blocks, tail = -(-filled // rows), filled % rows
            moved = rows_moved(blocks, tail, rows)
            assert filled <= moved <= min(1.1 * filled, blocks * rows)
            assert (moved == filled) == (should_cut(blocks, tail, rows) or not tail)


async def test_reads_of_one_pull_end_together() -> None:
    ended: list[str] = []

    async def endless() -> int:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cancelled")
        return 0

    async def lost() -> int:
        raise PeerLost("gone", "shm", "P0")

    with pytest.raises(PeerLost):
        await gather_or_cancel([endless(), lost()])
    assert ended == ["cancelled"]
