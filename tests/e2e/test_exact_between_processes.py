"""Exact tokens between processes: every transport, every placement, text, images and chunked prefill.

Each request must have moved the bytes of its rows, and a tenth more at most, over the transport that was asked for.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.lender import ready
from support.pauses import pausing
from support.pipeline_options import pipeline_options
from support.running_instances import GREEDY, PHOTOS
from support.thinned import thinned
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.request import Output, Request
from trinity.testing.oracle import Oracle


def often(case: tuple[str, str]) -> bool:
    """The placement where all moves, and all placements over shared memory."""
    return case[0] == "shm" or case[1] == "1E1P1D"


SCHEMES = ("shm", "nixl", "nixl-tcp", "nixl-push", "ucx")
PLACEMENTS = {"1E1P1D": ("image", "kv"), "1EP1D": ("kv",), "1ED1P": ("image", "kv"), "2E2P2D": ("image", "kv")}
TOKENS, KV_BLOCK = 128, 16  # of a step's budget, of a block
MAX_TOKENS = 12
IMAGE_TOKENS = 16  # of one photograph: (56 / 14) squared
REQUESTS = {
    "text": ("Only text, and no picture", 0),
    "one image": ("<image>\nWhat is this?", 1),
    "three images": ("<image> and <image>, but <image>?", 3),
    "chunked": ("<image>\n" + "One word, and another. " * 30, 1),
}


@pytest.fixture(scope="module", autouse=True)
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    wanted()
    with pausing(tmp_path_factory.mktemp("pauses")):
        yield


def requests() -> list[Request]:
    return [
        Request(prompt, images=PHOTOS[:images], max_tokens=MAX_TOKENS, sampling=GREEDY, request_id=name)
        for name, (prompt, images) in REQUESTS.items()
    ]


@cache
def wanted() -> dict[str, list[int]]:
    return dict(zip(REQUESTS, Oracle(checkpoint("llava")).generate_all(requests()), strict=True))


async def served(scheme: str, placement: str) -> tuple[dict[str, Output], dict[str, int]]:
    """The outputs by request, and the bytes of a row of each kind. Nothing is cached: every request moves its own."""
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": {"image": 16, "kv": 256}}
    settings |= {
        "prefix_cache": False,
        "image_cache": False,
        "rules": BatchRules(token_budget=TOKENS),
        "kv_block_size": KV_BLOCK,
    }
    async with Pipeline(checkpoint("llava"), placement, connector=scheme, **pipeline_options(settings)) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(request) for request in requests()))
        hellos = [member.started.hello for member in pipe.processes.values() if member.started is not None]
    layouts = {kind: layout for hello in hellos for kind, layout in hello.layouts.items()}
    row_bytes = {kind: layout.block_bytes // layout.shape[-2] for kind, layout in layouts.items()}
    return dict(zip(REQUESTS, outputs, strict=True)), row_bytes


@pytest.mark.parametrize(("scheme", "placement"), thinned(product(SCHEMES, PLACEMENTS), often))
async def test_exact(scheme: str, placement: str) -> None:
    ready(scheme.partition("-")[0])
    outputs, row_bytes = await served(scheme, placement)
    assert {name: output.token_ids for name, output in outputs.items()} == wanted()
    for name, output in outputs.items():
        moved: Counter[str] = Counter()
        for record in output.transfers:
            assert (record["outcome"], record["scheme"]) == ("pulled", scheme), (name, record)
            moved[record["kind"]] += record["bytes"]
        rows = {"image": REQUESTS[name][1] * IMAGE_TOKENS, "kv": output.prompt_tokens}
        needed = {kind: rows[kind] * row_bytes[kind] for kind in PLACEMENTS[placement] if rows[kind]}
        assert set(moved) == set(needed), name
        assert all(size <= moved[kind] <= 1.1 * size for kind, size in needed.items()), (name, moved, needed)
    assert outputs["three images"].prompt_tokens < TOKENS < outputs["chunked"].prompt_tokens / 2


def test_the_photographs_are_there() -> None:
    assert all(isinstance(photo, Path) and photo.exists() for photo in PHOTOS[:3])
