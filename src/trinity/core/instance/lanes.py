"""Lanes and their steps in flight: one, or two with ``depth`` 2 (vLLM's async scheduling)."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable
from itertools import chain

import msgspec

from trinity.core.messages import Step
from trinity.core.scheduler import NOTHING, Outstanding

LANE_PARTS = {"joint": ("vision", "language"), "vision": ("vision",), "language": ("language",)}  # ``StageKind.part``


class StepInFlight(msgspec.Struct):  # which makes one in less time than a dataclass
    """A step in flight on a lane."""

    step: Step
    requests: Collection[str]  # those with a row, in order: a replay must not depend on hashes
    written: float | None = None  # clock time at which the last layer of its prefills' KV was written

    @classmethod
    def of(cls, step: Step) -> StepInFlight:
        if not (step.encodes or step.prefills):
            return cls(step, step.decodes)
        rows = [row.request for row in step.encodes] + [row.request for row in step.prefills]
        return cls(step, dict.fromkeys([*rows, *step.decodes]))


Flights = dict[str, deque[StepInFlight]]  # of each lane, in the order in which they run


def count_in_flight(flights: Flights) -> Counter[str]:
    """Count for each request the steps in flight that have rows of it."""
    running = chain.from_iterable(flights.values())
    return Counter(chain.from_iterable(each.requests for each in running))


def outstanding(flights: Flights, own: str) -> Outstanding:
    """Largest count per stage among the steps in flight on the other lanes."""
    most = NOTHING
    for lane, flight in flights.items():
        if lane != own and flight:
            most = _most([most, *map(_counts, flight)])
    return most


def _counts(running: StepInFlight) -> Outstanding:
    step = running.step
    prefill = sum(row.length for row in step.prefills)
    return Outstanding(len(step.decodes), prefill, sum(row.span.tokens for row in step.encodes))


def _most(counts: Iterable[Outstanding]) -> Outstanding:
    return Outstanding(*(max(each) for each in zip(*counts, strict=True)))
