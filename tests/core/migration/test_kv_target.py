"""KV that comes while its prefill runs (EPD-Serve 3.3): pieces, records, cells. Three layers, blocks of four."""

from __future__ import annotations

import pytest

from support.core_streams import ready, target
from support.core_tables import Row, brief, done, emptied, kv_offer, lost, sent, table, work
from trinity.core.instance.request_state import Piece, PullProgress
from trinity.core.messages import (
    Cancel,
    Commit,
    Failure,
    Finished,
    Pulled,
    Ready,
    Release,
)
from trinity.core.scheduler import BatchRules

PULL_REST = "pull P0:1.1 kv of r from P0 3,4,5 into 0,1,2 layers 1,3"


# ---------------------------------------------------------------- the target


def test_the_target_reserves_at_once_and_decodes_after_commit_and_every_cell() -> None:
    core = target()
    core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
    assert core.state.kv.held == 3
    rows: list[Row] = [
        (ready(0, 1, blocks=(0, 3)), ["pull P0:1.0 kv of r from P0 3,4,5 into 0,1,2 layers 0,1"]),
        (ready(1, 3, blocks=(0, 3)), ["pull P0:1.1 kv of r from P0 3,4,5 into 0,1,2 layers 1,3"]),
        (Pulled("P0:1", 1), []),
        (Commit("P0:1", (5,)), []),
        (Pulled("P0:1", 0), ["P0: release P0:1 pulled", "open r kv 0,1,2 after 5", "step 1 joint: decode r"]),
    ]
    table(core, rows)


def test_pieces_skip_what_the_target_has_cached() -> None:
    core = target()
    core.handle(kv_offer("P0:9", work("a", 10), (7, 8, 9)), 0.0)
    for event in (Ready("P0:9", (0,)), Pulled("P0:9", 0), Commit("P0:9", (5,))):
        core.handle(event, 0.0)
    rows: list[Row] = [
        (kv_offer("P0:1", work("r", 10), (3, 4, 5)), []),
        (ready(blocks=(0, 1)), []),
        (ready(0, 2, blocks=(1, 3)), ["pull P0:1.0 kv of r from P0 5 into 3 layers 0,2"]),
        (ready(2, 3, blocks=(1, 3)), ["pull P0:1.1 kv of r from P0 5 into 3 layers 2,3"]),
    ]
    table(core, rows)


def test_where_all_is_cached_no_piece_moves_and_the_record_says_so() -> None:
    core = target()
    core.handle(kv_offer("P0:9", work("a", 8), (7, 8)), 0.0)
    for event in (Ready("P0:9", (0,)), Pulled("P0:9", 0), Commit("P0:9", (5,))):
        core.handle(event, 0.0)
    core.handle(kv_offer("P0:1", work("r", 8), (3, 4)), 0.0)
    table(core, [(ready(0, 1, blocks=(0, 2)), []), (ready(1, 3, blocks=(0, 2)), [])])
    assert brief(core.handle(Commit("P0:1", (5,)), 0.0))[0] == "P0: release P0:1 cached"
    assert [each["outcome"] for each in core.state.requests["r"].transfers] == ["cached"]


def test_pieces_of_an_offer_that_waits_for_blocks_are_pulled_when_it_has_them() -> None:
    core = target(kv=3)
    core.handle(kv_offer("P0:9", work("a", 10), (7, 8, 9)), 0.0)
    core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
    table(core, [(ready(0, 1, blocks=(0, 3)), []), (ready(1, 3, blocks=(0, 3)), [])])
    out = brief(core.handle(Cancel("a"), 0.0))
    assert out[-2:] == [
        "pull P0:1.0 kv of r from P0 3,4,5 into 0,1,2 layers 0,1",
        "pull P0:1.1 kv of r from P0 3,4,5 into 0,1,2 layers 1,3",
    ]


def test_an_ending_commit_ends_the_request_once_its_pulls_are_drained() -> None:
    core = target()
    core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
    core.handle(ready(0, 1, blocks=(0, 3)), 0.0)
    rows: list[Row] = [
        (Commit("P0:1", (5,), ending="stop"), []),
        (Pulled("P0:1", 0), ["P0: release P0:1 cancelled", "frontend: finished r stop 1 by way of P0 D0"]),
    ]
    table(core, rows)
    emptied(core)


