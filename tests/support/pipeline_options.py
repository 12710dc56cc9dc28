"""Keywords of a Pipeline from flat settings, as the cases of tests give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trinity.memory.cache_config import CacheConfig
from trinity.remote.supervision.process_config import ProcessConfig

GROUPS: dict[str, type[CacheConfig] | type[ProcessConfig]] = {"cache": CacheConfig, "processes": ProcessConfig}


def pipeline_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the fields of ``CacheConfig`` and ``ProcessConfig`` gathered in these values."""
    options = dict(settings)
    for keyword, value in GROUPS.items():
        fields = {name: options.pop(name) for name in value.__dataclass_fields__ if name in options}
        if fields:
            options[keyword] = value(**fields)
    return options
