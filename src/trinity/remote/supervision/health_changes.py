"""HealthChanges: tells a program of instances whose state has changed (``ProcessConfig(on_change=)``)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from trinity.remote.supervision.supervisor_messages import InstanceHealth

logger = logging.getLogger("trinity")


class HealthChanges:
    """States that a program knows, and its function that hears of others; None: nobody listens."""

    def __init__(self, on_change: Callable[[InstanceHealth], None] | None) -> None:
        self._on_change = on_change
        self._told: dict[str, tuple[str, int]] = {}  # state and epoch of each

    def tell(self, health: Callable[[], Mapping[str, InstanceHealth]]) -> None:
        """Tell of each whose state or epoch is another than was told last. Errors of the function are logged."""
        if self._on_change is None:
            return
        for name, each in health().items():
            if self._told.get(name) != (each.state, each.epoch):
                self._told[name] = (each.state, each.epoch)
                try:
                    self._on_change(each)
                except Exception:
                    logger.exception("on_change failed")

    def forget(self, name: str) -> None:
        """Forget an instance that does not come back."""
        self._told.pop(name, None)
