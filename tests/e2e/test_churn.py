"""Many requests that come when they like and leave when they like: nothing leaks and the others do not notice."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.recordings import (
    METHODS,
    PATIENCE_S,
    Served,
    case_of,
    copy_of,
    nothing_held,
    nothing_left,
    parting,
    problems,
)
from support.request_cases import answers, waves
from support.wrapped_transports import WrappedTransport
from trinity.core.scheduler import BatchRules
from trinity.errors import DeadlineExceeded
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.stream import Stream
from trinity.request import Request

pytestmark = pytest.mark.xdist_group("llava")

REQUESTS, CONCURRENT = 128, 64
ARRIVALS_S = 0.3
FATES = ("finish", "finish", "leave", "leave", "cancel", "deadline", "deadline", "stop")
POOLS = {"image": 12, "kv": 24}  # a few requests at a time: the others wait for blocks, in every queue


@dataclass(frozen=True)
class Plan:
    """One client: when it asks, and what becomes of it. ``when``: seconds, or tokens for "leave" and "stop"."""

    request: Request
    arrives: float
    fate: str
    when: float


@dataclass
class Seen:
    """What the clients saw; ``left`` is (stream, tokens at that moment) of those that ended early."""

    served: Served = field(default_factory=Served)
    left: list[tuple[Stream, int]] = field(default_factory=list)
    fates: Counter[str] = field(default_factory=Counter)
    inside: int = 0
    most: int = 0
    early: dict[str, list[int]] = field(default_factory=dict)


def plans(seed: int, fates: Sequence[str] = FATES) -> list[Plan]:
    """Reproducible clients over the cases of the matrix."""
    dice = random.Random(seed)
    cases = [request for wave in waves("llava") for request in wave]
    made = []
    for number in range(REQUESTS):
        request, fate = copy_of(dice.choice(cases), number), dice.choice(fates)
        when = dice.choice((0, 1, 5, 20)) if fate in ("leave", "stop") else dice.random() * 0.4 + 0.001
        if fate == "deadline":
            request = copy_of(request, number, deadline_s=when)
        made.append(Plan(request, dice.random() * ARRIVALS_S, fate, when))
    return made


async def _client(pipe: Pipeline, plan: Plan, seen: Seen) -> None:
    await asyncio.sleep(plan.arrives)
    seen.fates[plan.fate] += 1
    seen.inside += 1
    seen.most = max(seen.most, seen.inside)
    await _meet_fate(pipe, plan, seen)
    seen.inside -= 1


async def _meet_fate(pipe: Pipeline, plan: Plan, seen: Seen) -> None:
    if plan.fate == "cancel":
        reading = asyncio.ensure_future(_read(pipe, plan, seen))
        await asyncio.wait([reading], timeout=plan.when)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
    elif plan.fate == "deadline":
        try:
            await _read(pipe, plan, seen)
        except DeadlineExceeded as error:
            output: Any = error.output
            assert output.finish_reason == "deadline"
            seen.early[plan.request.request_id] = output.token_ids
    else:
        await _read(pipe, plan, seen)


async def _read(pipe: Pipeline, plan: Plan, seen: Seen) -> None:
    """Read to the end, or until the plan says to leave. Records the output, whole or not."""
    name = plan.request.request_id
    async with pipe.stream(plan.request) as stream:
        try:
            await _tokens(stream, plan)
        finally:
            stream.cancel()
            seen.left.append((stream, len(stream.output.token_ids)))
            if stream.output.finish_reason == "length":
                seen.served.outputs[name] = stream.output
            else:
                seen.early[name] = stream.output.token_ids


async def _tokens(stream: Stream, plan: Plan) -> None:
    """``leave`` breaks out of the loop; ``stop`` cancels the stream and reads on to its end."""
    count = 0
    while True:
        if count >= plan.when and plan.fate in ("leave", "stop"):
            if plan.fate == "leave":
                return
            stream.cancel()
        if await anext(stream, None) is None:
            return
        count += 1


async def churn(method: str, planned: Sequence[Plan], **options: Any) -> Seen:
    """Serve all clients on one pipeline; after the last nothing is held, and after its end nothing remembered."""
    seen = Seen()
    cache = CacheConfig(pools=POOLS, image_block_size=7)
    options = {"rules": BatchRules(token_budget=40, image_budget=40), "cache": cache, **options}
    async with asyncio.timeout(PATIENCE_S):
        async with Pipeline(
            checkpoint("llava"), method, dtype="float32", observe=seen.served.observe, **options
        ) as pipe:
            seen.served.record.attach(pipe)
            async with asyncio.TaskGroup() as group:
                for plan in planned:
                    group.create_task(_client(pipe, plan, seen))
            await pipe.wait_idle()
            await nothing_held(pipe)
            for host in pipe.hosts.values():
                host.core.check()
    nothing_left(pipe)
    return seen


def check(seen: Seen, planned: Sequence[Plan]) -> None:
    """The promises: nothing after a cancel, the rest unchanged, and what came early is how it would have begun."""
    expected = answers("llava")
    assert seen.most >= CONCURRENT
    assert seen.served.record.after_cancel() == []
    assert [stream.request.request_id for stream, count in seen.left if len(stream.output.token_ids) != count] == []
    for name, tokens in seen.early.items():
        whole = expected[case_of(name)].token_ids
        assert parting(tokens, whole) == len(tokens), f"{name} began otherwise"
    finishing = {plan.request.request_id for plan in planned if plan.fate == "finish"}
    assert finishing <= set(seen.served.outputs)
    assert problems(seen.served, expected) == {}


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    answers("llava")  # outside of any event loop


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 9))])
async def test_requests_come_and_go(method: str, seed: int) -> None:
    planned = plans(seed)
    seen = await churn(method, planned)
    assert set(seen.fates) == set(FATES)
    assert len(seen.early) > 10, "hardly anybody left early"
    check(seen, planned)


@pytest.mark.parametrize("method", ["E+P+D", "ED+P", "PD+E"])
async def test_cancels_while_blocks_are_on_their_way(method: str) -> None:
    """Slow reads: many cancels find a pull in flight, whose blocks must stay out of every pool until it ends."""
    planned = plans(21, ("finish", "cancel", "cancel", "leave"))
    connector = WrappedTransport(delay_s=0.02)
    seen = await churn(method, planned, connector=connector)
    assert sum(connector.reads.values()) >= 8
    check(seen, planned)


@pytest.mark.parametrize("placement", ["2E2P2D", "2ED1P", "1E1EPD"])
async def test_requests_come_and_go_between_many_instances(placement: str) -> None:
    planned = plans(31)
    check(await churn(placement, planned, lanes=("vision", "language")), planned)
