"""Transports of others that raise what would end more than a read: SystemExit, and a cancellation of their own."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from support.pipeline_driver import ONE, TEXT, all_tokens, good_ones, serving
from trinity.connector import Connector
from trinity.errors import MigrationError, TransportError
from trinity.request import Request
from trinity.transport.base import contain
from trinity.transport.inproc import InprocTransport

LIVENESS_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


async def cancel_itself() -> int:
    task = asyncio.ensure_future(asyncio.sleep(60))
    task.cancel()
    await task
    return 0


async def leave() -> int:
    raise SystemExit(3)


class OddRemote:
    """Reads well, but for what ``odd`` names: there it does what ``how`` says as long as ``broken`` is set."""

    def __init__(self, remote: Any, transport: Odd) -> None:
        self.remote, self.transport = remote, transport

    async def read(self, *given: Any, **named: Any) -> int:
        await self.transport.perhaps("read")
        return int(await self.remote.read(*given, **named))

    async def generation(self, *given: Any) -> int:
        await self.transport.perhaps("generation")
        return int(await self.remote.generation(*given))

    async def aclose(self) -> None:
        await self.transport.perhaps("aclose")
        await self.remote.aclose()


class Odd(InprocTransport):
    scheme = "odd"

    def __init__(self, odd: str, how: Any) -> None:
        super().__init__()
        self.odd, self.how, self.broken = odd, how, True

    async def perhaps(self, name: str) -> None:
        if self.broken and name == self.odd:
            await self.how()

    async def attach(self, *given: Any, **named: Any) -> Any:
        await self.perhaps("attach")
        return OddRemote(await super().attach(*given, **named), self)


@pytest.mark.parametrize("how", [cancel_itself, leave])
@pytest.mark.parametrize("odd", ["attach", "read", "generation"])
async def test_it_fails_its_own_request(odd: str, how: Any) -> None:
    transport = Odd(odd, how)
    async with asyncio.timeout(LIVENESS_S), serving("E+P+D", connector=Connector(transport, timeout_s=20)) as pipe:
        for request in (TEXT.request(), ONE.request()):
            with pytest.raises(MigrationError, match=r"the transport (cancelled its own call|raised SystemExit)"):
                await pipe.complete(request)
        transport.broken = False
        await good_ones(pipe)


@pytest.mark.parametrize("how", [cancel_itself, leave])
async def test_one_that_cannot_be_closed_is_left(how: Any) -> None:
    async with asyncio.timeout(LIVENESS_S):
        async with serving("E+P+D", connector=Connector(Odd("aclose", how))) as pipe:
            assert (await pipe.complete(TEXT.request())).token_ids == TEXT.tokens


async def test_a_cancellation_from_outside_stays_one() -> None:
    waiting = asyncio.ensure_future(contain(asyncio.sleep(60), "odd"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(KeyError):
        await contain(missing(), "odd")
    with pytest.raises(TransportError, match="SystemExit: 3"):
        await contain(leave(), "odd")


async def missing() -> None:
    raise KeyError("as it is")


async def test_a_stream_that_was_not_entered_says_so() -> None:
    async with serving("EPD") as pipe:
        with pytest.raises(Exception, match="inside its block"):
            await asyncio.wait_for(anext(pipe.stream(Request("hi"))), LIVENESS_S)
