"""HomeFetch: features that an instance which prefills has asked a helper for (``home_features`` says what for)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class HomeFetch:
    """Features requested from a helper for an own request; ``void``: that one was lost while they were ``pulling``."""

    request: str
    holder: str
    pulling: bool = False
    void: bool = False
