"""Leases that run out, blocks that are taken back, deadlines that an instance keeps itself, heartbeats."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from support.core_tables import (
    brief,
    done,
    emitted,
    emptied,
    image_offer,
    kv_offer,
    make_core,
    peer_up,
    sent,
    table,
    work,
)
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import FrontendCore, FrontendOptions
from trinity.core.messages import (
    Commit,
    Failure,
    Finished,
    Forget,
    Offer,
    PeerDown,
    PeerLoad,
    Pull,
    Pulled,
    Ready,
    Release,
    Revoke,
    Sampled,
    Submit,
    Tick,
    Value,
    Withdraw,
)
from trinity.core.routing.router import RoundRobin
from trinity.core.scheduler import BatchRules

SLOW: dict[str, Any] = {"lease_s": 10.0, "report_s": inf}


def leased(name: str = "E0", **settings: Any) -> InstanceCore:
    """An encoder whose one image block is leased to P0 since 1.0; the request is at P0."""
    core = make_core(name, image=1, peers="P0 P1", **{**SLOW, **settings})
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    core.handle(done(1), 1.0)
    return core


def failures(commands: list[Value]) -> list[tuple[str, str, str]]:
    """(error, cause, instances of the route) of each Finished."""
    found = [(each.failure, each.route) for each in sent(commands, Finished)]
    return [(why.error, why.fields.get("cause", ""), " ".join(route)) for why, route in found if why is not None]


def test_a_lease_that_nobody_renews_runs_out_and_ends_its_request() -> None:
    core = leased()
    assert core.next_timer() == 11.0
    assert core.handle(Tick(), 10.9) == []
    assert core.state.pools["image"].held == 1
    commands = core.handle(Tick(), 11.0)
    assert brief(commands) == [
        "P0: withdraw E0:1 MigrationError",
        "frontend: finished r error 0 by way of E0 P0 MigrationError",
    ]
    assert failures(commands) == [("MigrationError", "LeaseExpired", "E0 P0")]
    assert core.state.pools["image"].held == 0
    assert core.next_timer() is None
    table(core, [(Release("E0:1", "pulled"), []), (Forget("r"), [])], 12.0)
    emptied(core)


@pytest.mark.parametrize("word", [PeerLoad("P0"), Release("E0:7", "pulled")], ids=["a heartbeat", "of another offer"])
def test_any_word_from_the_target_renews(word: Value) -> None:
    core = leased()
    if isinstance(word, Release):
        core = make_core("E0", image=2, peers="P0", **SLOW)
        for number, request in enumerate("rs"):
            core.handle(Submit(work(request, 1, f"{request}*4")), 0.0)
            core.handle(done(number + 1), 1.0)
        word = Release("E0:2", "pulled")
    core.handle(word, 9.0)
    assert brief(core.handle(Tick(), 11.0)) == []
    assert core.next_timer() == 19.0
    assert core.handle(Tick(), 18.9) == []
    assert len(sent(core.handle(Tick(), 19.0), Withdraw)) == 1


def test_a_word_from_another_instance_does_not() -> None:
    core = leased()
    core.handle(PeerLoad("P1"), 9.0)
    assert len(sent(core.handle(Tick(), 11.0), Withdraw)) == 1


def test_a_request_that_is_still_here_ends_here() -> None:
    core = make_core("E0", peers="P0", rules=BatchRules(token_budget=64, image_budget=4), **SLOW)
    core.handle(Submit(work("r", 1, "cat*4", "dog*4")), 0.0)
    core.handle(done(1), 1.0)
    commands = core.handle(Tick(), 11.0)
    assert brief(commands) == ["P0: withdraw E0:1 MigrationError"], "a step has a row of it"
    assert failures(core.handle(done(2), 12.0)) == [("MigrationError", "LeaseExpired", "E0")]
    core.handle(Forget("r"), 12.0)
    emptied(core)


def test_a_request_that_the_front_end_has_forgotten_ends_no_more() -> None:
    core = leased()
    core.handle(Forget("r"), 2.0)
    assert brief(core.handle(Tick(), 11.0)) == ["P0: withdraw E0:1 MigrationError"]
    emptied(core)


def test_an_instance_that_stood_still_itself_blames_nobody() -> None:
    core = leased()
    assert core.handle(Tick(), 300.0) == []
    assert core.next_timer() == 310.0
    core.handle(PeerLoad("P0"), 300.1)
    assert core.handle(Tick(), 310.0) == []


def test_blocks_taken_back_get_a_generation_before_they_get_content() -> None:
    core = leased(image_cache=False)
    core.handle(Tick(), 11.0)
    commands = core.handle(Submit(work("s", 1, "dog*4")), 12.0)
    assert commands[0] == Revoke("image", (0,), 1), "ahead of the step that writes"
    (offer,) = sent(core.handle(done(2), 13.0), Offer)
    assert offer.generation == 1
    core.handle(Release(offer.id, "pulled"), 14.0)
    core.handle(Submit(work("t", 1, "fox*4")), 15.0)
    assert core.state.generation == 1, "once for each lease taken back"
    core.handle(done(3), 16.0)
    core.handle(Tick(), 26.0)
    assert core.handle(Submit(work("u", 1, "cat*4")), 27.0)[0] == Revoke("image", (0,), 2)


def test_content_that_others_read_too_keeps_its_generation() -> None:
    """One image leased to two: the one that fell silent must not fail the other's read."""
    core = make_core("E0", image=2, peers="P0 P1", **SLOW)
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    core.handle(done(1), 1.0)
    core.handle(Submit(work("s", 1, "cat*4")), 1.0)
    assert {lease.target for lease in core.state.outgoing.values()} == {"P0", "P1"}
    core.handle(PeerLoad("P1"), 9.0)
    core.handle(Tick(), 11.0)
    assert core.state.pools["image"].references(0) == 1
    commands = core.handle(Submit(work("t", 1, "dog*4")), 12.0)
    assert not [each for each in commands if isinstance(each, Revoke)], "there was another free block"
    core.handle(Release("E0:2", "pulled"), 13.0)
    core.handle(Submit(work("u", 1, "fox*4")), 14.0)
    commands = core.handle(done(2), 15.0)
    assert Revoke("image", (0,), 1) in commands, "now that it is evicted"


