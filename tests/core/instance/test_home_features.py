"""Features of a helper come home to an asker that prefills: each message, random runs, and every order of events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import Row, brief, done, emptied, make_core, sent, table, work
from support.every_order import Search
from support.reader_checks import check_readers
from support.spread_clusters import spread_cluster, strike
from support.virtual.cluster import Durations, VirtualCluster, make_settings
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.core.frontend import dispatch
from trinity.core.instance import helpers, instance_core, peers
from trinity.core.instance.state import State
from trinity.core.messages import (
    Cancel,
    Failure,
    Fetch,
    Fetched,
    Forget,
    Helped,
    PeerDown,
    PeerSuspect,
    Pull,
    Pulled,
    Send,
    Submit,
    Value,
)
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.core.values import name_help

RULES = BatchRules(token_budget=64, image_budget=4)
POLICY = FailurePolicy(recoveries=20, wait_s=10.0)
PLACEMENTS = ("2EP1D", "3EP1D", "2EPD", "3EPD", "1E2EP1D", "1EP1EPD", "2EP2EPD", "1E1ED1EP1D")


def said(word: Any, epoch: int = 0, helper: str = "EPD1") -> Helped:
    return Helped(name_help("r", 0, 1), helper, word, epoch)


def asker(*pieces: str, **settings: Any) -> InstanceCore:
    """One that encodes its first image, and has left the second one to a helper."""
    core = make_core("EPD0", peers="EPD1", **{"rules": RULES} | settings)
    found = core.handle(Submit(work("r", *(pieces or ("cat*4", "dog*4")), 1), helpers=("", "EPD1", "EPD1")), 0.0)
    assert brief(found) == ["step 1 joint: encode r.0 into 0"]
    return core


FETCH = "EPD1: fetch EPD0:r~0+1/1 for EPD0"
ENCODES = "step 2 joint: encode r.1 into 1"
PULLS = "pull EPD0:1.1 of r: EPD1's 5 into 1"
FOUND = Fetched("EPD0:r~0+1/1", "EPD1", (5,))
FAILED = Pulled("EPD0:r~0+1", 1, Failure("MigrationError", "no"))


def lines(core: InstanceCore, event: Value) -> list[str]:
    return brief(core.handle(event, 1.0))


def finish(core: InstanceCore) -> None:
    core.handle(Cancel("r"), 8.0)
    for lane in core.state.lanes.values():
        for flight in list(lane):
            core.handle(done(flight.step.id, **dict.fromkeys(flight.requests, 5)), 8.5)
    core.handle(Forget("r"), 9.0)
    emptied(core)
    assert not core.state.home_fetches


def test_features_come_home_by_a_lease_and_a_pull() -> None:
    core = asker()
    (asked,) = sent(core.handle(said("ready"), 1.0), Fetch)
    slot = core.state.requests["r"].media[1]
    assert (asked.id, asked.requester, asked.keys) == ("EPD0:r~0+1/1", "EPD0", tuple(slot.keys))
    assert lines(core, said("no")) == [], "a recall that came too late"
    (pull,) = [each for each in core.handle(FOUND, 1.0) if isinstance(each, Pull)]
    assert (pull.source, pull.source_blocks, pull.target_blocks) == ("EPD1", (5,), slot.blocks)
    assert not any("prefill" in line for line in lines(core, done(1)))
    after = lines(core, Pulled("EPD0:r~0+1", 1, record={"kind": "image", "source": "EPD1"}))
    assert after[0] == "EPD1: release EPD0:r~0+1/1 pulled"
    assert any("prefill r 0+9 last" in line for line in after)
    assert [each["outcome"] for each in core.state.requests["r"].transfers] == ["store"]
    assert core.state.cached_media(slot), "they are cached here from now on"
    finish(core)


def test_they_may_be_here_before_its_own() -> None:
    core = asker()
    core.handle(said("ready"), 1.0)
    core.handle(FOUND, 1.0)
    assert lines(core, Pulled("EPD0:r~0+1", 1)) == ["EPD1: release EPD0:r~0+1/1 pulled"]
    assert any("prefill r" in line for line in lines(core, done(1)))
    finish(core)


def test_equal_images_come_home_once() -> None:
    core = asker("cat*4", "dog*4", "dog*4")
    core.handle(done(1), 1.0)
    assert len(sent(core.handle(said("ready"), 1.0), Fetch)) == 1
    assert len([each for each in core.handle(FOUND, 1.0) if isinstance(each, Pull)]) == 1
    assert any("prefill r" in line for line in lines(core, Pulled("EPD0:r~0+1", 1)))
    finish(core)


@pytest.mark.parametrize(
    ("events", "released"),
    [
        ((Fetched("EPD0:r~0+1/1", "EPD1"),), []),
        ((FOUND, FAILED), ["failed"]),
        ((PeerDown("EPD1"),), []),
        ((PeerSuspect("EPD1", 0, suspected=True),), []),
        ((FOUND, PeerDown("EPD1"), Pulled("EPD0:r~0+1", 1)), ["pulled"]),
        ((FOUND, PeerSuspect("EPD1", 0, suspected=True), Pulled("EPD0:r~0+1", 1)), ["pulled"]),
    ],
    ids=["gone", "failed", "lost", "silent", "lost while pulled", "silent while pulled"],
)
def test_what_does_not_come_home_is_encoded_here(events: tuple[Value, ...], released: list[str]) -> None:
    """And not before a pull into the same blocks has ended; a former life's blocks may have been read."""
    core = asker()
    core.handle(done(1), 1.0)
    core.handle(said("ready"), 1.0)
    for event in events[:-1]:
        assert not any("encode" in line for line in lines(core, event))
    last = core.handle(events[-1], 1.0)
    assert brief(last)[-1] == ENCODES
    assert [line.split()[-1] for line in brief(last) if "release" in line] == released
    assert any("prefill r" in line for line in lines(core, done(2)))
    finish(core)


