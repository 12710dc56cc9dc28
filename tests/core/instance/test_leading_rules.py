"""Each rule of leading text by itself: for whom it makes way, and how much of it counts as cached by others."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from support.core_tables import brief, make_core, work
from trinity.core.instance.leading_text import find_leading_chunk
from trinity.core.instance.phases import Phase
from trinity.core.instance.request_state import RequestState
from trinity.core.messages import Submit
from trinity.core.prefix_cache import Key
from trinity.core.scheduler import BatchRules, EncodeView, LeadingChunk, PrefillView, View, schedule

OF = work("r", 10, "cat", 2)


@pytest.mark.parametrize(
    "place", ["prefilling", "prefill_queue", "migrated_queue", "preempted", "kv_offers", "paused", "nothing"]
)
def test_whoever_waits_for_prefill_or_for_blocks_comes_first(place: str) -> None:
    s = make_core(
        "P0", rules=BatchRules(token_budget=3)
    ).state  # a step has no room: what is asked here is asked by hand
    state = RequestState(OF, 0.0)
    state.phase = Phase.IMAGE_PULL
    s.requests["r"] = state
    s.leading.follow(state, Phase.NEW)
    other = RequestState(work("other", 3), 0.0)
    s.requests["other"] = other
    if place == "prefilling":
        s.prefilling["other"] = other
    elif place == "paused":
        s.paused.add("other")
    elif place != "nothing":
        getattr(s, place).append("other")
    chunk = find_leading_chunk(s, "joint", 64)
    assert chunk == (LeadingChunk("r", 0, 8) if place == "nothing" else None)


def test_behind_a_step_that_encodes_no_text_is_launched() -> None:
    """It would not run before that has ended, and then who has all features would wait for it."""
    core = make_core("EP0", depth=2, peers="D0")
    assert brief(core.handle(Submit(OF), 0.0)) == ["step 1 joint: encode r.0 into 0"]
    assert core.state.leading.requests()


@pytest.mark.parametrize(
    ("led", "cached", "others"),
    [
        ([], 12, 12),
        ([(0, 8)], 8, 0),
        ([(0, 8), (8, 16)], 4, 0),
        ([(0, 8), (8, 16)], 12, 0),
        ([(4, 8), (12, 16)], 16, 8),
        ([(8, 16)], 24, 16),
    ],
)
def test_what_others_had_cached_is_what_it_has_not_led(led: list[tuple[int, int]], cached: int, others: int) -> None:
    state = RequestState(work("r", 30, "cat", 2), 0.0)
    for start, end in led:
        state.lead(start, end)
    assert state.led_to == (led[-1][1] if led else 0)
    state.start_prefill(cached)
    assert state.cached_tokens == others
    state.start_prefill(0)
    assert state.cached_tokens == others, "of its first prefill"


def test_a_step_asks_for_the_first_one_alone_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    s = make_core("P0", kv=6, rules=BatchRules(token_budget=3)).state
    for number in range(5):
        state = RequestState(work(f"r{number}", 12, "cat", 2, text=100 * number), 0.0)
        state.phase = Phase.IMAGE_PULL
        s.requests[f"r{number}"] = state
        s.leading.follow(state, Phase.NEW)
    s.kv.allocate(4)
    asked: list[int] = []
    match = s.kv.match

    def counted(keys: Sequence[Key]) -> tuple[int, ...]:
        asked.append(len(keys))
        return match(keys)

    monkeypatch.setattr(s.kv, "match", counted)
    assert find_leading_chunk(s, "joint", 64) is None, "three blocks, and two are free"
    assert asked == [3]
    assert find_leading_chunk(s, "joint", 8) == LeadingChunk("r0", 0, 8)
    assert find_leading_chunk(s, "joint", 3) is None


def test_the_scheduler_asks_where_nothing_else_is_prefilled_or_encoded() -> None:
    asked: list[int] = []

    def find(room: int) -> LeadingChunk:
        asked.append(room)
        return LeadingChunk("r", 0, 4)

    rules = BatchRules(token_budget=10, image_budget=9)
    assert schedule(View(decoding=("a", "b"), find_leading=find), rules).leading == LeadingChunk("r", 0, 4)
    assert asked == [8], "what the decodes leave of the budget"
    for busy in (
        View(prefilling=[PrefillView("p", 0, 3)], find_leading=find),
        View(new_prefills=[PrefillView("p", 0, 3)], find_leading=find),
        View(encoding=[EncodeView("e", ((0, 4),))], find_leading=find),
        View(new_encodes=[EncodeView("e", ((0, 4),))], find_leading=find),
    ):
        assert schedule(busy, rules).leading is None
    assert asked == [8]
    assert schedule(View(new_prefills=[PrefillView("p", 0, 3, blocks=2)], find_leading=find), rules).leading
