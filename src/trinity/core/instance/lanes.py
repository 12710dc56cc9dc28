"""Lanes, and the steps in flight on each: the one that runs, and with depth 2 the one that follows it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

import msgspec

from trinity.core.messages import Step
from trinity.core.scheduler import NOTHING, Outstanding

LANES = {"joint": "EPD", "vision": "E", "language": "PD"}


class Running(msgspec.Struct):  # which makes one in less time than a dataclass
    """A step in flight on a lane."""

    step: Step
    requests: Collection[str]  # whose rows it has, in order: a replay must not depend on hashes
    written: float | None = None  # when it told of the last layer of its prefills' KV

    @classmethod
    def of(cls, step: Step) -> Running:
        if not (step.encodes or step.prefills):
            return cls(step, step.decodes)
        rows = [row.request for row in step.encodes] + [row.request for row in step.prefills]
        return cls(step, dict.fromkeys([*rows, *step.decodes]))


Flights = dict[str, deque[Running]]  # of each lane, in the order in which they run


def outstanding(flights: Flights, own: str) -> Outstanding:
    """The most of each stage that a step of this lane may have beside it on the others."""
    most = NOTHING
    for lane, flight in flights.items():
        if lane != own and flight:
            most = _most([most, *map(_counts, flight)])
    return most


def _counts(running: Running) -> Outstanding:
    step = running.step
    prefill = sum(row.length for row in step.prefills)
    return Outstanding(len(step.decodes), prefill, sum(row.span.tokens for row in step.encodes))


def _most(counts: Iterable[Outstanding]) -> Outstanding:
    return Outstanding(*(max(each) for each in zip(*counts, strict=True)))
