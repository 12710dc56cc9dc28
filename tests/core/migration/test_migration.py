"""The pull migration from both sides: Offer, Ready, Commit, Pull, Release; leases; ED+P and its way back."""

from __future__ import annotations

import pytest

from support.core_tables import Row, brief, done, emptied, image_offer, kv_offer, make_core, peer_up, sent, table, work
from trinity.core.instance.request_state import Tombstone
from trinity.core.messages import Cancel, Commit, Finished, Forget, Offer, Part, PeerUp, Pulled, Ready, Release, Submit
from trinity.core.scheduler import BatchRules

TWO = ("cat", 1, "dog*6", 1)


def test_an_encode_instance_offers_all_and_commits_when_one_step_encoded_all() -> None:
    core = make_core("E0", peers="P0")
    rows: list[Row] = [
        (Submit(work("r", *TWO)), ["step 1 joint: encode r.0 into 0, encode r.1 into 1,2"]),
        (done(1), ["P0: offer E0:1 image of r [0][1,2] by way of E0", "P0: ready E0:1 0,1", "P0: commit E0:1"]),
    ]
    table(core, rows)
    assert not core.state.requests
    assert not core.idle(), "the lease is still out"
    assert core.state.pools["image"].held == 3
    assert core.state.tombstones == {"r": Tombstone("P0", 0, 1, "frontend")}
    table(core, [(Release("E0:1", "pulled"), [])])
    assert core.idle()
    assert core.state.pools["image"].held == 0
    table(core, [(Forget("r"), [])])
    emptied(core)


def test_the_offer_goes_out_with_the_first_item_and_the_commit_with_the_last() -> None:
    core = make_core("E0", peers="P0", rules=BatchRules(image_budget=1))
    rows: list[Row] = [
        (Submit(work("r", *TWO, "fox", 1)), ["step 1 joint: encode r.0 into 0"]),
        (
            done(1),
            [
                "P0: offer E0:1 image of r [0][1,2][3] by way of E0",
                "P0: ready E0:1 0",
                "step 2 joint: encode r.1 into 1,2",
            ],
        ),
        (done(2), ["P0: ready E0:1 1", "step 3 joint: encode r.2 into 3"]),
        (done(3), ["P0: ready E0:1 2", "P0: commit E0:1"]),
        (Release("E0:1", "pulled"), []),
        (Forget("r"), []),
    ]
    table(core, rows)
    emptied(core)


def test_media_that_are_cached_are_offered_without_a_step() -> None:
    core = make_core("E0", peers="P0 P1")
    core.handle(Submit(work("a", *TWO)), 0.0)
    core.handle(done(1), 0.0)
    expected = ["P1: offer E0:2 image of b [1,2][0] by way of E0", "P1: ready E0:2 0,1", "P1: commit E0:2"]
    table(core, [(Submit(work("b", "dog*6", "cat", 1)), expected), (Release("E0:1", "pulled"), [])])
    assert core.state.pools["image"].held == 3, "one image offered to two instances has two leases"
    table(core, [(Release("E0:2", "cached"), []), (Forget("a"), []), (Forget("b"), [])])
    emptied(core)


def test_a_prefill_instance_pulls_each_item_as_it_is_ready() -> None:
    core = make_core("P0", peers="D0", prefix_cache=False)
    rows: list[Row] = [
        (image_offer("E0:1", work("r", *TWO), (5,), (6, 7)), []),
        (Ready("E0:1", (1,)), ["pull E0:1.1 image of r from E0 6,7 into 1,2"]),
        (Pulled("E0:1", 1), []),
        (Ready("E0:1", (0,)), ["pull E0:1.0 image of r from E0 5 into 0"]),
        (Pulled("E0:1", 0), []),
        (
            Commit("E0:1"),
            ["E0: release E0:1 pulled", "open r kv 0,1,2 images [0][1,2]", "step 1 joint: prefill r 0+12 last"],
        ),
        (
            done(1, r=5),
            [
                "frontend: emit r#0=5",
                "D0: offer P0:1 kv of r [0,1,2] by way of E0 P0",
                "D0: ready P0:1 0",
                "D0: commit P0:1 after 5",
                "close r",
            ],
        ),
    ]
    table(core, rows)
    assert core.state.pools["image"].held == 0, "features are given back after prefill"
    assert core.state.kv.held == 3, "the lease"
    table(core, [(Release("P0:1", "pulled"), []), (Forget("r"), [])])
    emptied(core)


