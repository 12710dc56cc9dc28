"""What the tests of pipelines share: requests whose tokens are known, and a pipeline of which nothing may be left."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.request import Output, Request, Sampling
from trinity.runtime.host import InstanceHost
from trinity.testing.oracle import Oracle

PLACES = ("EPD", "EP+D", "ED+P", "E+P+D", "PD+E")


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (56, 84, 3), dtype=np.uint8)


@cache
def oracle() -> Oracle:
    """Raises ``AssertionError`` in an event loop, also where it would be loaded fast enough for the guard of loops."""
    assert asyncio._get_running_loop() is None, "a fixture calls all_tokens() first: an oracle takes seconds to load"
    return Oracle(checkpoint("llava"))


@cache
def _tokens(case: Case) -> tuple[int, ...]:
    return tuple(oracle().generate(case.request()))


@dataclass(frozen=True)
class Case:
    """A request and the tokens that the whole model's generate() answers."""

    prompt: str
    pictures: tuple[int, ...] = ()
    max_tokens: int = 8

    def request(self, **changes: Any) -> Request:
        fields: dict[str, Any] = {
            "images": [picture(seed) for seed in self.pictures],
            "max_tokens": self.max_tokens,
            "sampling": Sampling(ignore_eos=True),
        }
        return Request(self.prompt, **{**fields, **changes})

    @property
    def tokens(self) -> list[int]:
        return list(_tokens(self))


TEXT = Case("Hello world, what a day")
ONE = Case("<image>\nWhat is this?", (1,))
TWO = Case("<image> and <image>, but which?", (2, 3))
GOOD = (TEXT, ONE, TWO)
LONG = Case("<image> Go on and on", (4,), 512)


def all_tokens() -> None:
    """Make the expected tokens outside an event loop, which generate() would block."""
    for case in GOOD:
        assert len(set(case.tokens)) > 3, "an output of one token would prove little"


@asynccontextmanager
async def serving(placement: str | Sequence[Instance] = "E+P+D", **settings: Any) -> AsyncIterator[Pipeline]:
    """A pipeline over the tiny LLaVA. At the end no thread, request, block or lease of it may be left."""
    pipe = Pipeline(checkpoint("llava"), placement, dtype="float32", **pipeline_options(settings))
    async with pipe:
        yield pipe
    nothing_left(pipe)


def nothing_left(pipe: Pipeline) -> None:
    threads = [thread for host in pipe.hosts.values() for thread in threads_of(host)]
    assert not [thread.name for thread in threads if thread.is_alive()]
    assert not pipe._frontend.core.entries
    assert not pipe._frontend.streams
    assert not pipe._frontend.core.waiting
    for host in pipe.hosts.values():
        assert host.core.idle(), f"{host.name} is not idle"
        host.core.check()
        assert not host.core.state.tombstones, f"{host.name} remembers {host.core.state.tombstones}"


def threads_of(host: InstanceHost) -> list[threading.Thread]:
    return [host._thread.thread, *(lane.thread for lane in host._lanes.values())]


async def good_ones(pipe: Pipeline, rounds: int = 1) -> None:
    """Serve every good case at once and compare."""
    cases = GOOD * rounds
    outputs = await asyncio.gather(*(pipe.complete(case.request()) for case in cases))
    check_exact(cases, outputs)


def check_exact(cases: Sequence[Case], outputs: Sequence[Output]) -> None:
    for case, output in zip(cases, outputs, strict=True):
        assert output.token_ids == case.tokens, case.prompt
        assert output.finish_reason == "length"


async def failing_all(pipe: Pipeline, requests: Iterable[Any]) -> list[Any]:
    """How each of ``requests`` ends, while every good case is served beside them and stays exact."""
    good = [asyncio.ensure_future(pipe.complete(case.request())) for case in GOOD]
    found = await asyncio.gather(*(pipe.complete(request) for request in requests), return_exceptions=True)
    check_exact(GOOD, await asyncio.gather(*good))
    return list(found)


async def failing(pipe: Pipeline, request: Request, error: type[BaseException]) -> Any:
    """The error that ``request`` ends with, while every good case is served beside it and stays exact."""
    (found,) = await failing_all(pipe, [request])
    assert isinstance(found, error), f"expected {error.__name__}, got {found!r}"
    return found
