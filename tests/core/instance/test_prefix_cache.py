"""The prefix cache: what a prefill starts from, what covered images save, and what happens when it is evicted."""

from __future__ import annotations

import pytest

from support.core_tables import Row, brief, done, emptied, image_offer, kv_offer, lost, make_core, sent, table, work
from trinity.core import InstanceCore
from trinity.core.messages import Cancel, Commit, Finished, Forget, Pulled, Ready, Release, Submit
from trinity.core.scheduler import BatchRules


def served(core: InstanceCore, *requests: str, text: int = 100, sizes: tuple[int | str, ...] = (9,)) -> None:
    """Each request alone from its Submit to its end, one output long."""
    for request in requests:
        core.handle(Submit(work(request, *sizes, text=text, max_tokens=1)), 0.0)
        while request in core.state.requests:
            core.handle(done(core.state.steps, **{request: 1}), 0.0)


@pytest.mark.parametrize(
    ("first", "second", "cached"),
    [(9, 9, 8), (9, 12, 8), (8, 8, 4), (8, 9, 8), (9, 8, 4), (7, 9, 4), (3, 9, 0), (9, 4, 0), (9, 5, 4)],
)
def test_a_hit_covers_whole_blocks_and_leaves_at_least_one_token(first: int, second: int, cached: int) -> None:
    core = make_core("EPD0")
    served(core, "a", sizes=(first,))
    out = brief(core.handle(Submit(work("b", second)), 0.0))
    assert out[0].endswith(f" cached {cached}") is bool(cached)
    assert out[1] == f"step 2 joint: prefill b {cached}+{second - cached} last"
    assert core.state.requests["b"].prefill_start == cached


def test_without_a_prefix_cache_nothing_hits() -> None:
    core = make_core("EPD0", prefix_cache=False)
    served(core, "a")
    assert brief(core.handle(Submit(work("b", 9)), 0.0)) == ["open b kv 0,1,2", "step 2 joint: prefill b 0+9 last"]


def test_another_text_or_another_image_does_not_hit() -> None:
    core = make_core("EPD0")
    served(core, "a", sizes=(4, "cat", 1))
    assert "cached" not in brief(core.handle(Submit(work("b", 9, text=300)), 0.0))[0]
    core = make_core("EPD0")
    served(core, "a", sizes=(4, "cat", 1))
    core.handle(Submit(work("b", 4, "dog", 1)), 0.0)
    out = brief(core.handle(done(core.state.steps), 0.0))
    assert out[0].endswith("cached 4"), "the text before the image alone"


def test_blocks_match_as_soon_as_their_step_has_ended_and_not_before() -> None:
    core = make_core("PD0", rules=BatchRules(token_budget=4))
    core.handle(Submit(work("a", 12)), 0.0)
    keys = core.state.requests["a"].keys
    assert core.state.kv.match(keys) == ()
    core.handle(done(1), 0.0)
    assert core.state.kv.match(keys) == (0,)
    core.handle(done(2), 0.0)
    assert core.state.kv.match(keys) == (0, 1)


def test_a_chunk_that_ends_inside_a_block_does_not_publish_it() -> None:
    core = make_core("PD0", rules=BatchRules(token_budget=6))
    core.handle(Submit(work("a", 12)), 0.0)
    keys = core.state.requests["a"].keys
    core.handle(done(1), 0.0)
    assert core.state.kv.match(keys) == (0,)


def test_outputs_are_not_published() -> None:
    core = make_core("PD0")
    core.handle(Submit(work("a", 3, max_tokens=9)), 0.0)
    for step in range(1, 9):
        core.handle(done(step, a=step), 0.0)
    assert not any(core.state.kv.published(block) for block in range(16))


def test_a_cached_prefix_is_shared_while_both_run() -> None:
    core = make_core("PD0")
    served(core, "a")
    core.handle(Submit(work("b", 9)), 0.0)
    core.handle(done(2, b=5), 0.0)
    core.handle(Submit(work("c", 9)), 0.0)
    out = brief(core.handle(done(3, b=6), 0.0))
    assert "open c kv 0,1,3 cached 8" in out
    assert core.state.kv.references(0) == 2
    assert core.state.kv.references(3) == 1


def test_the_pool_needs_room_for_the_rest_alone() -> None:
    core = make_core("PD0", kv=5)
    served(core, "a")
    core.handle(Submit(work("b", 9)), 0.0)
    core.handle(done(2, b=5), 0.0)
    core.handle(Submit(work("c", 9)), 0.0)
    assert "open c kv 0,1,3 cached 8" in brief(core.handle(done(3, b=6), 0.0))


