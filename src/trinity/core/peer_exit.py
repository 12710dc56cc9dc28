"""Messages about instances that leave: PeerLeaving, before a life's end; PeerRemoved, once no life follows it."""

from __future__ import annotations

from trinity.core.messages import Value


class PeerLeaving(Value, frozen=True):
    """An instance is to end once it is empty, or no longer. Requests go past one that leaves if they can."""

    name: str
    epoch: int
    leaving: bool


class PeerRemoved(Value, frozen=True):
    """An instance does not come back after this life, of whose end was told before: nobody waits for it any more."""

    name: str
    epoch: int
