"""Random loads for the virtual cluster whose decodes are moved: after tokens and at any time, among deaths."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from support.core_tables import work
from support.deadly import deadly_cluster
from support.reader_checks import check_readers
from support.recovering import change_policy
from support.scenarios import PLACEMENTS, pressed_cluster, random_cluster
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend import Abort, Deliver
from trinity.core.frontend.messages import MoveEnd, MoveRequest
from trinity.core.messages import FRONTEND, Offer, Open, Release, Send, Value
from trinity.core.transfers import PrecopyMode
from trinity.placement import Placement

PRECOPY: tuple[PrecopyMode, ...] = ("on", "off", "auto")
POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
WIDE = [each for each in PLACEMENTS if sum("D" in roles for _, roles in Placement.parse(each).instances()) > 1]


class Mover:
    """Asks after some tokens, at once or later, that their request go on at some decode instance."""

    def __init__(self, cluster: VirtualCluster, draw: Random, share: float) -> None:
        self.cluster, self.draw, self.share = cluster, draw, share
        self.aborted: set[str] = set()

    @property
    def decoders(self) -> list[str]:
        """Names of the instances that decode, in their present or next life."""
        return [name for name, core in self.cluster.cores.items() if "D" in core.settings.roles]

    def event(self, name: str, event: Value) -> None:
        if isinstance(event, Abort):
            self.aborted.add(event.request)

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, Deliver) and self.draw.random() < self.share:
            self.ask(command.request, self.cluster.now + self.draw.choice([0.0, 0.0, 0.01, 0.3]))

    def ask(self, request: str, at: float) -> None:
        anyone = self.decoders or ["nobody"]  # for a while none decodes: a life that has ended was to be the last D
        to = self.draw.choice(anyone if self.draw.random() < 0.95 else ["nobody"])
        self.cluster.post(at, FRONTEND, MoveRequest(request, to))

    def after_event(self, name: str) -> None:
        pass

    def lost(self, name: str) -> None:
        pass

    def at_end(self) -> None:
        for request, outcome in self.cluster.outcomes.items():
            left = outcome.end is not None and outcome.end.reason == "cancelled"
            assert request in self.aborted or not left, f"{request} was cancelled by nobody"


def moving_cluster(seed: int, deaths: bool = True) -> VirtualCluster:
    """A loaded cluster of several decoders, whose requests are asked to move; not run yet.

    Two in five have ``deaths``. All else comes as in the others: cancels, deadlines, faults, leases that run out,
    instances that stand still. Moves have from a tenth of a second to five.
    """
    draw = Random(seed * 7919 + 1)
    placement, kind = draw.choice(WIDE), draw.random()
    if kind < 0.4 and deaths:
        cluster = deadly_cluster(seed, placement, failures=POLICY)
    else:
        cluster = (pressed_cluster if kind < 0.65 else random_cluster)(seed, placement)
        change_policy(cluster.frontend, POLICY)
    move_s, precopy = draw.choice([0.1, 0.5, 5.0]), PRECOPY[seed % 3]
    for core in cluster.cores.values():
        own = core.settings  # of its next lives as well
        core.settings = core.state.settings = replace(
            own, transfers=replace(own.transfers, move_s=move_s, precopy=precopy)
        )
    for name in cluster.cores:
        if draw.random() < 0.15:
            cluster.freeze(name, draw.uniform(0.0, 2.0), draw.choice([0.1, 1.0, 20.0]))
    mover = Mover(cluster, draw, draw.choice([0.1, 0.5, 1.0]))
    cluster.observers = [*cluster.observers, mover]
    for request, outcome in cluster.outcomes.items():
        for _ in range(draw.choice([0, 0, 1, 3])):
            mover.ask(request, outcome.submitted + draw.uniform(0.0, draw.choice([0.5, 2.0, 5.0])))
    return cluster


def run(seed: int, limit: int = 1_000_000) -> VirtualCluster:
    """Run it. Every reader gets each token once, in order, and one end: a whole one, or a typed one."""
    cluster = moving_cluster(seed)
    try:
        cluster.run(limit)
        check_readers(cluster)
        assert (cluster.frontend.inputs.waiting_bytes, cluster.frontend.inputs.kept_bytes) == (0, 0)
    except BaseException as error:
        error.add_note(f"moving_cluster({seed})")
        raise
    return cluster


def moves_of(cluster: VirtualCluster) -> list[str]:
    """How each move ended."""
    found = [each for _, _, each in cluster.commands if isinstance(each, MoveEnd)]
    return [each.failure.fields["reason"] if each.failure else "moved" for each in found]


def slow_move(lease_s: float = 30.0, pull_s: float = 2.0) -> VirtualCluster:
    """A request of twelve tokens on P+2D is to move at 5.05, which takes two seconds behind the end of its step."""
    slow = Durations(lambda *_: 0.01, lambda *_: 1.0, lambda draw, pull: pull_s if pull.source == "D0" else 0.1)
    settings = make_settings("P+2D", {"kv": 32}, kv_block_size=4, lease_s=lease_s)
    cluster = VirtualCluster(settings, durations=slow, failures=POLICY)
    cluster.submit(work("r", 9, max_tokens=12))
    cluster.post(5.05, FRONTEND, MoveRequest("r", "D1"))
    return cluster


def is_whole(cluster: VirtualCluster, lives: int, *ended: str) -> VirtualCluster:
    """Run it. Its one request is complete, in so many lives, and its moves end so."""
    cluster.run(limit=20_000)
    (outcome,) = cluster.outcomes.values()
    assert outcome.end is not None
    assert (outcome.end.reason, outcome.tokens) == ("length", list(range(1, 13)))
    assert (outcome.end.lives, moves_of(cluster)) == (lives, [*ended])
    return cluster


def target_dies() -> VirtualCluster:
    """It dies during its pull, and does not come back."""
    cluster = slow_move()
    cluster.kill("D1", at=6.5, back_s=None)
    return is_whole(cluster, 1, "lost")


def target_stands_still(lease_s: float = 1.5) -> VirtualCluster:
    """It does so for a minute; its lease ends, or the time that a move has."""
    cluster = slow_move(lease_s)
    cluster.freeze("D1", 5.0, 60.0)
    return is_whole(cluster, 1, "late")


def commit_on_its_way() -> VirtualCluster:
    """A target that gives the decode up while the Commit is on its way, for it hears nothing: the next life goes on."""
    slow = ("D0", "D1")
    durations = Durations(lambda draw, *ends: 3.0 if ends == slow else 0.01, lambda *_: 1.0, lambda *_: 0.5)
    settings = make_settings("P+2D", {"kv": 32}, kv_block_size=4)
    settings[-1] = replace(settings[-1], lease_s=1.5)
    cluster = VirtualCluster(settings, durations=durations, failures=POLICY)
    cluster.submit(work("r", 9, max_tokens=12))
    cluster.post(5.05, FRONTEND, MoveRequest("r", "D1"))
    return is_whole(cluster, 2, "ended")


def count(cluster: VirtualCluster, seen: Counter[str]) -> None:
    """Count how its moves ended, the deaths, and the requests that survived one."""
    seen["runs"] += 1
    seen["deaths"] += cluster.lives.kills
    copies: set[str] = set()
    for _, _, each in cluster.commands:
        said = each.message if isinstance(each, Send) else None
        if isinstance(said, Offer) and said.copies:
            copies.add(said.id)
        elif isinstance(said, Release) and said.id in copies:
            seen[f"copy {said.outcome}"] += 1
        elif isinstance(each, MoveEnd):
            seen[each.failure.fields["reason"] if each.failure else "moved"] += 1
        elif isinstance(each, Open) and len(each.tokens) > 1 and not each.again:
            seen["with tokens"] += 1
    for outcome in cluster.outcomes.values():
        assert outcome.end is not None
        seen["survived"] += bool(outcome.end.former) and outcome.end.reason in ("length", "stop")
        seen["failed"] += outcome.end.failure is not None