def test_evictable_hits_count_in_the_need() -> None:
    core = make_core("PD0", kv=4)
    served(core, "a")
    core.handle(Submit(work("b", 3, text=300, max_tokens=4)), 0.0)
    core.handle(Submit(work("c", 9, max_tokens=5)), 0.0)
    out = brief(core.handle(done(2, b=5), 0.0))
    assert out == ["frontend: emit b#0=5", "step 3 joint: decode b"], "c has two blocks cached and needs two more"
    assert core.state.kv.references(0) == 0, "nothing stays pinned"


def test_the_count_of_cached_tokens_is_reported() -> None:
    core = make_core("PD0")
    served(core, "a")
    core.handle(Submit(work("b", 9, max_tokens=1)), 0.0)
    assert sent(core.handle(done(2, b=5), 0.0), Finished)[0].cached_tokens == 8
    core = make_core("P0", peers="D0")
    served(core, "a")
    core.handle(Submit(work("b", 9)), 0.0)
    assert "D0: commit P0:1 after 5 cached 8" in brief(core.handle(done(2, b=5), 0.0))


@pytest.mark.parametrize(
    ("pieces", "matching", "hits"),
    [
        pytest.param((1, "cat*6", 6), 1, 0, id="4 lies in the image [1, 7): back to its block"),
        pytest.param((1, "cat*6", 6), 2, 2, id="8 lies behind it"),
        pytest.param((4, "cat*6", 6), 1, 1, id="4 is its start"),
        pytest.param((4, "cat*6", 6), 2, 1, id="8 lies in the image [4, 10)"),
        pytest.param((2, "cat*6", 6), 2, 2, id="8 is its end"),
        pytest.param((1, "cat*6", "dog*3", 6), 2, 0, id="8 lies in the dog, whose block begins in the cat"),
        pytest.param((1, "cat*6", "dog*3", 6), 3, 3, id="12 lies behind both"),
        pytest.param((5, "cat*6", 6), 2, 1, id="8 lies in the image [5, 11): back to 4"),
    ],
)
def test_a_hit_does_not_cut_an_atomic_span(pieces: tuple[int | str, ...], matching: int, hits: int) -> None:
    """Gemma 3: the rows of an image see each other, so that it is taken whole or not at all."""
    for atomic, expected in ((True, hits), (False, matching)):
        core = make_core("PD0")
        core.handle(kv_offer("P0:1", work("a", *pieces, atomic=atomic), (0, 1, 2, 3)), 0.0)
        state = core.state.requests["a"]
        blocks = core.state.kv.allocate(matching)
        for block, key in zip(blocks, core.state.prefix_keys(state), strict=False):
            core.state.kv.publish(block, key)
        assert core.state.prefix_hits(state) == blocks[:expected]


def test_images_that_cached_kv_covers_are_not_encoded() -> None:
    core = make_core("EPD0")
    served(core, "a", sizes=("cat", 5))
    expected = ["open b kv 0,1,2 images [] cached 8", "step 3 joint: prefill b 8+2 last"]
    table(core, [(Submit(work("b", "cat", 6)), expected)])
    assert core.state.pools["image"].held == 0


def test_a_second_image_behind_the_cached_prefix_needs_both() -> None:
    core = make_core("EPD0")
    served(core, "a", sizes=("cat", 5))
    core.handle(Submit(work("b", "cat", 4, "dog", 1)), 0.0)
    out = brief(core.handle(done(3), 0.0))
    assert out[0] == "open b kv 0,1,2,3 images [0][1] cached 8"


def test_an_image_that_ends_behind_the_hit_is_needed() -> None:
    core = make_core("EPD0")
    served(core, "a", sizes=("cat*6", 3))
    table(
        core,
        [
            (
                Submit(work("b", "cat*6", 1)),
                ["open b kv 0,2,3 images [0,1] cached 4", "step 3 joint: prefill b 4+3 last"],
            )
        ],
    )


def covered_offer(**settings: object) -> InstanceCore:
    """P0 has the KV of "cat" and five tokens cached, and no image any more; a's KV was pulled."""
    core = make_core("P0", peers="D0", image_cache=False, **settings)  # type: ignore[arg-type]
    rows: list[Row] = [
        (image_offer("E0:1", work("a", "cat", 5), (1,)), []),
        (Ready("E0:1", (0,)), ["pull E0:1.0 image of a from E0 1 into 0"]),
        (Pulled("E0:1", 0), []),
        (Commit("E0:1"), ["E0: release E0:1 pulled", "open a kv 0,1,2 images [0]", "step 1 joint: prefill a 0+9 last"]),
    ]
    table(core, rows)
    core.handle(done(1, a=1), 0.0)
    core.handle(Release("P0:1", "pulled"), 0.0)
    core.handle(Forget("a"), 0.0)
    return core