def test_no_release_before_the_commit_nor_before_the_last_part() -> None:
    core = make_core("P0", peers="D0")
    rows: list[Row] = [
        (image_offer("E0:1", work("r", *TWO), (5,), (6, 7)), []),
        (
            Ready("E0:1", (0, 1)),
            ["pull E0:1.0 image of r from E0 5 into 0", "pull E0:1.1 image of r from E0 6,7 into 1,2"],
        ),
        (Commit("E0:1"), []),
        (Pulled("E0:1", 1), []),
        (
            Pulled("E0:1", 0),
            ["E0: release E0:1 pulled", "open r kv 0,1,2 images [0][1,2]", "step 1 joint: prefill r 0+12 last"],
        ),
    ]
    table(core, rows)


def test_an_offer_waits_for_image_blocks_while_its_parts_become_ready() -> None:
    core = make_core("P0", image=3, peers="D0")
    rows: list[Row] = [
        (image_offer("E0:1", work("a", *TWO), (5,), (6, 7)), []),
        (image_offer("E0:2", work("b", "fox", 1), (8,)), []),
        (Ready("E0:2", (0,)), []),
        (Commit("E0:2"), []),
        (
            Ready("E0:1", (0, 1)),
            ["pull E0:1.0 image of a from E0 5 into 0", "pull E0:1.1 image of a from E0 6,7 into 1,2"],
        ),
        (Cancel("a"), []),
        (Pulled("E0:1", 0), []),
        (
            Pulled("E0:1", 1),
            [
                "E0: release E0:1 cancelled",
                "frontend: finished a cancelled 0 by way of E0 P0",
                "pull E0:2.0 image of b from E0 8 into 0",
            ],
        ),
    ]
    table(core, rows)


def test_a_decode_instance_decodes_only_after_commit_and_pull() -> None:
    for last in (Commit("P0:1", (5,)), Pulled("P0:1", 0)):
        core = make_core("D0")
        core.handle(kv_offer("P0:1", work("r", 6), (3, 4)), 0.0)
        out = core.handle(Ready("P0:1", (0,)), 0.0)
        assert brief(out) == ["pull P0:1.0 kv of r from P0 3,4 into 0,1"]
        first = Pulled("P0:1", 0) if isinstance(last, Commit) else Commit("P0:1", (5,))
        expected = ["P0: release P0:1 pulled", "open r kv 0,1 after 5", "step 1 joint: decode r"]
        table(core, [(first, []), (last, expected)])


