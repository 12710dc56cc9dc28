"""What the tables of commands do not show: tight pools, partial hits, times, and what is counted where."""

from __future__ import annotations

from dataclasses import replace

import pytest

from support.core_tables import Row, brief, broken, done, emptied, image_offer, kv_offer, make_core, sent, table, work
from trinity.core.instance.lanes import outstanding
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import Lease
from trinity.core.messages import Cancel, Commit, Failure, Finished, Forget, Pulled, Ready, Release, Submit
from trinity.core.scheduler import BatchRules, Outstanding

LANES = ("vision", "language")


def test_only_decodes_go_on_in_the_language_lane() -> None:
    core = make_core("EPD0", lanes=LANES)
    core.handle(Submit(work("a", 3)), 0.0)
    table(core, [(done(1, "language", a=5), ["frontend: emit a#0=5", "step 2 language: decode a"])])


def test_the_language_lane_encodes_nothing() -> None:
    core = make_core("EPD0", lanes=LANES, rules=BatchRules(image_budget=1))
    table(core, [(Submit(work("r", "cat", "dog", 1)), ["step 1 vision: encode r.0 into 0"])])
    table(core, [(Submit(work("x", 1)), ["open x kv 0", "step 2 language: prefill x 0+1 last"])])
    table(core, [(done(2, "language", x=1), ["frontend: emit x#0=1", "step 3 language: decode x"])])


def test_each_lane_knows_what_the_other_runs() -> None:
    core = make_core("EPD0", kv=64, lanes=LANES, rules=BatchRules(token_budget=7, image_budget=64))
    core.handle(Submit(work("a", 1)), 0.0)
    core.handle(Submit(work("b", 1)), 0.0)
    core.handle(done(1, "language", a=1), 0.0)
    core.handle(done(2, "language", a=1, b=1), 0.0)
    core.handle(Submit(work("c", 9)), 0.0)
    core.handle(Submit(work("d", 9)), 0.0)
    core.handle(Submit(work("m", "cat*5", "dog*6", 1)), 0.0)
    core.handle(done(3, "language", a=1, b=1), 0.0)
    assert outstanding(core.state.lanes, "vision") == Outstanding(decodes=1, prefill_tokens=6)
    assert outstanding(core.state.lanes, "language") == Outstanding(media_tokens=11)
    core.handle(done(4, "vision"), 0.0)
    assert outstanding(core.state.lanes, "language") == Outstanding()


def test_the_time_of_a_step_counts_what_the_other_lane_runs() -> None:
    asked: set[tuple[int, int, int]] = set()

    class Cost:
        def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
            asked.add((decodes, prefill_tokens, media_tokens))
            return prefill_tokens + media_tokens

    core = make_core("EPD0", lanes=LANES, rules=BatchRules(token_budget=64, policy="time", cost=Cost(), limit_s=20.0))
    core.handle(Submit(work("m", "cat*12", 1)), 0.0)
    asked.clear()
    assert brief(core.handle(Submit(work("a", 9)), 0.0)) == ["open a kv 0,1,2", "step 2 language: prefill a 0+8"]
    assert {media for _, _, media in asked} == {12}


def test_a_running_prefill_does_not_cut_an_atomic_span() -> None:
    core = make_core("EPD0", rules=BatchRules(token_budget=4, image_budget=64))
    core.handle(Submit(work("r", 6, "cat*6", 1, atomic=True)), 0.0)
    rows: list[Row] = [
        (done(1), ["open r kv 0,1,2,3 images [0,1]", "step 2 joint: prefill r 0+4"]),
        (done(2), ["step 3 joint: prefill r 4+2"]),
        (done(3), ["step 4 joint: prefill r 6+6"]),
        (done(4), ["step 5 joint: prefill r 12+1 last"]),
    ]
    table(core, rows)


