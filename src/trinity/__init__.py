"""trinity serves vision-language models of transformers as encode, prefill and decode stages.

The public names are loaded on first use: ``import trinity`` imports neither torch nor transformers.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trinity import errors as errors

if TYPE_CHECKING:
    from trinity.connector import Connector as Connector
    from trinity.core.failure_policy import FailurePolicy as FailurePolicy
    from trinity.core.logits_processors import register_logits_processor as register_logits_processor
    from trinity.core.routing.router import RoutingPolicy as RoutingPolicy
    from trinity.core.scheduler import BatchRules as BatchRules
    from trinity.core.transfers import TransferPolicy as TransferPolicy
    from trinity.costs.budgets import StepBudgets as StepBudgets
    from trinity.costs.step_cost import Device as Device
    from trinity.errors import ClosedError as ClosedError
    from trinity.errors import ConfigError as ConfigError
    from trinity.errors import RequestError as RequestError
    from trinity.errors import TransportError as TransportError
    from trinity.errors import TrinityError as TrinityError
    from trinity.instance import Instance as Instance
    from trinity.memory.cache_config import CacheConfig as CacheConfig
    from trinity.metrics import Metrics as Metrics
    from trinity.pipeline import Pipeline as Pipeline
    from trinity.pipeline.features import Features as Features
    from trinity.pipeline.live_view import LiveView as LiveView
    from trinity.pipeline.stream import Stream as Stream
    from trinity.pipeline.sync_pipeline import SyncPipeline as SyncPipeline
    from trinity.placement import Placement as Placement
    from trinity.planner import HybridPlanner as HybridPlanner
    from trinity.planner import Plan as Plan
    from trinity.planner import SearchConfig as SearchConfig
    from trinity.preprocess.media.clips import Clip as Clip
    from trinity.preprocess.media.image_kind import open_image as open_image
    from trinity.preprocess.media_limits import MediaLimits as MediaLimits
    from trinity.remote.buddy import Buddy as Buddy
    from trinity.remote.channel.tls import TLSConfig as TLSConfig
    from trinity.remote.hosts.hosts import plan_hosts as plan_hosts
    from trinity.remote.hosts.hosts import read_hosts as read_hosts
    from trinity.remote.hosts.hosts import write_hosts as write_hosts
    from trinity.remote.ray.ray_supply import RaySupply as RaySupply
    from trinity.remote.supervision.process_config import ProcessConfig as ProcessConfig
    from trinity.request import Media as Media
    from trinity.request import Output as Output
    from trinity.request import Request as Request
    from trinity.request import Sampling as Sampling
    from trinity.request import Structured as Structured
    from trinity.request import Token as Token
    from trinity.runtime.compose import LoadedStage as LoadedStage
    from trinity.runtime.compose import load_stage as load_stage
    from trinity.runtime.compose import start_instance as start_instance
    from trinity.runtime.host import Network as Network
    from trinity.stages.base import Stage as Stage
    from trinity.timeline import Timeline as Timeline
    from trinity.traces.goodput import Goodput as Goodput
    from trinity.traces.trace import SLO as SLO
    from trinity.traces.trace import Trace as Trace
    from trinity.transport.base import Transport as Transport

__version__ = "0.1.0"

_HOMES = {
    "costs.budgets": ["StepBudgets"],
    "runtime.compose": ["LoadedStage", "load_stage", "start_instance"],
    "connector": ["Connector"],
    "costs.step_cost": ["Device"],
    "errors": ["ClosedError", "ConfigError", "RequestError", "TransportError", "TrinityError"],
    "traces.goodput": ["Goodput"],
    "instance": ["Instance"],
    "memory.cache_config": ["CacheConfig"],
    "metrics": ["Metrics"],
    "core.transfers": ["TransferPolicy"],
    "core.failure_policy": ["FailurePolicy"],
    "pipeline": ["Pipeline"],
    "pipeline.features": ["Features"],
    "pipeline.sync_pipeline": ["SyncPipeline"],
    "placement": ["Placement"],
    "planner": ["HybridPlanner", "Plan", "SearchConfig"],
    "preprocess.media.clips": ["Clip"],
    "preprocess.media.image_kind": ["open_image"],
    "preprocess.media_limits": ["MediaLimits"],
    "remote.buddy": ["Buddy"],
    "remote.hosts.hosts": ["plan_hosts", "read_hosts", "write_hosts"],
    "remote.ray.ray_supply": ["RaySupply"],
    "remote.supervision.process_config": ["ProcessConfig"],
    "remote.channel.tls": ["TLSConfig"],
    "request": ["Media", "Output", "Request", "Sampling", "Structured", "Token"],
    "runtime.host": ["Network"],
    "core.logits_processors": ["register_logits_processor"],
    "core.routing.router": ["RoutingPolicy"],
    "core.scheduler": ["BatchRules"],
    "stages.base": ["Stage"],
    "pipeline.live_view": ["LiveView"],
    "pipeline.stream": ["Stream"],
    "timeline": ["Timeline"],
    "traces.trace": ["SLO", "Trace"],
    "transport.base": ["Transport"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted([*_HOME, "errors"])


if not TYPE_CHECKING:  # a checker that saw this would believe in every name

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            module = sys.modules[__name__]
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
