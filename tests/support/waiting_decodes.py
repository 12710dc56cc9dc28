"""Watches decodes that wait for room at one instance of a virtual cluster while a sibling has some."""

from __future__ import annotations

from support.virtual.cluster import VirtualCluster
from trinity.core.instance import siblings
from trinity.core.instance.state import State
from trinity.core.messages import Value


class Waiting:
    """Since when a decode waits that may be passed, and a sibling has room for it."""

    def __init__(self, cluster: VirtualCluster, bound_s: float) -> None:
        self.cluster, self.bound_s = cluster, bound_s
        self.since: dict[tuple[str, str, str], float] = {}
        self.longest = 0.0

    def after_event(self, name: str) -> None:
        cores, now, found = self.cluster.cores, self.cluster.now, set()
        for own, core in cores.items():
            for other, taker in cores.items() if core.state.kv_offers else ():
                peer = taker.announcement()
                for state in siblings.find_decodes(core.state, peer) if own != other else ():
                    if _has_room(taker.state, siblings.count_need(core.state, state)):
                        found.add((own, other, state.work.request))
        self.since = {each: self.since.get(each, now) for each in found}
        if self.since:
            self.longest = max(self.longest, now - min(self.since.values()))
        assert self.longest <= self.bound_s, f"{self.since} at {now}"

    def event(self, name: str, event: Value) -> None: ...

    def command(self, name: str, command: Value) -> None: ...

    def lost(self, name: str) -> None: ...

    def at_end(self) -> None: ...


def _has_room(s: State, need: int) -> bool:
    return "D" in s.settings.roles and not s.kv_offers and s.kv.available >= need