@pytest.mark.parametrize("epoch", [1, None])
def test_what_a_former_life_has_kept_is_not_asked_for(epoch: int | None) -> None:
    """By the time that its word is heard it is known to be lost, or another life of it is up."""
    core = asker()
    core.handle(done(1), 1.0)
    if epoch is None:
        core.handle(PeerDown("EPD1"), 1.0)
        assert not sent(core.handle(said("ready"), 1.0), Fetch)
    else:
        last = core.handle(said("ready", epoch), 1.0)
        assert not sent(last, Fetch)
        assert brief(last)[-1] == ENCODES
    finish(core)


@pytest.mark.parametrize("when", ["asked", "pulling"])
def test_a_request_that_ends_meanwhile_leaves_no_lease(when: str) -> None:
    core = asker()
    core.handle(done(1), 1.0)
    core.handle(said("ready"), 1.0)
    if when == "pulling":
        core.handle(FOUND, 1.0)
    core.handle(Cancel("r"), 1.0)
    assert ("r" in core.state.requests) is (when == "pulling"), "its blocks are written until the pull ends"
    last = core.handle(FOUND if when == "asked" else Pulled("EPD0:r~0+1", 1), 1.0)
    assert "EPD1: release EPD0:r~0+1/1 " + ("cancelled" if when == "asked" else "pulled") in brief(last)
    finish(core)


def test_one_that_waits_for_blocks_asks_once_it_is_admitted() -> None:
    core = make_core("EPD0", image=2, peers="EPD1", rules=RULES)
    core.handle(Submit(work("first", "owl*8", 1)), 0.0)
    core.handle(Submit(work("r", "cat*4", "dog*4", 1), helpers=("", "EPD1")), 0.0)
    assert core.handle(said("ready"), 0.5) == []
    core.handle(done(1), 1.0)
    assert len(sent(core.handle(done(2, first=5), 2.0), Fetch)) == 1, "its features gave their blocks back"


