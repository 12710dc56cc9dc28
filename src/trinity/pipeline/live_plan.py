"""LivePlanner: a plan for what a pipeline has served, made on a thread while it serves on."""

from __future__ import annotations

import asyncio
import time
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

from trinity.adapt.auto import AutoPlanner, PlanningStopped
from trinity.costs.step_cost import DEVICES, CostModel, Roofline
from trinity.errors import Overloaded, TraceError
from trinity.pipeline.live_snapshot import name_placement
from trinity.planner import Plan
from trinity.traces.trace import SLO, Trace, TraceRow

if TYPE_CHECKING:
    from trinity.pipeline.pipeline import Pipeline

CHECK_S = 0.2  # s between two looks at whether a plan must stop
GUESSED = "Priced by a roofline of a small CPU, as nothing was measured: call `await pipe.profile()` while it is idle."


class LivePlan(msgspec.Struct, frozen=True):
    """A plan in words: the placement to run, that of now, whether an SLO is met by it, the explanation, and notes."""

    placement: str
    now: str
    met: bool
    text: str
    note: str = ""


class LivePlanner:
    """Plans on a pipeline's last requests, one plan at a time.

    - ``pipe``: the pipeline; all is called on its loop's thread.
    - ``requests`` (count, 2,000): most that are planned on.
    - ``seconds`` (s, 20): a plan that takes longer is given up after the replay that runs then.
    """

    def __init__(self, pipe: Pipeline, requests: int = 2_000, seconds: float = 20.0) -> None:
        self._pipe, self._requests, self._seconds = pipe, requests, seconds
        self._running: asyncio.Task[Plan] | None = None

    async def plan(self, ttft: float, tbt: float) -> LivePlan:
        """Plan for these bounds (seconds) and as many instances as there are now.

        A caller that is cancelled leaves the thread to its end.

        Raises ``Overloaded`` while another plan is made or where it takes too long, ``ConfigError`` for a model of
        unknown shape, ``TraceError`` where too little was served.
        """
        if self._running is not None and not self._running.done():
            raise Overloaded("another plan is being made; wait until it is there")
        pipe = self._pipe
        rows = list(islice(reversed(pipe.trace), self._requests))[::-1]
        if not rows:
            raise TraceError("nothing was served so far: send some requests first")
        auto = AutoPlanner(pipe.model, len(pipe.instances), SLO(ttft, tbt))
        cost = pipe.cost or Roofline(model=auto.model, device=DEVICES["cpu"])
        self._running = asyncio.create_task(self._run(auto, rows, cost))
        self._running.add_done_callback(lambda done: done.cancelled() or done.exception())  # its caller may be gone
        found = await asyncio.shield(self._running)
        note = "" if pipe.cost is not None else GUESSED
        return LivePlan(found.placement, name_placement(pipe), found.met, found.explain(), note)

    async def _run(self, auto: AutoPlanner, rows: list[TraceRow], cost: CostModel) -> Plan:
        """Plan on a thread until it is done, takes too long, or the pipeline is closed."""
        planning = asyncio.create_task(asyncio.to_thread(_plan_on_rows, auto, rows, cost))
        until = time.monotonic() + self._seconds
        try:
            while not planning.done():
                left = until - time.monotonic()
                if left <= 0 or self._pipe.state == "closed":
                    auto.stop()
                await asyncio.wait([planning], timeout=min(CHECK_S, left) if left > 0 else None)
            return planning.result()
        except PlanningStopped:
            raise Overloaded(
                f"no plan was found in {self._seconds:g} s beside what is served; plan on the trace"
            ) from None
        finally:
            auto.stop()


def _plan_on_rows(auto: AutoPlanner, rows: list[TraceRow], cost: CostModel) -> Plan:
    return auto.plan_on(Trace(row.request_at(row.timestamp) for row in rows), cost)