def test_an_offer_of_images_that_cached_kv_covers_moves_nothing() -> None:
    core = covered_offer()
    rows: list[Row] = [
        (image_offer("E0:2", work("b", "cat", 6), (1,)), []),
        (Ready("E0:2", (0,)), []),
        (
            Commit("E0:2"),
            ["E0: release E0:2 cached", "open b kv 0,1,2 images [] cached 8", "step 2 joint: prefill b 8+2 last"],
        ),
    ]
    table(core, rows)
    out = brief(core.handle(done(2, b=5), 0.0))
    assert "D0: offer P0:2 kv of b [0,1,2] by way of E0 P0" in out


def test_a_covered_offer_whose_kv_was_evicted_while_it_waited_pulls_after_all() -> None:
    core = covered_offer(kv=5)
    rows: list[Row] = [
        (image_offer("E0:2", work("b", "cat", 6), (1,)), []),
        (Submit(work("x", 17, text=500, max_tokens=1)), ["open x kv 0,1,2,3,4", "step 2 joint: prefill x 0+17 last"]),
        (Ready("E0:2", (0,)), []),
        (Commit("E0:2"), []),
        (
            done(2, x=1),
            [
                "frontend: emit x#0=1",
                "frontend: finished x length 1 by way of P0",
                "close x",
                "pull E0:2.0 image of b from E0 1 into 0",
            ],
        ),
        (
            Pulled("E0:2", 0),
            ["E0: release E0:2 pulled", "open b kv 0,1,4 images [0]", "step 3 joint: prefill b 0+10 last"],
        ),
    ]
    table(core, rows)


def test_a_covered_request_whose_kv_was_evicted_while_it_waited_is_encoded_after_all() -> None:
    core = make_core(
        "EPD0", kv=5, image_cache=False, rules=BatchRules(token_budget=64, image_budget=64, order="deadline")
    )
    served(core, "a", sizes=("cat", 5))
    rows: list[Row] = [
        (Submit(work("q", 2, text=700, max_tokens=1)), ["open q kv 2", "step 3 joint: prefill q 0+2 last"]),
        (Submit(work("b", "cat", 6, max_tokens=1)), []),
        (Submit(work("x", 17, text=500, max_tokens=1, deadline_s=9.0)), []),
        (
            done(3, q=1),
            [
                "frontend: emit q#0=1",
                "frontend: finished q length 1 by way of EPD0",
                "close q",
                "open x kv 0,1,2,3,4",
                "step 4 joint: prefill x 0+17 last",
            ],
        ),
        (
            done(4, x=1),
            [
                "frontend: emit x#0=1",
                "frontend: finished x length 1 by way of EPD0",
                "close x",
                "step 5 joint: encode b.0 into 0",
            ],
        ),
        (done(5), ["open b kv 0,1,4 images [0]", "step 6 joint: prefill b 0+10 last"]),
        (done(6, b=1), ["frontend: emit b#0=1", "frontend: finished b length 1 by way of EPD0", "close b"]),
    ]
    table(core, rows)
    emptied(core)


def test_a_covered_offer_can_be_cancelled_before_and_after_its_commit() -> None:
    gone = ["E0: release E0:2 cancelled", "frontend: finished b cancelled 0 by way of E0 P0"]
    core = covered_offer()
    core.handle(image_offer("E0:2", work("b", "cat", 6), (1,)), 0.0)
    table(core, [(Cancel("b"), gone), (Commit("E0:2"), []), (Forget("b"), [])])
    emptied(core)
    core = covered_offer()
    core.handle(Submit(work("x", 1)), 0.0)
    core.handle(image_offer("E0:2", work("b", "cat", 6), (1,)), 0.0)
    core.handle(Commit("E0:2"), 0.0)
    table(core, [(Cancel("b"), gone)])


def test_kv_that_was_pulled_may_be_matched_by_the_next() -> None:
    core = make_core("D0")
    core.handle(kv_offer("P0:1", work("a", 9), (0, 1, 2)), 0.0)
    core.handle(Ready("P0:1", (0,)), 0.0)
    keys = core.state.prefix_keys(core.state.requests["a"])
    assert core.state.kv.match(keys) == ()
    core.handle(Pulled("P0:1", 0), 0.0)
    assert core.state.kv.match(keys) == (0, 1)
    core = make_core("D0")
    core.handle(kv_offer("P0:1", work("a", 9), (0, 1, 2)), 0.0)
    core.handle(Ready("P0:1", (0,)), 0.0)
    core.handle(lost("P0:1"), 0.0)
    assert core.state.kv.match(keys) == ()
