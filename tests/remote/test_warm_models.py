"""A launcher that has served one model serves another: real ones, exactly."""

from __future__ import annotations

import asyncio

import pytest

from support.bare_launchers import Births
from support.bare_launchers import started as started
from support.checkpoint_files import checkpoint
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling
from trinity.testing.oracle import Oracle

GREEDY = Sampling(ignore_eos=True)
REAL = {"llama": "PD", "llava": "E+PD"}


@pytest.mark.slow
async def test_one_model_after_another_is_served_exactly_by_one_launcher(started: Births) -> None:
    request = Request("Hello, who is there?", max_tokens=6, sampling=GREEDY)
    wanted = await asyncio.to_thread(lambda: [Oracle(checkpoint(name)).generate_all([request])[0] for name in REAL])
    got = []
    for name, placement in REAL.items():
        cache = CacheConfig(pools={"image": 4, "kv": 64})
        async with Pipeline(checkpoint(name), placement, hosting="process", dtype="float32", cache=cache) as pipe:
            got.append((await pipe.complete(request)).token_ids)
    assert got == wanted
    assert len(started) == 1, "torch was imported by one launcher"
