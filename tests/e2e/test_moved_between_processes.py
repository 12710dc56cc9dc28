"""Decodes that move after each token between processes, over every transport: the tokens of generate()."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from support import paths
from support.checkpoint_files import checkpoint
from support.lender import ready
from support.moved_streams import check_alike, read_moving, reason_of, sampled
from support.pipeline_options import pipeline_options
from support.recordings import TEXT_ONLY
from support.shared_launcher import sharing
from support.thinned import thinned
from trinity.core.transfers import TransferPolicy
from trinity.pipeline import Pipeline
from trinity.remote.supervision.fork_client import Launcher
from trinity.request import Request, Sampling
from trinity.testing.checkpoints import ARCHITECTURES
from trinity.testing.oracle import Oracle

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
STOP = TransferPolicy(precopy="off")  # else it may end while blocks go ahead, on a busy machine
SCHEMES = ("shm", "nixl", "nixl-push", "ucx", "auto")


@pytest.fixture(scope="module", autouse=True)
def launcher(torch_launcher: Launcher) -> Iterator[None]:
    wanted()  # it takes seconds to load, which is not for an event loop
    with sharing(torch_launcher):
        yield


def greedy() -> list[Request]:
    plain = Sampling(ignore_eos=True)
    return [
        Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=40, sampling=plain),
        Request("Only text, and no picture", max_tokens=40, sampling=plain),
    ]


@cache
def wanted() -> list[list[int]]:
    return Oracle(checkpoint("llava")).generate_all(greedy())


@pytest.mark.parametrize(
    ("scheme", "placement", "named"),
    [
        *thinned(((scheme, "1E1P2D", {}) for scheme in SCHEMES), lambda case: case[0] == "ucx"),
        *(("shm", placement, {"depth": depth}) for placement, depth in [("2EPD", 1), ("1E1P2D", 2)]),
        *((scheme, "1E1P2D", {"transfers": TransferPolicy(precopy="on")}) for scheme in ("shm", "ucx")),
    ],
)
async def test_a_decode_that_moves_at_each_step_is_exact(scheme: str, placement: str, named: dict[str, Any]) -> None:
    ready(scheme.partition("-")[0])
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": {"image": 24, "kv": 512}}
    names = ("EPD0", "EPD1") if placement == "2EPD" else ("D0", "D1")
    settings |= {"transfers": STOP, **named}
    async with Pipeline(checkpoint("llava"), placement, connector=scheme, **pipeline_options(settings)) as pipe:
        alone = await asyncio.gather(*map(pipe.complete, sampled(PHOTOS[:1])))
        streams = [pipe.stream(each) for each in (*greedy(), *sampled(PHOTOS[:1]))]
        found = await asyncio.gather(*(read_moving(each, names) for each in streams))
        assert await reason_of(pipe, greedy()[1], "nobody") == "unknown"
    outputs = [output for output, _ in found]
    assert [output.token_ids for output in outputs[: len(wanted())]] == wanted()
    for output, left_alone in zip(outputs[len(wanted()) :], alone, strict=True):
        check_alike(output, left_alone)
    ways = [moved for _, moved in found]
    assert (min if settings["transfers"] is STOP else max)(ways) > 0, ways
    pulled = {record["scheme"] for output in outputs for record in output.transfers if record["outcome"] == "pulled"}
    assert pulled == {"shm" if scheme == "auto" else scheme}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", [each for each in ARCHITECTURES if each != "llava"])
async def test_each_architecture_moves_between_processes(architecture: str) -> None:
    images = () if architecture in TEXT_ONLY else PHOTOS[:1]
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": {"image": 96, "kv": 512}}
    settings["transfers"] = STOP
    placement = "1P2D" if architecture in TEXT_ONLY else "1E1P2D"
    plain = Request(
        f"{'<image> ' * len(images)}Go on.", images=images, max_tokens=32, sampling=Sampling(ignore_eos=True)
    )
    asked = (plain, *sampled(images))
    async with Pipeline(checkpoint(architecture), placement, connector="shm", **pipeline_options(settings)) as pipe:
        alone = await asyncio.gather(*map(pipe.complete, asked))
        found = await asyncio.gather(*(read_moving(pipe.stream(each), ("D0", "D1")) for each in asked))
    for (output, moved), left_alone in zip(found, alone, strict=True):
        check_alike(output, left_alone)
        assert moved
