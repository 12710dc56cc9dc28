"""placement="auto": starts with general instances, records requests, plans on them, logs or applies the plan.

TriInfer 4.4.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

from trinity.costs import model_config
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import MODELS, ModelShape
from trinity.costs.step_cost import DEVICES, CostModel, CostTables, Device, Roofline
from trinity.emulation.model import EmulatedModel
from trinity.errors import ChangeRefused, ClosedError, ConfigError, TrinityError, describe_error
from trinity.planner import HybridPlanner, Plan, SearchConfig
from trinity.stage_kinds import all_letters, stage_kinds
from trinity.traces.goodput import LEAST_REQUESTS
from trinity.traces.trace import SLO, Trace

Given = TypeVar("Given")
logger = logging.getLogger("trinity")
AUTO_CACHE_BYTES = 1 << 30  # of an instance's pools where memory_bytes is not given


class RecordingPipeline(Protocol):
    """Pipeline that records a trace, can measure its costs, and can become what a plan says."""

    trace: Trace
    cost: CostModel | None

    async def profile(self) -> CostTables: ...
    async def apply(self, placement: Plan, /) -> object: ...


class PlanningStopped(Exception):
    """Raised by ``AutoPlanner.plan_on`` once it was told to stop."""


class AutoPlanner:
    """Plans once ``requests`` requests were recorded, with costs measured at start; logs the plan, and may apply it.

    model: checkpoint directory or emulated model.
    instances: number of instances to start with, at least 1.
    slo: latency bounds to plan for.
    memory_bytes (bytes, None): memory of an instance, weights included; None: 1 GiB beside its weights.
    apply (False): True applies the plan where it meets the SLO and is for another placement than runs. While an
        instance is away or another change runs, that waits; any other error is logged, and ends it.

    Sets ``done`` at the end, with ``plan``, or with ``error`` where planning or applying failed; ``applied`` is True
    where the plan runs. Without ``apply`` nothing moves: the next pipeline can start with the plan. Raises
    ``ConfigError`` without an SLO, for fewer than one instance, and for a model of unknown shape.
    """

    def __init__(
        self,
        model: Path | EmulatedModel,
        instances: int | None,
        slo: SLO | None,
        memory_bytes: int | None = None,
        apply: bool = False,
    ) -> None:
        if slo is None:
            raise ConfigError('placement="auto" plans for an SLO: give slo=trinity.SLO(ttft, tbt)')
        if instances is None or instances < 1:
            raise ConfigError(f'placement="auto" needs instances=, the number to start with, got {instances!r}')
        self.instances, self.slo, self.apply = instances, slo, apply
        self.requests, self.every_s = LEAST_REQUESTS, 1.0
        self.model = _known_shape(model)
        self.memory = memory_bytes or self.model.weight_bytes(all_letters()) + AUTO_CACHE_BYTES
        self.plan: Plan | None = None
        self.applied = False
        self.error: TrinityError | None = None
        self.done = asyncio.Event()
        self._stopped = self._applying = False
        self._task: asyncio.Task[None] | None = None

    @property
    def placement(self) -> str:
        """Placement to start with: N x EPD, or N x PD for a model of text alone."""
        letters = (kind.letter for kind in stage_kinds() if self.model.encoder or kind.media is None)
        return f"{self.instances}{''.join(letters)}"

    async def begin(self, pipe: RecordingPipeline) -> None:
        """Measure costs unless the pipeline has some, then start to wait for requests."""
        cost = pipe.cost or await pipe.profile()
        self._task = asyncio.create_task(self._run(pipe, cost), name="trinity-auto")

    async def aclose(self) -> None:
        """Stop planning and applying. A plan in progress ends after its current replay, an apply after its switch."""
        self.stop()
        if self._task is not None:
            if self._applying:
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def stop(self) -> None:
        """Have a plan in progress raise ``PlanningStopped`` after its current replay."""
        self._stopped = True

    async def _run(self, pipe: RecordingPipeline, cost: CostModel) -> None:
        while len(pipe.trace) + pipe.trace.dropped < self.requests:
            await asyncio.sleep(self.every_s)
            if self._stopped:
                return
        recorded = Trace(row.request_at(row.timestamp) for row in pipe.trace)
        try:
            self.plan = await asyncio.to_thread(self.plan_on, recorded, cost)
            self._log_plan(self.plan)
        except PlanningStopped:
            return
        except TrinityError as error:
            self.error = error
            logger.warning("no plan could be made from %d requests: %s", len(recorded), error)
        except Exception as error:  # a fault of trinity: log it, and serving goes on
            self.error = TrinityError(f"planning failed: {describe_error(error)}")
            logger.exception("planning failed on %d requests", len(recorded))
        if self.apply and self.plan is not None and self._is_better(self.plan):
            await self._apply_plan(pipe, self.plan)
        self.done.set()

    async def _apply_plan(self, pipe: RecordingPipeline, plan: Plan) -> None:
        """Apply the plan once the pipeline can be changed. An error is logged and kept; serving goes on."""
        self._applying, said = True, ""
        try:
            while not self._stopped and not self.applied:
                try:
                    await pipe.apply(plan)
                    self.applied = True
                except ChangeRefused as why:
                    if str(why) != said:
                        said = str(why)
                        logger.info("the plan for %s waits: %s", plan.placement, said)
                    await asyncio.sleep(self.every_s)
        except ClosedError:
            return  # nobody is left to serve
        except TrinityError as error:
            self.error = error
            logger.warning("the plan for %s could not be applied: %s", plan.placement, error)
        except Exception as error:  # a fault of trinity: log it, and serving goes on
            self.error = TrinityError(f"applying the plan failed: {describe_error(error)}")
            logger.exception("applying the plan for %s failed", plan.placement)
        finally:
            self._applying = False

    def plan_on(self, recorded: Trace, cost: CostModel) -> Plan:
        """Plan on recorded requests; for a thread. Raises ``PlanningStopped``, and what ``HybridPlanner.plan`` does."""
        device = msgspec.structs.replace(_device(cost), memory=self.memory)
        planner = HybridPlanner(
            self.model,
            self.slo,
            cluster=Cluster.of(device, self.instances),
            cost=cost,
            memory_share=1.0,
            search=SearchConfig(least_requests=min(LEAST_REQUESTS, self.requests), seeds=0),
            progress=self._raise_if_stopped,
        )
        return planner.plan(recorded)

    def _raise_if_stopped(self, *_: Any) -> None:
        if self._stopped:
            raise PlanningStopped

    def _is_better(self, plan: Plan) -> bool:
        return plan.met and plan.placement != self.placement

    def _log_plan(self, plan: Plan) -> None:
        if self._is_better(plan):
            logger.warning("another placement serves this traffic better than %s: %s", self.placement, plan.explain())
        else:
            logger.info("%s", plan.explain())


def resolve_auto_placement(
    model: Path | EmulatedModel,
    placement: Given,
    instances: int | None,
    slo: SLO | None,
    memory_bytes: int | None,
    apply: bool = False,
) -> tuple[AutoPlanner | None, Given | str]:
    """Make the planner of a pipeline whose placement is "auto", and the placement to start with.

    Raises ``ConfigError`` for ``apply`` with any other placement.
    """
    if placement != "auto":
        if apply:
            raise ConfigError('apply=True applies the plan of placement="auto"; of another one, await pipe.apply(plan)')
        return None, placement
    auto = AutoPlanner(model, instances, slo, memory_bytes, apply)
    return auto, auto.placement


def _known_shape(model: Path | EmulatedModel) -> ModelShape:
    if not isinstance(model, EmulatedModel):
        return model_config.read_model_shape(model)
    if isinstance(model.cost, Roofline):
        return model.cost.model
    known = model.shape.name.lower()
    if known not in MODELS:
        raise ConfigError(
            f"a plan needs a known model shape, but {known!r} is not one of trinity.costs.model_shape.MODELS"
        )
    return MODELS[known]


def name_shape(model: Path | EmulatedModel) -> str | None:
    """Name of a model's shape, as plans have it; None where that is not known."""
    try:
        return _known_shape(model).name
    except ConfigError:
        return None


def _device(cost: CostModel) -> Device:
    """Device of a roofline; for measured costs any device, since its figures are not used."""
    return cost.device if isinstance(cost, Roofline) else DEVICES["cpu"]
