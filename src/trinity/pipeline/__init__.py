"""Pipeline: one model served on instances under a placement; what a program calls to have requests served."""

from __future__ import annotations

from trinity.core.failure_policy import FailurePolicy as FailurePolicy
from trinity.pipeline.pipeline import Pipeline as Pipeline
