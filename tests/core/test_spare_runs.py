"""Requests that idle siblings take, in virtual time and in every order of events.

``run_spare(seed)`` repeats a run. Most are sent to one instance of a stage; pools hold one request
and little more in half of the runs; instances and front ends die, fall silent and return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import work
from support.every_order import Search
from support.spare_clusters import FirstOfAll, run_spare
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import Abort
from trinity.core.instance import admission, instance_core, siblings
from trinity.core.instance.peer_questions import SiblingWords
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.state import State
from trinity.core.messages import Send, Spare, Step, Submit, Value
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy

AT_ALL = 40


def count(cluster: VirtualCluster, seen: Counter[str]) -> None:
    said = [each.message for _, _, each in cluster.commands if isinstance(each, Send)]
    seen.update(each.said for each in said if isinstance(each, Spare))
    seen["passed"] += sum(isinstance(each, Submit) and bool(each.route) for each in said)
    for outcome in cluster.outcomes.values():
        seen[outcome.end.reason if outcome.end else "nobody's"] += 1


def test_requests_are_whole_whoever_takes_them() -> None:
    seen: Counter[str] = Counter()
    for seed in range(AT_ALL):
        count(run_spare(seed, deaths=seed % 4 > 0), seen)
    for what in ("want", "have", "take", "no", "passed", "length", "cancelled"):
        assert seen[what] > AT_ALL // 20, seen
    assert seen["none"], seen


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_many_more_runs_in_which_siblings_take(part: int) -> None:
    """1,000 in all."""
    for seed in range(10_000 + part * 250, 10_250 + part * 250):
        run_spare(seed, deaths=seed % 2 > 0)


# ---------------------------------------------------------------- what it gives

MESSAGE_S, STEP_S = 0.001, 1.0
STILL = Durations(lambda *_: MESSAGE_S, lambda *_: STEP_S, lambda *_: 0.01)
ONE_A_STEP = BatchRules(token_budget=8, image_budget=1)


def at_rest(placement: str, hand_over: bool = True, **settings: Any) -> VirtualCluster:
    """A step takes a second, a message a thousandth of that, and all are sent to the first instance of a stage."""
    own = make_settings(
        placement,
        {"image": 16, "kv": 64},
        rules=ONE_A_STEP,
        image_block_size=4,
        kv_block_size=4,
        transfers=TransferPolicy(hand_over=hand_over),
        **settings,
    )
    return VirtualCluster(own, routing=FirstOfAll, durations=STILL)


def ask(cluster: VirtualCluster, requests: int, image: bool) -> None:
    for number in range(requests):
        name = f"r{number}"
        pieces: list[Any] = [f"{name}*4", 1] if image else [8]
        cluster.submit(work(name, *pieces, text=100 * number, max_tokens=1), at=0.01 * number)


@pytest.mark.parametrize(("placement", "image"), [("3P+D", False), ("3E+PD", True), ("3EPD", False), ("3EPD", True)])
def test_three_requests_for_one_of_three_instances_are_served_side_by_side(placement: str, image: bool) -> None:
    first, letter = {}, placement[1]
    for hand_over in (False, True):
        cluster = at_rest(placement, hand_over)
        ask(cluster, 3, image)
        cluster.run()
        began = [
            at
            for at, name, step in cluster.commands
            if isinstance(step, Step) and (step.encodes if image else step.prefills) and letter in name
        ]
        first[hand_over] = began[2]
    assert first[False] >= 2 * STEP_S, "one after the other"
    assert first[True] < 0.1, "at once, but for messages"


class Idleness:
    """Since when a request could have been taken: it waits where it is, and a sibling has nothing to do."""

    def __init__(self, cluster: VirtualCluster, bound_s: float) -> None:
        self.cluster, self.bound_s = cluster, bound_s
        self.since: dict[tuple[str, str, str], float] = {}
        self.longest = 0.0

    def after_event(self, name: str) -> None:
        cores, now, found = self.cluster.cores, self.cluster.now, set()
        free = [each for each in cores.values() if each.state.idle()]
        for own, core in cores.items():
            for other in free:
                peer = other.announcement()
                for state in siblings.find_spare(core.state, peer) if own != peer.name else ():
                    found.add((own, peer.name, state.work.request))
        self.since = {each: self.since.get(each, now) for each in found}
        if self.since:
            self.longest = max(self.longest, now - min(self.since.values()))
        assert self.longest <= self.bound_s, f"{self.since} at {now}"

    def event(self, name: str, event: Value) -> None: ...

    def command(self, name: str, command: Value) -> None: ...

    def lost(self, name: str) -> None: ...

    def at_end(self) -> None: ...


@pytest.mark.parametrize("placement", ["3P+D", "3E+PD", "2EPD", "2EP2D", "4EPD"])
def test_nothing_waits_beside_an_idle_sibling_for_longer_than_its_messages_take(placement: str) -> None:
    """Want, have, take and the request, and one that is told of it first and has something by now: six messages."""
    cluster = at_rest(placement)
    watch = Idleness(cluster, bound_s=6.5 * MESSAGE_S)
    cluster.observers = [*cluster.observers, watch]
    image = "E" in placement.split("+")[0]
    ask(cluster, 12, image)
    cluster.run()
    assert watch.longest > 0.0


def test_each_is_handed_over_once_however_many_are_idle() -> None:
    cluster = at_rest("4EPD")
    ask(cluster, 30, False)
    cluster.run()
    routes = Counter(
        len(each.end.finished.route) for each in cluster.outcomes.values() if each.end and each.end.finished
    )
    assert set(routes) == {1, 2}, routes
    words = sum(isinstance(getattr(each, "message", None), Spare) for _, _, each in cluster.commands)
    assert words < 30 * 8, "a few words a request"


def test_where_nobody_is_idle_or_nobody_waits_nothing_is_said() -> None:
    for placement, requests in (("EPD", 9), ("2P+D", 1)):
        cluster = at_rest(placement)
        ask(cluster, requests, False)
        cluster.run()
        assert not [each for _, _, each in cluster.commands if isinstance(getattr(each, "message", None), Spare)]


# ---------------------------------------------------------------- every order

ROOM = {"image": 4, "kv": 8}
PICTURE = Submit(work("r", "cat*4", 1, max_tokens=1))
TEXT = Submit(work("s", 4, text=300, max_tokens=1))


def search(victim: str, *more: Value, back: bool = False) -> Search:
    """In turn, per stage, a request of an image and one of text alone come to one instance; the other is idle."""
    rules, transfers = BatchRules(token_budget=64, image_budget=64), TransferPolicy(early=False, hand_over=True)
    own = make_settings(
        "2EPD", ROOM, image_block_size=4, kv_block_size=4, prefix_cache=False, rules=rules, transfers=transfers
    )
    return Search(own, (PICTURE, TEXT, *more), victim, back, NO_RECOVERY)


def ends(found: Search) -> set[str]:
    return {reason for each in found.ends for _, reason in each}


def test_in_every_order_both_are_whole() -> None:
    found = search("")
    assert len(found.run()) > 100
    assert ends(found) == {"length"}


@pytest.mark.parametrize("victim", ["EPD0", "EPD1"])
def test_in_every_order_the_loss_of_either_leaves_nothing_behind(victim: str) -> None:
    found = search(victim)
    assert len(found.run()) > 500
    assert ends(found) <= {"length", "MigrationError", "StageError", "Overloaded"}


def test_in_every_order_a_cancel_leaves_nothing_behind() -> None:
    found = search("", Abort("s", "cancelled"))
    assert len(found.run()) > 400
    assert ends(found) == {"length", "cancelled"}


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("victim", ["EPD0", "EPD1"])
def test_in_every_order_one_that_comes_back_leaves_nothing_behind(victim: str) -> None:
    assert len(search(victim, back=True).run()) > 5000


# ---------------------------------------------------------------- a rule not kept is noticed

Patch = pytest.MonkeyPatch
Broken = Callable[[Patch], None]


def handles(patch: Patch, kind: type[Value], handle: Callable[..., None]) -> None:
    patch.setitem(instance_core._HANDLERS, kind, handle)


def greedy(patch: Patch) -> None:
    """Who has something takes more."""

    def handle(s: State, event: Spare, now: float) -> None:
        if event.said == "have":
            s.send(event.name, Spare(s.settings.name, "take", event.kind, 99))
        else:
            siblings.handle_spare(s, event, now)

    handles(patch, Spare, handle)


def of_two(patch: Patch) -> None:
    """One that waits for a request from a sibling takes another one's as well."""
    patch.setattr(SiblingWords, "came", lambda self, name: None)
    patch.setattr(siblings, "is_free", lambda s: s.idle() and s.reserved_as is None)


