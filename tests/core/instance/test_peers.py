"""Where a request is, and what is left when an instance is lost: leases, transfers, routes."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.core_tables import brief, done, emitted, emptied, image_offer, make_core, peer_up, sent, table, work
from trinity.core import InstanceCore
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import Deliver, End, FrontendCore, FrontendOptions
from trinity.core.messages import (
    Commit,
    Finished,
    Forget,
    Gone,
    Moved,
    Offer,
    Part,
    PeerDown,
    Pulled,
    Ready,
    Release,
    Sampled,
    Send,
    Submit,
)
from trinity.core.routing.router import RoundRobin
from trinity.core.scheduler import BatchRules

HANDED_ON = ["D0: offer P0:1 kv of r [0] by way of P0", "D0: ready P0:1 0", "D0: commit P0:1 after 5"]


def offered_by(core: InstanceCore) -> Offer:
    """An encode instance that has encoded one image and offered it."""
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    (offer,) = sent(core.handle(done(1), 1.0), Offer)
    return offer


def test_the_target_of_an_offer_tells_the_front_end_where_the_request_is() -> None:
    core = make_core("P0", peers="E0 D0", epoch=2)
    offer = replace(image_offer("E0:1", work("r", 1, "cat*4"), (0,)), epoch=5)
    assert core.handle(offer, 0.0)[0] == Send("frontend", Moved("r", 0, "P0", 1, 2)), "no token comes from E0"
    kv = Offer(id="P0:1", kind="kv", source="P0", work=work("r", 3), parts=(Part((0,)),), route=("E0", "P0"), epoch=5)
    target = make_core("D0", peers="P0")
    assert sent(target.handle(kv, 0.0), Moved) == [Moved("r", 0, "D0", 2, 0, "P0", 5)], "the first one does from P0"


def test_the_first_instance_need_not_say_that_it_has_the_request() -> None:
    assert not sent(make_core("P0", peers="D0").handle(Submit(work("r", 3)), 0.0), Moved)


def test_a_lease_of_a_lost_target_is_taken_back() -> None:
    core = make_core("E0", peers="P0 P1")
    offered_by(core)
    assert core.state.pools["image"].held == 1
    assert brief(core.handle(PeerDown("P0"), 1.5))[0].startswith("P1: offer E0:2")
    assert core.state.pools["image"].held == 1
    assert core.handle(PeerDown("P1"), 2.0) == [Send("frontend", Gone("r", 0, "E0", "P1", 3))]
    assert core.state.pools["image"].held == 0
    core.handle(peer_up("P1"), 2.5)
    core.handle(Forget("r"), 3.0)
    emptied(core)
    core.handle(Submit(work("s", 1, "dog*4")), 4.0)
    assert brief(core.handle(done(2), 5.0))[0].startswith("P1: offer")


def test_a_forgotten_request_is_not_told_of_any_more_and_a_later_attempt_stays() -> None:
    core = make_core("E0", peers="P0 P1")
    offered_by(core)
    core.handle(Release("E0:1", "pulled"), 2.0)
    core.handle(Submit(work("r", 1, "cat*4", attempt=1)), 2.0)
    core.handle(Forget("r", 0), 3.0)
    (gone,) = sent(core.handle(PeerDown("P1"), 4.0), Gone)
    assert (gone.attempt, gone.to) == (1, "P1")
    core.handle(Forget("r", 1), 5.0)
    assert not sent(core.handle(PeerDown("P1"), 6.0), Gone)
    emptied(core)


def test_a_forget_of_a_former_attempt_does_not_end_the_one_that_is_here() -> None:
    core = make_core("P0", peers="D0")
    core.handle(Submit(work("r", 3, attempt=1)), 0.0)
    table(core, [(Forget("r", 0), []), (done(1, r=5), ["frontend: emit r#0=5", *HANDED_ON, "close r"])])


def test_a_request_that_is_still_being_encoded_for_a_lost_target_is_its_sources_again() -> None:
    core = make_core("E0", peers="P0", rules=BatchRules(token_budget=64, image_budget=4))
    core.handle(Submit(work("r", 1, "cat*4", "dog*4")), 0.0)
    core.handle(done(1), 1.0)
    assert core.state.outgoing
    commands = core.handle(PeerDown("P0"), 2.0)
    assert sent(commands, Moved) == [Moved("r", 0, "E0", 2)]
    (finished,) = sent(core.handle(done(2), 3.0), Finished)  # no other is up just now
    assert finished.failure is not None
    assert finished.failure.fields["cause"] == "Nowhere"
    assert not sent(commands, Gone)
    core.handle(Forget("r"), 3.0)
    emptied(core)


def test_without_any_peer_left_a_request_fails() -> None:
    core = make_core("E0", peers="P0")
    core.handle(PeerDown("P0"), 0.0)
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    (finished,) = sent(core.handle(done(1), 1.0), Finished)
    assert finished.failure is not None
    assert finished.failure.error == "MigrationError"
    assert "stage P is up" in finished.failure.message


@pytest.mark.parametrize("ready", [False, True], ids=["nothing ready", "a pull in flight"])
def test_blocks_of_a_lost_source_are_not_waited_for(ready: bool) -> None:
    core = make_core("P0", peers="D0 E0")
    core.handle(image_offer("E0:1", work("r", 1, "cat*4"), (0,)), 0.0)
    if ready:
        core.handle(Ready("E0:1", (0,)), 0.0)
    commands = core.handle(PeerDown("E0"), 1.0)
    if ready:  # its destination is in quarantine until the pull has ended
        assert not sent(commands, Finished)
        assert core.state.pools["image"].held == 1
        commands = core.handle(Pulled("E0:1", 0), 2.0)
    (finished,) = sent(commands, Finished)
    assert finished.failure is not None
    assert (finished.failure.error, finished.failure.fields["source"]) == ("MigrationError", "E0")
    core.handle(Forget("r"), 3.0)
    emptied(core)


def test_a_request_whose_blocks_are_here_outlives_its_source() -> None:
    core = make_core("P0", peers="D0 E0")
    core.handle(image_offer("E0:1", work("r", 1, "cat*4"), (0,)), 0.0)
    core.handle(Ready("E0:1", (0,)), 0.0)
    core.handle(Commit("E0:1"), 0.0)
    core.handle(Pulled("E0:1", 0), 0.0)
    assert brief(core.handle(PeerDown("E0"), 1.0)) == []
    assert sent(core.handle(done(1, r=7), 1.0), Offer)


def test_offers_of_another_life_have_other_names() -> None:
    core = make_core("E0", peers="P0")
    again = make_core("E0", peers="P0", epoch=3)
    assert offered_by(core).id == "E0:1"
    assert offered_by(again).id == "E0.3:1"
    assert again.announcement().epoch == 3


def test_a_lost_peer_that_nobody_had_to_do_with_changes_nothing() -> None:
    core = make_core("EPD0", peers="EPD1")
    core.handle(Submit(work("r", 4)), 0.0)
    table(core, [(PeerDown("EPD1"), [])])


# ---------------------------------------------------------------- the front end


def frontend(*names: str) -> FrontendCore:
    core = FrontendCore(RoundRobin(), FrontendOptions(failures=NO_RECOVERY))
    for name in names or ("E0", "P0", "D0"):
        core.handle(peer_up(name), 0.0)
    return core


def asked(core: FrontendCore, *moves: Moved) -> None:
    core.handle(Submit(work("r", 1, "cat*4")), 0.0)
    for move in moves:
        core.handle(move, 0.0)


def ends(commands: list[object]) -> list[tuple[str, str]]:
    found = [each for each in commands if isinstance(each, End)]
    return [(each.request, each.failure.error if each.failure else each.reason) for each in found]


ROUTE = (Moved("r", 0, "P0", 1), Moved("r", 0, "D0", 2, 0, "P0", 0))


@pytest.mark.parametrize(
    ("moves", "lost", "fails"),
    [
        ((), "E0", True),
        ((), "P0", False),
        (ROUTE[:1], "P0", True),
        (ROUTE[:1], "E0", False),
        (ROUTE, "D0", True),
        (ROUTE, "P0", True),
        (ROUTE, "E0", False),
        (ROUTE[::-1], "D0", True),
        (ROUTE[::-1], "P0", True),
    ],
)
def test_a_loss_ends_the_requests_that_are_there(moves: tuple[Moved, ...], lost: str, fails: bool) -> None:
    core = frontend()
    asked(core, *moves)
    commands = core.handle(PeerDown(lost), 1.0)
    if fails and moves and lost == max(moves, key=lambda move: move.hop).to:
        assert not ends(list(commands)), "its source may have it still, and says so or that it is gone"
        last = max(moves, key=lambda move: move.hop)
        commands = core.handle(Gone("r", 0, "its source", lost, last.hop), 1.0)
    if len(moves) == 2 and lost == "P0":
        assert not ends(list(commands)), "its target has yet to say what has come"
        commands = core.handle(emitted(("r", 0, 1, Sampled(5))), 1.0)
    assert ends(list(commands)) == ([("r", "StageError")] if fails else [])
    forgotten = {each.to for each in commands if isinstance(each, Send) and isinstance(each.message, Forget)}
    assert forgotten == ({"E0", *(move.to for move in moves)} if fails else set())
    assert [core.handle(move, 2.0) for move in moves if fails] == [
        [Send(move.to, Forget("r", 0))] for move in moves if fails
    ], "whoever speaks of it later, whose word was slower, is told to forget it"
    assert bool(core.entries) != fails


@pytest.mark.parametrize("finished", [False, True], ids=["decoding", "finished"])
def test_a_first_token_that_was_lost_with_its_instance_is_not_waited_for(finished: bool) -> None:
    core = frontend()
    asked(core, *ROUTE)
    if finished:
        done_there = Finished(request="r", attempt=0, reason="length", count=3, route=("E0", "P0", "D0"))
        assert core.handle(done_there, 0.5) == []
    core.handle(emitted(("r", 0, 1, Sampled(5))), 0.5)
    assert ends(list(core.handle(PeerDown("P0"), 1.0))) == [("r", "StageError")]
    assert not core.entries


def test_one_that_has_come_is_enough() -> None:
    core = frontend()
    asked(core, *ROUTE)
    core.handle(emitted(("r", 0, 0, Sampled(5))), 0.5)
    assert ends(list(core.handle(PeerDown("P0"), 1.0))) == []
    assert core.entries


def test_a_move_to_an_instance_that_is_lost_already_is_a_loss() -> None:
    core = frontend()
    asked(core)
    core.handle(PeerDown("P0"), 1.0)
    assert ends(list(core.handle(ROUTE[0], 1.1))) == []
    assert ends(list(core.handle(Gone("r", 0, "E0", "P0", 1), 1.2))) == [("r", "StageError")]


def test_what_comes_after_a_loss_is_dropped_and_forgotten() -> None:
    core = frontend()
    asked(core, *ROUTE)
    core.handle(emitted(("r", 0, 0, Sampled(5))), 0.5)
    core.handle(PeerDown("D0"), 1.0)
    core.handle(Gone("r", 0, "P0", "D0", 2), 1.0)
    late = Finished(request="r", attempt=0, reason="length", count=3, route=("E0", "P0", "D0"))
    assert core.handle(emitted(("r", 0, 1, Sampled(5))), 2.0) == []
    assert core.handle(late, 2.0) == [Send(name, Forget("r", 0)) for name in ("E0", "P0", "D0")]
    assert core.waiting == 0


def test_a_request_that_finished_before_the_loss_keeps_its_end() -> None:
    core = frontend()
    asked(core, *ROUTE)
    core.handle(Finished(request="r", attempt=0, reason="length", count=1, route=("E0", "P0", "D0")), 0.5)
    assert ends(list(core.handle(PeerDown("D0"), 1.0))) == []
    commands = core.handle(emitted(("r", 0, 0, Sampled(5))), 2.0)  # P's channel is slower than D's
    assert isinstance(commands[0], Deliver)
    assert ends(list(commands)) == [("r", "length")]


def test_while_a_stage_has_no_instance_requests_are_refused_and_then_served_again() -> None:
    core = frontend()
    core.handle(PeerDown("P0"), 0.0)
    assert ends(list(core.handle(Submit(work("r", 1)), 1.0))) == [("r", "Overloaded")]
    core.handle(peer_up("P0"), 2.0)
    assert ends(list(core.handle(Submit(work("r", 1)), 3.0))) == []


def test_a_move_of_an_unknown_request_is_answered_with_forget() -> None:
    core = frontend()
    assert core.handle(Moved("gone", 0, "P0", 1), 0.0) == [Send("P0", Forget("gone", 0))]
    asked(core)
    assert core.handle(Moved("r", 7, "P0", 1), 0.0) == [Send("P0", Forget("r", 7))]
    assert ends(list(core.handle(PeerDown("P0"), 1.0))) == []


def test_an_instance_takes_turns_from_its_own_number_on() -> None:
    """All from the first on, they would send to one peer at a time."""
    core = make_core("P1", peers="D0 D1 D2", kv=64)
    targets = []
    for number, name in enumerate(("r", "s", "t"), start=1):
        core.handle(Submit(work(name, 3)), 0.0)
        (offered,) = [line for line in brief(core.handle(done(number, **{name: 5}), 0.0)) if ": offer" in line]
        targets.append(offered.partition(":")[0])
    assert targets == ["D1", "D2", "D0"]
