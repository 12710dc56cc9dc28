"""A decode that moves, as its source and as its target have it: each event, and all that answers it."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import Row, brief, done, emptied, kv_offer, lost, make_core, peer_up, sent, table, work
from trinity.core import InstanceCore
from trinity.core.messages import (
    Cancel,
    Caught,
    Commit,
    Failure,
    Forget,
    Move,
    Moved,
    NotMoved,
    Offer,
    Part,
    PeerDown,
    Pulled,
    Ready,
    Release,
    Tick,
    Withdraw,
)
from trinity.core.transfers import TransferPolicy

R = work("r", 5, max_tokens=9)
QUIET: dict[str, Any] = {"report_s": inf, "prefix_cache": False}
BLOCKS = "0,1,2,3"  # of r: five tokens and nine outputs


def decoding(peers: str = "P0 D1", **settings: Any) -> InstanceCore:
    """D0, which decodes r with two tokens out, and runs its next step."""
    core = make_core("D0", peers=peers, **{**QUIET, **settings})
    rows: list[Row] = [
        (kv_offer("P0:1", R, (4, 5)), []),
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of r from P0 4,5 into 0,1"]),
        (Commit("P0:1", (7,)), []),
        (Pulled("P0:1", 0), ["P0: release P0:1 pulled", f"open r kv {BLOCKS} after 7", "step 1 joint: decode r"]),
        (done(1, r=8), ["frontend: emit r#1=8", "step 2 joint: decode r"]),
    ]
    table(core, rows)
    return core


ASKED: list[Row] = [(Move("r", 0, "D1"), [])]
OFFERED: list[Row] = [
    *ASKED,
    (done(2, r=9), ["frontend: emit r#2=9", "D1: offer D0:1 kv of r [0,1] by way of P0 D0", "D1: ready D0:1 0"]),
]
GOES_ON = ["step 3 joint: decode r"]
HANDED_ON: list[Row] = [*OFFERED, (Caught("D0:1", "D1"), ["D1: commit D0:1 after 7,8,9", "close r"])]


def moving(rows: list[Row], **settings: Any) -> InstanceCore:
    core = decoding(**settings)
    table(core, rows)
    return core


# ---------------------------------------------------------------- the source


def test_a_decode_is_offered_after_its_last_step_and_committed_once_its_target_has_it() -> None:
    core = moving([*HANDED_ON, (Release("D0:1", "pulled"), [])])
    (stone,) = core.state.tombstones.values()
    assert stone.target == "D1"
    table(core, [(Forget("r"), [])])
    emptied(core)


def test_the_offer_says_that_it_moves_and_which_rows_are_written() -> None:
    core = decoding()
    core.handle(Move("r", 0, "D1"), 0.0)
    (offer,) = sent(core.handle(done(2, r=9), 0.0), Offer)
    assert (offer.moves, offer.parts) == (True, (Part((0, 1), tail=3),)), "seven rows: the last token has none yet"


def test_all_steps_in_flight_end_first() -> None:
    core = make_core("D0", peers="P0 D1", depth=2, **QUIET)
    for event in (kv_offer("P0:1", R, (4, 5)), Ready("P0:1", (0,)), Commit("P0:1", (7,)), Pulled("P0:1", 0)):
        core.handle(event, 0.0)
    rows: list[Row] = [
        (Move("r", 0, "D1"), []),
        (done(1, r=8), ["frontend: emit r#1=8"]),
        (done(2, r=9), ["frontend: emit r#2=9", *OFFERED[1][1][1:]]),
    ]
    table(core, rows)


@pytest.mark.parametrize(
    ("event", "reason", "more"),
    [
        (Release("D0:1", "refused"), "refused", []),
        (Release("D0:1", "unpulled"), "unpulled", []),
        (PeerDown("D1"), "lost", []),
    ],
)
def test_where_the_target_does_not_have_it_the_source_decodes_on(event: Any, reason: str, more: list[str]) -> None:
    core = moving([*OFFERED, (event, [*more, f"frontend: not moved r {reason}", *GOES_ON])])
    table(core, [(done(3, r=10), ["frontend: emit r#3=10", "step 4 joint: decode r"])])
    assert not core.state.outgoing


def test_a_target_that_takes_too_long_is_left_though_it_speaks() -> None:
    core = moving(OFFERED, transfers=TransferPolicy(move_s=2.0))
    assert core.next_timer() == 2.0
    core.handle(peer_up("D1"), 1.9)
    assert brief(core.handle(Tick(), 2.0)) == [
        "D1: withdraw D0:1 MigrationError",
        "frontend: not moved r late",
        *GOES_ON,
    ]
    assert brief(core.handle(Caught("D0:1", "D1"), 2.1)) == ["D1: withdraw D0:1"], "it is late"


def test_a_lease_that_runs_out_while_it_moves_ends_the_move_alone() -> None:
    core = moving(OFFERED, lease_s=1.0)
    assert brief(core.handle(Tick(), 1.0)) == [
        "D1: withdraw D0:1 MigrationError",
        "frontend: not moved r late",
        *GOES_ON,
    ]
    assert brief(core.handle(done(3, r=10), 1.1)) == ["frontend: emit r#3=10", "step 4 joint: decode r"]


def test_behind_the_commit_a_lease_that_runs_out_is_the_requests_loss() -> None:
    core = moving(HANDED_ON, lease_s=1.0)
    lines = ["D1: withdraw D0:1 MigrationError", "frontend: finished r error 3 by way of P0 D0 D1 MigrationError"]
    assert brief(core.handle(Tick(), 1.0)) == lines


def test_behind_the_commit_the_targets_death_is_told_and_its_refusal_is_the_requests_loss() -> None:
    table(moving(HANDED_ON), [(PeerDown("D1"), ["frontend: gone r with D1"])])
    lines = ["frontend: finished r error 3 by way of P0 D0 D1 MigrationError"]
    table(moving(HANDED_ON), [(Release("D0:1", "refused"), lines)])


@pytest.mark.parametrize("event", [Cancel("r"), Forget("r")])
def test_one_that_ends_while_it_moves_is_withdrawn_and_reported_by_its_source(event: Any) -> None:
    lines = ["D1: withdraw D0:1", "frontend: finished r cancelled 3 by way of P0 D0", "close r"]
    core = moving([*OFFERED, (event, lines), (Caught("D0:1", "D1"), ["D1: withdraw D0:1"])])
    table(core, [(Release("D0:1", "refused"), [])])
    emptied(core)


def test_one_that_ends_in_its_last_step_is_not_offered() -> None:
    core = make_core("D0", peers="P0 D1", **QUIET)
    r = work("r", 5, max_tokens=2)
    rows: list[Row] = [
        (kv_offer("P0:1", r, (4, 5)), []),
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of r from P0 4,5 into 0,1"]),
        (Commit("P0:1", (7,)), []),
        (Pulled("P0:1", 0), ["P0: release P0:1 pulled", "open r kv 0,1 after 7", "step 1 joint: decode r"]),
        (Move("r", 0, "D1"), []),
        (done(1, r=8), ["frontend: emit r#1=8", "frontend: finished r length 2 by way of P0 D0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_a_cancel_that_came_behind_the_commit_is_passed_on() -> None:
    table(moving(HANDED_ON), [(Cancel("r"), ["D1: cancel r"])])


@pytest.mark.parametrize(
    ("move", "reason"),
    [
        (Move("s", 0, "D1"), "not decoding"),
        (Move("r", 1, "D1"), "not decoding"),
        (Move("r", 0, "D0"), "lost"),
        (Move("r", 0, "D7"), "lost"),
        (Move("r", 0, "P0"), "lost"),
    ],
)
def test_what_cannot_move_stays_as_it_is(move: Move, reason: str) -> None:
    core = decoding()
    table(
        core,
        [(move, [f"frontend: not moved {move.request} {reason}"]), (done(2, r=9), ["frontend: emit r#2=9", *GOES_ON])],
    )


def test_a_second_move_is_refused_while_one_is_under_way() -> None:
    moving([*ASKED, (Move("r", 0, "D1"), ["frontend: not moved r not decoding"]), *OFFERED[1:]])


def test_a_target_that_dies_before_the_last_step_has_ended_is_not_offered_it() -> None:
    rows: list[Row] = [
        (PeerDown("D1"), []),
        (done(2, r=9), ["frontend: emit r#2=9", "frontend: not moved r lost", *GOES_ON]),
    ]
    core = moving([*ASKED, *rows])
    assert not core.state.outgoing


def test_one_that_could_not_go_may_be_asked_again() -> None:
    rows: list[Row] = [
        (Release("D0:1", "refused"), ["frontend: not moved r refused", *GOES_ON]),
        (Move("r", 0, "D1"), []),
        (
            done(3, r=10),
            ["frontend: emit r#3=10", "D1: offer D0:2 kv of r [0,1] by way of P0 D0", "D1: ready D0:2 0"],
        ),
        (Caught("D0:2", "D1"), ["D1: commit D0:2 after 7,8,9,10", "close r"]),
    ]
    moving([*OFFERED, *rows])


# ---------------------------------------------------------------- the target


def offered(id: str = "D0:1") -> Offer:
    return replace(kv_offer(id, R, (4, 5), source="D0"), route=("P0", "D0"), moves=True)


COMMIT = Commit("D0:1", (7, 8, 9))
PULLING: list[Row] = [
    (offered(), []),
    (Ready("D0:1", (0,)), ["pull D0:1.0 kv of D0:1 from D0 4,5 into 0,1"]),
]
CAUGHT: list[Row] = [*PULLING, (Pulled("D0:1", 0), ["D0: caught D0:1"])]
TAKEN = ["D0: release D0:1 pulled", f"open r kv {BLOCKS} after 7,8,9", "step 1 joint: decode r"]


def target(rows: list[Row], **settings: Any) -> InstanceCore:
    core = make_core("D1", peers="P0 D0", **{**QUIET, **settings})
    table(core, rows)
    return core


def test_the_target_says_that_it_has_all_and_decodes_once_it_is_committed() -> None:
    core = target(CAUGHT)
    out = core.handle(COMMIT, 0.0)
    assert brief(out) == TAKEN
    (moved,) = sent(out, Moved)
    assert moved == Moved("r", 0, "D1", 2, 0, "D0", 0, start=3)
    table(core, [(done(1, r=10), ["frontend: emit r#3=10", "step 2 joint: decode r"])])


def test_until_then_it_says_nothing_to_the_front_end() -> None:
    core = make_core("D1", peers="P0 D0", **QUIET)
    for event, _ in CAUGHT:
        assert not sent(core.handle(event, 0.0), Moved)


def test_one_without_room_refuses_at_once_and_one_behind_others_as_well() -> None:
    core = target([(offered(), ["D0: release D0:1 refused"])], kv=3)
    emptied(core)
    core = target([(kv_offer("P0:1", work("s", 9, max_tokens=9), (1, 2, 3)), [])], kv=4)
    table(core, [(offered(), ["D0: release D0:1 refused"])])


def test_a_pull_that_fails_gives_it_back() -> None:
    core = target([*PULLING, (lost("D0:1"), ["D0: release D0:1 unpulled"]), (COMMIT, [])])
    emptied(core)


@pytest.mark.parametrize(
    ("rows", "after"), [(PULLING, [(Pulled("D0:1", 0), ["D0: release D0:1 refused"])]), (CAUGHT, [])]
)
def test_one_that_is_withdrawn_is_let_go_of_once_its_pull_has_ended(rows: list[Row], after: list[Row]) -> None:
    said = [] if after else ["D0: release D0:1 refused"]
    core = target([*rows, (Withdraw("D0:1"), said), *after, (COMMIT, [])])
    emptied(core)


@pytest.mark.parametrize("rows", [PULLING, CAUGHT])
def test_the_death_of_its_source_ends_it_without_a_word_to_the_front_end(rows: list[Row]) -> None:
    core = target(rows)
    out = brief(core.handle(PeerDown("D0"), 0.0)) + (
        brief(core.handle(Pulled("D0:1", 0), 0.0)) if rows is PULLING else []
    )
    assert out == ["D0: release D0:1 unpulled"]
    emptied(core)


def test_a_silent_source_loses_it() -> None:
    core = target(CAUGHT, lease_s=1.0)
    assert brief(core.handle(Tick(), 1.0)) == ["D0: release D0:1 unpulled"]
    table(core, [(COMMIT, [])], start=1.1)
    emptied(core)


@pytest.mark.parametrize("event", [Cancel("r"), Forget("r")])
def test_what_is_said_of_the_request_is_not_of_what_moves_here(event: Any) -> None:
    """Its source hears it as well, and withdraws."""
    target([*CAUGHT, (event, []), (COMMIT, TAKEN)])


def test_it_may_have_the_request_in_another_way_before_it_has_let_go_of_a_move() -> None:
    """Its source went on, and handed it to a prefill instance, whose offer is here ahead of the Withdraw."""
    rows: list[Row] = [
        (kv_offer("P0:1", R, (8, 9)), []),
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of r from P0 8,9 into 4,5"]),
        (Withdraw("D0:1", Failure("MigrationError", "late")), []),
        (Pulled("D0:1", 0), ["D0: release D0:1 unpulled"]),
        (Commit("P0:1", (7,)), []),
        (Pulled("P0:1", 0), ["P0: release P0:1 pulled", "open r kv 4,5,6,7 after 7", "step 1 joint: decode r"]),
    ]
    target([*PULLING, *rows])


def test_it_comes_back_to_where_it_was() -> None:
    back = replace(offered("D1:1"), source="D1", route=("P0", "D0", "D1"))
    rows: list[Row] = [
        *HANDED_ON,
        (Release("D0:1", "pulled"), []),
        (back, []),
        (Ready("D1:1", (0,)), ["pull D1:1.0 kv of D1:1 from D1 4,5 into 0,1"]),
        (Pulled("D1:1", 0), ["D1: caught D1:1"]),
        (Cancel("r"), ["D1: cancel r"]),
        (Commit("D1:1", (7, 8, 9, 10)), ["D1: release D1:1 pulled", f"open r kv {BLOCKS} after 7,8,9,10", *GOES_ON]),
    ]
    core = moving(rows)
    assert not core.state.tombstones, "two would pass a late Cancel in a circle"


def test_every_reason_has_a_text_of_its_own() -> None:
    found = set()
    for event in (Release("D0:1", "refused"), Release("D0:1", "unpulled"), PeerDown("D1")):
        core = moving(OFFERED)
        (said,) = sent(core.handle(event, 0.0), NotMoved)
        assert said.failure.message.startswith("D1 ")
        assert said.failure.message.endswith(": it goes on at D0")
        found.add(said.failure.message)
    assert len(found) == 3