def test_another_request_with_the_image_has_it_by_the_same_pull() -> None:
    core = asker()
    core.handle(Submit(work("s", "dog*4", 1)), 0.5)
    core.handle(said("ready"), 1.0)
    core.handle(FOUND, 1.0)
    core.handle(done(1), 1.0)
    after = lines(core, Pulled("EPD0:r~0+1", 1))
    assert any("prefill r 0+9 last, prefill s 0+5 last" in line for line in after), after
    core.handle(Cancel("s"), 2.0)
    finish(core)


def test_helpers_of_one_whose_prefix_is_cached_are_called_off() -> None:
    rows: list[Row] = [(Submit(work("a", "cat*4", "dog*4", 1)), ["step 1 joint: encode a.0 into 0"])]
    core = make_core("EPD0", peers="EPD1", rules=RULES)
    table(core, rows)
    core.handle(done(1), 1.0)
    core.handle(done(2), 2.0)
    core.handle(done(3, a=5), 3.0)
    found = lines(core, Submit(work("r", "cat*4", "dog*4", 1), helpers=("", "EPD1")))
    assert "EPD1: cancel r~0+1" in found


# ---------------------------------------------------------------- random runs


def run(seed: int, limit: int = 1_000_000, deaths: bool = True) -> VirtualCluster:
    cluster = spread_cluster(seed, POLICY, PLACEMENTS[seed % len(PLACEMENTS)])
    try:
        (strike(cluster, seed) if deaths else cluster).run(limit)
        check_readers(cluster)
    except BaseException as error:
        error.add_note(f"run({seed}, {deaths=})")
        raise
    return cluster


def home_pulls(cluster: VirtualCluster) -> int:
    fetched = {
        each.message.id for _, _, each in cluster.commands if isinstance(each, Send) and each.message.__class__ is Fetch
    }
    pulls = [each for _, name, each in cluster.commands if isinstance(each, Pull) and "E" in name and "P" in name]
    return sum(f"{pull.offer}/{pull.part}" in fetched for pull in pulls)


def test_requests_are_whole_whatever_becomes_of_what_comes_home() -> None:
    assert sum(home_pulls(run(seed)) for seed in range(40)) > 10
    assert sum(home_pulls(run(seed, deaths=False)) for seed in range(5000, 5020)) > 5


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(4))
def test_many_more_runs(part: int) -> None:
    for seed in range(400_000 + part * 500, 400_500 + part * 500):
        run(seed, deaths=bool(seed % 4))


