"""Costs as a user gives them: cost models, or paths of the tables that were measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trinity.costs.step_cost import CostModel, CostTables

GivenCosts = CostModel | str | Path | Mapping[str, CostModel | str | Path] | None


def load_costs(given: GivenCosts) -> CostModel | Mapping[str, CostModel] | None:
    """Return costs with the tables of each path in its place. Raises ``ConfigError`` for a file that has none."""
    if isinstance(given, Mapping):
        return {name: _load(each) for name, each in given.items()}
    return None if given is None else _load(given)


def _load(given: CostModel | str | Path) -> CostModel:
    return CostTables.load(given) if isinstance(given, str | Path) else given