def test_a_request_that_must_go_back_for_its_images_stands_in_nobodys_way() -> None:
    core = make_core(
        "EPD0", kv=6, image_cache=False, rules=BatchRules(token_budget=64, image_budget=64, order="deadline")
    )
    core.handle(Submit(work("a", "cat", 5, max_tokens=1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(done(2, a=1), 0.0)
    core.handle(Submit(work("q", 2, text=700, max_tokens=1)), 0.0)
    core.handle(Submit(work("b", "cat", 6, max_tokens=1, deadline_s=90.0)), 0.0)
    core.handle(Submit(work("x", 21, text=500, max_tokens=1, deadline_s=9.0)), 0.0)
    core.handle(Submit(work("y", 3, text=900, max_tokens=1)), 0.0)
    core.handle(done(3, q=1), 0.0)
    expected = ["frontend: emit x#0=1", "frontend: finished x length 1 by way of EPD0", "close x"]
    found = brief(core.handle(done(4, x=1), 0.0))
    assert found[:3] == expected
    assert found[3].startswith("open y")
    assert found[4] == "step 5 joint: prefill y 0+3 last"
    assert core.state.requests["b"].phase is Phase.IMAGE_QUEUE


def test_images_that_end_where_the_hit_ends_are_covered() -> None:
    core = make_core("EPD0")
    core.handle(Submit(work("a", "cat", 1, max_tokens=1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(done(2, a=1), 0.0)
    expected = ["open b kv 0,1 images [] cached 4", "step 3 joint: prefill b 4+2 last"]
    table(core, [(Submit(work("b", "cat", 2, max_tokens=1)), expected)])


def test_every_cached_item_counts_in_the_need() -> None:
    core = make_core("E0", image=4, peers="P0")
    for step, name in enumerate(["cat", "dog", "owl"], start=1):
        core.handle(Submit(work(name, name, 1)), 0.0)
        core.handle(done(step), 0.0)
    core.handle(Release("E0:1", "pulled"), 0.0)
    core.handle(Release("E0:2", "pulled"), 0.0)
    assert core.state.pools["image"].available == 3, "cat and dog are cached, one is free; owl is leased"
    table(core, [(Submit(work("r", "cat", "dog", "fox*8", 1)), [])])
    out = brief(core.handle(Release("E0:3", "pulled"), 0.0))
    assert out[0] == "step 4 joint: encode r.2 into 2,3"


def test_an_image_of_which_the_last_block_was_evicted_is_encoded_whole() -> None:
    core = make_core("E0", image=4, peers="P0")
    core.handle(Submit(work("a", "cat*8", 1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(Release("E0:1", "pulled"), 0.0)
    core.state.pools["image"].hold((0,))
    core.state.pools["image"].drop((0,))
    core.handle(Submit(work("b", "dog*12", 1)), 0.0)
    core.handle(done(2), 0.0)
    core.handle(Release("E0:2", "pulled"), 0.0)
    assert core.state.pools["image"].match(core.state.slots(work("q", "cat*8"))[0].keys) == (0,)
    assert brief(core.handle(Submit(work("c", "cat*8", 1)), 0.0))[0].startswith("step 3 joint: encode c.0 into ")


def test_an_image_of_which_the_target_has_a_part_is_pulled_whole() -> None:
    core = make_core("P0", image=4, peers="D0", prefix_cache=False)
    core.handle(image_offer("E0:1", work("a", "cat*8", 1), (5, 6)), 0.0)
    core.handle(Ready("E0:1", (0,)), 0.0)
    core.handle(Pulled("E0:1", 0), 0.0)
    core.handle(Cancel("a"), 0.0)
    core.state.pools["image"].hold((0,))
    core.state.pools["image"].drop((0,))
    core.handle(image_offer("E0:2", work("b", "dog*12", 1), (1, 2, 3)), 0.0)
    core.handle(Cancel("b"), 0.0)
    core.handle(image_offer("E0:3", work("c", "cat*8", 1), (5, 6)), 0.0)
    assert core.state.pools["image"].held == 2
    assert brief(core.handle(Ready("E0:3", (0,)), 0.0))[0].startswith("pull E0:3.0 image of c from E0 5,6 into ")


def test_evictable_hits_count_in_the_need_of_an_image_offer() -> None:
    core = make_core("P0", image=4, peers="D0", prefix_cache=False)
    core.handle(image_offer("E0:1", work("a", "cat", 1), (5,)), 0.0)
    core.handle(Ready("E0:1", (0,)), 0.0)
    core.handle(Pulled("E0:1", 0), 0.0)
    core.handle(Cancel("a"), 0.0)
    core.handle(image_offer("E0:2", work("b", "fox", 1), (6,)), 0.0)
    core.handle(image_offer("E0:3", work("c", "cat", "dog*12", 1), (5,), (7, 8, 9)), 0.0)
    assert list(core.state.image_offers) == ["c"], "three are available, the cat's among them"
    table(core, [(Ready("E0:3", (0, 1)), [])])
    out = brief(core.handle(Cancel("b"), 0.0))
    assert out[-1] == "pull E0:3.1 image of c from E0 7,8,9 into 1,2,3"


def test_evictable_hits_count_in_the_need_of_a_kv_offer() -> None:
    core = make_core("D0", kv=4)
    core.handle(kv_offer("P0:1", work("a", 9, max_tokens=2), (0, 1, 2)), 0.0)
    core.handle(Ready("P0:1", (0,)), 0.0)
    core.handle(Pulled("P0:1", 0), 0.0)
    core.handle(Cancel("a"), 0.0)
    core.handle(kv_offer("P0:2", work("b", 3, text=500, max_tokens=2), (5,)), 0.0)
    core.handle(kv_offer("P0:3", work("c", 9, max_tokens=6), (0, 1, 2)), 0.0)
    assert list(core.state.kv_offers) == ["c"], "it needs two beside its two hits, and one is free"
    assert core.state.kv.available == 3
    core.handle(Ready("P0:3", (0,)), 0.0)
    out = brief(core.handle(Cancel("b"), 0.0))
    assert out[-1].startswith("pull P0:3.0 kv of c from P0 2 into ")


def test_hits_lessen_the_need_of_a_kv_offer() -> None:
    core = make_core("D0", kv=5)
    core.handle(kv_offer("P0:1", work("a", 9, max_tokens=2), (0, 1, 2)), 0.0)
    core.handle(Ready("P0:1", (0,)), 0.0)
    core.handle(Pulled("P0:1", 0), 0.0)
    core.handle(kv_offer("P0:2", work("b", 9, max_tokens=2), (3, 4, 5)), 0.0)
    assert brief(core.handle(Ready("P0:2", (0,)), 0.0)) == ["pull P0:2.0 kv of b from P0 5 into 3"]


def test_a_part_is_asked_for_once_while_others_become_ready() -> None:
    core = make_core("P0", peers="D0")
    core.handle(image_offer("E0:1", work("r", "cat", "dog", 1), (5,), (6,)), 0.0)
    table(core, [(Ready("E0:1", (0,)), ["pull E0:1.0 image of r from E0 5 into 0"])])
    table(core, [(Ready("E0:1", (1,)), ["pull E0:1.1 image of r from E0 6 into 1"])])
    assert core.state.requests["r"].pulls_in_flight == 2


def test_a_migration_that_waited_beyond_its_commit_goes_on_as_soon_as_there_is_room() -> None:
    core = make_core("D0", rules=BatchRules(token_budget=1))
    core.handle(kv_offer("P0:1", work("a", 8, max_tokens=2), (0, 1)), 0.0)
    core.handle(Ready("P0:1", (0,)), 0.0)
    core.handle(Pulled("P0:1", 0), 0.0)
    core.handle(Commit("P0:1", (5,)), 0.0)
    core.handle(kv_offer("P0:2", work("b", 8, max_tokens=2), (0, 1)), 1.0)
    core.handle(Ready("P0:2", (0,)), 1.0)
    core.handle(Commit("P0:2", (5,), spans={"prefill": 1.0}), 1.0)
    out = brief(core.handle(done(1, a=6), 3.0))
    assert out[-3:] == ["P0: release P0:2 cached", "open b kv 0,1,2 after 5", "step 2 joint: decode b"]
    finished = sent(core.handle(done(2, b=6), 7.0), Finished)[0]
    assert finished.spans == {"prefill": 1.0, "pd_migration": 2.0, "decode_queue": 0.0, "decode": 4.0}


def test_the_spans_of_a_request_on_one_instance() -> None:
    core = make_core("EPD0", rules=BatchRules(token_budget=4, image_budget=64))
    core.handle(Submit(work("x", 4, max_tokens=1)), 0.0)
    core.handle(Submit(work("r", "cat", 1, max_tokens=2)), 0.0)
    core.handle(done(1, x=1), 1.0)
    core.handle(Submit(work("y", 4, text=500, max_tokens=1)), 2.0)
    core.handle(done(2), 3.0)
    core.handle(done(3, y=1), 7.0)
    core.handle(done(4), 12.0)
    core.handle(done(5, r=1), 18.0)
    finished = sent(core.handle(done(6, r=2), 25.0), Finished)[0]
    assert finished.spans == {
        "encode_queue": 1.0,
        "encode": 2.0,
        "prefill_queue": 4.0,
        "prefill": 11.0,
        "decode_queue": 0.0,
        "decode": 7.0,
    }


def test_the_spans_go_on_with_the_commit() -> None:
    core = make_core("E0", peers="P0")
    core.handle(Submit(work("x", "owl", 1)), 0.0)
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(done(1), 3.0)
    commit = sent(core.handle(done(2), 8.0), Commit)[0]
    assert commit.spans == {"encode_queue": 3.0, "encode": 5.0}


def test_a_source_that_waits_for_somebody_elses_step_may_end_at_once() -> None:
    """b's second image is in a's step, so that nothing of b is in flight."""
    called_off = ["P0: cancel b"]
    for last, at_once in ((Release("E0:3", "failed"), []), (Forget("b"), called_off), (Cancel("b"), called_off)):
        core = make_core("E0", peers="P0", rules=BatchRules(image_budget=4))
        core.handle(Submit(work("x", "fox", 1)), 0.0)
        core.handle(Submit(work("a", "owl", "cat", 1)), 0.0)
        core.handle(Submit(work("b", "owl", "cat", 1)), 0.0)
        core.handle(done(1), 0.0)
        core.handle(done(2), 0.0)
        assert core.state.requests["b"].outgoing == "E0:3"
        table(core, [(last, at_once)], start=1.0)
        assert "b" not in core.state.requests


def test_a_kind_without_a_pool_has_no_blocks() -> None:
    core = make_core("EPD0")
    pools = core.settings.pools
    del pools["image"]
    out = core.handle(Submit(work("r", "cat", 1)), 0.0)
    text = "the request needs 1 image blocks and instance EPD0 has 0"
    assert sent(out, Finished)[0].failure == Failure("RequestTooLarge", text)


def test_a_lease_remembers_whose_it_is_and_where_it_went() -> None:
    core = make_core("E0", peers="P0")
    core.handle(Submit(work("r", "cat", 1)), 0.0)
    core.handle(done(1), 0.0)
    kept = core.state.outgoing["E0:1"]
    assert replace(kept, offer=None, said=None) == Lease("E0:1", "r", "P0", "image", (0,), route=("E0",))
    assert (kept.offer is not None, kept.said) == (True, Commit("E0:1", spans={"encode_queue": 0.0, "encode": 0.0}))


def test_keys_are_computed_once() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("r", 9)), 0.0)
    state = core.state.requests["r"]
    assert core.state.prefix_keys(state) is core.state.prefix_keys(state)
    core = make_core("PD0", prefix_cache=False)
    core.handle(Submit(work("r", 9)), 0.0)
    assert core.state.prefix_keys(core.state.requests["r"]) == []


def test_check_names_what_leaked() -> None:
    core = make_core("PD0")
    core.check()
    core.state.pending["cat"] = None  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="PD0: pending media leaked"):
        core.check()
    core.state.kv.allocate(2)
    with pytest.raises(AssertionError, match="PD0: 2 kv blocks leaked"):
        core.check()


def test_check_looks_at_the_pools_of_a_busy_core_too() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("r", 9)), 0.0)
    core.check()
    core.state.kv._references[0] = 0
    with pytest.raises(AssertionError, match="pool kv: block 0"):
        core.check()


def test_the_second_failure_of_a_shared_image_is_the_end_of_both() -> None:
    core = make_core("EPD0", kv=64)
    core.handle(Submit(work("x", "fox", 1, max_tokens=1)), 0.0)
    core.handle(Submit(work("a", 1, "cat", 1)), 0.0)
    core.handle(Submit(work("b", 2, "cat", 1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(broken(2, "a", x=1), 0.0)
    table(core, [(broken(3, "b"), ["frontend: finished b error 0 by way of EPD0 StageError"])])
    emptied(core)
