"""SearchConfig: how a planner searches, and on which requests."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinity.errors import ConfigError, UnknownName
from trinity.planner.algorithm2 import Split
from trinity.planner.plan import STRATEGIES, Strategy
from trinity.planner.search_space import Space
from trinity.traces.goodput import LEAST_REQUESTS

SPLITS = ("largest_remainder", "minimax")


@dataclass(frozen=True)
class SearchConfig:
    """The search of a ``HybridPlanner``.

    - ``strategy`` ("race"): "race" (all methods and ratios, few replays), "paper" (Algorithm 2 line by line),
      "exhaustive", or "bayesian" (EPDServe's wider space, through Optuna).
    - ``space`` (``Space()``): settings that "bayesian" may choose beside a placement.
    - ``split`` ("largest_remainder"): rounding of Algorithm 2; "minimax" gives each instance in turn to the stage that
      is slowest.
    - ``least_requests`` (requests, 1,000): fewer tell no goodput.
    - ``resample`` (True): draw a trace longer that is too short for an answer (fewer than ``least_requests``, or over
      within ten TTFT bounds); the plan says so.
    - ``seed`` (0): of all random draws.
    - ``seeds`` (redrawn traces, 3): on each, search again the goodput of the best and of Algorithm 2's choice, which
      shows how sure a plan is.

    Raises ``ConfigError`` (``UnknownName``).
    """

    strategy: Strategy = "race"
    space: Space = field(default_factory=Space)
    split: Split = "largest_remainder"
    least_requests: int = LEAST_REQUESTS
    resample: bool = True
    seed: int = 0
    seeds: int = 3

    def __post_init__(self) -> None:
        for what, given, known in (("strategy", self.strategy, STRATEGIES), ("partition", self.split, SPLITS)):
            if given not in known:
                raise UnknownName(what, str(given), known)
        for name, value, least in (("seeds", self.seeds, 0), ("least_requests", self.least_requests, 1)):
            if type(value) is not int or value < least:
                raise ConfigError(f"{name} at least {least}, a whole number, got {value!r}")
        if type(self.seed) is not int:
            raise ConfigError(f"seed is a whole number, got {self.seed!r}")
        if not isinstance(self.space, Space):
            raise ConfigError(f"space is a trinity.planner.Space, got {self.space!r}")
