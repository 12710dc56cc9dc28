"""Virtual clusters to which all happens at once that can happen, each checked after every event.

Deaths and returns, also of those that take part in what is just said; faults, freezes, false suspicions, leases that
run out; cancels and deadlines; switches of roles; moves, with and without blocks that go ahead; encoders that help;
poison; a budget of retries. ``play(together(seed))`` repeats a run.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

from support.deadly import change_roles, largest_pools
from support.moving import PRECOPY, Mover
from support.poisoned import Poison, choose_poison
from support.recovering import change_policy
from support.scenarios import PLACEMENTS, pressed_cluster, random_cluster
from support.spread_clusters import PLACEMENTS as WITH_HELPERS
from support.spread_clusters import spread_cluster, suspect_some
from support.storms import watch_storms
from support.virtual.cluster import Faults, VirtualCluster
from trinity.core.failure_policy import FailurePolicy
from trinity.core.frontend.messages import MoveEnd
from trinity.core.messages import (
    FRONTEND,
    Caught,
    Commit,
    Emit,
    Fetch,
    Finished,
    Helped,
    Moved,
    NotMoved,
    Offer,
    PeerEmpty,
    PeerReserved,
    Ready,
    Release,
    Send,
    Submit,
    Value,
    Work,
)
from trinity.stage_kinds import order_letters

TYPED = {
    "BadMedia",
    "StageError",
    "RequestTooLarge",
    "Overloaded",
    "MigrationError",
    "DeadlineExceeded",
    "RequestError",
}
DELICATE: tuple[type[Value], ...] = (
    *(Offer, Ready, Caught, Commit, Release, Moved, NotMoved, Submit, Emit, Finished, Fetch, Helped),
    *(PeerEmpty, PeerReserved),
)
APART = 1000  # from the tokens of one prompt to those of the next
LONG_LEASE_S = 30.0
MORE_HANDS = ("3E2P3D", "2E1EP2PD1D", "4E1P1PD2D")


class Striker:
    """Kills, halts and switches instances while a cluster runs: after any event, or amid what is delicate.

    - ``gentle``: all that die come back.
    - ``strikes``: how many are left. ``share``: of the events that are followed by one.
    """

    def __init__(self, cluster: VirtualCluster, draw: Random, gentle: bool) -> None:
        self.cluster, self.draw, self.gentle = cluster, draw, gentle
        self.strikes, self.share = draw.choice([0, 1, 2, 4, 8]), draw.choice([0.003, 0.01, 0.05])
        self.amid: tuple[type[Value], ...] = draw.choice([*((kind,) for kind in DELICATE), DELICATE, DELICATE])
        self.changed_at, self.gone = -1.0, False
        self.pools = largest_pools(core.settings for core in cluster.cores.values())
        self.letters = order_letters(letter for core in cluster.cores.values() for letter in core.settings.roles)
        self.seen: Counter[str] = Counter()

    def event(self, name: str, event: Value) -> None:
        """Nothing."""

    def command(self, name: str, command: Value) -> None:
        if isinstance(command, MoveEnd):
            self.seen[command.failure.fields["reason"] if command.failure else "moved"] += 1
        if isinstance(command, Send) and isinstance(command.message, Offer):
            self.seen["offers passed"] += command.message.passed
        if not isinstance(command, Send) or not isinstance(command.message, self.amid):
            return
        if self.strikes and self.draw.random() < 4 * self.share:
            victim = self.draw.choice([name, command.to])
            if victim != FRONTEND:
                self.seen[f"amid {type(command.message).__name__}"] += 1
                self._kill(victim)

    def after_event(self, name: str) -> None:
        if self.strikes and self.draw.random() < self.share:
            victim = self.draw.choice(list(self.cluster.cores))
            self.draw.choice([self._kill, self._kill, self._kill, self._halt, self._switch])(victim)

    def _kill(self, name: str) -> None:
        if name in self.cluster.lives.dead:
            return
        self.strikes -= 1
        self.seen["killed"] += 1
        back_s = self.draw.choice([0.05, 0.5, 2.0, 2.0 if self.gentle or self.gone else None])
        self.gone |= back_s is None
        self.cluster.kill(name, self.cluster.now + self.draw.choice([0.0, 0.0, 0.0, 0.1]), back_s)

    def _halt(self, name: str) -> None:
        self.strikes -= 1
        self.seen["halted"] += 1
        self.cluster.freeze(name, self.cluster.now, self.draw.choice([0.1, 1.0, 20.0]))

    def _switch(self, name: str) -> None:
        """Have it take other roles, unless another does so now: there is one change at a time."""
        now = self.cluster.now
        if name in self.cluster.lives.dead or now <= self.changed_at or self.gone:
            return
        self.strikes -= 1
        self.seen["switched"] += 1
        own = {each: core.settings for each, core in self.cluster.cores.items()}
        becomes = change_roles(self.draw, name, own, self.letters, self.pools)
        drain_s, change_s = self.draw.choice([0.0, 0.3, 2.0]), self.draw.choice([0.05, 0.5])
        self.changed_at = now + drain_s + change_s
        self.cluster.switch(name, now, becomes, drain_s, change_s)

    def lost(self, name: str) -> None:
        """Nothing."""

    def at_end(self) -> None:
        """Nothing."""


class Together:
    """A cluster to which all happens, not run yet. ``gentle``: nothing that ends a request by itself is among it."""

    def __init__(self, seed: int) -> None:
        draw = Random(seed * 104_729 + 11)
        self.seed, self.gentle = seed, draw.random() < 0.5
        self.policy = self._choose_policy(draw)
        self.cluster = cluster = _make_cluster(seed, draw, self.policy)
        if self.gentle:
            cluster.faults = Faults()
            cluster.frontend.options = dataclasses.replace(cluster.frontend.options, max_waiting=1024)
        self.bases: dict[tuple[object, ...], int] = {}
        cluster.sample = self.sample
        self._set_transfers(draw)
        self.mover = Mover(cluster, draw, draw.choice([0.0, 0.1, 0.5, 1.0]))
        self.striker = Striker(cluster, draw, self.gentle)
        cluster.observers = [*cluster.observers, self.mover, self.striker]
        if self.policy.retry_share < 1e-3 and self.policy.wait_s != 0:  # else nothing is held back
            watch_storms(cluster)
        if draw.random() < 0.3:
            suspect_some(draw, cluster)
        poison = choose_poison(draw, cluster) if draw.random() < 0.5 else {}
        self.poison = Poison(cluster, poison, draw.choice([0.05, 0.5, 2.0]))

    def _choose_policy(self, draw: Random) -> FailurePolicy:
        narrow = {"retry_share": 1e-9, "retry_floor": draw.choice([1, 2, 5])} if draw.random() < 0.4 else {}
        alone = draw.choice([1, 2, 2])
        if self.gentle:
            return FailurePolicy(recoveries=200, wait_s=None, alone_after=alone, **narrow)  # type: ignore[arg-type]
        recoveries, wait_s = draw.choice([1, 2, 2, 20]), draw.choice([0.0, 1.0, 10.0, 60.0])
        return FailurePolicy(recoveries=recoveries, wait_s=wait_s, alone_after=alone, **narrow)  # type: ignore[arg-type]

    def _set_transfers(self, draw: Random) -> None:
        """Let moves have from a tenth of a second to five, and some of them their blocks sent ahead."""
        move_s, precopy = draw.choice([0.1, 0.5, 5.0]), draw.choice(PRECOPY)
        for core in self.cluster.cores.values():
            own = core.settings
            transfers = replace(own.transfers, move_s=move_s, precopy=precopy, hand_over=self.seed % 5 == 1)
            lease_s = max(own.lease_s, LONG_LEASE_S) if self.gentle else own.lease_s  # one that slow messages keep
            core.settings = core.state.settings = replace(own, transfers=transfers, lease_s=lease_s)

    def sample(self, work: Work, index: int) -> int:
        """Sample as a model would: equal prompts have equal outputs, others have others; 3 may end one."""
        base = self.bases.setdefault((work.prompt, *(span.content for span in work.media)), len(self.bases))
        return index + 1 if index + 1 in work.stop_ids else base * APART + index + 1


def _make_cluster(seed: int, draw: Random, failures: FailurePolicy) -> VirtualCluster:
    kind = draw.random()
    if kind < 0.3:
        return spread_cluster(seed, failures, draw.choice([*WITH_HELPERS, *MORE_HANDS]))
    placement = draw.choice([*PLACEMENTS, *MORE_HANDS])
    makers: list[Callable[[], VirtualCluster]] = [
        lambda: pressed_cluster(seed, placement),
        lambda: random_cluster(seed, placement, encode_only=draw.choice([0.0, 0.0, 0.3])),
    ]
    cluster = makers[kind < 0.75]()
    change_policy(cluster.frontend, failures)
    cluster.frontend.dispatch.spread = spread = draw.choice([1, 2, 4])
    cluster.frontend.router.counts = spread > 1
    return cluster


def together(seed: int) -> Together:
    """Make the cluster of this seed."""
    return Together(seed)


def play(run: Together, limit: int = 300_000) -> Counter[str]:
    """Run it to its end, with every check. Returns how often each thing happened, and how requests ended."""
    try:
        run.cluster.run(limit)
        seen = Counter(run.striker.seen)
        for name in run.cluster.outcomes:
            seen[_check_reader(run, name)] += 1
        _check_nothing_is_left(run.cluster)
    except BaseException as error:
        error.add_note(f"play(together({run.seed}))")
        raise
    outcomes = run.cluster.outcomes.values()
    seen["survived"] += sum(bool(each.end and each.end.former and each.end.failure is None) for each in outcomes)
    seen["deaths"] += run.cluster.lives.kills
    if run.policy.wait_s != 0:  # else nothing runs alone
        seen["poison that killed a fourth"] += sum(len(deaths) > 3 for deaths in run.poison.deaths.values())
    seen["deaths behind the end"] += run.poison.later
    seen["requests"] += len(run.cluster.outcomes)
    seen["tokens"] += sum(len(each.tokens) for each in outcomes)
    return seen


def _check_reader(run: Together, name: str) -> str:
    """Check that a reader has one end, and each token once, in order, all of them unless it left or has an error."""
    outcome, work = run.cluster.outcomes[name], run.cluster.outcomes[name].work
    end = outcome.end
    assert end is not None, f"{name} has no end"
    wanted = [run.sample(work, index) for index in range(len(outcome.tokens))]
    assert outcome.tokens == wanted, f"{name}: {outcome.tokens}"
    assert not set(wanted[:-1]) & work.stop_ids, f"{name} went on behind its end: {wanted}"
    if end.failure is None:
        if end.reason == "length":
            assert len(wanted) == work.max_tokens, f"{name} ended by its length after {len(wanted)}"
        elif end.reason == "stop":
            assert name in run.mover.aborted or wanted[-1] in work.stop_ids, f"{name} ended behind {wanted}"
        else:
            assert end.reason in ("cancelled", "encoded"), f"{name} ended {end.reason}"
        return end.reason
    kind = end.failure.error
    if kind == "PoisonRequest":
        assert end.failure.fields["instances"].count(",") >= 2, end.failure
        return "poison refused" if name in run.poison.stages else "innocent refused"
    assert kind in TYPED, f"{name}: {end.failure}"
    allowed = {"RequestTooLarge", *(["DeadlineExceeded"] if work.deadline_s is not None else [])}
    innocent = run.gentle and name not in run.poison.stages
    assert kind in allowed or not innocent, f"{name} in a gentle run: {end.failure}"
    return f"{'gentle ' if run.gentle else ''}{kind}"


def _check_nothing_is_left(cluster: VirtualCluster) -> None:
    core = cluster.frontend
    assert (core.waiting, core.inputs.waiting_bytes, core.inputs.kept_bytes) == (0, 0, 0)
    assert (core.isolation.ward, core.isolation.places) == ("", {})
    turns = [
        *core.dispatch.retries.active,
        *core.dispatch.retries.waiting,
        *core.inputs.preparations.active,
        *core.inputs.preparations.waiting,
    ]
    assert not turns, f"turns that nobody gave back: {turns}"
    held = [name for name, each in cluster.cores.items() if each.state.reserved_as and name not in cluster.lives.dead]
    assert not held, f"{held} are reserved for nobody"
