"""Requests with the same image share one entry: encoded once, held by each, surviving the end of any of them."""

from __future__ import annotations

import pytest

from support.core_tables import Row, brief, broken, done, emptied, make_core, sent, table, work
from trinity.core import InstanceCore
from trinity.core.messages import Cancel, Finished, Forget, Release, Step, Submit
from trinity.core.scheduler import BatchRules


def sharing(**settings: object) -> InstanceCore:
    """Requests a and b were admitted together; the first one's image "cat" is in step 2 into block 1."""
    core = make_core("EPD0", kv=64, **settings)  # type: ignore[arg-type]
    rows: list[Row] = [
        (Submit(work("x", "fox", 1)), ["step 1 joint: encode x.0 into 0"]),
        (Submit(work("a", 1, "cat", 1), ("of a",)), []),
        (Submit(work("b", 2, "cat", 1), ("of b",)), []),
        (done(1), ["open x kv 0,1 images [0]", "step 2 joint: encode a.0 into 1, prefill x 0+5 last"]),
    ]
    table(core, rows)
    assert core.state.pools["image"].references(1) == 2
    return core


@pytest.mark.parametrize("cache", [True, False])
def test_one_image_of_two_requests_is_encoded_once(cache: bool) -> None:
    core = sharing(image_cache=cache)
    rows: list[Row] = [
        (
            done(2, x=1),
            [
                "frontend: emit x#0=1",
                "open a kv 2,3 images [1]",
                "open b kv 4,5,6 images [1]",
                "step 3 joint: prefill a 0+6 last, prefill b 0+7 last, decode x",
            ],
        ),
        (
            broken(3, "a", x=2, b=5),
            [
                "frontend: emit b#0=5 x#1=2",
                "frontend: finished a error 0 by way of EPD0 StageError",
                "close a",
                "step 4 joint: decode x b",
            ],
        ),
    ]
    table(core, rows)
    assert core.state.pools["image"].held == 0
    assert bool(core.state.pools["image"].match(core.state.slots(work("q", "cat"))[0].keys)) is cache


def test_the_others_encode_their_own_inputs_when_the_owners_fail() -> None:
    core = sharing()
    out = core.handle(broken(2, "a", x=1), 0.0)
    lines = ["frontend: emit x#0=1", "frontend: finished a error 0 by way of EPD0 StageError"]
    assert brief(out) == [*lines, "step 3 joint: encode b.0 into 1, decode x"]
    step = out[-1]
    assert isinstance(step, Step)
    assert step.encodes[0].inputs == "of b"
    assert core.state.pools["image"].references(1) == 1
    assert brief(core.handle(done(3, x=2), 0.0))[1] == "open b kv 2,3,4 images [1]"


def test_an_entry_whose_every_owner_failed_is_gone() -> None:
    core = sharing()
    core.handle(Cancel("b"), 0.0)
    core.handle(broken(2, "a", x=1), 0.0)
    assert core.state.pending == {}
    assert core.state.pools["image"].held == 0


def test_a_cancelled_owner_in_a_step_leaves_its_image_to_the_others() -> None:
    core = sharing()
    rows: list[Row] = [
        (Cancel("a"), []),
        (
            done(2, x=1),
            [
                "frontend: emit x#0=1",
                "frontend: finished a cancelled 0 by way of EPD0",
                "open b kv 2,3,4 images [1]",
                "step 3 joint: prefill b 0+7 last, decode x",
            ],
        ),
    ]
    table(core, rows)
    assert core.state.pools["image"].references(1) == 1


def test_a_cancelled_owner_that_waits_passes_its_image_to_the_next() -> None:
    core = make_core("E0", peers="P0", rules=BatchRules(image_budget=4))
    rows: list[Row] = [
        (Submit(work("x", "fox", 1)), ["step 1 joint: encode x.0 into 0"]),
        (Submit(work("a", "owl", "cat", 1)), []),
        (Submit(work("b", "owl", "cat", 1)), []),
        (
            done(1),
            [
                "P0: offer E0:1 image of x [0] by way of E0",
                "P0: ready E0:1 0",
                "P0: commit E0:1",
                "step 2 joint: encode a.0 into 1",
            ],
        ),
    ]
    table(core, rows)
    assert list(core.state.encode_queue) == ["b"]
    rows = [
        (Release("E0:1", "pulled"), []),
        (
            done(2),
            [
                "P0: offer E0:2 image of a [1][2] by way of E0",
                "P0: ready E0:2 0",
                "step 3 joint: encode a.1 into 2",
                "P0: offer E0:3 image of b [1][2] by way of E0",
                "P0: ready E0:3 0",
            ],
        ),
        (Cancel("a"), ["P0: cancel a"]),
        (Release("E0:2", "cancelled"), []),
        (done(3), ["P0: ready E0:3 1", "P0: commit E0:3"]),
    ]
    table(core, rows)
    table(core, [(Release("E0:3", "pulled"), []), (Forget("a"), []), (Forget("b"), []), (Forget("x"), [])])
    emptied(core)