def begun(patch: Patch) -> None:
    """What is being encoded or prefilled is handed over, too."""

    def find(s: State, peer: Any) -> Any:
        return iter([each for each in s.requests.values() if each.phase in (Phase.ENCODING, Phase.PREFILLING)])

    patch.setattr(siblings, "find_spare", find)


def kept(patch: Patch) -> None:
    """Who hands a request over has it still."""

    def pass_on(s: State, state: RequestState, target: str, now: float) -> None:
        s.send(target, Submit(state.work, state.inputs, state.route, target_epoch=s.router.peers[target].epoch))
        s.leave_tombstone(state, target)

    patch.setattr(siblings, "pass_on", pass_on)


def untraced(patch: Patch) -> None:
    """Who hands a request over does not know where to."""

    def pass_on(s: State, state: RequestState, target: str, now: float) -> None:
        admission.pass_on(s, state, target, now)
        s.forget(state.work.request, state.attempt)

    patch.setattr(siblings, "pass_on", pass_on)


def nameless(patch: Patch) -> None:
    """The one that takes it takes it for its own from the first."""

    def submit(s: State, event: Submit, now: float) -> None:
        admission.handle_submit(s, replace(event, route=()), now)

    handles(patch, Submit, submit)


def silent(patch: Patch) -> None:
    """Who has nothing any more says nothing."""
    plain = siblings._say
    patch.setattr(siblings, "_say", lambda s, to, said, *rest: plain(s, to, said, *rest) if said != "none" else None)


