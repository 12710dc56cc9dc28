"""Conditions of a virtual cluster: settings of a placement, how long everything takes, and what fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from random import Random
from typing import Any

from trinity.core.instance.settings import Settings
from trinity.core.messages import Collect, Failure, LayersWritten, Pull, Step, Work
from trinity.core.scheduler import StepTime
from trinity.placement import Placement
from trinity.stage_kinds import roles_of


def _message(draw: Random, source: str, target: str) -> float:
    return draw.uniform(0.0, 0.05)


def _step(draw: Random, instance: str, step: Step) -> float:
    return draw.uniform(0.0, 0.1)


def _pull(draw: Random, pull: Pull) -> float:
    return draw.uniform(0.0, 0.1)


def predict_steps(cost: StepTime) -> Callable[[Random, str, Step], float]:
    """Make step durations from a cost model, for ``Durations.step``."""

    def seconds(draw: Random, instance: str, step: Step) -> float:
        prefill = sum(row.length for row in step.prefills)
        media = sum(row.span.tokens for row in step.encodes)
        return cost.seconds(len(step.decodes), prefill, media)

    return seconds


@dataclass(frozen=True)
class Durations:
    """Seconds that a message, a step and a pull take; each function may draw from the cluster's generator."""

    message: Callable[[Random, str, str], float] = _message
    step: Callable[[Random, str, Step], float] = _step
    pull: Callable[[Random, Pull], float] = _pull


@dataclass(frozen=True)
class Faults:
    """Choice of the rows of a step (instance, step, request), of the pulls and of the copies for a reader that fail."""

    row: Callable[[Random, str, Step, str], bool] = lambda draw, instance, step, request: False
    pull: Callable[[Random, Pull], bool] = lambda draw, pull: False
    collect: Callable[[Random, Collect], bool] = lambda draw, collect: False

    @classmethod
    def at_random(cls, rows: float, pulls: float) -> Faults:
        """Fail each row of a step, and each copy, with probability ``rows``, each pull with probability ``pulls``."""
        return cls(
            lambda draw, instance, step, request: draw.random() < rows,
            lambda draw, pull: draw.random() < pulls,
            lambda draw, collect: draw.random() < rows,
        )


def make_settings(placement: str | Placement, pools: Mapping[str, int], **common: Any) -> list[Settings]:
    """Make settings for every instance of a placement.

    ``pools`` has blocks by kind; each instance gets the kinds of its roles. ``common`` has fields of ``Settings``;
    ``lanes`` goes only to instances that encode beside another stage. By default leases never expire and loads are not
    reported, so that time passes only through the cluster's requests.
    """
    common = {"lease_s": inf, "report_s": inf, **common}
    parsed = Placement.parse(placement) if isinstance(placement, str) else placement
    result = []
    for name, roles in parsed.instances():
        does, own = roles_of(roles), dict(common)
        kinds = does.kinds & set(pools)
        if not does.has_two_parts:
            own.pop("lanes", None)
        result.append(Settings(name, roles, {kind: pools[kind] for kind in sorted(kinds)}, **own))
    return result


def count_up(work: Work, index: int) -> int:
    """Sample 1, 2, 3 and so on."""
    return index + 1


def fail_pull(pull: Pull) -> Failure:
    """Make the failure of a pull; a pull of some layers fails by wrong bytes (``IntegrityError``)."""
    fields = {"cause": "IntegrityError"} if pull.layers else {}
    return Failure("MigrationError", f"a pull of {pull.request} failed", fields)


def report_layers(draw: Random, step: Step, layers: int, fails: bool) -> list[tuple[float, LayersWritten]]:
    """Report layers evenly over a step; a failing one, and now and then another, begins anew in its middle.

    Returns reports with their times, as shares of the step's.
    """
    groups = [(first, min(first + step.group, layers)) for first in range(0, layers, step.group)]
    told = draw.randint(0, len(groups))
    again = fails or draw.random() < 0.1
    reports = [
        ((number + 1) / (len(groups) + 2), LayersWritten(step.id, step.lane, group))
        for number, group in enumerate(groups[: told if again else len(groups)])
    ]
    return [*reports, (0.95, LayersWritten(step.id, step.lane, None))] if again and told else reports
