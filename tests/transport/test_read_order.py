"""What a step has written is there for every reader of every transport when the core hears of the step (decision 0048).

The lane is the real one, on a stand-in for torch.cuda that runs queued work as late as it may; the transports are the
real ones, with no digests: a read that overtakes the device brings old bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.lazy_cuda import LazyCuda, replace_cuda
from support.lender import EMPTY, LIVENESS_S, ready
from trinity.connector import Connector
from trinity.core.messages import Encode, MediaSpan, Prefill, Pull, Sampled, Step
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.runtime.cuda_stream import make_lane_stream
from trinity.runtime.lane import Lane
from trinity.stages.async_steps import FinishedStep
from trinity.timeline import Timeline

SCHEMES = ["inproc", "shm", "nixl", "nixl-push", "ucx"]
SHAPE = BlockShape("kv", (2, 2, 1, 16, 32), torch.float32)  # 2 layers
BLOCKS = 6
SPAN = MediaSpan("image", 4, 0, 4, "a cat")
ENCODE = Step(1, "joint", encodes=(Encode("a", 0, SPAN, (0,), None),))
CHUNK = Step(1, "joint", prefills=(Prefill("a", 0, 4, False),))
STREAMED = Step(1, "joint", prefills=(Prefill("a", 0, 4, False),), group=1)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LazyCuda:
    return replace_cuda(monkeypatch)


class Writing:
    """A stage that queues writes of its pool on the current stream, layer by layer, and leaves."""

    letters = "EP"

    def __init__(self, cuda: LazyCuda, memory: BlockMemory) -> None:
        self.cuda, self.memory = cuda, memory
        self.on_layers: Callable[[int, int], None] | None = None

    def forward(self, step: Step) -> dict[str, Sampled]:
        for layer in range(2):
            self.cuda.launch(lambda layer=layer: self.memory.tensor[:, layer].fill_(7 + layer), 1)  # type: ignore[misc]
            if step.group and self.on_layers is not None:
                event = torch.cuda.Event()
                event.record()
                event.synchronize()
                self.on_layers(layer, layer + 1)
        return {}


class Launching(Writing):
    """One whose pending steps wait for nothing."""

    def launch(self, step: Step) -> FinishedStep:
        return FinishedStep(self.forward(step), lambda: None)


async def read_as_told(
    cuda: LazyCuda, scheme: str, step: Step, roles: str, make: Callable[[LazyCuda, BlockMemory], Writing]
) -> list[list[float]]:
    """Run a step on a lane; what a reader finds of each layer, each time that the core is told of something."""
    source, target = (BlockMemory(SHAPE, BLOCKS, shared=True) for _ in range(2))
    for each in (source, target):
        each.tensor.fill_(EMPTY)
    connector, loop = Connector(scheme, verify="never"), asyncio.get_running_loop()
    connector.bind("source", {"kv": source})
    connector.bind("target", {"kv": target})
    numbers, found = tuple(range(BLOCKS)), list[list[float]]()

    async def pull() -> None:
        answer = await connector.pull("target", Pull("source:1", 0, "source", "kv", "r", numbers, numbers))
        assert answer.failure is None, answer.failure
        found.append([float(target.tensor[:, layer].mean()) for layer in range(2)])

    def post(_: Any) -> None:
        asyncio.run_coroutine_threadsafe(pull(), loop).result(LIVENESS_S)

    await pull()
    stream, stage = make_lane_stream("cuda:1", "joint", roles), make(cuda, source)
    lane = Lane("P0", "joint", [stage], post, print, Timeline(), 0, stream=stream)  # type: ignore[list-item]
    lane.start()
    lane.post(step)
    lane.stop()
    await asyncio.to_thread(lane.join)
    await connector.aclose()
    return found[1:]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_an_encode_is_read_whole(cuda: LazyCuda, scheme: str) -> None:
    ready(scheme)
    assert await read_as_told(cuda, scheme, ENCODE, "E", Writing) == [[7, 8]]


@pytest.mark.parametrize("scheme", SCHEMES)
async def test_layers_are_read_whole_while_their_step_runs(cuda: LazyCuda, scheme: str) -> None:
    """Those that are reported; the others are still as they were."""
    ready(scheme)
    assert await read_as_told(cuda, scheme, STREAMED, "P", Writing) == [[7, EMPTY], [7, 8], [7, 8]]


@pytest.mark.parametrize("scheme", ["inproc", "shm"])
@pytest.mark.parametrize("make", [Writing, Launching])
async def test_a_chunk_that_samples_nothing_is_read_whole(
    cuda: LazyCuda, scheme: str, make: Callable[[LazyCuda, BlockMemory], Writing]
) -> None:
    """Launched or not: no token tells the host that the device has run it."""
    assert await read_as_told(cuda, scheme, CHUNK, "P", make) == [[7, 8]]