def faithful(patch: Patch) -> None:
    """What a lost sibling was to hand over is waited for."""
    patch.setattr(SiblingWords, "avoid", lambda self, name: None)


def nagging(patch: Patch) -> None:
    """One that was told is told again before it has answered."""

    def tell(self: SiblingWords, name: str) -> None:
        self.told.discard(name)

    patch.setattr(SiblingWords, "tell", tell)


RULES: dict[Broken, int] = {
    greedy: 11,
    of_two: 2,
    begun: 2,
    kept: 2,
    untraced: 32,
    nameless: 8,
    silent: 38,
    faithful: 97,
    nagging: 7,
}
"""And the seed at which each is noticed, when this was written."""


@pytest.mark.parametrize("broken", RULES, ids=lambda each: each.__name__)
def test_a_rule_that_is_not_kept_is_noticed(broken: Broken, monkeypatch: Patch) -> None:
    broken(monkeypatch)
    for seed in range(RULES[broken], RULES[broken] + 600):
        try:
            run_spare(seed, limit=20_000)
        except (AssertionError, KeyError, ValueError, RecursionError):
            return
    pytest.fail(f"600 runs did not notice: {broken.__doc__}")


def test_one_that_never_says_what_it_wants_is_noticed_by_who_waits(monkeypatch: Patch) -> None:
    """Nothing breaks by it, but requests wait beside idle siblings."""
    monkeypatch.setattr(siblings, "share_work", lambda s: None)
    monkeypatch.setattr(instance_core, "share_work", lambda s: None)
    with pytest.raises(AssertionError):
        test_nothing_waits_beside_an_idle_sibling_for_longer_than_its_messages_take("3P+D")
