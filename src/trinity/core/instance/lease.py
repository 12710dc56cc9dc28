"""Lease: blocks that another instance may read, from an offer to its Release."""

from __future__ import annotations

from dataclasses import dataclass

from trinity.core.messages import STATE, Commit, Offer


@dataclass(slots=True)
class Lease:
    """A lease on ``blocks`` for a transfer of which this instance is the source, from clock time ``since`` to Release.

    ``attempt``, ``route`` and ``count`` (output tokens) go to the front end where the lease ends without a Release.
    ``state``: block of states that goes with KV.
    """

    id: str
    request: str
    target: str
    kind: str
    blocks: tuple[int, ...]
    since: float = 0.0
    attempt: int = 0
    route: tuple[str, ...] = ()
    count: int = 0
    state: tuple[int, ...] = ()
    copies: bool = False  # ahead of a move: its request decodes on meanwhile
    offer: Offer | None = None  # and what it was told at the end: to be said again to another, if this one is lost
    said: Commit | None = None
    deadline: float = float("inf")

    @property
    def by_kind(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """Its blocks by kind."""
        own = (self.kind, self.blocks)
        return (own, (STATE, self.state)) if self.state else (own,)
