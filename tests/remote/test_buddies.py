"""A program that serves dies, and its readers go on with its buddy: nothing twice, nothing missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import trinity
from support.buddy_programs import POOLS, Victim, come_back, listening, make_pipeline, victim
from support.checkpoint_files import checkpoint
from support.emulated_pipelines import LIVENESS_S, MODEL, asked, check, right, serve
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ClosedError, OfferRefused, ResumeError
from trinity.pipeline import Pipeline
from trinity.remote.buddy import Buddy
from trinity.testing.checkpoints import build_checkpoint

LONG = EmulatedRequest(text_tokens=21, image_tokens=(576,), contents=("cat",), max_tokens=300)
HERE, ROLES = "remote.test_buddies", ("EP", "D")


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    with listening(2) as found:
        yield found


def requests() -> list[EmulatedRequest]:
    return [replace(LONG, request_id=f"r{number}", max_tokens=100 + 70 * number) for number in range(4)]


def make_victim(given: tuple[list[str], str]) -> tuple[Pipeline, list[EmulatedRequest]]:
    addresses, buddy = given
    pipe = make_pipeline(MODEL, ROLES, addresses, cache=POOLS, attach=True, buddy=Buddy(buddy))
    return pipe, requests()


@asynccontextmanager
async def survivor(addresses: list[str], tmp_path: Path, **terms: Any) -> AsyncIterator[Pipeline]:
    buddy = Buddy(listen=f"unix:{tmp_path}/buddy", **terms)
    async with make_pipeline(MODEL, ROLES, addresses, cache=POOLS, buddy=buddy) as pipe:
        yield pipe


async def killed(pipe: Pipeline, addresses: list[str], tokens: int, numbers: tuple[int, ...] = (0, 1, 2, 3)) -> Victim:
    given = (addresses, pipe.journal_address)
    async with victim(HERE, "make_victim", given, list(numbers)) as one:
        await one.kill_after(tokens)
    return one


async def test_readers_of_a_killed_program_go_on_with_its_buddy(addresses: list[str], tmp_path: Path) -> None:
    async with survivor(addresses, tmp_path) as pipe:
        own = [asyncio.ensure_future(pipe.complete(request)) for request in requests()]  # with the same ids
        one = await killed(pipe, addresses, 60)
        assert one.heard
        assert not one.ended
        outputs = await asyncio.wait_for(asyncio.gather(*own), LIVENESS_S)
        assert all(each.lives == 1 for each in outputs), "nobody else notices"
        for request in requests():
            had = one.heard[request.request_id]
            tokens, text = await come_back(pipe, request.request_id, had)
            assert tokens == right(request), f"{request.request_id} had {len(had)}"
            assert text == "".join(f"<{token}>" for token in right(request))
        others = asked()
        check(await serve(pipe, others), others)


def make_first(given: tuple[list[str], str]) -> tuple[Pipeline, list[EmulatedRequest]]:
    addresses, buddy = given
    return make_pipeline(MODEL, ROLES, addresses, cache=POOLS, buddy=Buddy(buddy)), requests()


@pytest.mark.slow
async def test_the_pipeline_that_set_the_instances_up_dies_and_an_attached_one_goes_on(tmp_path: Path) -> None:
    """With no supervisor left, the instances serve on for it."""
    journal = f"unix:{tmp_path}/buddy"
    with listening(2) as addresses:
        begun = asyncio.ensure_future(_kill_first(addresses, journal))
        pipe = await _attach(addresses, journal)
        try:
            one = await begun
            assert not one.ended
            for request in requests():
                tokens, _ = await come_back(pipe, request.request_id, one.heard[request.request_id])
                assert tokens == right(request)
            others = asked()
            check(await serve(pipe, others), others)
        finally:
            await pipe.aclose()


async def _kill_first(addresses: list[str], journal: str) -> Victim:
    async with victim(HERE, "make_first", (addresses, journal), [0, 1, 2, 3]) as one:
        await one.kill_after(80)
    return one


async def _attach(addresses: list[str], journal: str) -> Pipeline:
    """Attach once the first pipeline has set the instances up."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            pipe = make_pipeline(MODEL, ROLES, addresses, cache=POOLS, attach=True, buddy=Buddy(listen=journal))
            try:
                await pipe.start()
                return pipe
            except OfferRefused:
                await asyncio.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_one_on_other_weights_is_no_buddy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of two models whose configurations are equal; it was taken, and went on with tokens of its own."""
    other = tmp_path / "other"
    await asyncio.to_thread(build_checkpoint, "llama", other, seed=1)
    models = (await asyncio.to_thread(checkpoint, "llama"), other, other)
    with listening(3) as addresses:
        pipes = [
            make_pipeline(model, ("PD",), [address], dtype="float32", buddy=terms)
            for model, address, terms in zip(models, addresses, _terms(tmp_path), strict=True)
        ]
        async with pipes[0], pipes[1], pipes[2], asyncio.timeout(LIVENESS_S):
            while not pipes[2].has_buddy:
                await asyncio.sleep(0.01)
            while "other weights" not in caplog.text:
                await asyncio.sleep(0.01)
            assert not pipes[0].has_buddy
            assert len((await pipes[0].complete(trinity.Request("Hello", max_tokens=4))).token_ids) == 4


def _terms(tmp_path: Path) -> list[Buddy]:
    """The second one listens, for the first and the third."""
    address = f"unix:{tmp_path}/journals"
    return [Buddy(address), Buddy(listen=address), Buddy(address)]


@pytest.mark.slow
async def test_a_program_that_closes_leaves_its_buddy_nothing(addresses: list[str], tmp_path: Path) -> None:
    async with survivor(addresses, tmp_path) as pipe:
        other, asked_there = make_victim((addresses, pipe.journal_address))
        async with other:
            while not other.has_buddy:
                await asyncio.sleep(0.01)
            reading = asyncio.ensure_future(other.complete(asked_there[3]))
            await asyncio.sleep(0.2)
        with pytest.raises(ClosedError):
            await reading
        with pytest.raises(ResumeError) as caught:
            await come_back(pipe, "r3", [])
        assert caught.value.reason == "unknown"
        assert not pipe.streams