def test_one_image_twice_in_a_request_is_encoded_once() -> None:
    core = make_core("E0", peers="P0")
    rows: list[Row] = [
        (Submit(work("r", "cat", 1, "cat")), ["step 1 joint: encode r.0 into 0"]),
        (done(1), ["P0: offer E0:1 image of r [0][0] by way of E0", "P0: ready E0:1 0,1", "P0: commit E0:1"]),
    ]
    table(core, rows)
    assert core.state.pools["image"].references(0) == 2, "one of each part of the lease"
    table(core, [(Release("E0:1", "pulled"), []), (Forget("r"), [])])
    emptied(core)


def test_one_image_twice_in_a_request_that_fails_is_no_longer_waited_for() -> None:
    core = make_core("E0", peers="P0")
    core.handle(Submit(work("r", "cat", 1, "cat")), 0.0)
    core.handle(broken(1, "r"), 0.0)
    emptied(core)


def test_a_later_request_finds_the_image_cached() -> None:
    core = make_core("EPD0", prefix_cache=False)
    rows: list[Row] = [
        (Submit(work("a", "cat*6", 1, max_tokens=1)), ["step 1 joint: encode a.0 into 0,1"]),
        (done(1), ["open a kv 0,1 images [0,1]", "step 2 joint: prefill a 0+7 last"]),
        (done(2, a=1), ["frontend: emit a#0=1", "frontend: finished a length 1 by way of EPD0", "close a"]),
        (
            Submit(work("b", 1, "cat*6", max_tokens=1)),
            ["open b kv 0,1 images [0,1]", "step 3 joint: prefill b 0+7 last"],
        ),
    ]
    table(core, rows)


def test_without_an_image_cache_a_later_request_encodes_anew() -> None:
    core = make_core("EPD0", image_cache=False, prefix_cache=False)
    core.handle(Submit(work("a", "cat*6", 1, max_tokens=1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(done(2, a=1), 0.0)
    table(core, [(Submit(work("b", 1, "cat*6")), ["step 3 joint: encode b.0 into 0,1"])])


def test_an_image_of_which_a_block_was_evicted_is_encoded_whole() -> None:
    core = make_core("E0", image=4, peers="P0")
    core.handle(Submit(work("a", "cat*8", 1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(Release("E0:1", "pulled"), 0.0)
    core.handle(Submit(work("b", "dog*12", 1)), 0.0)
    core.handle(done(2), 0.0)
    core.handle(Release("E0:2", "pulled"), 0.0)
    assert core.state.pools["image"].evictions == 1
    assert core.state.pools["image"].match(core.state.slots(work("q", "cat*8"))[0].keys) == ()
    out = brief(core.handle(Submit(work("c", "cat*8", 1)), 0.0))
    assert out[0].startswith("step 3 joint: encode c.0 into ")


def test_the_same_content_with_another_number_of_rows_is_another_entry() -> None:
    core = make_core("E0", peers="P0")
    core.handle(Submit(work("a", "cat*4", 1)), 0.0)
    core.handle(done(1), 0.0)
    assert "encode b.0" in brief(core.handle(Submit(work("b", "cat*3", 1)), 0.0))[0]


def test_an_item_is_encoded_while_another_of_the_request_waits_for_its_owner() -> None:
    core = make_core("E0", image=8, peers="P0", rules=BatchRules(image_budget=4))
    core.handle(Submit(work("x", "fox", 1)), 0.0)
    core.handle(Submit(work("a", "owl", "cat", 1)), 0.0)
    core.handle(done(1), 0.0)
    core.handle(Submit(work("b", "cat", "dog", 1)), 0.0)
    out = brief(core.handle(done(2), 0.0))
    assert out[2] == "step 3 joint: encode a.1 into 2"
    assert list(core.state.encode_queue) == ["b"], "its own item does not fit the image budget beside a's"
    out = brief(core.handle(done(3), 0.0))
    assert "step 4 joint: encode b.1 into 3" in out
    assert "P0: ready E0:3 0" in out


def test_rows_that_fail_beside_another_request_with_one_of_its_images_end_it_once() -> None:
    """That image is ready by the other request's row; there is no prefill instance that it could be offered to."""
    core = make_core("E0")
    core.handle(Submit(work("s", "dog*4", 1)), 0.0)
    core.handle(Submit(work("r", "owl*4", "fox*4", 1)), 0.0)
    core.handle(Submit(work("t", "owl*4", "cat*4", 1)), 0.0)
    core.handle(done(1), 1.0)
    found = sent(core.handle(broken(2, "t"), 2.0), Finished)
    failed = {each.request: each.failure.error for each in found if each.failure}
    assert failed == {"r": "MigrationError", "t": "StageError"}
