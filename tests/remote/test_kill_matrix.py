"""SIGKILL and SIGSTOP of the source and of the target of a transfer, before, during and after it, on every transport.

What was asked for ends exactly or with a typed error; the victim is fenced and started again under its name; the
pipeline then serves exact tokens, and the survivors hold no block, descriptor or mapping more than before.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import trinity.remote.supervision.supervisor_core
from support.checkpoint_files import checkpoint
from support.lender import ready
from support.pauses import PHASES, Pauses, pausing
from support.pipeline_options import pipeline_options
from support.running_instances import LIVENESS_S, POOLS, descriptors, recovered, request
from support.thinned import thinned
from trinity.errors import RequestError
from trinity.pipeline import Pipeline
from trinity.request import Output
from trinity.testing.oracle import Oracle

SCHEMES = ("shm", "nixl", "nixl-tcp", "nixl-push", "ucx")
OFTEN = ("shm",)
SOURCES = {"image": "E0", "kv": "P0"}
TARGETS = {"image": "P0", "kv": "D0"}


class Strike(NamedTuple):
    """One case: what is done to whom, at which point of the transfer of which blocks."""

    scheme: str
    kind: str
    victim: str
    sent: str
    phase: str

    @property
    def name(self) -> str:
        return (SOURCES if self.victim == "source" else TARGETS)[self.kind]


ALL = [Strike(*each) for each in product(SCHEMES, SOURCES, ("source", "target"), ("SIGKILL", "SIGSTOP"), PHASES)]


def pairwise(cases: list[Strike]) -> list[Strike]:
    """Few cases in which every two values that can meet do meet."""

    def pairs(case: Strike) -> set[tuple[tuple[int, str], ...]]:
        return set(combinations(enumerate(case), 2))

    missing = set().union(*map(pairs, cases))
    chosen = []
    while missing:
        best = max(cases, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


@pytest.fixture(scope="module")
def pauses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pauses]:
    wanted()
    with pausing(tmp_path_factory.mktemp("pauses")) as (pauses, _):
        yield pauses


@cache
def wanted() -> list[int]:
    return Oracle(checkpoint("llava")).generate(request())


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipeline that is struck twenty times a minute would pause longer and longer."""
    monkeypatch.setattr(trinity.remote.supervision.supervisor_core, "LONGEST_BACKOFF_S", 0.1)


def mappings(process: int) -> int:
    return Path(f"/proc/{process}/maps").read_text().count("/memfd:trinity")


def holdings(pipe: Pipeline) -> dict[str, Counter[str]]:
    """What each process has open and mapped."""
    return {
        name: Counter(descriptors(member.process)) + Counter(pool=mappings(member.process))
        for name, member in pipe.processes.items()
    }


def unfree(pipe: Pipeline) -> dict[str, dict[str, int]]:
    """Blocks that an instance says are held, or that of an older life it was the last that spoke."""
    pools = {name: member.started.up.pools for name, member in pipe.processes.items() if member.started}
    loads = {name: (pipe.loads[name].epoch, pipe.loads[name].free) for name in pools if name in pipe.loads}
    full = {name: (pipe.processes[name].setup.epoch, dict(free)) for name, free in pools.items()}
    return {name: dict(loads.get(name, (0, {}))[1]) for name in full if loads.get(name) != full[name]}


async def settled(pipe: Pipeline, before: dict[str, Counter[str]], case: Strike) -> None:
    """Until nothing is held that was not held before."""
    await asyncio.wait_for(pipe.wait_idle(), LIVENESS_S)
    until = time.monotonic() + LIVENESS_S
    while True:
        left = {name: now - before[name] for name, now in holdings(pipe).items() if now - before[name]}
        held = unfree(pipe)
        if not left and not held:
            return
        assert time.monotonic() < until, f"{case}: left open {left}; free blocks of those that hold some {held}"
        await asyncio.sleep(0.05)


async def strike(pipe: Pipeline, pauses: Pauses, case: Strike) -> None:
    victim = pipe.processes[case.name]
    pauses.ask(case.kind, case.phase)
    asked = asyncio.ensure_future(pipe.complete(request()))
    await pauses.reached()
    os.kill(victim.process, signal.Signals[case.sent])
    pauses.resume()
    (ended,) = await asyncio.wait_for(asyncio.gather(asked, return_exceptions=True), LIVENESS_S)
    assert isinstance(ended, (Output, RequestError)), case
    if isinstance(ended, Output):
        assert ended.token_ids == wanted(), case
    async with asyncio.timeout(LIVENESS_S):
        while pipe.processes[case.name] is victim:
            await asyncio.sleep(0.02)
    assert (await recovered(pipe, request())).token_ids == wanted(), case
    with pytest.raises(ProcessLookupError):
        os.kill(victim.process, 0)


async def struck(pauses: Pauses, scheme: str, cases: list[Strike]) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": POOLS, "silence_s": 2.0}
    settings |= {"prefix_cache": False, "image_cache": False}  # so that every request moves its blocks
    async with Pipeline(checkpoint("llava"), "E+P+D", connector=scheme, **pipeline_options(settings)) as pipe:
        assert (await pipe.complete(request())).token_ids == wanted()
        before = holdings(pipe)
        for case in cases:
            await strike(pipe, pauses, case)
            await settled(pipe, before, case)


def test_few_cases_cover_all_pairs() -> None:
    few = pairwise(ALL)
    assert len(few) <= 20
    for values in combinations([{case[place] for case in ALL} for place in range(5)], 2):
        assert all(values)
    for one, other in combinations(range(5), 2):
        assert {(each[one], each[other]) for each in few} == {(each[one], each[other]) for each in ALL}


@pytest.mark.parametrize("scheme", thinned(SCHEMES, OFTEN.__contains__))
async def test_pairwise(pauses: Pauses, scheme: str) -> None:
    ready(scheme.partition("-")[0])
    await struck(pauses, scheme, [case for case in pairwise(ALL) if case.scheme == scheme])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scheme", SCHEMES)
async def test_all(pauses: Pauses, scheme: str) -> None:
    ready(scheme.partition("-")[0])
    await struck(pauses, scheme, [case for case in ALL if case.scheme == scheme])
