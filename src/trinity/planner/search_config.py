"""SearchConfig: how a planner searches, and on which requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from trinity.errors.arguments import Count, Whole, check_arguments
from trinity.planner.algorithm2 import Split
from trinity.planner.plan import Objective, Strategy
from trinity.planner.progress import Report
from trinity.planner.search_space import Space
from trinity.traces.goodput import LEAST_REQUESTS


@check_arguments
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
    least_requests: Whole = LEAST_REQUESTS
    resample: bool = True
    seed: int = 0
    seeds: Count = 3


class Options(NamedTuple):
    """A planner's objective and search."""

    objective: Objective
    rate: float | None
    search: SearchConfig
    progress: Report | None
