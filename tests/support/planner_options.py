"""Keywords of a HybridPlanner from flat settings, as the cases of tests give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from trinity.planner import SearchConfig


def planner_options(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings with the fields of ``SearchConfig`` gathered in one."""
    options = dict(settings)
    found = {each.name: options.pop(each.name) for each in fields(SearchConfig) if each.name in options}
    return {**options, "search": SearchConfig(**found)}