def test_a_pull_that_fails_in_the_middle_of_prefill_ends_the_request() -> None:
    core = target()
    core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
    core.handle(ready(0, 1, blocks=(0, 3)), 0.0)
    ends = ["P0: release P0:1 failed", "frontend: finished r error 0 by way of P0 D0 MigrationError"]
    table(core, [(lost("P0:1"), ends), (ready(1, 3, blocks=(0, 3)), []), (Commit("P0:1", (5,), ending="stop"), [])])
    emptied(core)


def test_what_is_void_is_pulled_again_after_the_first_pull_has_ended() -> None:
    core = target()
    core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
    core.handle(ready(0, 2, blocks=(0, 3)), 0.0)
    rows: list[Row] = [
        (ready(blocks=(0, 3), void=True), []),
        (Commit("P0:1", (5,)), []),
        (Pulled("P0:1", 0), ["pull P0:1.1 kv of r from P0 3,4,5 into 0,1,2"]),
        (Pulled("P0:1", 1), ["P0: release P0:1 pulled", "open r kv 0,1,2 after 5", "step 1 joint: decode r"]),
    ]
    table(core, rows)


def test_what_is_void_before_it_was_asked_for_is_never_pulled() -> None:
    core = target(kv=3)
    core.handle(kv_offer("P0:9", work("a", 10), (7, 8, 9)), 0.0)
    core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
    core.handle(ready(0, 2, blocks=(0, 3)), 0.0)
    core.handle(ready(blocks=(0, 3), void=True), 0.0)
    assert brief(core.handle(Cancel("a"), 0.0))[-1] == "pull P0:1.0 kv of r from P0 3,4,5 into 0,1,2"


def differs(part: int) -> Pulled:
    """A pull whose bytes are not those that the source's digests are of."""
    return Pulled("P0:1", part, Failure("MigrationError", "differs", {"cause": "IntegrityError"}))


def test_bytes_that_differ_because_their_step_ran_again_are_no_failure() -> None:
    """Whether the source's word comes before the pull's end or after it."""
    for late in (False, True):
        core = target()
        core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
        core.handle(ready(0, 1, blocks=(0, 3)), 0.0)
        core.handle(ready(1, 2, blocks=(0, 3)), 0.0)
        core.handle(Pulled("P0:1", 0), 0.0)
        events = [differs(1), ready(blocks=(0, 3), void=True)]
        for event in reversed(events) if late else events:
            out = core.handle(event, 0.0)
        assert brief(out) == ["pull P0:1.2 kv of r from P0 3,4,5 into 0,1,2"]
        core.handle(Commit("P0:1", (5,)), 0.0)
        assert brief(core.handle(Pulled("P0:1", 2), 0.0))[0] == "P0: release P0:1 pulled"


def test_bytes_that_differ_and_do_not_come_again_end_the_request_at_its_commit() -> None:
    core = target()
    core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
    core.handle(ready(0, 1, blocks=(0, 3)), 0.0)
    ends = ["P0: release P0:1 failed", "frontend: finished r error 1 by way of P0 D0 MigrationError"]
    table(core, [(differs(0), []), (ready(1, 3, blocks=(0, 3)), [PULL_REST]), (Pulled("P0:1", 1), [])])
    table(core, [(Commit("P0:1", (5,)), ends)])
    emptied(core)


def test_bytes_that_differ_after_the_commit_or_of_a_step_that_had_ended_are_a_failure_at_once() -> None:
    for event, last in ((ready(0, 3, blocks=(0, 3)), True), (Ready("P0:1", (0,)), False)):
        core = target()
        core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
        core.handle(event, 0.0)
        if last:
            core.handle(Commit("P0:1", (5,)), 0.0)
        assert "finished r error" in brief(core.handle(differs(0), 0.0))[1]


def test_layers_of_a_running_step_are_matchable_only_after_the_commit() -> None:
    core = target()
    core.handle(kv_offer("P0:1", work("r", 8), (3, 4)), 0.0)
    core.handle(ready(0, 3, blocks=(0, 2)), 0.0)
    core.handle(Pulled("P0:1", 0), 0.0)
    assert not core.state.kv.published(0), "the step may fail, and then these blocks are written again"
    core.handle(Commit("P0:1", (5,)), 0.0)
    assert core.state.kv.published(0)


