"""Stages run parts of a model on an instance; these are the names for stages and attention backends of your own.

Each name is loaded on first use: importing this package imports neither torch nor numpy.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinity.core.messages import IMAGE as IMAGE
    from trinity.core.messages import KV as KV
    from trinity.core.messages import Encode as Encode
    from trinity.core.messages import Grow as Grow
    from trinity.core.messages import Open as Open
    from trinity.core.messages import Prefill as Prefill
    from trinity.core.messages import Sampled as Sampled
    from trinity.core.messages import Step as Step
    from trinity.stages.attention.interface import AttentionBackend as AttentionBackend
    from trinity.stages.attention.interface import AttentionParams as AttentionParams
    from trinity.stages.attention.interface import ChunkRows as ChunkRows
    from trinity.stages.attention.interface import PagedRows as PagedRows
    from trinity.stages.attention.interface import SplitAttention as SplitAttention
    from trinity.stages.base import CleanableStage as CleanableStage
    from trinity.stages.base import GrowableStage as GrowableStage
    from trinity.stages.base import LaunchableStage as LaunchableStage
    from trinity.stages.base import LayerReporter as LayerReporter
    from trinity.stages.base import PendingStep as PendingStep
    from trinity.stages.base import Stage as Stage
    from trinity.stages.base import StageFactory as StageFactory
    from trinity.stages.base import StageSetup as StageSetup
    from trinity.stages.encode import EncodeStage as EncodeStage
    from trinity.stages.language import LanguageStage as LanguageStage

_HOMES = {
    "core.messages": ["IMAGE", "KV", "Encode", "Grow", "Open", "Prefill", "Sampled", "Step"],
    "stages.attention.interface": ["AttentionBackend", "AttentionParams", "ChunkRows", "PagedRows", "SplitAttention"],
    "stages.base": [
        *("CleanableStage", "GrowableStage", "LaunchableStage", "LayerReporter", "PendingStep"),
        *("Stage", "StageFactory", "StageSetup"),
    ],
    "stages.encode": ["EncodeStage"],
    "stages.language": ["LanguageStage"],
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # a type checker would take any name for granted

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            module = sys.modules[__name__]
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=module)
        value = getattr(import_module(f"trinity.{_HOME[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