def test_a_lost_target_leaves_its_blocks_in_doubt_too() -> None:
    core = leased(image_cache=False)
    core.handle(PeerDown("P0"), 2.0)
    core.handle(PeerDown("P1"), 2.0)
    assert core.handle(Submit(work("s", 1, "dog*4")), 3.0)[0] == Revoke("image", (0,), 1)


def test_a_pull_carries_the_generation_of_its_offer() -> None:
    core = make_core("P0", peers="D0 E0", **SLOW)
    offer = image_offer("E0:1", work("r", 1, "cat*4"), (0,))
    core.handle(Offer(**{**{name: getattr(offer, name) for name in offer.__struct_fields__}, "generation": 7}), 0.0)
    (pull,) = core.handle(Ready("E0:1", (0,)), 0.0)
    assert isinstance(pull, Pull)
    assert pull.generation == 7


def test_an_offer_of_a_silent_source_is_given_up() -> None:
    core = make_core("D0", peers="P0", kv=4, **SLOW)
    core.handle(kv_offer("P0:1", work("r", 4), (0,)), 1.0)
    assert core.next_timer() == 11.0
    core.handle(PeerLoad("P0"), 5.0)
    assert core.handle(Tick(), 11.0) == []
    commands = core.handle(Tick(), 15.0)
    assert brief(commands) == ["P0: release P0:1 failed", "frontend: finished r error 0 by way of P0 D0 MigrationError"]
    table(
        core, [(Ready("P0:1", (0,)), []), (Commit("P0:1", (5,)), []), (Withdraw("P0:1"), []), (Forget("r"), [])], 16.0
    )
    emptied(core)


def test_its_pull_in_flight_is_waited_for() -> None:
    core = make_core("D0", peers="P0", kv=4, **SLOW)
    core.handle(kv_offer("P0:1", work("r", 4), (0,)), 1.0)
    core.handle(Ready("P0:1", (0,)), 1.0)
    assert core.handle(Tick(), 11.0) == []
    assert core.state.kv.held, "in quarantine"
    assert failures(core.handle(Pulled("P0:1", 0), 12.0)) == [("MigrationError", "LeaseExpired", "P0 D0")]
    core.handle(Forget("r"), 12.0)
    emptied(core)


