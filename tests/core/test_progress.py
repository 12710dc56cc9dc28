"""A part makes no progress where its oldest work is old and none has ended for as long: by a table of events."""

from __future__ import annotations

import asyncio

import pytest

from trinity.core.progress import PartProgress, StalledPart, WorkToken

AFTER_S = 10.0
CASES: dict[str, tuple[list[tuple[float, str, str]], float, dict[str, float]]] = {
    "no work": ([], 100, {}),
    "young work": ([(0, "begin", "text 1")], 10, {}),
    "old work": ([(0, "begin", "text 1")], 11, {"text": 11}),
    "ended work": ([(0, "begin", "text 1"), (1, "end", "text 1")], 100, {}),
    "work that came late": ([(0, "begin", "text 1"), (1, "end", "text 1"), (95, "begin", "text 2")], 100, {}),
    "a queue of which some ends": ([(0, "begin", "text 1"), (0, "begin", "text 2"), (95, "end", "text 2")], 100, {}),
    "a queue of which nothing ends any more": (
        [(0, "begin", "text 1"), (0, "begin", "text 2"), (50, "end", "text 2")], 100, {"text": 50},
    ),
    "another part's end": (
        [(0, "begin", "text 1"), (0, "begin", "media 1"), (99, "end", "media 1")],
        100, {"text": 100},
    ),
    "two ends of one": (
        [(0, "begin", "text 1"), (0, "begin", "text 2"), (1, "end", "text 1"), (99, "end", "text 1")],
        100, {"text": 99},
    ),
    "seen the same": ([(0, "see", "lane a"), (50, "see", "lane a")], 100, {"lane": 100}),
    "seen another": ([(0, "see", "lane a"), (95, "see", "lane b")], 100, {}),
    "seen none": ([(0, "see", "lane a"), (5, "see", "lane")], 100, {}),
    "seen and gone": ([(0, "see", "lane a"), (5, "forget", "lane")], 100, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_parts_without_progress(case: str) -> None:
    events, at, expected = CASES[case]
    now, tokens = [0.0], dict[str, WorkToken]()
    progress = PartProgress(lambda: now[0])
    for now[0], what, named in events:
        part, _, name = named.partition(" ")
        if what == "begin":
            tokens[named] = progress.begin(part)
        elif what == "end":
            progress.end(tokens[named])
        elif what == "see":
            progress.observe(part, name or None)
        else:
            progress.forget(part)
    now[0] = at
    assert progress.find_stalled(AFTER_S) == [StalledPart(*each) for each in expected.items()]


def test_work_may_be_allowed_more_time_and_ends_with_its_block() -> None:
    now = [0.0]
    progress = PartProgress(lambda: now[0])
    with progress.working("media", 60.0):
        now[0] = 69.0
        assert not progress.find_stalled(AFTER_S)
        now[0] = 71.0
        assert progress.find_stalled(AFTER_S) == [StalledPart("media", 71.0)]
    assert not progress.find_stalled(AFTER_S)
    progress.observe("lane", 1, 60.0)
    now[0] += 69.0
    assert not progress.find_stalled(AFTER_S)
    now[0] += 2.0
    assert progress.find_stalled(AFTER_S) == [StalledPart("lane", 71.0)]


@pytest.mark.parametrize(("how", "left"), [(asyncio.CancelledError, True), (ValueError, False)])
def test_work_that_leaves_is_no_end(how: type[BaseException], left: bool) -> None:
    now = [0.0]
    progress = PartProgress(lambda: now[0])
    progress.begin("text")
    now[0] = 8.0
    with pytest.raises(how), progress.working("text"):
        raise how
    now[0] = 11.0
    assert progress.find_stalled(AFTER_S) == ([StalledPart("text", 11.0)] if left else [])


def test_what_is_observed_may_be_predicted_later() -> None:
    """A lane's report of its step and the word of how long that takes come one after the other."""
    now = [0.0]
    progress = PartProgress(lambda: now[0])
    progress.observe("lane", "a")
    now[0] = 5.0
    progress.observe("lane", "a", 60.0)
    now[0] = 69.0
    progress.observe("lane", "a", 1.0)
    assert not progress.find_stalled(AFTER_S), "that of the step behind it, whose report comes later"
    now[0] = 71.0
    assert progress.find_stalled(AFTER_S) == [StalledPart("lane", 71.0)]
    progress.observe("lane", "b")
    now[0] = 82.0
    assert progress.find_stalled(AFTER_S) == [StalledPart("lane", 11.0)]
