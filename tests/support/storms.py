"""A check of virtual clusters: after losses no more requests go on at once than the policy says, the oldest first."""

from __future__ import annotations

from support.virtual.cluster import VirtualCluster
from trinity.core.frontend import FrontendCore
from trinity.core.frontend.frontend_request import FrontendRequest
from trinity.core.frontend.messages import Prepare
from trinity.core.frontend.turns import PREPARED_AT_ONCE
from trinity.core.messages import FRONTEND, Send, Submit, Value


def is_going_on(entry: FrontendRequest) -> bool:
    """True for a life after a loss that is at an instance and has no token yet."""
    return bool(entry.former) and not entry.waits and entry.finished is None and entry.delivered == entry.base


class StormCheck:
    """Raises ``AssertionError`` where a life that had no turn before this event is sent ahead of an older one.

    A life that is sent again, as after a preemption, has the turn that it had. ``most``: of them at once so far,
    ``held``: events at which some waited for a turn.
    """

    def __init__(self, core: FrontendCore) -> None:
        self.core, self.most, self.held = core, 0, 0
        self._had: set[str] = set()  # lives with a turn as the last event was over

    def event(self, name: str, event: Value) -> None:
        """Nothing."""

    def command(self, name: str, command: Value) -> None:
        if name == FRONTEND and isinstance(command, Send) and isinstance(command.message, Submit):
            entry = self.core.lives.get(command.message.work.request)
            kept = command.message.work.request in self._had
            if entry is not None and entry.former and not entry.work.alone and not kept:
                older = [age for age in self.core.dispatch.retries.waiting.values() if age < entry.work.number]
                assert not older, f"{entry.id} goes ahead of {older}"
        if isinstance(command, Prepare):
            assert len(self.core.inputs.preparations.active) <= PREPARED_AT_ONCE

    def after_event(self, name: str) -> None:
        if name == FRONTEND:
            entries = self.core.entries.values()
            found = sum(is_going_on(each) and not each.work.alone for each in entries)
            assert found <= self.core.options.failures.most_retries(0), f"{found} go on at once"
            self.most, self.held = max(self.most, found), self.held + bool(self.core.dispatch.retries.waiting)
            self._had = {self.core.entries[name].work.request for name in self.core.dispatch.retries.active}
            assert set(self.core.dispatch.retries.waiting) | self.core.dispatch.retries.active <= set(self.core.entries)

    def lost(self, name: str) -> None:
        """Nothing."""

    def at_end(self) -> None:
        core = self.core
        left = (
            core.dispatch.retries.active,
            core.dispatch.retries.waiting,
            core.inputs.preparations.active,
            core.inputs.preparations.waiting,
        )
        assert left == (set(), {}, set(), {}), f"turns that nobody gave back: {left}"


def watch_storms(cluster: VirtualCluster) -> StormCheck:
    """Add the check to a cluster whose policy has a share near nothing: the floor alone counts."""
    check = StormCheck(cluster.frontend)
    cluster.observers = [*cluster.observers, check]
    return check
