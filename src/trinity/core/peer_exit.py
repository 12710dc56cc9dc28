"""PeerLeaving: message that an instance's life is to end once it is empty."""

from __future__ import annotations

from trinity.core.messages import Value


class PeerLeaving(Value, frozen=True):
    """An instance is to end once it is empty, or no longer. Requests go past one that leaves if they can."""

    name: str
    epoch: int
    leaving: bool
