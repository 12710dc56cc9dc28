"""AutoApply: watches a running pipeline, and applies proposals by themselves under a guard (TriInfer 4.4).

::

    watch = DriftDetector(Demand.for_slo(pipe.cost, slo))
    applies = AutoApply(pipe, Replanner(watch, str(pipe.placement)), planner.plan)
    watching = asyncio.create_task(applies.run())
    ...
    for decision in applies.decisions:
        print(decision)
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from trinity.adapt.apply_guard import ApplyDecision, ApplyGuard, ApplyRules, has_same_roles
from trinity.adapt.live_requests import WatchedPipeline, follow_requests
from trinity.adapt.proposals import iter_proposals
from trinity.adapt.replanner import PlanResult, Proposal, Replanner
from trinity.errors import ChangeRefused, ClosedError, ConfigError, TrinityError
from trinity.planner import Plan
from trinity.traces.trace import Trace

logger = logging.getLogger("trinity")


class ChangingPipeline(WatchedPipeline, Protocol):
    """Pipeline whose placement can be changed while it is watched, such as a ``trinity.Pipeline``."""

    @property
    def state(self) -> str: ...
    @property
    def change_obstacle(self) -> str: ...
    @property
    def placement(self) -> Any: ...

    async def apply(self, placement: Any, /) -> Sequence[Any]: ...


class AutoApply:
    """Applies proposals for a running pipeline as ``rules`` allow, and keeps each decision.

    Follows the pipeline's requests, plans again after a shift in a thread, and gives each proposal to an
    ``ApplyGuard``. One that is held back is looked at again, and planned again where it has waited too long.

    - ``pipe``: the pipeline, which runs.
    - ``replanner``: finds shifts; it is told what runs, also where somebody else has changed it.
    - ``plan``: called in a thread as ``plan(trace, placement)``, such as ``HybridPlanner.plan``; it must not touch the
      pipeline.
    - ``rules`` (None): ``ApplyRules``; the defaults where None.
    - ``every_s`` (seconds, 1): between two looks at the pipeline.

    ``decisions`` has what became of each proposal, and why; each is logged to "trinity". ``error`` is the last error
    of an apply. Times of decisions (s) are those of the wall clock at ``run``, and do not jump with it. Raises
    ``ConfigError`` for an ``every_s`` that is not positive.
    """

    def __init__(
        self,
        pipe: ChangingPipeline,
        replanner: Replanner,
        plan: Callable[[Trace, str], PlanResult],
        *,
        rules: ApplyRules | None = None,
        every_s: float = 1.0,
    ) -> None:
        if not 0 < every_s < float("inf"):
            raise ConfigError(
                f"every_s, the seconds between two looks at a pipeline, must be positive, got {every_s!r}"
            )
        self.pipe, self.replanner, self.plan, self.every_s = pipe, replanner, plan, every_s
        self.guard = ApplyGuard(rules)
        self.error: TrinityError | None = None
        self._ahead_s = time.time() - time.monotonic()
        self._applying: asyncio.Future[Sequence[Any]] | None = None
        self._running = False

    @property
    def decisions(self) -> Sequence[ApplyDecision]:
        """Decisions about proposals, the last thousand: what became of each, and why."""
        return tuple(self.guard.decisions)

    async def run(self) -> None:
        """Watch and apply until the pipeline is closed or has failed; returns then. Cancel it to end it sooner.

        Raises ``ClosedError`` for a pipeline that does not run, ``ConfigError`` while this runs already, and what
        ``plan`` and the pipeline's ``apply`` raise that is no ``TrinityError``.
        """
        if self.pipe.state != "running":
            raise ClosedError(f"a pipeline that is {self.pipe.state} cannot be watched; start one, and watch that")
        if self._running:
            raise ConfigError("this watcher runs already; make another AutoApply for another pipeline")
        self._running, self._ahead_s = True, time.time() - time.monotonic()
        try:
            await self._watch()
        finally:
            self._running = False

    async def _watch(self) -> None:
        rows = follow_requests(self.pipe, self.every_s)
        proposals = iter_proposals(rows, self.replanner, self.plan)
        coming: asyncio.Future[Proposal] = asyncio.ensure_future(anext(proposals))
        try:
            while self.pipe.state == "running":
                waited: list[asyncio.Future[Any]] = [each for each in (coming, self._applying) if each is not None]
                await asyncio.wait(waited, timeout=self.every_s, return_when=asyncio.FIRST_COMPLETED)
                if self._applying is not None and self._applying.done():
                    self._take_end(self._applying)
                self._tell_present()
                if coming.done():
                    self._log(self.guard.offer(coming.result(), self._now))
                    coming = asyncio.ensure_future(anext(proposals))
                self._look()
        finally:
            left = [each for each in (coming, self._applying) if each is not None]
            for each in left:
                each.cancel()
            await asyncio.gather(*left, return_exceptions=True)
            self._applying = None
            await proposals.aclose()
            await rows.aclose()

    @property
    def _now(self) -> float:
        return time.monotonic() + self._ahead_s

    def _tell_present(self) -> None:
        """Tell the replanner what runs; between two switches of an apply that is nothing to plan for."""
        present = str(self.pipe.placement)
        if self._applying is None and not has_same_roles(present, self.replanner.placement):
            self.replanner.set_placement(present)

    def _look(self) -> None:
        made = self.guard.look(self._now, str(self.pipe.placement), self.pipe.change_obstacle)
        self._log(made)
        if made is not None and made.verdict == "applies":
            plan = made.proposal.plan
            wanted = plan if isinstance(plan, Plan) else made.proposal.placement
            self._applying = asyncio.ensure_future(self.pipe.apply(wanted))
        elif made is not None and made.verdict == "planned again":
            self.replanner.plan_again()

    def _take_end(self, ended: asyncio.Future[Sequence[Any]]) -> None:
        """Tell the guard how an apply has ended."""
        self._applying, error = None, ended.exception()
        if error is None:
            names = ", ".join(f"{each.name} is {each.roles or 'gone'}" for each in ended.result())
            self._log(self.guard.succeed(self._now, names))
        elif isinstance(error, ChangeRefused):
            self._log(self.guard.refuse(self._now, str(error)))
        elif isinstance(error, ClosedError) and self.pipe.state != "running":
            pass  # that ends watching, and is no fault of the placement's
        elif isinstance(error, TrinityError):
            self.error = error
            self._log(self.guard.fail(self._now, str(error)))
        else:
            raise error

    def _log(self, made: ApplyDecision | None) -> None:
        if made is not None:
            logger.log(logging.WARNING if made.verdict == "failed" else logging.INFO, "placement %s", made)
