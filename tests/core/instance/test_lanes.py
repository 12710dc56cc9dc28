"""Depth 2: the next step of a lane is decided while one runs, before its tokens are known (core/instance/lanes.py)."""

from __future__ import annotations

from collections import Counter, deque
from typing import Any

import pytest

from support.core_tables import Row, brief, broken, done, emptied, kv_offer, make_core, sent, table, work
from trinity.core import InstanceCore
from trinity.core.instance.lanes import outstanding
from trinity.core.instance.phases import Phase
from trinity.core.messages import (
    Cancel,
    Commit,
    Finished,
    LayersWritten,
    Pulled,
    Ready,
    Sampled,
    Step,
    Stepped,
    Submit,
    Tick,
)
from trinity.core.scheduler import BatchRules, Outstanding
from trinity.core.transfers import TransferPolicy


def ahead(name: str = "PD0", **settings: Any) -> InstanceCore:
    return make_core(name, depth=2, **{"prefix_cache": False, "image_cache": False, **settings})


def test_a_prompt_decodes_right_behind_its_last_chunk_and_never_beyond_its_last_token() -> None:
    core = ahead()
    rows: list[Row] = [
        (
            Submit(work("r", 3, max_tokens=4)),
            ["open r kv 0,1", "step 1 joint: prefill r 0+3 last", "step 2 joint: decode r"],
        ),
        (done(1, r=5), ["frontend: emit r#0=5", "step 3 joint: decode r"]),
        (done(2, r=6), ["frontend: emit r#1=6", "step 4 joint: decode r"]),
        (done(3, r=7), ["frontend: emit r#2=7"]),
        (done(4, r=8), ["frontend: emit r#3=8", "frontend: finished r length 4 by way of PD0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_one_token_asked_for_is_no_decode() -> None:
    core = ahead()
    rows: list[Row] = [
        (Submit(work("r", 3, max_tokens=1)), ["open r kv 0", "step 1 joint: prefill r 0+3 last"]),
        (done(1, r=5), ["frontend: emit r#0=5", "frontend: finished r length 1 by way of PD0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_chunks_follow_each_other_without_a_gap() -> None:
    core = ahead(rules=BatchRules(token_budget=8, image_budget=64))
    rows: list[Row] = [
        (
            Submit(work("r", 19, max_tokens=2)),
            ["open r kv 0,1,2,3,4", "step 1 joint: prefill r 0+8", "step 2 joint: prefill r 8+8"],
        ),
        (done(1), ["step 3 joint: prefill r 16+3 last"]),
        (done(2), ["step 4 joint: decode r"]),
        (done(3, r=5), ["frontend: emit r#0=5"]),
        (done(4, r=6), ["frontend: emit r#1=6", "frontend: finished r length 2 by way of PD0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_a_stop_token_leaves_a_row_that_runs_for_nothing_and_keeps_its_blocks_until_then() -> None:
    """The invariant that matters most: nobody gets a block into which a step in flight still writes."""
    core = ahead(kv=3)
    stops = work("r", 3, max_tokens=4, stop_ids=frozenset({6}))
    rows: list[Row] = [
        (Submit(stops), ["open r kv 0,1", "step 1 joint: prefill r 0+3 last", "step 2 joint: decode r"]),
        (Submit(work("q", 5, text=200, max_tokens=4)), []),
        (done(1, r=6), ["frontend: emit r#0=6"]),
    ]
    table(core, rows)
    assert core.state.kv.held == 2
    table(
        core,
        [
            (
                done(2, r=9),
                [
                    "frontend: finished r stop 1 by way of PD0",
                    "close r",
                    "open q kv 0,1",
                    "step 3 joint: prefill q 0+5 last",
                    "step 4 joint: decode q",
                ],
            )
        ],
    )


def test_the_others_of_such_a_step_go_on() -> None:
    core = ahead()
    rows: list[Row] = [
        (
            Submit(work("a", 3, max_tokens=9, stop_ids=frozenset({6}))),
            ["open a kv 0,1,2", "step 1 joint: prefill a 0+3 last", "step 2 joint: decode a"],
        ),
        (Submit(work("b", 3, max_tokens=9)), []),
        (done(1, a=5), ["frontend: emit a#0=5", "open b kv 3,4,5", "step 3 joint: prefill b 0+3 last, decode a"]),
        (done(2, a=6), ["frontend: emit a#1=6", "step 4 joint: decode b"]),
        (
            done(3, a=7, b=1),
            ["frontend: emit b#0=1", "frontend: finished a stop 2 by way of PD0", "close a", "step 5 joint: decode b"],
        ),
    ]
    table(core, rows)


def test_a_cancel_waits_for_both_steps() -> None:
    core = ahead()
    core.handle(Submit(work("r", 3, max_tokens=9)), 0.0)
    rows: list[Row] = [
        (Cancel("r"), []),
        (done(1, r=5), []),
        (done(2, r=5), ["frontend: finished r cancelled 0 by way of PD0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_a_deadline_waits_for_both_steps() -> None:
    core = ahead()
    core.handle(Submit(work("r", 3, max_tokens=9, deadline_s=1.0)), 0.0)
    assert sent(core.handle(Tick(), 2.0), Finished) == []
    assert core.handle(done(1, r=5), 2.0) == []
    finished = ["frontend: finished r error 0 by way of PD0 DeadlineExceeded", "close r"]
    assert brief(core.handle(done(2, r=5), 2.0)) == finished
    emptied(core)


def test_a_failed_row_ends_its_request_after_its_row_of_the_next_step() -> None:
    core = ahead()
    core.handle(Submit(work("a", 3, max_tokens=9)), 0.0)
    core.handle(Submit(work("b", 3, max_tokens=9)), 0.0)
    rows: list[Row] = [
        (done(1, a=5), ["frontend: emit a#0=5", "open b kv 3,4,5", "step 3 joint: prefill b 0+3 last, decode a"]),
        (broken(2, "a"), ["step 4 joint: decode b"]),
        (
            broken(3, "a", b=7),
            [
                "frontend: emit b#0=7",
                "frontend: finished a error 1 by way of PD0 StageError",
                "close a",
                "step 5 joint: decode b",
            ],
        ),
    ]
    table(core, rows)


def test_a_failed_chunk_makes_the_later_ones_void() -> None:
    core = ahead(rules=BatchRules(token_budget=4, image_budget=64), prefix_cache=True)
    core.handle(Submit(work("r", 12)), 0.0)
    rows: list[Row] = [
        (broken(1, "r"), []),
        (done(2), ["frontend: finished r error 0 by way of PD0 StageError", "close r"]),
    ]
    table(core, rows)
    assert not any(core.state.kv.published(block) for block in range(16))
    emptied(core)


def test_a_chunk_is_matchable_when_its_own_step_has_ended() -> None:
    core = ahead(rules=BatchRules(token_budget=4, image_budget=64), prefix_cache=True)
    core.handle(Submit(work("r", 12)), 0.0)
    core.handle(done(1), 0.0)
    assert [core.state.kv.published(block) for block in range(3)] == [True, False, False]


def test_images_of_one_request_are_encoded_in_two_steps_at_once() -> None:
    core = ahead("EPD0", rules=BatchRules(token_budget=64, image_budget=1))
    rows: list[Row] = [
        (
            Submit(work("r", "cat", "dog", 1, max_tokens=1)),
            ["step 1 joint: encode r.0 into 0", "step 2 joint: encode r.1 into 1"],
        ),
        (done(1), []),
        (done(2), ["open r kv 0,1,2 images [0][1]", "step 3 joint: prefill r 0+9 last"]),
        (done(3, r=5), ["frontend: emit r#0=5", "frontend: finished r length 1 by way of EPD0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_what_is_encoded_for_several_is_in_one_step_alone() -> None:
    core = ahead("EPD0", image_cache=True)
    rows: list[Row] = [
        (Submit(work("a", "cat", 1)), ["step 1 joint: encode a.0 into 0"]),
        (Submit(work("b", "cat", 2)), []),
    ]
    table(core, rows)


def test_two_lanes_run_ahead_each_for_itself() -> None:
    core = ahead("EPD0", lanes=("vision", "language"), rules=BatchRules(token_budget=64, image_budget=1))
    rows: list[Row] = [
        (
            Submit(work("a", 3, max_tokens=3)),
            ["open a kv 0,1", "step 1 language: prefill a 0+3 last", "step 2 language: decode a"],
        ),
        (
            Submit(work("c", "cat", "dog", "cow", 1)),
            ["step 3 vision: encode c.0 into 0", "step 4 vision: encode c.1 into 1"],
        ),
        (done(3, "vision"), ["step 5 vision: encode c.2 into 2"]),
        (done(1, "language", a=5), ["frontend: emit a#0=5", "step 6 language: decode a"]),
        (done(2, "language", a=6), ["frontend: emit a#1=6"]),
    ]
    table(core, rows)


def test_a_step_reckons_with_the_largest_that_may_run_beside_it() -> None:
    """Policy time: of the other lane's two steps, the one with more visual tokens."""
    asked: set[tuple[int, int, int]] = set()

    class Cost:
        def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
            asked.add((decodes, prefill_tokens, media_tokens))
            return 0.0

    core = ahead(
        "EPD0",
        lanes=("vision", "language"),
        rules=BatchRules(token_budget=64, image_budget=8, policy="time", cost=Cost(), limit_s=1.0),
    )
    core.handle(Submit(work("c", "cat*3", 1)), 0.0)
    core.handle(Submit(work("d", "dog*12", 1)), 0.0)
    assert outstanding(core.state.lanes, "language") == Outstanding(media_tokens=12)
    assert outstanding(core.state.lanes, "vision") == Outstanding()


def test_steps_end_in_the_order_in_which_they_began() -> None:
    core = ahead()
    core.handle(Submit(work("r", 3)), 0.0)
    with pytest.raises(AssertionError, match="step 2 is not running on joint"):
        core.handle(done(2, r=5), 0.0)
    core = ahead()
    with pytest.raises(AssertionError, match="nothing runs on joint"):
        core.handle(done(1), 0.0)


def test_migrated_kv_decodes_two_steps_deep() -> None:
    core = ahead("D0")
    offer = kv_offer("P0:1", work("r", 5, max_tokens=4), (7, 8))
    rows: list[Row] = [
        (offer, []),
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of r from P0 7,8 into 0,1"]),
        (Commit("P0:1", (5,)), []),
        (
            Pulled("P0:1", 0),
            ["P0: release P0:1 pulled", "open r kv 0,1 after 5", "step 1 joint: decode r", "step 2 joint: decode r"],
        ),
        (done(1, r=6), ["frontend: emit r#1=6", "step 3 joint: decode r"]),
        (done(2, r=7), ["frontend: emit r#2=7"]),
        (done(3, r=8), ["frontend: emit r#3=8", "frontend: finished r length 4 by way of P0 D0", "close r"]),
    ]
    table(core, rows)
    emptied(core)


def test_kv_streams_from_both_chunks_in_their_order() -> None:
    core = ahead(
        "P0",
        peers="D0",
        rules=BatchRules(token_budget=8, image_budget=64),
        transfers=TransferPolicy(kv="layer"),
        layers=2,
    )
    rows: list[Row] = [
        (
            Submit(work("r", 12)),
            [
                "open r kv 0,1,2",
                "step 1 joint: prefill r 0+8",
                "D0: offer P0:1 kv of r [0,1,2] by way of P0",
                "step 2 joint: prefill r 8+4 last",
            ],
        ),
        (LayersWritten(1, "joint", (0, 1)), ["D0: ready P0:1 0 layers 0,1 blocks 0,2"]),
        (done(1), ["D0: ready P0:1 0 layers 1,2 blocks 0,2"]),
        (LayersWritten(2, "joint", (0, 1)), ["D0: ready P0:1 0 layers 0,1 blocks 2,3"]),
        (
            done(2, r=5),
            ["frontend: emit r#0=5", "D0: ready P0:1 0 layers 1,2 blocks 2,3", "D0: commit P0:1 after 5", "close r"],
        ),
    ]
    table(core, rows)
    with pytest.raises(AssertionError, match="of a lane where nothing runs"):
        core.handle(LayersWritten(3, "joint", (0, 1)), 0.0)


def test_progress_is_of_the_step_that_runs() -> None:
    core = ahead(
        "P0",
        peers="D0",
        rules=BatchRules(token_budget=8, image_budget=64),
        transfers=TransferPolicy(kv="layer"),
        layers=2,
    )
    core.handle(Submit(work("r", 12)), 0.0)
    with pytest.raises(AssertionError, match="during step 1"):
        core.handle(LayersWritten(2, "joint", (0, 1)), 0.0)


def test_a_step_teaches_what_it_took_itself() -> None:
    """``seconds`` of a step count from its own begin, whenever it was decided."""
    core = ahead()
    core.handle(Submit(work("r", 3, max_tokens=9)), 0.0)
    core.handle(Stepped(1, "joint", {"r": Sampled(1)}, seconds=3.0), 3.0)
    core.handle(Stepped(2, "joint", {"r": Sampled(1)}, seconds=0.5), 3.5)
    assert core.state.rates.per_unit == {"P": 1.0, "D": 0.5}


def test_time_before_the_first_decode_is_not_booked_twice() -> None:
    core = ahead()
    core.handle(Submit(work("r", 3, max_tokens=3)), 0.0)
    core.handle(done(1, r=1), 2.0)
    state = core.state.requests["r"]
    assert (state.phase, state.decode_started, core.state.new_decodes) == (Phase.DECODING, True, [])
    core.handle(done(2, r=1), 3.0)
    assert state.spans == {"encode_queue": 0.0, "prefill_queue": 0.0, "prefill": 2.0}
    core.handle(done(3, r=1), 5.0)
    assert state.spans == {"encode_queue": 0.0, "prefill_queue": 0.0, "prefill": 2.0, "decode": 3.0}


@pytest.mark.parametrize("policy", ["alg1", "prefill_first"])
def test_no_row_is_in_a_step_twice(policy: str) -> None:
    core = ahead(rules=BatchRules(token_budget=4, policy=policy))  # type: ignore[arg-type]
    out = core.handle(Submit(work("a", 7, max_tokens=3)), 0.0) + core.handle(Submit(work("b", 2, max_tokens=3)), 0.0)
    steps = deque(each for each in out if isinstance(each, Step))
    ran: Counter[str] = Counter()
    while steps:
        step = steps.popleft()
        rows = [row.request for row in step.prefills if row.last] + list(step.decodes)
        assert len(set(rows)) == len(rows)
        ran.update(rows)
        steps += [each for each in core.handle(done(step.id, **dict.fromkeys(rows, 1)), 0.0) if isinstance(each, Step)]
    assert ran == {"a": 3, "b": 3}
    emptied(core)
