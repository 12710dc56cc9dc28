"""What an admitted request reserves, in which order requests are admitted, and who stands in whose way."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from support.core_tables import Row, brief, done, emptied, image_offer, kv_offer, make_core, table, work
from support.virtual.checks import check_state
from trinity.core.messages import Cancel, Commit, Pulled, Ready, Release, Submit, Work
from trinity.core.scheduler import BatchRules, EncodeView, Order, View, schedule


def test_image_blocks_of_all_items_are_reserved_at_once_or_not_at_all() -> None:
    core = make_core("E0", image=4, peers="P0", image_cache=False)
    rows: list[Row] = [
        (Submit(work("a", "cat*8", 1)), ["step 1 joint: encode a.0 into 0,1"]),
        (Submit(work("b", "dog", 1, "fox*8")), []),
        (done(1), ["P0: offer E0:1 image of a [0,1] by way of E0", "P0: ready E0:1 0", "P0: commit E0:1"]),
        (Submit(work("c", "owl", 1)), []),
        (Release("E0:1", "pulled"), ["step 2 joint: encode b.0 into 0, encode b.1 into 1,2, encode c.0 into 3"]),
    ]
    table(core, rows)


def test_nobody_overtakes_a_request_that_waits_for_image_blocks() -> None:
    core = make_core("E0", image=4, peers="P0")
    rows: list[Row] = [
        (Submit(work("a", "cat*8", 1)), ["step 1 joint: encode a.0 into 0,1"]),
        (Submit(work("b", "dog*12", 1)), []),
        (Submit(work("c", "owl", 1)), []),
        (done(1), ["P0: offer E0:1 image of a [0,1] by way of E0", "P0: ready E0:1 0", "P0: commit E0:1"]),
    ]
    table(core, rows)
    assert list(core.state.encode_queue) == ["b", "c"]


def test_kv_for_the_prompt_and_every_output_but_the_last_is_reserved_where_decoding_happens() -> None:
    assert brief(make_core("PD0").handle(Submit(work("r", 4, max_tokens=5)), 0))[0] == "open r kv 0,1"
    assert brief(make_core("PD0").handle(Submit(work("r", 4, max_tokens=6)), 0))[0] == "open r kv 0,1,2"
    assert brief(make_core("P0").handle(Submit(work("r", 4, max_tokens=6)), 0))[0] == "open r kv 0"


def test_nobody_overtakes_a_request_that_waits_for_kv() -> None:
    core = make_core("PD0", kv=4, prefix_cache=False)
    rows: list[Row] = [
        (Submit(work("a", 7, max_tokens=2)), ["open a kv 0,1", "step 1 joint: prefill a 0+7 last"]),
        (Submit(work("b", 12, max_tokens=1)), []),
        (Submit(work("c", 1, max_tokens=1)), []),
        (done(1, a=5), ["frontend: emit a#0=5", "step 2 joint: decode a"]),
        (
            done(2, a=5),
            [
                "frontend: emit a#1=5",
                "frontend: finished a length 2 by way of PD0",
                "close a",
                "open b kv 0,1,2",
                "open c kv 3",
                "step 3 joint: prefill b 0+12 last, prefill c 0+1 last",
            ],
        ),
    ]
    table(core, rows)


def test_several_requests_are_admitted_while_blocks_and_budget_last() -> None:
    core = make_core("PD0", kv=8, rules=BatchRules(token_budget=10))
    core.handle(Submit(work("first", 1)), 0.0)
    for name in "abc":
        core.handle(Submit(work(name, 6, text=ord(name) * 100)), 0.0)
    expected = ["frontend: emit first#0=1", "open a kv 1,2", "open b kv 3,4"]
    table(core, [(done(1, first=1), [*expected, "step 2 joint: prefill a 0+6 last, prefill b 0+3, decode first"])])
    assert list(core.state.prefill_queue) == ["c"]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", ["long", "short", "urgent"]),
        ("sjf", ["short", "urgent", "long"]),
        ("deadline", ["urgent", "long", "short"]),
    ],
)
def test_the_order_of_new_prompts(order: Order, expected: list[str]) -> None:
    core = make_core("PD0", rules=BatchRules(token_budget=64, order=order))
    core.handle(Submit(work("first", 1)), 0.0)
    core.handle(Submit(work("long", 9, deadline_s=5.0)), 1.0)
    core.handle(Submit(work("short", 2)), 2.0)
    core.handle(Submit(work("urgent", 5, deadline_s=1.0)), 3.0)
    out = brief(core.handle(done(1, first=1), 3.0))
    assert [line.split()[1] for line in out if line.startswith("open")] == expected


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("fcfs", "encode long.0 into 1,2,3, encode short.0 into 4, encode urgent.0 into 5,6"),
        ("sjf", "encode short.0 into 1, encode urgent.0 into 2,3, encode long.0 into 4,5,6"),
        ("deadline", "encode urgent.0 into 1,2, encode long.0 into 3,4,5, encode short.0 into 6"),
    ],
)
def test_the_order_of_new_media(order: Order, expected: str) -> None:
    core = make_core("EPD0", rules=BatchRules(token_budget=64, image_budget=64, order=order))
    core.handle(Submit(work("first", "owl", 1)), 0.0)
    core.handle(Submit(work("long", "cat*12", 1, deadline_s=5.0)), 1.0)
    core.handle(Submit(work("short", 9, "dog")), 2.0)
    core.handle(Submit(work("urgent", "fox*8", 1, deadline_s=1.0)), 3.0)
    assert expected in brief(core.handle(done(1), 3.0))[-1]


def test_a_migrated_request_goes_ahead_of_new_arrivals_first_in_first_out() -> None:
    core = make_core("EP0", peers="D0", prefix_cache=False)
    one, two = work("one", "cat", 1), work("two", "dog", 1)
    rows: list[Row] = [
        (Submit(work("first", 1)), ["open first kv 0", "step 1 joint: prefill first 0+1 last"]),
        (Submit(work("new", 1)), []),
        (image_offer("E0:1", one, (5,)), []),
        (image_offer("E0:2", two, (6,)), []),
        (Ready("E0:2", (0,)), ["pull E0:2.0 image of two from E0 6 into 1"]),
        (Ready("E0:1", (0,)), ["pull E0:1.0 image of one from E0 5 into 0"]),
        (Commit("E0:1"), []),
        (Commit("E0:2"), []),
        (Pulled("E0:2", 0), ["E0: release E0:2 pulled"]),
        (Pulled("E0:1", 0), ["E0: release E0:1 pulled"]),
    ]
    table(core, rows)
    opened = [line for line in brief(core.handle(done(1, first=5), 0.0)) if line.startswith("open")]
    assert opened == ["open two kv 1,2 images [1]", "open one kv 3,4 images [0]", "open new kv 5"]


def test_new_requests_leave_image_blocks_to_migrations_that_wait_for_them() -> None:
    core = make_core("EPD0", image=4, image_cache=False)
    rows: list[Row] = [
        (Submit(work("a", "cat*8", 1)), ["step 1 joint: encode a.0 into 0,1"]),
        (image_offer("E0:1", work("m", "dog*12", 1), (0, 1, 2)), []),
        (Submit(work("b", "fox", 1)), []),
        (done(1), ["open a kv 0,1,2 images [0,1]", "step 2 joint: prefill a 0+9 last"]),
        (done(2, a=5), ["frontend: emit a#0=5", "step 3 joint: encode b.0 into 3, decode a"]),
        (Ready("E0:1", (0,)), ["pull E0:1.0 image of m from E0 0,1,2 into 0,1,2"]),
    ]
    table(core, rows)


def test_new_requests_leave_kv_blocks_to_migrations_that_wait_for_them() -> None:
    core = make_core("PD0", kv=4, prefix_cache=False)
    rows: list[Row] = [
        (Submit(work("a", 7, max_tokens=2)), ["open a kv 0,1", "step 1 joint: prefill a 0+7 last"]),
        (kv_offer("P0:1", work("m", 10, max_tokens=2), (0, 1, 2)), []),
        (Submit(work("b", 1, max_tokens=1)), []),
        (done(1, a=5), ["frontend: emit a#0=5", "step 2 joint: decode a"]),
        (Cancel("m"), ["P0: release P0:1 cancelled", "frontend: finished m cancelled 0 by way of P0 PD0"]),
        (
            done(2, a=5),
            [
                "frontend: emit a#1=5",
                "frontend: finished a length 2 by way of PD0",
                "close a",
                "open b kv 0",
                "step 3 joint: prefill b 0+1 last",
            ],
        ),
    ]
    table(core, rows)


def test_migrations_reserve_in_the_order_of_their_offers() -> None:
    core = make_core("D0", kv=4)
    rows: list[Row] = [
        (kv_offer("P0:1", work("a", 6, max_tokens=3), (0, 1)), []),
        (kv_offer("P0:2", work("b", 10, max_tokens=3), (2, 3, 4)), []),
        (kv_offer("P0:3", work("c", 2), (5,)), []),
        (Ready("P0:3", (0,)), []),
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of a from P0 0,1 into 0,1"]),
        (
            Cancel("b"),
            [
                "P0: release P0:2 cancelled",
                "frontend: finished b cancelled 0 by way of P0 D0",
                "pull P0:3.0 kv of c from P0 5 into 2",
            ],
        ),
    ]
    table(core, rows)


def test_without_that_rule_it_takes_as_many_as_its_blocks_hold() -> None:
    core = make_core("D0", rules=BatchRules(token_budget=2, limit_decodes=False))
    for number in (1, 2, 3):
        core.handle(kv_offer(f"P0:{number}", work(f"r{number}", 2), (number,)), 0.0)
        assert core.handle(Ready(f"P0:{number}", (0,)), 0.0), f"migration {number} is pulled"


def test_a_decode_instance_takes_no_more_migrations_than_its_token_budget_has_rows() -> None:
    core = make_core("D0", rules=BatchRules(token_budget=2))
    ready = {f"P0:{n}": work(f"r{n}", 2) for n in (1, 2, 3)}
    for offer, each in ready.items():
        core.handle(kv_offer(offer, each, (int(offer[-1]),)), 0.0)
    rows: list[Row] = [
        (Ready("P0:1", (0,)), ["pull P0:1.0 kv of r1 from P0 1 into 0"]),
        (Ready("P0:2", (0,)), ["pull P0:2.0 kv of r2 from P0 2 into 1"]),
        (Ready("P0:3", (0,)), []),
        (Commit("P0:1", (5,)), []),
        (Pulled("P0:1", 0), ["P0: release P0:1 pulled", "open r1 kv 0 after 5", "step 1 joint: decode r1"]),
        (done(1, r1=6), ["frontend: emit r1#1=6", "step 2 joint: decode r1"]),
        (
            done(2, r1=7),
            [
                "frontend: emit r1#2=7",
                "frontend: finished r1 length 3 by way of P0 D0",
                "close r1",
                "pull P0:3.0 kv of r3 from P0 3 into 0",
            ],
        ),
    ]
    table(core, rows)


def test_a_cached_item_counts_only_what_it_takes_from_the_pool() -> None:
    core = make_core("E0", image=3, peers="P0")
    cat = ["P0: offer E0:1 image of a [0] by way of E0", "P0: ready E0:1 0", "P0: commit E0:1"]
    rows: list[Row] = [
        (Submit(work("a", "cat", 1)), ["step 1 joint: encode a.0 into 0"]),
        (done(1), cat),
        (
            Submit(work("b", "cat", 1, "dog*8")),
            [
                "step 2 joint: encode b.1 into 1,2",
                "P0: offer E0:2 image of b [0][1,2] by way of E0",
                "P0: ready E0:2 0",
            ],
        ),
        (done(2), ["P0: ready E0:2 1", "P0: commit E0:2"]),
        (Release("E0:1", "pulled"), []),
        (Release("E0:2", "pulled"), []),
        (Submit(work("c", "cat", 1, "dog*8", 1, "fox")), []),
    ]
    table(core, rows[:-1])
    assert core.state.pools["image"].available == 3
    out = brief(core.handle(Submit(work("c", "fox*8", 1, "cat")), 0.0))
    assert out[0] == "step 3 joint: encode c.0 into 1,2", "cat stays, dog goes"
    assert core.state.pools["image"].evictions == 2


def test_what_one_admission_counts_on_is_not_evicted_by_another_in_the_same_step() -> None:
    core = make_core("E0", image=5, peers="P0")
    for step, name in enumerate(["cat", "dog"], start=1):
        core.handle(Submit(work(name, name, 1)), 0.0)
        core.handle(done(step), 0.0)
        core.handle(Release(f"E0:{step}", "pulled"), 0.0)
    core.handle(Submit(work("owl", "owl", 1)), 0.0)
    core.handle(Submit(work("a", "fox*12", 1)), 0.0)
    core.handle(Submit(work("b", "cat", 1)), 0.0)
    out = brief(core.handle(done(3), 0.0))
    check_state(core.state)
    assert "step 4 joint: encode a.0 into 3,4,1" in out, "the dog's block went"
    assert out[-1] == "P0: commit E0:4"
    assert core.state.outgoing["E0:4"].blocks == (0,), "although the cat's is older"


def test_what_nobody_was_admitted_for_may_be_evicted() -> None:
    core = make_core("E0", image=4, peers="P0")
    core.handle(Submit(work("cat", "cat", 1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(Submit(work("a", "fox*16", 1)), 0.0)
    core.handle(Submit(work("b", "cat", 1)), 0.0)
    out = brief(core.handle(Release("E0:1", "pulled"), 0.0))
    check_state(core.state)
    assert out == ["step 2 joint: encode a.0 into 0,1,2,3"]
    assert core.state.requests["b"].media[0].blocks == ()


def test_a_drained_core_is_idle() -> None:
    core = make_core("EPD0")
    emptied(core)


def striped(request: str, *strips: int) -> Work:
    """A request of four visual tokens an item; ``strips``: each item's place in its image."""
    made = work(request, *(f"{request}{number}*4" for number in range(len(strips))), 1)
    return replace(made, media=tuple(replace(span, strip=at) for span, at in zip(made.media, strips, strict=True)))


