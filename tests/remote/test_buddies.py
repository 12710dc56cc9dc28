"""A program that serves dies, and its readers go on with its buddy: nothing twice, nothing missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from support.buddy_programs import POOLS, Victim, come_back, listening, make_pipeline, victim
from support.emulated_pipelines import LIVENESS_S, MODEL, asked, check, right, serve
from trinity.emulation.model import EmulatedRequest
from trinity.pipeline import Pipeline
from trinity.remote.buddy import Buddy

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
