"""placement="auto": general instances at first, requests recorded, then a plan, and what it says (TriInfer 4.4)."""

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
from trinity.errors import ConfigError, TrinityError
from trinity.planner import HybridPlanner, Plan
from trinity.traces.goodput import LEAST_REQUESTS
from trinity.traces.trace import SLO, Trace

Given = TypeVar("Given")
logger = logging.getLogger("trinity")
CACHE_BYTES = 1 << 30  # of an instance's pools where nobody says


class Profiled(Protocol):
    """What is asked of a pipeline."""

    trace: Trace
    cost: CostModel | None

    async def profile(self) -> CostTables: ...


class _ClosedError(Exception):
    """Nobody waits for the plan any more."""


class Auto:
    """Plans once ``requests`` were recorded, with costs measured at start, and tells by the log "trinity".

    ``plan`` is what was found, ``error`` why nothing was; ``done`` is set then. Nothing is moved: the next pipeline can
    start with the plan. An instance may use ``memory_bytes``, weights included; None: 1 GiB beside its weights.
    Raises ``ConfigError`` without an SLO, for fewer than one instance, and for a model whose shape is not known.
    """

    def __init__(
        self, model: Path | EmulatedModel, instances: int | None, slo: SLO | None, memory_bytes: int | None = None
    ) -> None:
        if slo is None:
            raise ConfigError('placement="auto" plans for an SLO: give slo=trinity.SLO(ttft, tbt)')
        if instances is None or instances < 1:
            raise ConfigError(f'placement="auto" needs instances=, how many to start with, got {instances!r}')
        self.instances, self.slo = instances, slo
        self.requests, self.every_s = LEAST_REQUESTS, 1.0
        self.model = _shape(model)
        self.memory = memory_bytes or self.model.weight_bytes("EPD") + CACHE_BYTES
        self.plan: Plan | None = None
        self.error: TrinityError | None = None
        self.done = asyncio.Event()
        self._closed = False
        self._task: asyncio.Task[None] | None = None

    @property
    def placement(self) -> str:
        """What the pipeline starts as: N x EPD, or N x PD for a model of text alone."""
        return f"{self.instances}{'EPD' if self.model.vision else 'PD'}"

    async def begin(self, pipe: Profiled) -> None:
        """Measure what steps cost, unless that is known, and wait for requests from now on."""
        cost = pipe.cost or await pipe.profile()
        self._task = asyncio.create_task(self._run(pipe.trace, cost), name="trinity-auto")

    async def aclose(self) -> None:
        """Plan no more. A plan that is being made ends after the replay it is at."""
        self._closed = True
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self, trace: Trace, cost: CostModel) -> None:
        while len(trace) + trace.dropped < self.requests:
            await asyncio.sleep(self.every_s)
            if self._closed:
                return
        recorded = Trace(row.request_at(row.timestamp) for row in trace)
        try:
            self.plan = await asyncio.to_thread(self._planned, recorded, cost)
            self._tell(self.plan)
        except _ClosedError:
            return
        except TrinityError as error:
            self.error = error
            logger.warning("no plan could be made of %d requests: %s", len(recorded), error)
        except Exception as error:  # a fault of trinity: serving goes on, and it is told
            self.error = TrinityError(f"planning failed: {error!r}")
            logger.exception("planning failed on %d requests", len(recorded))
        self.done.set()

    def _planned(self, recorded: Trace, cost: CostModel) -> Plan:
        device = msgspec.structs.replace(_device(cost), memory=self.memory)
        planner = HybridPlanner(
            self.model,
            self.slo,
            cluster=Cluster.of(device, self.instances),
            cost=cost,
            memory_share=1.0,
            least_requests=min(LEAST_REQUESTS, self.requests),
            seeds=0,
            progress=self._go_on,
        )
        return planner.plan(recorded)

    def _go_on(self, *_: Any) -> None:
        if self._closed:
            raise _ClosedError

    def _tell(self, plan: Plan) -> None:
        if plan.met and plan.placement != self.placement:
            logger.warning("another placement serves this traffic better than %s: %s", self.placement, plan.explain())
        else:
            logger.info("%s", plan.explain())


def automatic(
    model: Path | EmulatedModel, placement: Given, instances: int | None, slo: SLO | None, memory_bytes: int | None
) -> tuple[Auto | None, Given | str]:
    """What plans, where a pipeline's placement is "auto", and the placement to start with."""
    if placement != "auto":
        return None, placement
    auto = Auto(model, instances, slo, memory_bytes)
    return auto, auto.placement


def _shape(model: Path | EmulatedModel) -> ModelShape:
    if not isinstance(model, EmulatedModel):
        return model_config.read_model_shape(model)
    if isinstance(model.cost, Roofline):
        return model.cost.model
    known = model.shape.name.lower()
    if known not in MODELS:
        raise ConfigError(f'placement="auto" needs the shape of a known model, and {known!r} is none of MODELS')
    return MODELS[known]


def _device(cost: CostModel) -> Device:
    """The device of a roofline; else one whose figures are not used, for its costs are given."""
    return cost.device if isinstance(cost, Roofline) else DEVICES["cpu"]
