"""Results: what a shell tells its core of steps, pulls and copies that it was commanded to run, and of the time."""

from __future__ import annotations

from typing import Any

import msgspec

from trinity.core.values import Failure, Sampled, Value


class Tick(Value, frozen=True):
    """A timer is due."""


class Stepped(Value, frozen=True):
    """A step ended after ``seconds``: its samples and its failures, by request."""

    id: int
    lane: str
    sampled: dict[str, Sampled] = msgspec.field(default_factory=dict)
    failed: dict[str, Failure] = msgspec.field(default_factory=dict)
    seconds: float = 0.0


class LayersWritten(Value, frozen=True):
    """A running step has written these layers, [first, end), of the KV of all its prefill rows.

    None: the step failed and runs again row by row; what it wrote before is void.
    """

    step: int
    lane: str
    layers: tuple[int, int] | None


class Pulled(Value, frozen=True):
    """A pull ended."""

    offer: str
    part: int
    failure: Failure | None = None
    record: dict[str, Any] = msgspec.field(default_factory=dict)


class Collected(Value, frozen=True):
    """The features of an encode-only request were copied: ``rows[i]`` of media item i, opaque to the cores."""

    request: str
    rows: tuple[Any, ...] = ()
    failure: Failure | None = None
