"""HybridPlanner: which disaggregation method and ratio serve a recorded trace best (TriInfer 4.4, Algorithm 2)."""

from __future__ import annotations

from trinity.planner.hybrid import HybridPlanner as HybridPlanner
from trinity.planner.plan import OBJECTIVES as OBJECTIVES
from trinity.planner.plan import STRATEGIES as STRATEGIES
from trinity.planner.plan import Candidate as Candidate
from trinity.planner.plan import Plan as Plan
from trinity.planner.search_config import SearchConfig as SearchConfig
from trinity.planner.search_space import Space as Space
