"""AdaptiveCluster: instances of a simulated cluster switch roles while it serves, by the cores that do so live.

What to switch, and in which order, is ``core.role_changes``; that decodes move away, what the other cores make of one
that leaves and of its next life, and when it is empty, are the cores' own. Here are only what a shell does, in its
order (``pipeline/thread_instances.py``), and the seconds that it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

import msgspec

from trinity.core import InstanceCore
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.decode_moves import is_empty
from trinity.core.frontend.messages import MoveEnd
from trinity.core.instance.state import Settings
from trinity.core.messages import FRONTEND, Failure, PeerDown, PeerLeaving, PeerUp, Pull, Pulled, Value
from trinity.core.role_changes import Switch, order_changes
from trinity.core.values import FrontendUp
from trinity.errors.arguments import KeywordsByName, Number, check_struct
from trinity.placement import Placement
from trinity.simulation.cluster_model import SimulatedCluster, SimulatedInstance
from trinity.simulation.workload import Job
from trinity.timeline import Slice


class PlacementChange(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """A placement that is applied while a replay runs, as by ``Pipeline.apply``.

    - ``placement``: what the instances, as many as there are, become.
    - ``at_s`` (seconds): when, on the trace's clock. One that comes during another begins after it.
    - ``change_s`` (seconds, 0.7): from a life's end until the next one serves: migration and onload. 0.7 is what
      EPDServe (3.2.4) says of its own.
    - ``drain_s`` (seconds, 30): how long requests that are at an instance may take to end.

    Raises ``ConfigError``.
    """

    placement: str
    at_s: Number
    change_s: Number = 0.7
    drain_s: Number = 30.0

    def __post_init__(self) -> None:
        check_struct(self)


class SwitchPlan(NamedTuple):
    """A change, and the settings of the next lives of those that switch, in their order."""

    change: PlacementChange
    becomes: tuple[Settings, ...]


class RunningRoles(NamedTuple):
    """A simulated instance: it may have any roles."""

    name: str
    roles: str
    may: str | None = None


def plan_switches(
    changes: Sequence[PlacementChange], instances: Sequence[Settings], settings_of: Callable[[str, str], Settings]
) -> list[SwitchPlan]:
    """List what switches at each change, one after another in time; ``settings_of``: of an instance with new roles.

    Raises ``PlacementError`` for a placement of another number of instances, or none at all.
    """
    roles, plans = {each.name: each.roles for each in instances}, []
    for change in sorted(changes, key=lambda each: each.at_s):
        order = order_changes([RunningRoles(*each) for each in roles.items()], Placement.parse(change.placement))
        roles.update(order)
        plans.append(SwitchPlan(change, tuple(settings_of(*each) for each in order)))
    return plans


class Apply(NamedTuple):
    """Event: a change is due."""

    plan: SwitchPlan


class DrainOver(NamedTuple):
    """Event: a life that leaves ends now, whatever it has."""

    name: str
    epoch: int


class Onload(NamedTuple):
    """Event: the next life of the instance that switches serves."""


class SwitchUnderWay:
    """The switch that is under way: since when, until when the instance emptied (``ended_at``, None), and how."""

    def __init__(self, change: PlacementChange, becomes: Settings, former: Settings, began: float) -> None:
        self.change, self.becomes, self.former, self.began = change, becomes, former, began
        self.ended_at: float | None = None
        self.emptied = True


class AdaptiveCluster(SimulatedCluster):
    """Applies placements at their times (``plans``), one instance after another; ``switches`` has what was done.

    Requests that their instance's end cuts short go on as a pipeline's do (``FailurePolicy``). What is said to a life
    that has ended, or before the next one is up, is lost. ``options`` are the ``SimulatedCluster``'s.
    """

    def __init__(
        self, instances: Sequence[Settings], jobs: Sequence[Job], plans: Sequence[SwitchPlan], **options: Any
    ) -> None:
        options["frontend"] = replace(options["frontend"], failures=FailurePolicy())
        super().__init__([_with_reports(each) for each in instances], jobs, **options)
        self._model, self._routing = options["model"], options["routing"]
        self._departure: SwitchUnderWay | None = None
        self._left: deque[tuple[PlacementChange, Settings]] = deque()
        self._born: dict[str, float] = {}  # number of the first event that a later life hears; inf while there is none
        self._pulls: dict[tuple[str, str, int], tuple[str, int]] = {}  # which life of its source each one reads
        self.carriers[MoveEnd] = self.skip  # nobody waits for it here
        self._turns: dict[type[Any], Callable[[Any], None]] = {
            Apply: self._apply,
            DrainOver: self._cut,
            Onload: self._onload,
        }
        for plan in plans:
            self.post(plan.change.at_s, FRONTEND, Apply(plan))

    def take(self, number: int, name: str, event: Any) -> Value | None:
        if number < self._born.get(name, 0):
            return None
        turn = self._turns.get(type(event))
        if turn is not None:
            turn(event)
            return None
        taken = super().take(number, name, event)
        return self._check_pull(name, taken) if type(taken) is Pulled else taken

    def handle(self, name: str, event: Value) -> None:
        super().handle(name, event)
        self._look(name)

    # ------------------------------------------------------------ a switch

    def _apply(self, event: Apply) -> None:
        self._left.extend((event.plan.change, each) for each in event.plan.becomes)
        if self._departure is None:
            self._begin_next()

    def _begin_next(self) -> None:
        """Have everybody go past the next one that switches."""
        if not self._left:
            return
        change, becomes = self._left.popleft()
        former = self.cores[becomes.name].settings
        self._departure = SwitchUnderWay(change, becomes, former, self.now)
        self.post(self.now + change.drain_s, FRONTEND, DrainOver(former.name, former.epoch))
        self._tell(PeerLeaving(former.name, former.epoch, leaving=True))

    def _look(self, name: str) -> None:
        """End the life of the one that leaves, once the front end knows of no request there and nothing is held.

        What is announced to its next stage while it is encoded is not known to be there, and held.
        """
        leaving = self._departure
        if leaving is None or leaving.ended_at is not None or name not in (FRONTEND, leaving.former.name):
            return
        if is_empty(self.frontend.entries, leaving.former.name) and self.cores[leaving.former.name].idle():
            self._end(leaving, emptied=True)

    def _cut(self, event: DrainOver) -> None:
        leaving = self._departure
        if leaving is not None and (leaving.former.name, leaving.former.epoch) == event and leaving.ended_at is None:
            self._end(leaving, emptied=False)

    def _end(self, leaving: SwitchUnderWay, emptied: bool) -> None:
        name, leaving.ended_at, leaving.emptied = leaving.former.name, self.now, emptied
        self.past_preemptions += self.cores[name].state.preemptions
        self._born[name] = self._due[name] = inf
        self.forget(name)
        self.post(self.now + leaving.change.change_s, FRONTEND, Onload())
        self._tell(PeerDown(name, "it begins anew with other roles", planned=True))

    @property
    def _away(self) -> set[str]:
        return {name for name, born in self._born.items() if born == inf}

    def _onload(self, event: Onload) -> None:
        """Begin the next life. It knows the others from the start, as a pipeline's instances do."""
        leaving, self._departure = self._departure, None
        assert leaving is not None
        name = leaving.former.name
        becomes = replace(_with_reports(leaving.becomes), epoch=leaving.former.epoch + 1)
        core = InstanceCore(becomes, self._routing())
        self.cores[name] = self._all[name] = core
        self.workers[name] = _follow_worker(self.workers[name], core, self._model)
        self._born[name] = next(self._sequence)
        for other in self.cores.values():
            self.handle(name, other.announcement())
        self.handle(name, FrontendUp(FRONTEND))
        self._tell(core.announcement())
        self._note(leaving)
        self._begin_next()

    def _note(self, leaving: SwitchUnderWay) -> None:
        """Take it down, and its parts on the timeline, as a pipeline does."""
        assert leaving.ended_at is not None
        name, former, roles = leaving.former.name, leaving.former.roles, leaving.becomes.roles
        drain_s, change_s = leaving.ended_at - leaving.began, self.now - leaving.ended_at
        self.switches.append(Switch(name, former, roles, drain_s, change_s, leaving.emptied))
        if self.timeline is not None:
            self.timeline.append(Slice(name, "switch", f"offload {former}", leaving.began, drain_s, {}))
            self.timeline.append(Slice(name, "switch", f"onload {roles}", leaving.ended_at, change_s, {}))

    def _tell(self, message: PeerLeaving | PeerDown | PeerUp) -> None:
        """Tell all other instances, and the front end at once: it is where changes are made."""
        for other in self.cores:
            if other != message.name:
                self.post(self.now + self.cluster.message_s, other, message)
        self.handle(FRONTEND, message)

    # ------------------------------------------------------------ pulls from a life that has ended

    def pull(self, name: str, pull: Pull) -> None:
        self._pulls[name, pull.offer, pull.part] = (pull.source, self.cores[pull.source].settings.epoch)
        super().pull(name, pull)

    def _check_pull(self, name: str, event: Pulled) -> Pulled:
        source, epoch = self._pulls.pop((name, event.offer, event.part))
        if source not in self._away and self.cores[source].settings.epoch == epoch:
            return event
        fields = {"source": source, "target": name, "cause": "PeerLost"}
        return Pulled(event.offer, event.part, Failure("MigrationError", "the source has ended", fields))


def _with_reports(own: Settings) -> Settings:
    """Have an instance report its load: which decodes move is judged by that."""
    return replace(own, report_s=min(own.report_s, Settings.report_s))


def _follow_worker(former: SimulatedInstance, core: InstanceCore, model: Any) -> SimulatedInstance:
    """Have the device work for the next life; its seconds and its peaks are counted on."""
    worker = SimulatedInstance(core, former.place, former.cost, model)
    worker.busy = {**worker.busy, **former.busy}
    worker.peak = {**worker.peak, **former.peak}
    return worker
