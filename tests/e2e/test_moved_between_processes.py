"""Decodes that move after each token between processes, over shared memory: the tokens of generate()."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support import paths
from support.checkpoint_files import checkpoint
from support.moved_streams import read_moving, reason_of
from support.shared_launcher import sharing
from trinity.pipeline import Pipeline
from trinity.remote.fork_client import Launcher
from trinity.request import Request, Sampling
from trinity.testing.oracle import Oracle

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))


def request(**sampling: float) -> Request:
    chosen = Sampling(ignore_eos=True, **sampling)  # type: ignore[arg-type]
    return Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=40, sampling=chosen)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_decode_that_moves_at_each_step_is_exact(depth: int, torch_launcher: Launcher) -> None:
    greedy, sampled = request(), request(temperature=0.9, top_p=0.9, seed=3, repetition_penalty=1.1)
    wanted = list(Oracle(checkpoint("llava")).generate(greedy))
    own: dict[str, Any] = {"hosting": "process", "connector": "shm", "dtype": "float32", "depth": depth}

    async def main() -> None:
        async with Pipeline(checkpoint("llava"), placement="1E1P2D", **own) as pipe:
            alone = list((await pipe.complete(sampled)).token_ids)
            streams = [pipe.stream(greedy), pipe.stream(sampled)]
            found = await asyncio.gather(*(read_moving(each, ("D0", "D1")) for each in streams))
            assert [list(output.token_ids) for output, _ in found] == [wanted, alone]
            assert all(moved >= 5 for _, moved in found), found
            assert all(output.lives == 1 for output, _ in found), "no move costs a recovery"
            assert await reason_of(pipe, request(), "P0") == "no decode"

    with sharing(torch_launcher):
        asyncio.run(main())
