"""Pipelines of processes over a transport give the model's own tokens, and say what moved how."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling
from trinity.testing.oracle import Oracle

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
LOCAL = ("inproc", "shm", "cuda_ipc")  # what never leaves the host
SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": {"image": 16, "kv": 256}}


def requests() -> list[Request]:
    greedy = Sampling(ignore_eos=True)
    return [
        Request("Only text, and no picture", max_tokens=20, sampling=greedy),
        Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=24, sampling=greedy),
        Request("<image> and <image>, but <image>?", images=PHOTOS[:3], max_tokens=16, sampling=greedy),
    ]


def tokens_of_the_model() -> list[tuple[int, ...]]:
    return [tuple(tokens) for tokens in Oracle(checkpoint("llava")).generate_all(requests())]


async def check_exact(
    placement: str, connector: str, wanted: list[tuple[int, ...]], *, hosting: Any = "process", says: str = ""
) -> list[dict[str, Any]]:
    """Serve the requests; the records of what was pulled, each of scheme ``says`` (that of the connector)."""
    async with Pipeline(
        checkpoint("llava"), placement, connector=connector, hosting=hosting, **pipeline_options(SETTINGS)
    ) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(request) for request in requests()))
    assert [tuple(output.token_ids) for output in outputs] == wanted, placement
    pulled = [record for output in outputs for record in output.transfers if record["outcome"] == "pulled"]
    assert {record["scheme"] for record in pulled} == {says or connector}
    assert {record["kind"] for record in pulled} == ({"kv"} if placement == "EP+D" else {"image", "kv"})
    for record in pulled:
        assert record["bytes"] > 0
        assert record["pieces"] > 0
        assert record["setup_s"] >= 0
        assert record["gb_s"] == pytest.approx(record["bytes"] / record["seconds"] / 1e9)
    assert all(("digest_s" in record) is (record["scheme"] not in LOCAL) for record in pulled), "verified by default"
    return pulled
