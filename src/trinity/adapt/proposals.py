"""Runs drift detection beside a pipeline: follows its requests, plans in a thread, yields proposals.

::

    watch = DriftDetector(Demand.for_slo(Roofline(model=get_model_shape("qwen2-vl-7b"), device=DEVICES["H100"]), slo))
    replanner = Replanner(watch, "2EP6D")
    async for proposal in iter_proposals(follow_requests(pipe), replanner, planner.plan):
        print(proposal)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from trinity.adapt.replanner import PlanResult, Proposal, Replanner
from trinity.errors import ConfigError, TrinityError
from trinity.traces.trace import Trace, TraceRow


async def follow(trace: Trace, every_s: float = 1.0) -> AsyncGenerator[TraceRow, None]:
    """Yield every row that is appended to a trace from now on; polls every ``every_s`` seconds, without end.

    Misses rows that the trace's limit drops between two polls. Raises ``ConfigError`` unless ``every_s`` is positive.
    """
    if not every_s > 0:
        raise ConfigError(f"every_s, the seconds between two polls of a trace, must be positive, got {every_s!r}")
    seen = len(trace) + trace.dropped
    while True:
        new = min(len(trace), len(trace) + trace.dropped - seen)
        seen = len(trace) + trace.dropped
        for row in [trace[len(trace) - left] for left in range(new, 0, -1)]:
            yield row
        await asyncio.sleep(every_s)


async def iter_proposals(
    rows: AsyncIterator[TraceRow], replanner: Replanner, plan: Callable[[Trace, str], PlanResult]
) -> AsyncGenerator[Proposal, None]:
    """Feed rows to ``replanner`` and yield its proposals; ends with the rows.

    ``plan(trace, placement)`` plans on a trace and evaluates the placement that runs, as ``HybridPlanner.plan`` does.
    It runs in a thread and must not touch the pipeline. A ``TrinityError`` of it goes to ``replanner.error`` and
    watching goes on; any other exception is raised here. If the generator is closed while a plan is made, the thread
    runs to its end and its plan is dropped.
    """
    reading: asyncio.Future[TraceRow | None] | None = asyncio.ensure_future(_next(rows))
    planning: asyncio.Task[PlanResult] | None = None
    try:
        while reading is not None or planning is not None:
            waited = [each for each in (reading, planning) if each is not None]
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if planning is not None and planning.done():
                done, planning = planning, None
                proposal = _take_proposal(done, replanner)
                if proposal is not None:
                    yield proposal
            if reading is not None and reading.done():
                row = reading.result()
                reading = asyncio.ensure_future(_next(rows)) if row is not None else None
                trace = replanner.feed(row) if row is not None else None
                if trace is not None:
                    made = asyncio.to_thread(plan, trace, replanner.placement)
                    planning = asyncio.create_task(made, name="trinity-plan")
    finally:
        for left in (reading, planning):
            if left is not None:
                left.cancel()
                await asyncio.gather(left, return_exceptions=True)


async def _next(rows: AsyncIterator[TraceRow]) -> TraceRow | None:
    return await anext(rows, None)


def _take_proposal(planning: asyncio.Task[PlanResult], replanner: Replanner) -> Proposal | None:
    try:
        plan = planning.result()
    except TrinityError as error:
        replanner.record_failure(error)
        return None
    return replanner.propose(plan)
