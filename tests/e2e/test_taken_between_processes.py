"""Requests and offers that a sibling takes, between processes: tokens of generate(), of themselves where sampled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from support import paths
from support.checkpoint_files import checkpoint
from support.lender import ready
from support.moved_streams import check_alike
from support.pipeline_options import pipeline_options
from support.shared_launcher import sharing
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import KvMode, TransferPolicy
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Output, Request, Sampling
from trinity.testing.oracle import Oracle

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
RULES = BatchRules(token_budget=16, image_budget=1)  # a long prompt takes many steps
ROUNDS = 5


@pytest.fixture(scope="module", autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()  # it takes seconds to load, which is not for an event loop
    wanted_uneven()
    with sharing(torch_launcher):
        yield


def skewed(**sampling: Any) -> list[Request]:
    """Long and short in turn: of two instances the first one gets what is long."""
    plain = Sampling(ignore_eos=True, **sampling)
    found = []
    for number in range(2 * ROUNDS):
        text = f"{number}: " + " ".join(f"{word * (number + 3)}" for word in range(1 if number % 2 else 40))
        images = PHOTOS[:1] if number == 1 else ()
        marked = f"<image>\n{text}" if images else text
        found.append(Request(marked, images=images, max_tokens=4, sampling=plain))
    return found


@cache
def wanted() -> list[list[int]]:
    return Oracle(checkpoint("llava")).generate_all(skewed())


def was_taken(output: Output) -> bool:
    """True where its prefill, or its encoding, went from one instance to another of the same kind."""
    kinds = [name.rstrip("0123456789") for name in output.route]
    return len(kinds) > len(set(kinds))


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["2EP1D", "2EPD"])
async def test_what_an_idle_sibling_takes_is_exact(placement: str) -> None:
    ready("shm")
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": {"image": 24, "kv": 512}}
    settings |= {"rules": RULES, "transfers": TransferPolicy(hand_over=True), "prefix_cache": False}
    async with Pipeline(checkpoint("llava"), placement, connector="shm", **pipeline_options(settings)) as pipe:
        drawn = skewed(temperature=0.9, seed=7)
        alone = [await pipe.complete(each) for each in drawn]
        found = await asyncio.gather(*map(pipe.complete, skewed()))
        again = await asyncio.gather(*map(pipe.complete, drawn))
        await asyncio.wait_for(pipe.wait_idle(), 60.0)
    assert [list(output.token_ids) for output in found] == wanted()
    for output, left_alone in zip(again, alone, strict=True):
        check_alike(output, left_alone)
    assert {output.lives for output in (*found, *again)} == {1}
    assert any(map(was_taken, (*found, *again))), [output.route for output in (*found, *again)]
    assert not any(map(was_taken, alone))


# ---------------------------------------------------------------- offers that wait for room


def uneven(**sampling: Any) -> list[Request]:
    """Many and few outputs in turn: of two decode instances the first one gets those that stay."""
    plain = Sampling(ignore_eos=True, **sampling)
    found = []
    for number in range(2 * ROUNDS):
        text = f"{number}: " + " ".join(f"{word * (number + 3)}" for word in range(8))
        images = PHOTOS[:1] if number == 4 else ()
        marked = f"<image>\n{text}" if images else text
        found.append(Request(marked, images=images, max_tokens=3 if number % 2 else 60, sampling=plain))
    return found


@cache
def wanted_uneven() -> list[list[int]]:
    return Oracle(checkpoint("llava")).generate_all(uneven())


def was_passed(output: Output) -> bool:
    """True where a second decode instance had it, by way of the one that had prefilled it."""
    return len(output.route) == 4 and output.route[0] == output.route[2]


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["off", "layer"])
async def test_a_decode_that_a_full_instance_passes_is_exact(kv: KvMode) -> None:
    """Each decode instance has room for two that stay: of 19 to 38 tokens of prompt and 60 of output."""
    ready("shm")
    decoders = [Instance("D", name=f"D{at}", pools={"kv": 14}, prefix_cache=False) for at in (0, 1)]
    placement = [Instance("EP", name="EP0", prefix_cache=False), *decoders]
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": {"image": 24, "kv": 512}}
    settings |= {"transfers": TransferPolicy(hand_over=True, kv=kv)}
    async with Pipeline(checkpoint("llava"), placement, connector="shm", **pipeline_options(settings)) as pipe:
        drawn = uneven(temperature=0.9, seed=7)
        alone = [await pipe.complete(each) for each in drawn]
        found = await asyncio.gather(*map(pipe.complete, uneven()))
        again = await asyncio.gather(*map(pipe.complete, drawn))
        await asyncio.wait_for(pipe.wait_idle(), 60.0)
    assert [list(output.token_ids) for output in found] == wanted_uneven()
    for output, left_alone in zip(again, alone, strict=True):
        check_alike(output, left_alone)
    assert {(output.lives, output.recomputed_tokens) for output in (*found, *again)} == {(1, 0)}
    assert any(map(was_passed, (*found, *again))), [output.route for output in (*found, *again)]
    assert not any(map(was_passed, alone))
