"""Optimistic reservation in one core, command by command: who grows, who waits, who gives way, who cannot."""

from __future__ import annotations

from typing import Any

import pytest

from support.core_tables import Row, brief, done, emptied, kv_offer, make_core, peer_up, table, work
from support.virtual.checks import check_state
from trinity.core import InstanceCore
from trinity.core.messages import Commit, Pulled, Ready, Submit, Work


def decoding(**options: Any) -> InstanceCore:
    """ "a" and "b" decode in a pool of five blocks; "a" came first. Each has a text of four, and a block to spare."""
    core = make_core("PD0", kv=5, reservation="optimistic", prefix_cache=False, **options)
    rows: list[Row] = [
        (Submit(work("a", 4, max_tokens=12, number=1)), ["open a kv 0,1", "step 1 joint: prefill a 0+4 last"]),
        (Submit(work("b", 4, max_tokens=12, number=2)), []),
        (done(1, a=9), ["frontend: emit a#0=9", "open b kv 2,3", "step 2 joint: prefill b 0+4 last, decode a"]),
    ]
    table(core, rows)
    return core


def step(core: InstanceCore, number: int, *requests: str) -> list[str]:
    out = brief(core.handle(done(number, **dict.fromkeys(requests, 9)), 0.0))
    check_state(core.state)
    return [line for line in out if "emit" not in line]


def test_a_request_grows_when_its_next_token_has_no_place() -> None:
    core = decoding()
    assert step(core, 2, "a", "b") == ["step 3 joint: decode a b"]
    for number in (3, 4, 5):
        out = step(core, number, "a", "b")
    assert out[0] == "grow a 4"
    assert out[1].startswith("step 6 joint: decode a b")


def test_the_youngest_gives_way_and_is_computed_again_behind_its_prompt() -> None:
    core = decoding()
    for number in (2, 3, 4, 5):
        step(core, number, "a", "b")
    assert step(core, 6, "a", "b") == ["step 7 joint: decode a"], "b waits: it is the youngest itself"
    for number in (7, 8):
        assert step(core, number, "a") == [f"step {number + 1} joint: decode a"]
    out = step(core, 9, "a")
    assert out == ["close b", "grow a 2", "step 10 joint: decode a"]
    assert core.state.requests["b"].preemptions == core.state.preemptions == 1
    assert list(core.state.preempted) == ["b"]
    assert step(core, 10, "a") == ["step 11 joint: decode a"], "its text and a little do not fit yet"
    assert step(core, 11, "a") == ["step 12 joint: decode a"]
    assert step(core, 12, "a")[0] == "frontend: finished a length 12 by way of PD0"
    assert core.state.requests["b"].prefill_end == 9, "four of its prompt, five outputs"


def until_preempted(core: InstanceCore, number: int = 1) -> list[str]:
    """What the core says when it preempts for the first time; steps end one after the other until then."""
    while True:
        running = core.state.lanes["joint"][0]
        ended = [row.request for row in running.step.prefills if row.last] + list(running.step.decodes)
        out = step(core, running.step.id, *ended)
        if core.state.preemptions:
            return out


@pytest.mark.parametrize("cached", [True, False])
def test_its_features_are_held_if_they_are_cached_and_encoded_again_if_not(cached: bool) -> None:
    core = make_core("EPD0", kv=6, reservation="optimistic", prefix_cache=False, image_cache=cached)
    core.handle(Submit(work("a", 4, max_tokens=20, number=1)), 0.0)
    core.handle(Submit(work("b", "cat", 1, max_tokens=20, number=2)), 0.0)
    out = until_preempted(core)
    state = core.state.requests["b"]
    assert state.media[0].ready == cached
    assert ("b" in core.state.preempted) == cached
    assert any("encode b.0" in line for line in out) == (not cached), out


def offered(core: InstanceCore, *works: Work) -> InstanceCore:
    """Their KV has come to a decode instance."""
    for number, each in enumerate(works, start=1):
        core.handle(kv_offer(f"P0:{number}", each, (number,)), 0.0)
        core.handle(Ready(f"P0:{number}", (0,)), 0.0)
        core.handle(Commit(f"P0:{number}", (7,)), 0.0)
        core.handle(Pulled(f"P0:{number}", 0), 0.0)
    return core


def test_a_decode_instance_sends_the_youngest_back_with_what_it_has() -> None:
    works = [work(name, 4, text=100 * number, max_tokens=16, number=number) for number, name in [(1, "a"), (2, "b")]]
    core = offered(make_core("D0", kv=5, reservation="optimistic", peers="P0"), *works)
    out = until_preempted(core)
    assert out[:2] == ["close b", "frontend: finished b preempted 5 by way of P0 D0"]
    assert list(core.state.requests) == ["a"]
    assert not core.state.tombstones


@pytest.mark.parametrize(("there", "blocks"), [(3, 4), (4, 2)])
def test_a_decode_instance_reserves_all_for_what_no_prefill_instance_could_compute_again(
    there: int, blocks: int
) -> None:
    """A text of four and thirteen tokens, the last of which is not fed: 16 positions, four blocks."""
    core = make_core("D0", kv=9, reservation="optimistic")
    core.handle(peer_up("P0", kv=there), 0.0)
    core.handle(peer_up("E1", kv=99), 0.0)
    offered(core, work("a", 4, max_tokens=13, number=1))
    assert len(core.state.requests["a"].block_table) == blocks
    assert core.state.requests["a"].never_preempted == (blocks == 4)


def test_who_could_not_be_computed_again_is_not_preempted_for_an_older_one() -> None:
    """P0 holds all four blocks that "a" may come to, and not the five of "b", which has them and keeps them."""
    core = make_core("D0", kv=8, reservation="optimistic", prefix_cache=False)
    core.handle(peer_up("P0", kv=4), 0.0)
    works = [work("a", 4, max_tokens=13, number=1), work("b", 4, text=200, max_tokens=17, number=2)]
    offered(core, *works)
    assert {name: len(state.block_table) for name, state in core.state.requests.items()} == {"a": 2, "b": 5}
    rows = []
    while len(core.state.requests) == 2:
        running = core.state.lanes["joint"][0].step
        rows.append(running.decodes)
        out = step(core, running.id, *running.decodes)
    assert out[:2] == ["frontend: finished b length 17 by way of P0 D0", "close b"]
    assert set(rows) == {("a",), ("a", "b"), ("b",)}, "the older one waits for the last of its blocks"
    assert not core.state.preemptions


def test_full_reservation_reserves_all_and_never_grows() -> None:
    core = make_core("PD0", kv=16)
    out = brief(core.handle(Submit(work("a", 4, max_tokens=12)), 0.0))
    assert out[0] == "open a kv 0,1,2,3"
    assert not core.announcement().returns
    assert make_core("PD0", reservation="optimistic").announcement().returns


def test_a_request_that_asks_for_little_reserves_no_more_than_it_can_use() -> None:
    core = make_core("PD0", kv=16, reservation="optimistic")
    assert brief(core.handle(Submit(work("a", 4, max_tokens=1)), 0.0))[0] == "open a kv 0"


def test_new_requests_leave_a_block_to_each_that_decodes() -> None:
    core = make_core("PD0", kv=4, reservation="optimistic", prefix_cache=False)
    core.handle(Submit(work("a", 4, max_tokens=12, number=1)), 0.0)
    core.handle(Submit(work("b", 4, max_tokens=12, number=2)), 0.0)
    assert step(core, 1, "a") == ["step 2 joint: decode a"], "two blocks are free, and one is for a"


def test_a_drained_core_is_idle() -> None:
    emptied(make_core("EPD0", reservation="optimistic"))
