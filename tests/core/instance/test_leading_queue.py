"""Who has leading text to prefill: it follows each move of a request, and forgets who has its features or ends."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from msgspec.structs import replace as replace_value

from support.core_tables import work
from trinity.core.instance.phases import MOVES, Phase
from trinity.core.instance.queues import AWAITS_FEATURES, LeadingQueue, leading_blocks
from trinity.core.instance.request_state import RequestState
from trinity.core.instance.settings import Settings
from trinity.core.messages import Work
from trinity.core.scheduler import BatchRules

OWN = Settings("EP0", "EP", {"image": 8, "kv": 16}, kv_block_size=4, image_block_size=4)


def at(phase: Phase, name: str = "r", text: int = 8) -> RequestState:
    state = RequestState(work(name, text, "cat", 1), 0.0)
    state.phase = phase
    return state


@pytest.mark.parametrize(
    ("of", "blocks"),
    [
        (work("r", 8, "cat", 1), 2),
        (work("r", 11, "cat", 1), 2),
        (work("r", 12, "cat", 9, "dog", 1), 3),
        (work("r", 3, "cat", 1), 0),
        (work("r", "cat", 40), 0),
        (work("r", 40), 0),
        (work("r", 8, "cat", 1, encode_only=True), 0),
    ],
)
def test_whole_blocks_before_the_first_image_lead(of: Work, blocks: int) -> None:
    assert leading_blocks(of, 4) == blocks


@pytest.mark.parametrize("end", [9, 12])
def test_text_that_sees_an_image_behind_it_does_not_lead(end: int) -> None:
    """As Molmo 2 and PaliGemma have it: tokens from the first on see each other, and no chunk may cut them."""
    of = work("r", 8, "cat", 1, 3)
    assert leading_blocks(replace_value(of, media=tuple(replace_value(each, whole=end) for each in of.media)), 4) == 0


@pytest.mark.parametrize("phase", sorted(AWAITS_FEATURES, key=str))
def test_who_waits_for_features_waits_here_in_the_order_in_which_it_came(phase: Phase) -> None:
    queue = LeadingQueue(OWN)
    first, second = at(phase), at(phase, "s")
    for each in (first, second):
        queue.follow(each, Phase.NEW)
    first.phase = Phase.IMAGE_PULL
    queue.follow(first, phase)
    assert queue.requests() == (first, second), "it keeps its place"
    assert queue


def test_who_has_had_its_turn_does_not_come_back_by_waiting_on() -> None:
    queue, state = LeadingQueue(OWN), at(Phase.IMAGE_OFFER)
    queue.follow(state, Phase.NEW)
    queue.leave(state)
    state.phase = Phase.IMAGE_PULL
    queue.follow(state, Phase.IMAGE_OFFER)
    assert not queue


@pytest.mark.parametrize("phase", sorted({*Phase} - AWAITS_FEATURES, key=str))
def test_who_waits_for_no_feature_is_not_here(phase: Phase) -> None:
    queue, state = LeadingQueue(OWN), at(Phase.IMAGE_PULL)
    queue.follow(state, Phase.NEW)
    state.phase = phase
    queue.follow(state, Phase.IMAGE_PULL)
    assert queue.requests() == ()


def test_every_way_into_a_wait_for_features_is_followed() -> None:
    ways = [(before, after) for before, moves in MOVES.items() for after in moves if after in AWAITS_FEATURES]
    assert {before for before, _ in ways} > {Phase.NEW, Phase.DECODING, Phase.MIGRATED_QUEUE}
    for before, after in ways:
        queue, state = LeadingQueue(OWN), at(after)
        queue.follow(state, before)
        assert bool(queue) is (before not in AWAITS_FEATURES), f"{before} to {after}"


@pytest.mark.parametrize(
    "changed",
    [
        {"prefix_cache": False},
        {"roles": "E"},
        {"pools": {"image": 8}},
        {"rules": BatchRules(leading_text=False)},
        {"rules": BatchRules(chunked=False)},
    ],
    ids=str,
)
def test_where_it_is_off_nobody_waits(changed: dict[str, Any]) -> None:
    queue = LeadingQueue(replace(OWN, **changed))
    queue.follow(at(Phase.IMAGE_PULL), Phase.NEW)
    assert not queue


def test_the_text_of_one_request_runs_at_a_time() -> None:
    queue = LeadingQueue(OWN)
    queue.begin("r")
    with pytest.raises(AssertionError, match="text of r is in a step, and s begins"):
        queue.begin("s")
    queue.finish()
    queue.begin("s")
    assert queue.running == "s"
