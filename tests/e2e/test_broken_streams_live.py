"""SIGKILL of an instance amid a prompt that it streams: whole blocks at its target are not computed again, exactly."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from trinity import FailurePolicy
from trinity.core.messages import KV
from trinity.core.prefix_cache import DIGEST
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Output, Request, Sampling
from trinity.testing.oracle import Oracle

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
TEXT = "this is said of it, at length, so that there is much to prefill in many chunks; " * 24
BUDGET, KV_BLOCK = 16, 16
WHOLE = 12  # blocks that its prefill instance has reported as it dies: these have been announced
LIVENESS_S = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()
    with sharing(torch_launcher):
        yield


def asked() -> Request:
    return Request(f"<image>\n{TEXT} What is it?", images=PHOTOS[:1], max_tokens=20, sampling=Sampling(ignore_eos=True))


@cache
def wanted() -> list[int]:
    return Oracle(checkpoint("llava")).generate_all([asked()])[0]


async def serve(placement: str, **cache: Any) -> tuple[Output, str]:
    """Serve the request, and kill who prefills it once that has done ``WHOLE`` blocks. Returns its name, too."""
    settings: dict[str, Any] = {
        "dtype": "float32",
        "hosting": "process",
        "pools": {"image": 24, "kv": 512},
        "failures": FailurePolicy(),
        "routing": "least_loaded",  # reports are sent soon
        "rules": BatchRules(token_budget=BUDGET, leading_text=False),
        "transfers": TransferPolicy(kv="layer"),
        **cache,
    }
    async with Pipeline(checkpoint("llava"), placement, **pipeline_options(settings)) as pipe:
        serving = asyncio.ensure_future(pipe.complete(asked()))
        victim = await until_prefilled(pipe, busy=not cache)
        os.kill(pipe.processes[victim].process, signal.SIGKILL)
        return await serving, victim


async def until_prefilled(pipe: Pipeline, busy: bool) -> str:
    """Wait until an instance that only prefills has done so much of the prompt. Returns its name."""
    core = pipe._frontend.core
    names = [name for name, peer in core.router.peers.items() if "P" in peer.roles and "D" not in peer.roles]
    async with asyncio.timeout(LIVENESS_S):
        while True:
            for entry in core.entries.values():
                route = entry.route
                prefills = [name for name in route if name in names]
                if prefills and route[-1] != prefills[-1] and entry.place is not None:
                    load = core.router.loads.get(prefills[-1])
                    done = len(load.cached.get(KV, b"")) // DIGEST if load is not None else 0
                    if done >= WHOLE or not busy:
                        assert not entry.delivered, "its prefill has not ended"
                        return prefills[-1]
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("placement", ["1E2P1D", "1E1P1PD"])
async def test_a_prefill_goes_on_behind_what_it_has_streamed(placement: str) -> None:
    output, victim = await serve(placement)
    assert output.token_ids == wanted()
    assert (output.lives, victim) == (2, output.former_lives[0]["route"][1]), output.former_lives
    prompt = output.prompt_tokens
    print(placement, prompt, output.recomputed_tokens, output.route, output.transfers)
    assert output.recomputed_tokens <= prompt - (WHOLE - 4) * KV_BLOCK


async def test_without_a_prefix_cache_all_of_it_is_prefilled_again() -> None:
    output, _ = await serve("1E2P1D", prefix_cache=False)
    assert output.token_ids == wanted()
    assert output.recomputed_tokens == output.prompt_tokens
