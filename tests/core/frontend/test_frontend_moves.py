"""The front end where a decode is to move: which are asked for, which answer each gets, and whose loss is what."""

from __future__ import annotations

import pytest

from support.core_tables import Row
from support.recovering import AT_D0, LEFT, TO_D0, emit, quiet, recovering, table
from trinity.core.frontend import Abort
from trinity.core.frontend.messages import MoveRequest
from trinity.core.frontend.suspicion import Life
from trinity.core.messages import Failure, Finished, Moved, NotMoved, PeerDown, Value

PEERS = "E0 P0 P1 D0 D1 D2"
ASK = MoveRequest("r", "D1")
MOVED = Moved("r", 0, "D1", 3, 0, "D0", 0, start=3)
STAYS = NotMoved("r", 0, Failure("MoveError", "no room", {"reason": "refused"}))
AT_D1: list[Row] = [*AT_D0, (ASK, ["D0: move r to D1"]), (MOVED, ["r is moved"])]
WHOLE = Finished(request="r", attempt=0, reason="length", count=4, route=("E0", "P0", "D0", "D1"))


def said(*rows: Row, before: list[Row] = AT_D0) -> None:
    table(recovering(PEERS), [*before, *rows])


def test_a_move_is_answered_by_its_target() -> None:
    said((ASK, ["D0: move r to D1"]), (MOVED, ["r is moved"]), (MoveRequest("r", "D0"), ["D1: move r to D0"]))


def test_a_move_is_answered_by_its_source() -> None:
    said((ASK, ["D0: move r to D1"]), (STAYS, ["r is not moved: refused"]), (ASK, ["D0: move r to D1"]))


def test_tokens_of_both_come_in_order() -> None:
    """The target's may be here first."""
    core = recovering(PEERS)
    table(core, [*AT_D0, (ASK, ["D0: move r to D1"]), (MOVED, ["r is moved"]), (emit("r", 0, (3, 8)), []), (WHOLE, [])])
    ended = ["deliver r#2=7", "deliver r#3=8", "end r length"]
    forget = [f"{name}: forget r" for name in ("E0", "P0", "D0", "D1")]
    table(core, [(emit("r", 0, (2, 7)), [*ended, *forget])])
    quiet(core)


@pytest.mark.parametrize(
    ("to", "reason"), [("D7", "unknown"), ("P1", "no decode"), ("D0", "same"), ("E0", "no decode"), ("", "unknown")]
)
def test_what_is_no_place_to_go_is_refused_at_once(to: str, reason: str) -> None:
    said((MoveRequest("r", to), [f"r is not moved: {reason}"]))


def test_one_that_is_not_up_is_told_from_one_that_never_was() -> None:
    said((PeerDown("D1"), []), (ASK, ["r is not moved: lost"]))


def test_a_request_that_does_not_decode_is_not_asked_for() -> None:
    core = recovering(PEERS)
    table(
        core, [(MoveRequest("x", "D1"), ["x is not moved: ended"]), *AT_D0[:2], (ASK, ["r is not moved: not decoding"])]
    )


def test_a_second_move_is_refused_while_one_is_under_way() -> None:
    said((ASK, ["D0: move r to D1"]), (MoveRequest("r", "D2"), ["r is not moved: moving"]), (MOVED, ["r is moved"]))


def test_pools_that_can_never_hold_it_are_told() -> None:
    core = recovering(PEERS)
    core.router.peers["D1"].pools["kv"] = 1
    table(core, [*AT_D0, (ASK, ["r is not moved: too large"])])


# ---------------------------------------------------------------- ends and losses


def test_a_request_that_ends_ends_its_move() -> None:
    ended = Finished(request="r", attempt=0, reason="length", count=2, route=("E0", "P0", "D0"))
    forget = [f"{name}: forget r" for name in ("E0", "P0", "D0")]
    said((ASK, ["D0: move r to D1"]), (ended, ["r is not moved: ended", "end r length", *forget]))


def test_a_request_that_is_cancelled_ends_its_move_with_the_answer_of_its_instance() -> None:
    ended = Finished(request="r", attempt=0, reason="cancelled", count=2, route=("E0", "P0", "D0"))
    forget = [f"{name}: forget r" for name in ("E0", "P0", "D0")]
    rows: list[Row] = [
        (ASK, ["D0: move r to D1"]),
        (Abort("r", "cancelled"), ["E0: cancel r", "end r cancelled"]),
        (MoveRequest("r", "D2"), ["r is not moved: ended"]),
        (ended, ["r is not moved: ended", *forget]),
    ]
    said(*rows)


def test_the_sources_death_before_it_is_handed_on_ends_the_move_and_the_request_is_recovered() -> None:
    said((ASK, ["D0: move r to D1"]), (PeerDown("D0"), ["r is not moved: ended", *LEFT]))


def test_the_targets_death_before_the_source_speaks_ends_nothing() -> None:
    said((ASK, ["D0: move r to D1"]), (PeerDown("D1"), []), (STAYS, ["r is not moved: refused"]))


def test_the_targets_death_behind_the_move_is_recovered() -> None:
    forget = [f"{name}: forget r" for name in ("E0", "P0", "D0", "D1")]
    said((PeerDown("D1"), [*forget, "P0: submit r~1.1"]), before=AT_D1)


def test_the_sources_death_is_a_loss_while_it_has_tokens_that_are_not_out() -> None:
    """What the target has sent waits for them."""
    forget = [f"{name}: forget r" for name in ("E0", "P0", "D0", "D1")]
    said((emit("r", 0, (3, 8)), []), (PeerDown("D0"), [*forget, "P0: submit r~1.1"]), before=AT_D1)
    said((emit("r", 0, (2, 7)), ["deliver r#2=7"]), (PeerDown("D0"), []), before=AT_D1)


def test_what_a_former_life_says_of_its_move_is_no_answer() -> None:
    said(
        (ASK, ["D0: move r to D1"]),
        (PeerDown("D0"), ["r is not moved: ended", *LEFT]),
        (STAYS, []),
        (MOVED, ["D1: forget r"]),
    )


def test_only_what_moved_ends_a_move() -> None:
    """Its way to where it is may be heard late."""
    said(
        (MoveRequest("r", "D0"), ["P0: move r to D0"]),
        (TO_D0, []),
        (STAYS, ["r is not moved: refused"]),
        before=AT_D0[:3],
    )


def test_an_answer_to_nobodys_question_is_dropped() -> None:
    events: list[Value] = [STAYS, NotMoved("x", 0, STAYS.failure), NotMoved("r", 1, STAYS.failure)]
    said(*[(event, []) for event in events])
    rows: list[Row] = [(ASK, ["D0: move r to D1"]), (events[2], []), (STAYS, ["r is not moved: refused"])]
    said(*rows)


def test_only_lives_that_owe_a_token_are_remembered() -> None:
    core = recovering(PEERS)
    table(core, AT_D1)
    table(core, [(emit("r", 0, (2, 7)), ["deliver r#2=7"]), (Moved("r", 0, "D0", 4, 0, "D1", 0, start=4), [])])
    assert core.entries["r"].senders == [(Life("D1", 0), 4)]
