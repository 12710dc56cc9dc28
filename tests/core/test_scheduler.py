"""Algorithm 1 (TriInfer 4.2) worked out by hand, line by line; its policies and switches; what must always hold."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.core.scheduler import (
    NOTHING,
    Batch,
    BatchRules,
    EncodeView,
    Outstanding,
    PrefillView,
    View,
    latency_bound,
    schedule,
)
from trinity.errors import ConfigError


@dataclass(frozen=True)
class Cost:
    """A second for each row."""

    decode: float = 1.0
    prefill: float = 1.0
    media: float = 1.0

    def seconds(self, decodes: int, prefill_tokens: int, media_tokens: int) -> float:
        return decodes * self.decode + prefill_tokens * self.prefill + media_tokens * self.media


def prompt(request: str, end: int, start: int = 0, blocks: int = 1, **fields: Any) -> PrefillView:
    return PrefillView(request, start, end, blocks=blocks, **fields)


def images(request: str, *tokens: int, blocks: int = 1) -> EncodeView:
    return EncodeView(request, tuple(enumerate(tokens)), {"image": blocks})


def batch(rules: BatchRules, **view: Any) -> Batch:
    view.setdefault("free_kv", 100)
    view["free_media"] = {"image": view.get("free_media", 100)}
    return schedule(View(**view), rules)


@pytest.mark.parametrize(
    ("roles", "bound"),
    [("E", 2.0), ("EP", 2.0), ("P", 2.0), ("D", 0.098), ("ED", 0.098), ("EPD", 0.098), ("PD", 0.098)],
)
def test_lines_1_to_4_the_latency_bound_follows_from_the_stages(roles: str, bound: float) -> None:
    assert latency_bound(roles, ttft=4.0, tbt=0.1) == pytest.approx(bound)


def test_lines_7_to_9_every_decode_is_in_the_batch_even_beyond_the_budget() -> None:
    found = batch(BatchRules(2), decoding=("a", "b", "c"), prefilling=[prompt("p", 9)], new_prefills=[prompt("q", 9)])
    assert found == Batch(decodes=("a", "b", "c"))


def test_lines_10_to_13_running_prefills_share_what_decodes_leave_of_the_token_budget() -> None:
    found = batch(BatchRules(10), decoding=("a", "b"), prefilling=[prompt("p", 12, start=7), prompt("q", 9)])
    assert found.prefills == [("p", 7, 5), ("q", 0, 3)]
    assert found.admitted_prefills == []


def test_lines_14_to_16_running_encodes_take_whole_images_within_the_image_budget() -> None:
    found = batch(BatchRules(image_budget=10), encoding=[images("a", 4, 4, 4), images("b", 2)])
    assert found.encodes == [("a", (0, 1)), ("b", (0,))]
    assert found.admitted_encodes == []


def test_an_image_larger_than_the_budget_runs_alone() -> None:
    assert batch(BatchRules(image_budget=1), encoding=[images("a", 40, 1)]).encodes == [("a", (0,))]
    assert batch(BatchRules(image_budget=1), new_encodes=[images("a", 40, 1)]).encodes == [("a", (0,))]


def test_lines_17_to_20_new_prefills_are_admitted_while_budget_and_blocks_last() -> None:
    found = batch(BatchRules(10), new_prefills=[prompt("p", 4), prompt("q", 4), prompt("r", 4), prompt("s", 4)])
    assert found.prefills == [("p", 0, 4), ("q", 0, 4), ("r", 0, 2)]
    assert found.admitted_prefills == ["p", "q", "r"]


def test_new_prefills_start_behind_their_hits() -> None:
    assert batch(BatchRules(10), new_prefills=[prompt("p", 9, start=6)]).prefills == [("p", 6, 3)]


def test_new_prefills_wait_for_blocks_in_their_order() -> None:
    waiting = [prompt("p", 4, blocks=3), prompt("q", 4, blocks=3), prompt("r", 4, blocks=1)]
    assert batch(BatchRules(), new_prefills=waiting, free_kv=5).admitted_prefills == ["p"]
    assert batch(BatchRules(), new_prefills=waiting, free_kv=6).admitted_prefills == ["p", "q"]
    assert batch(BatchRules(), new_prefills=waiting, free_kv=7).admitted_prefills == ["p", "q", "r"]
    assert batch(BatchRules(), new_prefills=waiting, free_kv=2).admitted_prefills == []


def test_the_running_go_ahead_of_the_new() -> None:
    found = batch(BatchRules(6), prefilling=[prompt("p", 4)], new_prefills=[prompt("q", 4)])
    assert found.prefills == [("p", 0, 4), ("q", 0, 2)]
    found = batch(BatchRules(image_budget=6), encoding=[images("a", 4)], new_encodes=[images("b", 4)])
    assert (found.encodes, found.admitted_encodes) == ([("a", (0,))], [])


def test_lines_21_to_24_new_encodes_are_admitted_while_budget_and_blocks_last() -> None:
    waiting = [images("a", 4), images("b", 4, 4), images("c", 4)]
    found = batch(BatchRules(image_budget=10), new_encodes=waiting)
    assert found.encodes == [("a", (0,)), ("b", (0,))], "b's second image follows once it runs"
    assert found.admitted_encodes == ["a", "b"]


def test_new_encodes_wait_for_blocks_in_their_order() -> None:
    waiting = [images("a", 4, blocks=3), images("b", 4, blocks=3), images("c", 4)]
    assert batch(BatchRules(image_budget=99), new_encodes=waiting, free_media=5).admitted_encodes == ["a"]
    assert batch(BatchRules(image_budget=99), new_encodes=waiting, free_media=6).admitted_encodes == ["a", "b"]
    assert batch(BatchRules(image_budget=99), new_encodes=waiting, free_media=2).admitted_encodes == []


def test_a_request_whose_images_are_all_cached_costs_no_budget() -> None:
    waiting = [images("a", 4), images("b", blocks=2), images("c", blocks=9)]
    found = batch(BatchRules(image_budget=1), new_encodes=waiting, free_media=3)
    assert (found.encodes, found.admitted_encodes) == ([("a", (0,))], ["a", "b"])


def test_encodes_take_nothing_from_the_token_budget_nor_prefills_from_the_image_budget() -> None:
    found = batch(
        BatchRules(token_budget=4, image_budget=4),
        decoding=("d",),
        new_prefills=[prompt("p", 9)],
        new_encodes=[images("a", 4)],
    )
    assert found == Batch(("d",), [("p", 0, 3)], [("a", (0,))], ["p"], ["a"])


def test_a_full_budget_looks_at_no_waiting_request() -> None:
    def nobody() -> Any:
        raise AssertionError("asked for the next one")
        yield

    assert batch(BatchRules(1), decoding=("d",), new_prefills=nobody()).admitted_prefills == []

    def one() -> Any:
        yield prompt("p", 4)
        raise AssertionError("asked for the next one")

    assert batch(BatchRules(4), new_prefills=one()).admitted_prefills == ["p"]


@pytest.mark.parametrize(
    ("tokens", "running", "expected"),
    [
        (10, [prompt("p", 8)], [("p", 0, 8)]),
        (10, [prompt("p", 12)], [("p", 0, 12)]),
        (10, [prompt("p", 8), prompt("q", 8)], [("p", 0, 8)]),
        (10, [prompt("p", 8), prompt("q", 2)], [("p", 0, 8), ("q", 0, 2)]),
        (10, [prompt("p", 12), prompt("q", 1)], [("p", 0, 12)]),
    ],
)
def test_without_chunking_a_prompt_runs_whole_and_alone_where_it_exceeds_the_budget(
    tokens: int, running: list[PrefillView], expected: list[tuple[str, int, int]]
) -> None:
    rules = BatchRules(token_budget=tokens, chunked=False)
    assert batch(rules, prefilling=running).prefills == expected
    assert batch(rules, new_prefills=running).prefills == expected


def test_without_chunking_a_prompt_waits_where_decodes_fill_the_budget() -> None:
    rules = BatchRules(token_budget=2, chunked=False)
    assert batch(rules, decoding=("a", "b"), prefilling=[prompt("p", 4)]).prefills == []
    assert batch(rules, decoding=("a",), prefilling=[prompt("p", 4)]).prefills == [("p", 0, 4)]


def test_without_an_image_budget_every_encode_runs() -> None:
    rules = BatchRules(image_budget=1, limit_encodes=False)
    assert batch(rules, new_encodes=[images("a", 9, 9), images("b", 9)]).encodes == [("a", (0, 1)), ("b", (0,))]


@pytest.mark.parametrize(
    ("tokens", "start", "expected"),
    [
        pytest.param(4, 0, 3, id="before the span [3, 8)"),
        pytest.param(3, 0, 3, id="just up to it"),
        pytest.param(8, 0, 8, id="just behind it"),
        pytest.param(9, 0, 9, id="beyond it"),
        pytest.param(2, 3, 5, id="over the budget where it begins with it and runs alone"),
        pytest.param(5, 3, 5, id="the span alone"),
        pytest.param(11, 0, 10, id="before the second span [10, 14)"),
        pytest.param(99, 0, 16, id="everything"),
    ],
)
def test_a_chunk_does_not_cut_an_atomic_span(tokens: int, start: int, expected: int) -> None:
    view = prompt("p", 16, start=start, atomic=((3, 8), (10, 14)))
    assert batch(BatchRules(token_budget=tokens), prefilling=[view]).prefills == [("p", start, expected)]


def test_an_atomic_span_that_does_not_fit_beside_another_prefill_waits() -> None:
    view = prompt("p", 16, start=3, atomic=((3, 8),))
    assert batch(BatchRules(5), prefilling=[prompt("q", 2), view]).prefills == [("q", 0, 2)]
    assert batch(BatchRules(7), prefilling=[prompt("q", 2), view]).prefills == [("q", 0, 2), ("p", 3, 5)]
    found = batch(BatchRules(5), new_prefills=[prompt("q", 2), view])
    assert (found.prefills, found.admitted_prefills) == ([("q", 0, 2)], ["q"])


def test_an_atomic_span_runs_over_the_budget_beside_decodes_and_not_where_they_fill_it() -> None:
    view = prompt("p", 16, start=3, atomic=((3, 8),))
    assert batch(BatchRules(3), decoding=("d",), prefilling=[view]).prefills == [("p", 3, 5)]
    assert batch(BatchRules(1), decoding=("d",), prefilling=[view]).prefills == []


def test_prefill_first_decodes_only_where_nothing_else_can_run() -> None:
    rules = BatchRules(token_budget=8, image_budget=8, policy="prefill_first")
    found = batch(rules, decoding=("d",), prefilling=[prompt("p", 20)])
    assert (list(found.decodes), found.prefills) == ([], [("p", 0, 8)])
    assert list(batch(rules, decoding=("d",), encoding=[images("a", 4)]).decodes) == []
    found = batch(rules, decoding=("d",), new_prefills=[prompt("p", 4, blocks=9)], free_kv=8)
    assert found == Batch(("d",)), "it waits for blocks that decodes will give back"
    assert batch(rules, decoding=("d", "e")) == Batch(("d", "e"))


def predicted(limit_s: float, **fields: Any) -> BatchRules:
    return replace(BatchRules(token_budget=100, image_budget=1, policy="time", limit_s=limit_s, cost=Cost()), **fields)


def test_time_admits_what_the_prediction_allows() -> None:
    found = batch(predicted(10.0), decoding=("d",), prefilling=[prompt("p", 4)], new_prefills=[prompt("q", 9)])
    assert found.prefills == [("p", 0, 4), ("q", 0, 5)]
    found = batch(predicted(10.0), prefilling=[prompt("p", 4)], encoding=[images("a", 5, 5)])
    assert found.encodes == [("a", (0,))]
    found = batch(predicted(10.0), prefilling=[prompt("p", 4)], encoding=[images("a", 6)])
    assert found.encodes == [("a", (0,))]
    found = batch(predicted(10.0), prefilling=[prompt("p", 4)], encoding=[images("a", 7)])
    assert found.encodes == []


def test_time_weighs_decodes_prompts_and_images_each_by_its_cost() -> None:
    rules = predicted(10.0, cost=Cost(decode=2.0, prefill=0.5, media=3.0))
    found = batch(rules, decoding=("d", "e"), new_prefills=[prompt("p", 20)])
    assert found.prefills == [("p", 0, 12)]
    assert batch(rules, decoding=("d", "e"), new_encodes=[images("a", 2)]).encodes == [("a", (0,))]
    chunk = [prompt("p", 2)]
    assert batch(rules, decoding=("d", "e"), prefilling=chunk, new_encodes=[images("a", 1)]).encodes == [("a", (0,))]
    assert batch(rules, decoding=("d", "e"), prefilling=chunk, new_encodes=[images("a", 2)]).encodes == []
    found = batch(rules, encoding=[images("a", 1, 1, 1, 1)])
    assert found.encodes == [("a", (0, 1, 2))]


def test_time_runs_one_piece_alone_whatever_it_costs() -> None:
    assert batch(predicted(0.0), prefilling=[prompt("p", 4)]).prefills == [("p", 0, 1)]
    assert batch(predicted(0.0), encoding=[images("a", 5, 5)]).encodes == [("a", (0,))]
    assert batch(predicted(0.0), decoding=("d",), prefilling=[prompt("p", 4)]) == Batch(("d",))
    found = batch(predicted(0.0), prefilling=[prompt("p", 4)], encoding=[images("a", 5)])
    assert (found.prefills, found.encodes) == ([("p", 0, 1)], [])


def test_time_admits_one_item_beside_decodes_where_none_would_ever_fit() -> None:
    """Else text requests that come and decode without end would keep an image waiting without end."""
    found = batch(predicted(4.0), decoding=("d", "e"), encoding=[images("a", 3, 1)], new_encodes=[images("b", 1)])
    assert (list(found.decodes), found.encodes) == (["d", "e"], [("a", (0,))])
    found = batch(predicted(4.0), decoding=("d", "e"), prefilling=[prompt("p", 1)], encoding=[images("a", 3)])
    assert (found.prefills, found.encodes) == ([("p", 0, 1)], []), "a prompt's piece went first: the next step's turn"


def test_time_is_bounded_by_the_token_budget_too() -> None:
    assert batch(predicted(50.0, token_budget=7), decoding=("d",), prefilling=[prompt("p", 20)]).prefills == [
        ("p", 0, 6)
    ]


def test_time_counts_what_the_other_lane_runs() -> None:
    other = Outstanding(decodes=1, prefill_tokens=2, media_tokens=3)
    assert batch(predicted(10.0), prefilling=[prompt("p", 20)], outstanding=other).prefills == [("p", 0, 4)]
    assert batch(predicted(10.0), encoding=[images("a", 1, 3, 1)], outstanding=other).encodes == [("a", (0, 1))]
    assert Outstanding(0, 0, 0) == NOTHING


def test_the_other_lane_takes_nothing_from_counted_budgets() -> None:
    other = Outstanding(decodes=9, prefill_tokens=9, media_tokens=9)
    assert batch(BatchRules(4), prefilling=[prompt("p", 9)], outstanding=other).prefills == [("p", 0, 4)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "fair"}, "unknown policy 'fair'; known: alg1, prefill_first, time"),
        ({"order": "lifo"}, "unknown order 'lifo'; known: deadline, fcfs, sjf"),
        ({"token_budget": 0}, "token_budget is a whole number of at least 1, got 0"),
        ({"image_budget": 0}, "image_budget is a whole number of at least 1, got 0"),
    ],
)
def test_rules_without_meaning_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        BatchRules(**fields)


def test_rules_at_their_limits() -> None:
    assert BatchRules(token_budget=1, image_budget=1) == BatchRules(
        token_budget=1, image_budget=1, policy="alg1", order="fcfs"
    )
    for rules in (BatchRules(), BatchRules(policy="prefill_first"), predicted(1.0)):
        rules.check_cost()
    for rules in (predicted(1.0, cost=None), replace(predicted(1.0), limit_s=None)):
        with pytest.raises(ConfigError) as error:
            rules.check_cost()
        hint = "give the pipeline an slo, which profiles them"
        assert str(error.value) == f"policy 'time' needs cost= and limit_s=: {hint}"


@st.composite
def views(draw: st.DrawFn) -> dict[str, Any]:
    """Requests at each stage, small enough to go through by hand."""
    sizes = st.integers(1, 20)

    def prompts(name: str, least: int) -> list[PrefillView]:
        found = []
        for index in range(draw(st.integers(0, 4))):
            start, length = draw(st.integers(0, 9)), draw(sizes)
            span = draw(st.sampled_from([(), ((start, start + length // 2),), ((start + 1, start + length),)]))
            atomic = tuple(each for each in span if each[0] < each[1])
            found.append(PrefillView(f"{name}{index}", start, start + length, atomic, draw(st.integers(least, 4))))
        return found

    def media(name: str) -> list[EncodeView]:
        items = st.lists(sizes, min_size=1, max_size=3)
        return [images(f"{name}{index}", *draw(items)) for index in range(draw(st.integers(0, 4)))]

    return {
        "decoding": tuple(f"d{index}" for index in range(draw(st.integers(0, 6)))),
        "prefilling": prompts("p", 0),
        "encoding": media("e"),
        "new_prefills": prompts("q", 1),
        "new_encodes": media("f"),
        "free_kv": draw(st.integers(0, 12)),
        "free_media": draw(st.integers(0, 4)),
    }


RULES = st.builds(
    BatchRules,
    token_budget=st.integers(1, 30),
    image_budget=st.integers(1, 30),
    chunked=st.booleans(),
    limit_encodes=st.booleans(),
    limit_decodes=st.booleans(),
    policy=st.sampled_from(["alg1", "prefill_first"]),
)


@given(views(), RULES)
def test_what_always_holds_of_a_batch(view: dict[str, Any], rules: BatchRules) -> None:
    found = batch(rules, **view)
    prompts = {each.request: each for each in [*view["prefilling"], *view["new_prefills"]]}
    for request, start, length in found.prefills:
        assert start == prompts[request].start
        assert 1 <= length <= prompts[request].end - start
        end = start + length
        assert not any(low < end < high for low, high in prompts[request].atomic) or not rules.chunked
    rows = len(found.decodes) + sum(length for *_, length in found.prefills)
    assert rows <= max(rules.token_budget, len(found.decodes)) or len(found.prefills) == 1
    for name, queue in (("prefills", view["new_prefills"]), ("encodes", view["new_encodes"])):
        admitted = getattr(found, f"admitted_{name}")
        assert admitted == [each.request for each in queue][: len(admitted)], "nobody is skipped"
    assert sum(prompts[request].blocks for request in found.admitted_prefills) <= view["free_kv"]
    assert len(found.admitted_encodes) <= view["free_media"]
    if view["decoding"] or view["prefilling"] or view["encoding"]:
        assert found.decodes or found.prefills or found.encodes, "something always runs"


def divisible(view: dict[str, Any]) -> dict[str, Any]:
    """The same without atomic spans."""
    plain = {name: [each._replace(atomic=()) for each in view[name]] for name in ("prefilling", "new_prefills")}
    return {**view, **plain}


@given(views(), st.integers(1, 30), st.integers(1, 30), st.integers(0, 10))
def test_more_tokens_or_blocks_never_admit_less(view: dict[str, Any], tokens: int, media: int, more: int) -> None:
    view = divisible(view)
    before = batch(BatchRules(token_budget=tokens, image_budget=media), **view)
    larger = {**view, "free_kv": view["free_kv"] + more, "free_media": view["free_media"] + more}
    for after in (
        batch(BatchRules(token_budget=tokens + more, image_budget=media), **view),
        batch(BatchRules(token_budget=tokens, image_budget=media), **larger),
    ):
        assert len(after.admitted_prefills) >= len(before.admitted_prefills)
        assert sum(length for *_, length in after.prefills) >= sum(length for *_, length in before.prefills)
        assert len(after.admitted_encodes) >= len(before.admitted_encodes)
        assert after.decodes == before.decodes


@given(views(), st.floats(0.0, 60.0), st.integers(0, 5))
def test_a_predicted_batch_keeps_its_limit_or_is_one_piece(view: dict[str, Any], limit_s: float, other: int) -> None:
    view = divisible(view)
    found = batch(predicted(limit_s, token_budget=40), **view, outstanding=Outstanding(other, other, other))
    tokens = sum(length for *_, length in found.prefills)
    every = [*view["encoding"], *view["new_encodes"]]
    sizes = {(each.request, item): size for each in every for item, size in each.items}
    chosen = [sizes[request, item] for request, each in found.encodes for item in each]
    seconds = Cost().seconds(len(found.decodes) + other, tokens + other, sum(chosen) + other)
    assert seconds <= limit_s or found.decodes == view["decoding"] != () or tokens + len(chosen) <= 1
