"""A closed pipeline holds no weights and no pools, though the program names it still and nobody looked for cycles."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image

import trinity
from support.checkpoint_files import checkpoint
from trinity.connector import Connector
from trinity.memory.block_memory import BlockMemory
from trinity.memory.digests import Verify


@pytest.fixture
def model() -> Iterator[Path]:
    """Its folder, made before any loop runs; nothing looks for cycles until the test ends."""
    folder = checkpoint("llava")
    gc.collect()
    gc.disable()
    yield folder
    gc.enable()


def find_held() -> set[int]:
    """Find pools and weights by address, by ``type()``: to ask some objects for their class warns."""
    return {id(each) for each in gc.get_objects() if issubclass(type(each), BlockMemory | torch.nn.Parameter)}


@pytest.mark.parametrize("verify", ["never", "always"])
@pytest.mark.parametrize("placement", ["EPD", "E+P+D"])
async def test_a_closed_pipeline_holds_no_memory(model: Path, placement: str, verify: Verify) -> None:
    before = await asyncio.to_thread(find_held)  # a loop has other work
    connector = Connector(verify=verify)
    pipe = trinity.Pipeline(model, placement, dtype="float32", connector=connector)
    async with pipe:
        await pipe.complete(trinity.Request("<image> Hello", images=[Image.new("RGB", (32, 32))], max_tokens=4))
        assert await asyncio.to_thread(find_held) - before, "pools at least: weights may be shared in a process"
    assert await asyncio.to_thread(find_held) <= before
    assert repr(pipe).endswith("closed, 1 ended)")
    assert pipe.metrics.summary()["finished"] == {"length": 1}
