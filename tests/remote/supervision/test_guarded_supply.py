"""Supplies that break their word: they raise what is no ``Exception``, swallow cancels, and return what is no place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from remote.test_supervision import emulated
from support.running_instances import LIVENESS_S
from trinity.errors import ConfigError
from trinity.remote.channel.channel import Address
from trinity.remote.supervision import instance_processes
from trinity.remote.supervision import supply as guarded_supply
from trinity.remote.supervision.supply import GuardedSupply, InstanceOrder, InstancePlace

ORDER = InstanceOrder("D0", 0, "D", b"s" * 32)
Act = Callable[[], Awaitable[Any]]


class ForeignError(BaseException):
    """An end of somebody else's, such as a framework's own cancel."""


async def raise_foreign() -> None:
    raise ForeignError("foreign")


async def await_cancelled() -> None:
    """Await something that was cancelled by others, as the reply of a client whose connection was closed."""
    reply = asyncio.get_running_loop().create_future()
    reply.cancel()
    await reply


async def swallow_a_cancel() -> None:
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        left.append(asyncio.current_task())
    await asyncio.Event().wait()


async def end_left() -> int:
    """End the calls that have swallowed a cancel, as nobody else does; return how many there were."""
    tasks = [each for each in left if each is not None]
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return len(tasks)


left: list[asyncio.Task[Any] | None] = []
ODD_ENDS = (raise_foreign, await_cancelled)
CALLS = ("begin", "end", "aclose")


class Breaking:
    """Does as it should, but for ``what``, where it acts; its lives are at an address where nobody listens."""

    def __init__(self, what: str, act: Act) -> None:
        self.what, self.act = what, act
        self.closed = False

    async def _do(self, what: str) -> None:
        if what == self.what:
            await self.act()

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        await self._do("begin")
        return InstancePlace(Address("unix", path="/nobody/listens.sock"), listen_s=0.1)

    async def end(self, name: str, epoch: int) -> None:
        await self._do("end")

    async def aclose(self) -> None:
        await self._do("aclose")
        self.closed = True


async def call(supply: GuardedSupply, what: str) -> None:
    await {"begin": lambda: supply.begin(ORDER), "end": lambda: supply.end("D0", 0), "aclose": supply.aclose}[what]()


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    left.clear()
    monkeypatch.setattr(guarded_supply, "GIVE_UP_S", 0.2)
    monkeypatch.setattr(instance_processes, "INSTANCE_STOP_S", 1.0)


@pytest.mark.parametrize("what", CALLS)
@pytest.mark.parametrize("act", ODD_ENDS)
async def test_what_is_no_exception_becomes_a_typed_error(what: str, act: Act) -> None:
    with pytest.raises(ConfigError, match=what):
        await call(GuardedSupply(Breaking(what, act)), what)


@pytest.mark.parametrize("what", CALLS)
async def test_a_cancel_is_passed_on_and_not_waited_for_for_ever(what: str, caplog: pytest.LogCaptureFixture) -> None:
    calling = asyncio.create_task(call(GuardedSupply(Breaking(what, swallow_a_cancel)), what))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    calling.cancel()
    async with asyncio.timeout(LIVENESS_S / 2):
        await asyncio.wait([calling])
    assert calling.cancelled()
    assert await end_left() == 1
    assert f"{what} of the supply of instances goes on" in caplog.text


async def test_one_that_tidies_up_after_a_cancel_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    tidied = []

    async def tidy_up() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            tidied.append(True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await call(GuardedSupply(Breaking("end", tidy_up)), "end")
    assert tidied == [True]
    assert not caplog.text


@pytest.mark.parametrize("answer", [None, "tcp:127.0.0.1:1", ("127.0.0.1", 1)])
async def test_an_answer_that_is_no_place_is_refused(answer: object, monkeypatch: pytest.MonkeyPatch) -> None:
    supply = Breaking("", raise_foreign)

    async def begin(order: InstanceOrder) -> InstancePlace:
        return cast(InstancePlace, answer)

    monkeypatch.setattr(supply, "begin", begin)
    with pytest.raises(ConfigError, match="no InstancePlace"):
        await GuardedSupply(supply).begin(ORDER)


@pytest.mark.parametrize("act", ODD_ENDS)
async def test_a_start_ends_with_a_typed_error(act: Act) -> None:
    supply = Breaking("begin", act)
    async with asyncio.timeout(LIVENESS_S):
        with pytest.raises(ConfigError, match="begin of the supply"):
            await emulated(supply=supply).start()
    assert supply.closed


@pytest.mark.parametrize("act", [*ODD_ENDS, swallow_a_cancel])
@pytest.mark.parametrize("what", ["end", "aclose"])
async def test_a_pipeline_closes_with_the_error_of_its_start(what: str, act: Act) -> None:
    supply = Breaking(what, act)
    async with asyncio.timeout(LIVENESS_S / 2):
        with pytest.raises(ConfigError, match="did not come up"):
            await emulated(supply=supply).start()
    assert supply.closed == (what == "end")
    assert bool(await end_left()) == (act is swallow_a_cancel)
