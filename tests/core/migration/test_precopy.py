"""A decode that moves while its full blocks go ahead: each event, and all that answers it, at source and target."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest
from msgspec.structs import replace

from support.core_tables import Row, brief, done, emptied, kv_offer, lost, make_core, sent, table, work
from trinity.core import InstanceCore
from trinity.core.messages import (
    Cancel,
    Caught,
    Commit,
    Forget,
    Move,
    Offer,
    Part,
    PeerDown,
    Pulled,
    Ready,
    Release,
    Tick,
    Withdraw,
)
from trinity.core.migration.moves import is_worth_copying
from trinity.core.transfers import PullCost, TransferPolicy

R = work("r", 5, max_tokens=9)
ON: dict[str, Any] = {"report_s": inf, "transfers": TransferPolicy(precopy="on")}
COPY = ["D1: offer D0:1 kv of r [0] by way of P0 D0", "D1: ready D0:1 0"]


def decoding(**settings: Any) -> InstanceCore:
    """D0, which decodes r, whose first block of four is full, and runs its third step."""
    core = make_core("D0", peers="P0 D1", **{**ON, **settings})
    rows: list[Row] = [
        (kv_offer("P0:1", R, (4, 5)), []),
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of r from P0 4,5 into 0,1"]),
        (Commit("P0:1", (7,)), []),
        (Pulled("P0:1", 0), ["P0: release P0:1 pulled", "open r kv 0,1,2,3 after 7", "step 1 joint: decode r"]),
        (done(1, r=8), ["frontend: emit r#1=8", "step 2 joint: decode r"]),
    ]
    table(core, rows)
    return core


ON_ITS_WAY: list[Row] = [
    (Move("r", 0, "D1"), COPY),
    (done(2, r=9), ["frontend: emit r#2=9", "step 3 joint: decode r"]),
]


def copying(rows: list[Row], **settings: Any) -> InstanceCore:
    core = decoding(**settings)
    table(core, [*ON_ITS_WAY, *rows])
    return core


def test_it_decodes_on_until_its_full_blocks_are_there_and_then_moves_with_the_rest() -> None:
    rows: list[Row] = [
        (done(3, r=10), ["frontend: emit r#3=10", "step 4 joint: decode r"]),
        (Release("D0:1", "pulled"), []),
        (
            done(4, r=11),
            ["frontend: emit r#4=11", "D1: offer D0:2 kv of r [0,1,2] by way of P0 D0", "D1: ready D0:2 0"],
        ),
        (Caught("D0:2", "D1"), ["D1: commit D0:2 after 7,8,9,10,11", "close r"]),
        (Release("D0:2", "pulled"), []),
        (Forget("r"), []),
    ]
    core = copying(rows)
    assert all(pool.held == 0 for pool in core.state.pools.values())


def test_the_copy_says_which_outputs_its_blocks_hold() -> None:
    core = decoding()
    for number in range(2, 6):
        core.handle(done(number, r=number + 7), 0.0)
    (copy,) = sent(core.handle(Move("r", 0, "D1"), 0.0), Offer)
    assert (copy.moves, copy.copies, copy.tokens) == (True, True, (7, 8, 9)), "eight positions are two blocks"
    assert copy.parts == (Part((0, 1)),)
    core.handle(Release(copy.id, "pulled"), 0.0)
    (move,) = sent(core.handle(done(6, r=13), 0.0), Offer)
    assert (move.copies, move.tokens) == (False, (7, 8, 9, 10, 11, 12)), "all but the last, which has no row yet"


@pytest.mark.parametrize(
    ("event", "reason"),
    [(Release("D0:1", "refused"), "refused"), (Release("D0:1", "unpulled"), "unpulled"), (PeerDown("D1"), "lost")],
)
def test_where_the_copy_does_not_come_about_it_stays_without_a_pause(event: Any, reason: str) -> None:
    core = copying(
        [
            (event, [f"frontend: not moved r {reason}"]),
            (done(3, r=10), ["frontend: emit r#3=10", "step 4 joint: decode r"]),
        ]
    )
    assert not core.state.outgoing
    table(core, [(Move("r", 0, "D1"), ["frontend: not moved r lost"])] if reason == "lost" else [])


def test_a_copy_whose_lease_runs_out_is_withdrawn() -> None:
    core = copying([], lease_s=1.0)
    assert brief(core.handle(Tick(), 1.0)) == ["D1: withdraw D0:1 MigrationError", "frontend: not moved r late"]


def test_one_that_ends_meanwhile_is_reported_and_its_copy_is_nobodys() -> None:
    lines = ["frontend: finished r cancelled 3 by way of P0 D0"]
    core = copying([(Cancel("r"), []), (done(3, r=10), [*lines, "close r"]), (Release("D0:1", "pulled"), [])])
    table(core, [(Forget("r"), [])])
    emptied(core)


def test_a_second_move_is_refused_while_a_copy_is_on_its_way() -> None:
    copying([(Move("r", 0, "D1"), ["frontend: not moved r not decoding"])])


@pytest.mark.parametrize(
    ("settings", "cost", "worth"),
    [
        ({}, None, True),
        ({"prefix_cache": False}, None, False),
        ({"transfers": TransferPolicy(precopy="off")}, PullCost(9.0, 9.0), False),
        ({"transfers": TransferPolicy(precopy="auto")}, None, False),
        ({"transfers": TransferPolicy(precopy="auto")}, PullCost(0.001, 0.004), False),
        ({"transfers": TransferPolicy(precopy="auto")}, PullCost(0.002, 0.004), True),
    ],
)
def test_a_copy_goes_ahead_where_it_is_asked_for_or_its_pull_is_long(settings: Any, cost: Any, worth: bool) -> None:
    s = decoding(**settings).state
    s.pull_cost = cost
    assert is_worth_copying(s, 2) is worth
    assert not is_worth_copying(s, 0), "there is no full block"


# ---------------------------------------------------------------- the target


def copied(id: str = "D0:1") -> Offer:
    offer = replace(kv_offer(id, R, (4, 5), source="D0"), moves=True, copies=True, tokens=(7, 8, 9))
    return replace(offer, route=())


PULLING: list[Row] = [(copied(), []), (Ready("D0:1", (0,)), ["pull D0:1.0 kv of D0:1 from D0 4,5 into 0,1"])]
THERE: list[Row] = [*PULLING, (Pulled("D0:1", 0), ["D0: release D0:1 pulled"])]


def target(rows: list[Row], **settings: Any) -> InstanceCore:
    core = make_core("D1", peers="P0 D0", **{**ON, **settings})
    table(core, rows)
    return core


def test_the_target_caches_them_and_holds_nothing() -> None:
    emptied(target(THERE))


def test_the_move_behind_it_pulls_the_rest_alone() -> None:
    move = replace(kv_offer("D0:2", R, (4, 5, 6), source="D0"), route=("P0", "D0"), moves=True, tokens=(7, 8, 9, 10))
    rows: list[Row] = [
        (move, []),
        (Ready("D0:2", (0,)), ["pull D0:2.0 kv of D0:2 from D0 6 into 2"]),
        (Pulled("D0:2", 0), ["D0: caught D0:2"]),
        (
            Commit("D0:2", (7, 8, 9, 10, 11)),
            ["D0: release D0:2 pulled", "open r kv 0,1,2,3 after 7,8,9,10,11", "step 1 joint: decode r"],
        ),
    ]
    target([*THERE, *rows])


def test_blocks_that_are_cached_are_not_copied_again() -> None:
    rows: list[Row] = [(copied("D0:2"), []), (Ready("D0:2", (0,)), ["D0: release D0:2 pulled"])]
    emptied(target([*THERE, *rows]))


def test_a_copy_needs_room_for_its_own_blocks_alone() -> None:
    emptied(target(THERE, kv=2))
    emptied(target([(copied(), ["D0: release D0:1 refused"])], kv=1))


@pytest.mark.parametrize(
    ("event", "said"),
    [(lost("D0:1"), ["D0: release D0:1 unpulled"]), (Withdraw("D0:1"), []), (PeerDown("D0"), [])],
)
def test_a_copy_that_fails_leaves_nothing(event: Any, said: list[str]) -> None:
    core = target([*PULLING, (event, said)])
    if not said:
        core.handle(Pulled("D0:1", 0), 0.0)
    emptied(core)