def rash(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lost helper has is encoded while a pull still writes it."""

    def lose(s: State, name: str) -> None:
        for state in s.requests.values():
            for item, slot in enumerate(state.media):
                if slot.helper == name:
                    helpers.call_off(s, state, item)

    monkeypatch.setattr(peers, "lose_helper", lose)


def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was pulled from a helper that was lost meanwhile is taken for its features."""
    lose = helpers.lose_helper

    def forgiving(s: State, name: str) -> None:
        lose(s, name)
        for fetch in s.home_fetches.values():
            fetch.void = False

    monkeypatch.setattr(peers, "lose_helper", forgiving)


def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not there any more at its helper is waited for."""
    encode = instance_core._encode_here

    def wait(s: State, state: Any, id: str) -> None:
        if s.home_fetches[id].pulling:
            encode(s, state, id)

    monkeypatch.setattr(instance_core, "_encode_here", wait)


@pytest.mark.slow  # messages that each of these breaks have tests above
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("broken", [rash, believing, idle])
def test_a_rule_that_is_not_kept_is_noticed(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    for seed in range(3000):
        try:
            run(seed, limit=20_000)
        except (AssertionError, KeyError, ValueError, RecursionError):
            return
    pytest.fail(f"3000 runs did not notice: {broken.__doc__}")


# ---------------------------------------------------------------- every order

PAIR = Submit(work("r", "cat*4", "dog*4", 1, max_tokens=1))
STILL = Durations(lambda *_: 0.001, lambda *_: 1.0, lambda *_: 0.01)


def search(victim: str, *asked: Value, image: int = 4) -> Search:
    own = make_settings(
        "2EPD",
        {"image": image, "kv": 8},
        image_block_size=4,
        kv_block_size=4,
        prefix_cache=False,
        rules=BatchRules(token_budget=64, image_budget=64),
        transfers=TransferPolicy(early=False),
    )
    return Search(own, asked or (PAIR,), victim, False, NO_RECOVERY, spread=2)


def ends(found: Search) -> set[str]:
    return {reason for each in found.ends for _, reason in each}


def askers(found: Search) -> set[str]:
    return {each.asker for each in found.events._values if isinstance(each, Submit)}


@pytest.mark.parametrize("victim", ["", "EPD1"])
def test_in_every_order_a_request_outlives_its_helper(victim: str) -> None:
    found = search(victim)
    assert len(found.run()) > 100
    assert ends(found) == {"length"}


def test_in_every_order_the_loss_of_the_asker_leaves_nothing_behind() -> None:
    found = search("EPD0")
    assert len(found.run()) > 100
    assert ends(found) <= {"length", "MigrationError", "StageError", "Overloaded"}


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Helpers need not be at rest, as where two front ends, or old reports, deal items: two can help each other."""
    monkeypatch.setattr(
        dispatch, "_fitting_helpers", lambda router, of: router.fitting("E", replace(of, encode_only=True))
    )


@pytest.mark.usefixtures("eager")
def test_in_every_order_two_that_help_each_other_with_room_for_one_are_whole() -> None:
    other = Submit(work("s", "owl*4", "fox*4", 1, max_tokens=1))
    found = search("", PAIR, other, image=2)
    assert len(found.run()) > 2000
    assert askers(found) == {"", "EPD0", "EPD1"}, "each helps the other one"
    assert ends(found) == {"length"}


@pytest.mark.usefixtures("eager")
def test_two_that_help_each_other_with_room_for_one_request_each_both_go_on() -> None:
    """Each request holds all image blocks of its own instance, while the other one is asked for a block."""
    own = make_settings(
        "2EPD", {"image": 4, "kv": 64}, rules=RULES, image_block_size=4, kv_block_size=4, prefix_cache=False
    )
    cluster = VirtualCluster(own, durations=STILL, spread=2)
    for request in "rstu":
        cluster.submit(work(request, *(f"{request}{item}*4" for item in range(4)), 1, max_tokens=1), at=0.0)
    cluster.run()
    helps = [
        each.message for _, _, each in cluster.commands if isinstance(each, Send) and isinstance(each.message, Submit)
    ]
    assert {help.asker for help in helps if help.asker} == {"EPD0", "EPD1"}
    assert {outcome.end.reason for outcome in cluster.outcomes.values() if outcome.end} == {"length"}


def test_idle_siblings_have_the_first_token_sooner() -> None:
    """Four images, a second each: in two rounds on two, in one and a half with the third."""

    def first(placement: str, spread: int) -> float:
        own = make_settings(placement, {"image": 16, "kv": 64}, rules=RULES, image_block_size=4, kv_block_size=4)
        cluster = VirtualCluster(own, durations=STILL, spread=spread)
        cluster.submit(work("r", *(f"r{item}*4" for item in range(4)), 1, max_tokens=1), at=0.0)
        cluster.run()
        return cluster.outcomes["r"].times[0]

    for placement in ("2EPD", "2EP1D", "1EP1EPD"):
        assert first(placement, 1) == pytest.approx(5.0, abs=0.1)
        assert first(placement, 2) == pytest.approx(3.0, abs=0.1)
    assert first("4EPD", 4) == pytest.approx(2.0, abs=0.1)