def test_a_request_whose_blocks_are_here_does_not_mind() -> None:
    core = make_core("D0", peers="P0", kv=4, **SLOW)
    for event in (kv_offer("P0:1", work("r", 4), (0,)), Ready("P0:1", (0,)), Commit("P0:1", (5,)), Pulled("P0:1", 0)):
        core.handle(event, 1.0)
    assert core.next_timer() is None
    assert core.handle(Tick(), 99.0) == []
    assert core.state.decoding


# ---------------------------------------------------------------- deadlines


def test_a_deadline_ends_a_request_without_a_word_from_the_front_end() -> None:
    core = make_core("PD0", **SLOW)
    core.handle(Submit(work("r", 4, deadline_s=3.0)), 1.0)
    core.handle(Submit(work("s", 4, text=300)), 1.0)
    assert core.next_timer() == 4.0
    assert core.handle(Tick(), 3.9) == []
    assert core.handle(Tick(), 4.0) == [], "a step has a row of it"
    assert failures(core.handle(done(1, r=5), 4.5)) == [("DeadlineExceeded", "", "PD0")]
    assert core.next_timer() is None
    assert list(core.state.requests) == ["s"]


def test_a_deadline_follows_the_offer_and_its_rest_the_commit() -> None:
    core = make_core("D0", peers="P0", kv=4, lease_s=inf, report_s=inf)
    core.handle(kv_offer("P0:1", work("r", 4, deadline_s=5.0), (0,)), 1.0)
    assert core.next_timer() == 6.0
    core.handle(Commit("P0:1", (5,), deadline_s=2.0), 1.5)
    assert core.next_timer() == 3.5
    commands = core.handle(Tick(), 3.5)
    assert brief(commands) == [
        "P0: release P0:1 failed",
        "frontend: finished r error 1 by way of P0 D0 DeadlineExceeded",
    ]


def test_a_source_withdraws_what_is_late() -> None:
    core = make_core("E0", peers="P0", rules=BatchRules(token_budget=64, image_budget=4), **SLOW)
    core.handle(Submit(work("r", 1, "cat*4", "dog*4", deadline_s=3.0)), 0.0)
    core.handle(done(1), 1.0)
    core.handle(Tick(), 3.0)
    assert brief(core.handle(done(2), 3.1)) == ["P0: withdraw E0:1 DeadlineExceeded"]


def test_a_deadline_of_a_request_that_ended_is_no_timer() -> None:
    core = make_core("PD0", **SLOW)
    core.handle(Submit(work("r", 4, max_tokens=1, deadline_s=3.0)), 0.0)
    core.handle(done(1, r=5), 1.0)
    assert core.next_timer() is None


# ---------------------------------------------------------------- the front end


def test_the_front_end_takes_the_first_end_it_hears_of() -> None:
    core = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY))
    for name in ("E0", "P0", "D0"):
        core.handle(peer_up(name), 0.0)
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    ended = Finished(request="r", attempt=0, reason="length", count=1, route=("E0", "P0"))
    why = Failure("MigrationError", "silent", {"cause": "LeaseExpired"})
    assert core.handle(ended, 1.0) == [], "its token is on a slower channel"
    assert core.handle(Finished(request="r", attempt=0, reason="error", failure=why, route=("E0", "P0")), 2.0) == []
    commands = core.handle(emitted(("r", 0, 0, Sampled(5))), 3.0)
    assert brief(commands)[:2] == ["deliver r#0=5", "end r length"]


def test_an_end_by_an_instances_own_clock_is_an_end_by_deadline() -> None:
    core = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY))
    core.handle(peer_up("PD0"), 0.0)
    core.handle(Submit(work("r", 4, deadline_s=3.0)), 0.0)
    late = Finished(request="r", attempt=0, reason="error", failure=Failure("DeadlineExceeded", "late"), route=("PD0",))
    assert brief(core.handle(late, 2.9))[0] == "end r deadline DeadlineExceeded"
    assert core.next_timer() is None
