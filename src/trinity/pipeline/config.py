"""PipelineConfig: all settings of a pipeline, in groups that the parts that obey them declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

from trinity.connector import Medium
from trinity.core.frontend import FrontendOptions
from trinity.errors.arguments import Whole, check_arguments
from trinity.instance import Instance, InstanceOptions
from trinity.memory.digests import Verify
from trinity.placement import Placement
from trinity.planner import Plan
from trinity.preprocess.loader import ProcessorOptions
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.runtime.loader import GivenModel, ServingOptions


@check_arguments
@dataclass(frozen=True)
class PipelineConfig(InstanceOptions, FrontendOptions, ProcessorOptions, ServingOptions):
    """Arguments of a ``Pipeline``.

    - ``model``: a directory, a hub id (cached, or fetched if ``download``), "shapes", or ``EmulatedModel``.
    - ``placement`` ("EPD"): "1EP1D", "2ED1P", "1E3P4D", ..., a ``Plan`` (its best placement), a list of ``Instance``,
      or "auto": ``instances`` of EPD, recorded traffic, and a plan of it in ``pipe.auto``.
    - ``instances`` (count, None): how many to start with under "auto".
    - ``apply`` (False): True applies the plan of "auto".
    - ``download`` (False): fetch a model that is not in the cache.
    - ``hosting`` ("thread"): "thread" runs instances in this process, "process" each in a process of its own.
    - ``processes`` (``ProcessConfig()``): the shared secret and the longest silence of such a process.
    - ``connector`` (None): transport of blocks, a name, a ``Transport``, a ``Connector``, or these by kind of block,
      such as ``{"image": "shm", "kv": "nixl"}``; "inproc" for threads and "auto" for processes.
    - ``verify`` (None): digests of blocks are compared, "always", "network", "never"; the connector's or "network".

    Raises ``ConfigError``.
    """

    model: GivenModel
    placement: str | Placement | Plan | Sequence[Instance] = "EPD"
    _: KW_ONLY
    hosting: Literal["thread", "process"] = "thread"
    connector: Medium | Mapping[str, Medium] | None = None
    verify: Verify | None = None
    processes: ProcessConfig = ProcessConfig()
    instances: Whole | None = None
    apply: bool = False
    download: bool = False