def test_strips_of_an_image_are_encoded_in_one_step_where_one_image_fits() -> None:
    rules = BatchRules(token_budget=64, image_budget=1)
    core = make_core("E0", image=16, peers="P0", rules=rules)
    first = core.handle(Submit(striped("r", 0, 1, 2, 0, 1, 0)), 0)
    assert brief(first) == ["step 1 joint: encode r.0 into 0, encode r.1 into 1, encode r.2 into 2"]
    ready = ["P0: offer E0:1 image of r [0][1][2][3][4][5] by way of E0", "P0: ready E0:1 0,1,2"]
    assert brief(core.handle(done(1), 1)) == [*ready, "step 2 joint: encode r.3 into 3, encode r.4 into 4"]
    assert brief(core.handle(done(2), 2))[-1] == "step 3 joint: encode r.5 into 5"


def test_a_strip_that_is_here_leaves_the_others_of_its_image_in_one_step() -> None:
    """Whichever of them is cached, helped with or encoded for another request: the rest is counted at its first."""
    rules = BatchRules(token_budget=64, image_budget=1)
    core = make_core("E0", image=16, peers="P0 E1", rules=rules)
    core.handle(Submit(striped("r", 0, 1, 2, 3), helpers=("E1", "", "E1", "")), 0)
    assert brief(core.handle(done(1), 1)) == ["E1: cancel r~0+0"], "both of its own were in the first step"
    other = make_core("E0", image=16, peers="P0", rules=rules)
    assert brief(other.handle(Submit(striped("r", 1)), 0)) == ["step 1 joint: encode r.0 into 0"], "as a helper has it"


def test_an_item_of_no_tokens_is_in_the_step_of_the_one_before_it() -> None:
    def encodes(budget: int, *tokens: int) -> list[tuple[str, tuple[int, ...]]]:
        view = View(new_encodes=[EncodeView("a", tuple(enumerate(tokens)))], free_media={"image": 9})
        return schedule(view, BatchRules(token_budget=64, image_budget=budget)).encodes

    assert encodes(1, 12, 0, 0, 8, 0) == [("a", (0, 1, 2))]
    assert encodes(19, 12, 0, 8, 0) == [("a", (0, 1))]
    assert encodes(20, 12, 0, 8, 0) == [("a", (0, 1, 2, 3))]
