"""Columns: what decode steps gave, and when it is written to the requests."""

from __future__ import annotations

import random

import pytest

from support.core_tables import make_core, sent, work
from support.virtual.checks import check_state
from trinity.core import InstanceCore
from trinity.core.instance.lanes import MAX_COLUMNS
from trinity.core.messages import Cancel, Emit, Finished, Sampled, Stepped, Submit, Work


def core_with(*works: Work) -> InstanceCore:
    core = make_core("PD0", kv=400)
    for each in works:
        core.handle(Submit(each), 0.0)
    return core


def step(core: InstanceCore, token: int = 1) -> list[Emit]:
    """The running step ends with the same token for every row."""
    running = core.state.lanes["joint"][0].step
    rows = [*(row.request for row in running.prefills if row.last), *running.decodes]
    out = core.handle(Stepped(running.id, "joint", {row: Sampled(token) for row in rows}), 0.0)
    check_state(core.state)
    return sent(out, Emit)


def test_tokens_are_written_when_somebody_asks_and_every_so_many_columns() -> None:
    core = core_with(work("a", 3, max_tokens=100))
    state = core.state.requests["a"]
    step(core)
    for count in range(1, 2 * MAX_COLUMNS + 3):
        step(core, token=count)
        assert state.outputs == count + 1
        assert len(state.stored_tokens) == 1 + count // MAX_COLUMNS * MAX_COLUMNS
    assert state.tokens == [1, *range(1, 2 * MAX_COLUMNS + 3)] == state.stored_tokens


def test_indices_go_on_whoever_comes_and_goes() -> None:
    core = core_with(*(work(name, 3, max_tokens=100) for name in "ab"))
    asks, seen = random.Random(1), dict[str, int]()
    for number in range(60):
        if number == 7:
            core.handle(Submit(work("c", 3, max_tokens=100)), 0.0)
        if number == 30:
            core.handle(Cancel("a"), 0.0)
            del seen["a"]
        (emit,) = step(core)
        assert set(emit.requests) >= set(seen)
        for request, attempt, index, sampled in emit.rows():
            assert (attempt, index, sampled) == (0, seen.get(request, -1) + 1, Sampled(1))
            seen[request] = index
        if asks.random() < 0.2:
            for request, last in seen.items():
                assert core.state.requests[request].tokens == [1] * (last + 1)
    assert sorted(seen) == ["b", "c"]


def test_a_request_ends_by_its_length_and_the_others_go_on() -> None:
    core = core_with(*(work(name, 3, max_tokens=tokens) for name, tokens in (("a", 5), ("b", 9), ("c", 30))))
    counts: dict[str, int] = {}
    while core.state.requests:
        for emit in step(core):
            for request, _, index, _ in emit.rows():
                assert index == counts.get(request, 0)
                counts[request] = index + 1
    assert counts == {"a": 5, "b": 9, "c": 30}


def test_only_the_request_whose_stop_token_it_is_ends() -> None:
    core = core_with(*(work(name, 3, max_tokens=99, stop_ids=frozenset({stop})) for name, stop in (("a", 7), ("b", 8))))
    for _ in range(3):
        step(core)
    running = core.state.lanes["joint"][0].step
    assert running.decodes == ("a", "b")
    out = core.handle(Stepped(running.id, "joint", {"a": Sampled(8), "b": Sampled(8)}), 0.0)
    assert [(each.request, each.reason) for each in sent(out, Finished)] == [("b", "stop")]
    assert list(core.state.decoding) == ["a"]
    assert core.state.requests["a"].tokens[-1] == 8
    step(core, token=8)
    assert list(core.state.decoding) == ["a"], "nobody is left who stops at 8"
    step(core, token=7)
    assert not core.state.requests


def test_nothing_is_kept_of_requests_that_have_left() -> None:
    core = core_with(*(work(name, 3, max_tokens=8) for name in "ab"))
    while core.state.requests:
        step(core)
    columns = core.state.decode_batch
    assert not columns.members
    assert not columns._kept
    assert not +columns._counted


def test_rows_of_an_emit_are_whole() -> None:
    with pytest.raises(ValueError, match="argument"):
        list(Emit(("a", "b"), (0,), (0,), (Sampled(1),)).rows())


def test_whether_nobody_ends_soon_is_known_without_a_look_at_the_rows() -> None:
    core = core_with(work("a", 3, max_tokens=9))
    step(core)
    step(core)
    columns = core.state.decode_batch  # a has 2 of its 9 tokens
    assert [columns.ends_none_within(more) for more in (0, 6, 7, 8)] == [True, True, False, False]