def test_a_decode_instance_goes_on_behind_the_first_token() -> None:
    core = make_core("D0")
    rows: list[Row] = [
        (kv_offer("P0:1", work("r", 6, max_tokens=3), (3, 4)), []),
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of r from P0 3,4 into 0,1"]),
        (Pulled("P0:1", 0), []),
        (Commit("P0:1", (5,)), ["P0: release P0:1 pulled", "open r kv 0,1 after 5", "step 1 joint: decode r"]),
        (done(1, r=6), ["frontend: emit r#1=6", "step 2 joint: decode r"]),
        (done(2, r=7), ["frontend: emit r#2=7", "frontend: finished r length 3 by way of P0 D0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_only_the_prompts_blocks_are_offered_and_pulled() -> None:
    core = make_core("P0", peers="D0")
    core.handle(Submit(work("r", 4, max_tokens=9)), 0.0)
    assert "D0: offer P0:1 kv of r [0] by way of P0" in brief(core.handle(done(1, r=5), 0.0))
    core = make_core("D0")
    core.handle(kv_offer("P0:1", work("r", 4, max_tokens=9), (7,)), 0.0)
    assert core.state.kv.held == 3
    assert brief(core.handle(Ready("P0:1", (0,)), 0.0)) == ["pull P0:1.0 kv of r from P0 7 into 0"]


def test_kv_that_the_target_has_cached_does_not_move() -> None:
    core = make_core("D0")
    for number, request in enumerate([work("a", 10), work("b", 10), work("c", 12), work("d", 10, text=500)], start=1):
        core.handle(kv_offer(f"P0:{number}", request, (3, 4, 5)), 0.0)
    rows: list[Row] = [
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of a from P0 3,4,5 into 0,1,2"]),
        (Pulled("P0:1", 0), []),
        (Cancel("b"), ["P0: release P0:2 cancelled", "frontend: finished b cancelled 0 by way of P0 D0"]),
    ]
    table(core, rows)
    rows = [
        (kv_offer("P0:5", work("e", 10), (6, 7, 8)), []),
        (Ready("P0:5", (0,)), ["pull P0:5.0 kv of e from P0 8 into 3"]),
        (kv_offer("P0:6", work("f", 8), (6, 7)), []),
        (Ready("P0:6", (0,)), []),
        (Commit("P0:6", (5,)), ["P0: release P0:6 cached", "open f kv 0,1,4 after 5", "step 1 joint: decode f"]),
    ]
    table(core, rows)


def test_features_that_the_target_has_cached_do_not_move() -> None:
    core = make_core("P0", peers="D0", prefix_cache=False)
    rows: list[Row] = [
        (image_offer("E0:1", work("a", "cat", 1), (5,)), []),
        (Ready("E0:1", (0,)), ["pull E0:1.0 image of a from E0 5 into 0"]),
        (Pulled("E0:1", 0), []),
        (image_offer("E0:2", work("b", *TWO), (5,), (6, 7)), []),
        (Ready("E0:2", (0, 1)), ["pull E0:2.1 image of b from E0 6,7 into 1,2"]),
        (image_offer("E0:3", work("c", "cat", 1, "cat"), (5,), (5,)), []),
        (Ready("E0:3", (0, 1)), []),
        (
            Commit("E0:3"),
            ["E0: release E0:3 cached", "open c kv 0,1,2 images [0][0]", "step 1 joint: prefill c 0+9 last"],
        ),
    ]
    table(core, rows)
    assert core.state.pools["image"].references(0) == 4


def test_the_report_says_what_did_not_move() -> None:
    core = make_core("P0", peers="D0", prefix_cache=False)
    for number in (1, 2):
        core.handle(image_offer(f"E0:{number}", work(f"r{number}", "cat", 1), (5,)), 0.0)
    core.handle(Ready("E0:1", (0,)), 0.0)
    core.handle(Pulled("E0:1", 0, None, {"bytes": 7}), 0.0)
    core.handle(Commit("E0:1"), 0.0)
    core.handle(Cancel("r2"), 0.0)
    core.handle(image_offer("E0:3", work("r3", "cat", 1), (5,)), 0.0)
    core.handle(Ready("E0:3", (0,)), 0.0)
    nothing = {
        "kind": "image",
        "source": "E0",
        "target": "P0",
        "outcome": "cached",
        "bytes": 0,
        "blocks": 0,
        "seconds": 0.0,
    }
    assert core.state.requests["r3"].transfers == [nothing]
    assert core.state.requests["r1"].transfers == [{"bytes": 7}]
    commit = sent(core.handle(done(1, r1=5), 0.0), Commit)[0]
    assert commit.transfers == ({"bytes": 7},)


def test_what_was_spent_and_moved_so_far_goes_on_with_the_request() -> None:
    core = make_core("D0")
    core.handle(kv_offer("P0:1", work("r", 6, max_tokens=2), (3, 4)), 10.0)
    core.handle(Ready("P0:1", (0,)), 11.0)
    spans = {"prefill": 2.0, "pd_migration": 0.25}
    core.handle(Commit("P0:1", (5,), 4, spans, ({"bytes": 7},)), 12.0)
    core.handle(Pulled("P0:1", 0, None, {"bytes": 9}), 13.0)
    finished = sent(core.handle(done(1, r=6), 15.0), Finished)[0]
    assert [each["bytes"] for each in finished.transfers] == [7, 9]
    assert finished.cached_tokens == 4
    assert finished.spans == {"prefill": 2.0, "pd_migration": 1.25, "decode_queue": 0.0, "decode": 2.0}


def test_the_remaining_time_goes_on_with_the_request() -> None:
    core = make_core("P0", peers="D0")
    core.handle(Submit(work("r", 6, deadline_s=5.0)), 100.0)
    commit = sent(core.handle(done(1, r=5), 102.0), Commit)[0]
    assert commit.deadline_s == 3.0
    core = make_core("P0", peers="D0")
    core.handle(Submit(work("r", 6)), 100.0)
    assert sent(core.handle(done(1, r=5), 102.0), Commit)[0].deadline_s is None
    core = make_core("D0")
    core.handle(kv_offer("P0:1", work("r", 6), (3, 4)), 200.0)
    core.handle(Commit("P0:1", (5,), deadline_s=3.0), 201.0)
    assert core.state.requests["r"].deadline == 204.0


def test_the_offer_is_one_shard_of_one_and_names_its_source() -> None:
    core = make_core("E0", peers="P0")
    request = work("r", "cat", 1)
    core.handle(Submit(request), 0.0)
    offer = sent(core.handle(done(1), 0.0), Offer)[0]
    parts = (Part((0,)),)
    assert offer == Offer(
        id="E0:1", kind="image", source="E0", work=request, parts=parts, route=("E0",), target_epoch=0
    )


def test_a_target_without_room_for_the_whole_need_is_passed_over() -> None:
    core = make_core("E0", peers="P0")
    core.handle(peer_up("P1", image=9), 0.0)
    core.handle(peer_up("P0", image=0), 0.0)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    assert brief(core.handle(done(1), 0.0))[0] == "P1: offer E0:1 image of r [0] by way of E0"


@pytest.mark.parametrize(("name", "letter"), [("E0", "P"), ("P0", "D")])
def test_no_target_with_room_is_an_error_of_the_request(name: str, letter: str) -> None:
    core = make_core(name)
    core.handle(peer_up(f"{letter}0", image=0, kv=0), 0.0)
    core.handle(Submit(work("r", *(["cat"] if name == "E0" else []), 1)), 0.0)
    out = core.handle(done(1) if name == "E0" else done(1, r=5), 0.0)
    assert [line for line in brief(out) if "finished" in line] == [
        f"frontend: finished r error {int(name == 'P0')} by way of {name} RequestTooLarge"
    ]
    text = f"no instance with stage {letter} has the blocks for this request; enlarge its pools"
    failure = sent(out, Finished)[0].failure
    assert failure is not None
    assert failure.message == text
    emptied(core)


def test_a_request_that_ends_with_its_first_token_is_not_handed_on() -> None:
    core = make_core("P0", peers="D0")
    core.handle(Submit(work("r", 3, max_tokens=1)), 0.0)
    expected = ["frontend: emit r#0=5", "frontend: finished r length 1 by way of P0", "close r"]
    table(core, [(done(1, r=5), expected)])
    emptied(core)


def test_ed_p_comes_back_to_the_instance_that_encoded() -> None:
    core = make_core("ED0", peers="P0")
    request = work("r", "cat", 2, max_tokens=2)
    rows: list[Row] = [
        (Submit(request), ["step 1 joint: encode r.0 into 0"]),
        (done(1), ["P0: offer ED0:1 image of r [0] by way of ED0", "P0: ready ED0:1 0", "P0: commit ED0:1"]),
        (kv_offer("P0:1", request, (3, 4)), []),
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of r from P0 3,4 into 0,1"]),
        (Commit("P0:1", (5,)), []),
        (Release("ED0:1", "pulled"), []),
        (Pulled("P0:1", 0), ["P0: release P0:1 pulled", "open r kv 0,1 after 5", "step 2 joint: decode r"]),
        (done(2, r=6), ["frontend: emit r#1=6", "frontend: finished r length 2 by way of P0 ED0", "close r"]),
        (Forget("r"), []),
    ]
    table(core, rows)
    emptied(core)


def test_ed_p_a_release_of_the_features_leaves_the_decoding_request_alone() -> None:
    core = make_core("ED0", peers="P0")
    request = work("r", "cat", 2)
    core.handle(Submit(request), 0.0)
    core.handle(done(1), 0.0)
    core.handle(kv_offer("P0:1", request, (3, 4)), 0.0)
    table(core, [(Release("ED0:1", "pulled"), [])])
    assert core.state.requests["r"].ending is None


def test_ed_p_the_way_back_ends_the_tombstone_so_that_no_cancel_goes_round() -> None:
    core = make_core("ED0", peers="P0")
    request = work("r", "cat", 2, max_tokens=2)
    core.handle(Submit(request), 0.0)
    core.handle(done(1), 0.0)
    table(core, [(Cancel("other"), []), (Cancel("r"), ["P0: cancel r"])])
    core.handle(kv_offer("P0:1", request, (3, 4)), 0.0)
    ends = ["P0: release P0:1 cancelled", "frontend: finished r cancelled 0 by way of P0 ED0"]
    table(core, [(Cancel("r"), ends), (Cancel("r"), [])])


def test_messages_about_a_transfer_that_is_over_change_nothing() -> None:
    core = make_core("P0", peers="D0")
    core.handle(image_offer("E0:1", work("r", "cat", 1), (5,)), 0.0)
    core.handle(Cancel("r"), 0.0)
    table(core, [(Ready("E0:1", (0,)), []), (Commit("E0:1"), []), (Forget("r"), [])])
    emptied(core)


def test_a_request_that_is_ending_asks_for_nothing_more() -> None:
    core = make_core("P0", peers="D0")
    core.handle(image_offer("E0:1", work("r", *TWO), (5,), (6, 7)), 0.0)
    core.handle(Ready("E0:1", (0,)), 0.0)
    table(core, [(Cancel("r"), []), (Ready("E0:1", (1,)), []), (Commit("E0:1", (5,)), [])])
    assert core.state.requests["r"].tokens == []


def test_a_pull_cannot_end_after_its_release() -> None:
    core = make_core("P0", peers="D0")
    with pytest.raises(AssertionError, match="a pull of E0:1 ended after its Release"):
        core.handle(Pulled("E0:1", 0), 0.0)


def test_a_request_that_is_offered_to_where_it_is_stays_as_it_is() -> None:
    """A lost instance had moved it there, and its source, which has not heard that, offers it again."""
    core = make_core("P0", peers="D0")
    core.handle(image_offer("E0:1", work("r", "cat", 1), (5,)), 0.0)
    table(core, [(image_offer("E0:2", work("r", "cat", 1), (5,)), ["E0: release E0:2 cached"])])
    assert core.state.incoming == {"E0:1": "r"}


def test_an_instance_announces_what_it_is_and_has() -> None:
    core = make_core("EP0", image=3, kv=5)
    assert core.announcement() == PeerUp("EP0", "EP", 0, {"image": 3, "kv": 5}, 4, 4)
