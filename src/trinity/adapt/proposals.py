"""Watching beside a pipeline: rows as they come, plans made in a thread, proposals as they are ready.

::

    watch = Watch(Demand.for_slo(Roofline(model=model("qwen2-vl-7b"), device=DEVICES["H100"]), slo))
    redeploy = Redeploy(watch, "2EP6D")
    async for proposal in proposals(follow(pipe.trace), redeploy, planner.plan):
        print(proposal)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from trinity.adapt.drift import Planned, Proposal, Redeploy
from trinity.errors import ConfigError, TrinityError
from trinity.traces.trace import Trace, TraceRow


async def follow(trace: Trace, every_s: float = 1.0) -> AsyncGenerator[TraceRow, None]:
    """Every row that is appended to a trace from now on; looked for every so many seconds, without end.

    Rows that a trace's limit dropped between two looks are missed.
    """
    if not every_s > 0:
        raise ConfigError(f"seconds between two looks at a trace must be positive, got {every_s!r}")
    seen = len(trace) + trace.dropped
    while True:
        new = min(len(trace), len(trace) + trace.dropped - seen)
        seen = len(trace) + trace.dropped
        for row in [trace[len(trace) - left] for left in range(new, 0, -1)]:
            yield row
        await asyncio.sleep(every_s)


async def proposals(
    rows: AsyncIterator[TraceRow], redeploy: Redeploy, plan: Callable[[Trace], Planned]
) -> AsyncGenerator[Proposal, None]:
    """Feed rows to ``redeploy`` and give its proposals; ends with the rows.

    ``plan`` runs in a thread and must not touch the pipeline. What it raises of ``TrinityError`` goes to
    ``redeploy.error`` and watching goes on; any other exception comes out of here. When this is closed while a plan is
    made, the thread runs to its end and what it found is dropped.
    """
    reading: asyncio.Future[TraceRow | None] | None = asyncio.ensure_future(_next(rows))
    planning: asyncio.Task[Planned] | None = None
    try:
        while reading is not None or planning is not None:
            waited = [each for each in (reading, planning) if each is not None]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if planning is not None and planning.done():
                done, planning = planning, None
                proposal = _proposal(done, redeploy)
                if proposal is not None:
                    yield proposal
            if reading is not None and reading.done():
                row = reading.result()
                reading = asyncio.ensure_future(_next(rows)) if row is not None else None
                trace = redeploy.feed(row) if row is not None else None
                if trace is not None:
                    planning = asyncio.create_task(asyncio.to_thread(plan, trace), name="trinity-plan")
    finally:
        for left in (reading, planning):
            if left is not None:
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)


async def _next(rows: AsyncIterator[TraceRow]) -> TraceRow | None:
    return await anext(rows, None)


def _proposal(planning: asyncio.Task[Planned], redeploy: Redeploy) -> Proposal | None:
    try:
        return redeploy.planned(planning.result())
    except TrinityError as error:
        redeploy.failed(error)
        return None
