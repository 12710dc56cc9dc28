"""FrontendRequest: what the front end remembers of a request, and which lives of instances have it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from trinity.core.messages import Finished, Sampled, Work


class Life(NamedTuple):
    """One life of an instance: it has another epoch after each restart."""

    name: str
    epoch: int


@dataclass(slots=True)
class FrontendRequest:
    """Record of a request that has not ended on every instance.

    ``hops``: the lives of instances that this attempt of it has come to, by number, as far as they are known: it is at
    the last one. ``prefilled_at``: the life that sends its first token, where another one decodes.
    """

    work: Work
    first: str
    deadline: float
    delivered: int = 0
    hops: dict[int, Life] = field(default_factory=dict)
    early: dict[int, Sampled] = field(default_factory=dict)
    aborted: str | None = None
    ended: bool = False
    finished: Finished | None = None
    tokens: list[int] = field(default_factory=list)
    inputs: tuple[Any, ...] = ()
    past: Finished | None = None  # the end of its former attempts, before it was sent back
    base: int = 0  # count of tokens delivered by then
    input_bytes: int = 0  # of its inputs that wait here, on the way or at an instance
    prefilled_at: Life | None = None

    @property
    def route(self) -> tuple[str, ...]:
        """Names of the instances that it has come to, as far as they are known."""
        return tuple(self.hops[hop].name for hop in sorted(self.hops))


def join_attempts(past: Finished, last: Finished) -> Finished:
    """Merge the records of two attempts of a request into one end."""
    spans = {name: past.spans.get(name, 0.0) + last.spans.get(name, 0.0) for name in {**past.spans, **last.spans}}
    return replace(
        last,
        spans=spans,
        cached_tokens=past.cached_tokens,
        transfers=past.transfers + last.transfers,
        route=past.route + last.route,
        preemptions=past.preemptions + last.preemptions,
    )
