"""Work that a cancel reaches only while it may stop."""

from __future__ import annotations

import asyncio

import pytest

from trinity.errors import ConfigError
from trinity.runtime.shielded_wait import carry_through


class Work:
    """Two parts: the first may be cancelled, the second is done whatever comes, and noted."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.first, self.noted = error, True, False
        self.going = asyncio.Event()

    async def run(self) -> str:
        await self.going.wait()
        self.first = False
        await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        self.noted = True
        return "done"


async def begin(work: Work) -> asyncio.Task[str]:
    task = asyncio.ensure_future(carry_through(work.run(), lambda: work.first))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return task


async def test_left_alone_it_returns_and_raises_what_the_work_does() -> None:
    work = Work()
    work.going.set()
    assert await carry_through(work.run(), lambda: work.first) == "done"
    failing = Work(ConfigError("no"))
    failing.going.set()
    with pytest.raises(ConfigError, match="no"):
        await carry_through(failing.run(), lambda: failing.first)


async def test_a_cancel_stops_it_while_it_may_stop() -> None:
    work = Work()
    task = await begin(work)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    work.going.set()
    await asyncio.sleep(0.02)
    assert (work.first, work.noted) == (True, False)


@pytest.mark.parametrize("times", [1, 3])
async def test_later_the_work_is_done_and_the_cancel_raised_after_it(times: int) -> None:
    work = Work()
    task = await begin(work)
    work.going.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert work.noted


@pytest.mark.parametrize(
    ("error", "raised"), [(ConfigError("no"), asyncio.CancelledError), (ValueError("no"), ValueError)]
)
async def test_an_error_of_ours_gives_way_to_the_cancel_and_a_fault_does_not(
    error: Exception, raised: type[BaseException]
) -> None:
    work = Work(error)
    task = await begin(work)
    work.going.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(raised):
        await task
