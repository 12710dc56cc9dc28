"""Watching beside a running loop: the loop is never blocked, errors of the planner are told, closing leaves nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable

import pytest

from support.steady_traffic import FLAT, Plan, row, steady
from trinity.adapt.drift import DriftDetector
from trinity.adapt.proposals import follow, iter_proposals
from trinity.adapt.replanner import Proposal, Replanner
from trinity.errors import ConfigError, TraceTooShort
from trinity.traces.trace import Trace, TraceRow

SHIFTED = [*steady(0, 300), *steady(300, 420, out=21)]


def replanner() -> Replanner:
    return Replanner(DriftDetector(FLAT), "1P1D", least=5, requests=20)


async def given(rows: Iterable[TraceRow]) -> AsyncIterator[TraceRow]:
    for each in rows:
        yield each


async def test_rows_go_on_while_a_plan_is_made_in_a_thread() -> None:
    made, release, threads = replanner(), threading.Event(), []

    def plan(trace: Trace, present: str) -> Plan:
        threads.append(threading.current_thread())
        assert present == "1P1D"  # what runs, to be evaluated too
        assert release.wait(120)
        return Plan("1P2D")

    async def rows() -> AsyncIterator[TraceRow]:
        for each in SHIFTED:
            yield each
        assert made.watch.now == 419  # all of it was taken in while the planner waits
        assert threads
        release.set()

    found = [proposal async for proposal in iter_proposals(rows(), made, plan)]
    assert [(proposal.placement, proposal.at_s) for proposal in found] == [("1P2D", 419)]
    assert threads != [threading.current_thread()]


async def test_a_proposal_comes_when_its_plan_is_ready_though_no_row_does() -> None:
    waiting = asyncio.Event()

    async def rows() -> AsyncIterator[TraceRow]:
        for each in SHIFTED:
            yield each
        await waiting.wait()

    coming = iter_proposals(rows(), replanner(), lambda trace, present: Plan("1P2D"))
    proposal = await asyncio.wait_for(anext(coming), 120)
    assert isinstance(proposal, Proposal)
    waiting.set()
    assert [each async for each in coming] == []


async def test_a_planner_without_an_answer_is_told_of_and_watching_goes_on() -> None:
    made, answers = replanner(), iter([None, Plan("2P2D")])

    def plan(trace: Trace, present: str) -> Plan:
        answer = next(answers)
        if answer is None:
            raise TraceTooShort("a trace too short", 60.0)
        return answer

    async def rows() -> AsyncIterator[TraceRow]:
        for each in SHIFTED:
            yield each
        while made.error is None:
            await asyncio.sleep(0.01)
        for each in (*steady(420, 700, out=21), *steady(700, 820, out=41)):
            yield each

    found = [proposal async for proposal in iter_proposals(rows(), made, plan)]
    assert isinstance(made.error, TraceTooShort)
    assert [(proposal.placement, proposal.shift.since_s) for proposal in found] == [("2P2D", 700)]


async def test_what_is_no_error_of_trinity_comes_out() -> None:
    def plan(trace: Trace, present: str) -> Plan:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        [proposal async for proposal in iter_proposals(given(SHIFTED), replanner(), plan)]


async def test_an_error_of_the_rows_comes_out_too() -> None:
    async def rows() -> AsyncIterator[TraceRow]:
        yield row(0)
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        [proposal async for proposal in iter_proposals(rows(), replanner(), lambda trace, present: Plan("1P2D"))]


async def test_closed_while_a_plan_is_made() -> None:
    release, started = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def plan(trace: Trace, present: str) -> Plan:
        loop.call_soon_threadsafe(started.set)
        release.wait(120)
        return Plan("1P2D")

    async def watching() -> None:
        async for proposal in iter_proposals(given([*SHIFTED, *steady(420, 500, out=21)]), replanner(), plan):
            raise AssertionError(proposal)

    task = asyncio.create_task(watching())
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    await loop.shutdown_default_executor()


async def test_following_gives_what_is_appended_and_nothing_else() -> None:
    trace = Trace(steady(0, 3), limit=4)
    rows = follow(trace, every_s=0.001)
    first = asyncio.ensure_future(anext(rows))
    await asyncio.sleep(0)
    trace.append(row(10))
    trace.append(row(11))
    assert [(await first).timestamp, (await anext(rows)).timestamp] == [10_000, 11_000]
    for at in range(20, 26):  # six more than a trace of four holds
        trace.append(row(at))
    assert [(await anext(rows)).timestamp for _ in range(4)] == [22_000, 23_000, 24_000, 25_000]
    await rows.aclose()
    with pytest.raises(ConfigError, match="positive"):
        await anext(follow(trace, every_s=0))