def test_requests_whose_kv_is_on_its_way_count_towards_the_token_budget() -> None:
    core = target(rules=BatchRules(token_budget=1))
    core.handle(kv_offer("P0:1", work("r", 4), (3,)), 0.0)
    core.handle(kv_offer("P0:2", work("b", 4), (4,)), 0.0)
    assert not core.state.requests["b"].block_table
    for event in (Ready("P0:1", (0,)), Pulled("P0:1", 0), Commit("P0:1", (5,)), done(1, r=6), done(2, r=7)):
        core.handle(event, 0.0)
    assert core.state.requests["b"].block_table


# ---------------------------------------------------------------- what is measured and recorded


def test_the_record_says_how_much_of_the_transfer_was_exposed() -> None:
    core = target()
    core.handle(kv_offer("P0:1", work("r", 10), (3, 4, 5)), 0.0)
    core.handle(ready(0, 2, blocks=(0, 3)), 10.0)
    core.handle(Pulled("P0:1", 0, None, {"bytes": 20, "seconds": 3.0, "scheme": "shm"}), 14.0)
    core.handle(ready(2, 3, blocks=(0, 3)), 20.0)
    core.handle(Commit("P0:1", (5,)), 21.0)
    core.handle(Pulled("P0:1", 1, None, {"bytes": 10, "seconds": 1.0, "scheme": "shm"}), 22.0)
    (record,) = core.state.requests["r"].transfers
    assert record == {
        "bytes": 30,
        "seconds": 4.0,
        "scheme": "shm",
        "pulls": 2,
        "mode": "layer",
        "group": 2,
        "blocks": 3,
        "busy_s": 6.0,
        "exposed_s": 1.0,
        "overlap": pytest.approx(5 / 6),
    }


def test_the_record_keeps_its_place_behind_what_moved_before() -> None:
    core = target()
    core.handle(kv_offer("P0:1", work("r", 10, max_tokens=2), (3, 4, 5)), 0.0)
    for number in range(3):
        core.handle(ready(number, number + 1, blocks=(0, 3)), 0.0)
    core.handle(Pulled("P0:1", 0, None, {"bytes": 1}), 0.0)
    core.handle(Commit("P0:1", (5,), transfers=({"bytes": 100},)), 0.0)
    core.handle(Pulled("P0:1", 1, None, {"bytes": 2}), 0.0)
    core.handle(Pulled("P0:1", 2, None, {"bytes": 4}), 0.0)
    finished = sent(core.handle(done(1, r=6), 0.0), Finished)[0]
    assert sorted(each["bytes"] for each in finished.transfers) == [7, 100]


def test_the_target_reports_what_pulls_took() -> None:
    core = target()
    for number, seconds in ((1, 3.0), (2, 3.0)):
        core.handle(kv_offer(f"P0:{number}", work(f"r{number}", 10, text=100 * number), (3, 4, 5)), 0.0)
        core.handle(Ready(f"P0:{number}", (0,)), 10.0 * number)
        core.handle(Pulled(f"P0:{number}", 0), 10.0 * number + seconds)
        release = sent(core.handle(Commit(f"P0:{number}", (5,)), 50.0), Release)[0]
    assert release.cost == pytest.approx((0.0, 3.0 / 9))


# ---------------------------------------------------------------- cells


def test_cells_count_what_is_missing() -> None:
    cells = PullProgress(blocks=5, layers=4, cached=2)
    assert cells.missing == 12
    assert cells.request(Ready("o", (0,), (0, 3), (0, 4))) == Piece((0, 3), (2, 4))
    assert cells.request(Ready("o", (0,), (3, 4), (0, 2))).cells == 0
    cells.note_arrival(Piece((0, 3), (2, 4)))
    assert cells.missing == 6
    cells.invalidate((3, 4))
    assert cells.missing == 9
    assert cells.request(Ready("o", (0,), None, (3, 4))) == Piece((0, 4), (3, 4))
    assert PullProgress(blocks=2, layers=3, cached=7).missing == 0


def test_cells_that_are_none_or_named_twice_are_a_fault() -> None:
    for bad in (((0, 5), (0, 1)), ((2, 2), (0, 1)), ((0, 1), (0, 6)), ((0, 1), (2, 1)), ((-1, 1), (0, 1))):
        with pytest.raises(AssertionError):
            PullProgress(5, 4, 0).request(Ready("o", (0,), *bad))
    cells = PullProgress(5, 4, 0)
    cells.request(Ready("o", (0,), (1, 3), (0, 3)))
    with pytest.raises(AssertionError, match="ready before"):
        cells.request(Ready("o", (0,), (2, 4), (2, 5)))
