"""The timeline's file, read back as a viewer would read it."""

from __future__ import annotations

import json
import math
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.errors import ConfigError
from trinity.timeline import SOURCE_LANE, Timeline

REQUIRED = {
    "X": {"name", "cat", "ts", "dur", "pid", "tid", "args"},
    "M": {"name", "pid", "tid", "args"},
    "s": {"name", "cat", "id", "ts", "pid", "tid"},
    "f": {"name", "cat", "id", "ts", "pid", "tid", "bp"},
}


def events(timeline: Timeline) -> list[dict[str, Any]]:
    document = json.loads(timeline.to_json())
    assert document["displayTimeUnit"] == "ms"
    found: list[dict[str, Any]] = document["traceEvents"]
    for event in found:
        assert set(event) - {"ph"} == REQUIRED[event["ph"]]
    return found


def of_kind(found: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in found if event["ph"] == kind]


def titles(found: list[dict[str, Any]]) -> dict[tuple[int, int], tuple[str, str]]:
    """(instance, lane) by (pid, tid)."""
    named = of_kind(found, "M")
    instances = {event["pid"]: event["args"]["name"] for event in named if event["name"] == "process_name"}
    lanes = [event for event in named if event["name"] == "thread_name"]
    return {(e["pid"], e["tid"]): (instances[e["pid"]], e["args"]["name"]) for e in lanes}


def example() -> Timeline:
    timeline = Timeline()
    timeline.add("E0", "vision", "encode", 100.0, 0.25, {"media tokens": 576})
    timeline.add("P0", "language", "prefill", 100.5, 0.125)
    timeline.add("P0", "migration", "pull image", 100.25, 0.0625, {"source": "E0", "bytes": 9})
    return timeline


def test_a_process_per_instance_and_a_thread_per_lane() -> None:
    found = events(example())
    assert set(titles(found).values()) == {
        ("E0", "vision"),
        ("E0", SOURCE_LANE),
        ("P0", "language"),
        ("P0", "migration"),
    }
    assert len({tid for _, tid in titles(found)}) == 4


def test_times_are_microseconds_from_the_first_slice() -> None:
    found = events(example())
    shown = {event["name"]: (event["ts"], event["dur"]) for event in of_kind(found, "X")}
    assert shown["encode"] == (0.0, 250_000.0)
    assert shown["pull image"] == (250_000.0, 62_500.0)
    assert shown["prefill"] == (500_000.0, 125_000.0)


def test_args_are_kept() -> None:
    (encode,) = [event for event in of_kind(events(example()), "X") if event["name"] == "encode"]
    assert encode["args"] == {"media tokens": 576}
    assert encode["cat"] == "vision"


def test_a_migration_has_an_arrow_between_slices_of_both_instances() -> None:
    found = events(example())
    (start,), (finish,) = of_kind(found, "s"), of_kind(found, "f")
    names = titles(found)
    assert names[start["pid"], start["tid"]] == ("E0", SOURCE_LANE)
    assert names[finish["pid"], finish["tid"]] == ("P0", "migration")
    assert (start["id"], start["cat"], start["name"]) == (finish["id"], finish["cat"], finish["name"])
    assert finish["bp"] == "e"
    for end in (start, finish):
        inside = [e for e in of_kind(found, "X") if (e["pid"], e["tid"]) == (end["pid"], end["tid"])]
        assert any(e["ts"] <= end["ts"] < e["ts"] + e["dur"] for e in inside)
    assert start["ts"] <= finish["ts"]


def test_arrows_have_numbers_of_their_own_and_none_goes_to_itself() -> None:
    timeline = Timeline()
    for i in range(3):
        timeline.add("P0", "migration", "pull", float(i), 0.5, {"source": "E0"})
    timeline.add("P0", "migration", "pull", 9.0, 0.5, {"source": "P0"})
    found = events(timeline)
    assert len({event["id"] for event in of_kind(found, "s")}) == 3
    assert len(of_kind(found, "X")) == 3 * 2 + 1


def test_nothing_is_a_valid_timeline() -> None:
    assert events(Timeline()) == []


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["E0", "P0"]),
            st.sampled_from(["a", "b"]),
            st.integers(0, 20).map(float),
            st.integers(0, 5).map(float),
            st.sampled_from([{}, {"source": "E0"}]),
        ),
        max_size=30,
    )
)
def test_slices_of_one_thread_never_overlap_and_none_is_lost(entries: list[Any]) -> None:
    timeline = Timeline()
    for instance, lane, start, duration, args in entries:
        timeline.add(instance, lane, "step", start, duration, args)
    found = events(timeline)
    by_thread: dict[Any, list[Any]] = {}
    for event in of_kind(found, "X"):
        assert titles(found)[event["pid"], event["tid"]][1].startswith(event["cat"])
        by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    migrations = sum(1 for entry in entries if entry[4] and entry[0] != "E0")
    assert sum(map(len, by_thread.values())) == len(entries) + migrations
    for spans in by_thread.values():
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start


def test_a_lane_takes_no_more_threads_than_it_needs() -> None:
    timeline = Timeline()
    for start in (1.5, 0.0, 1.0, 0.5):  # slices are recorded at their end
        timeline.add("D0", "language", "decode", start, 1.0)
    assert sorted(lane for _, lane in titles(events(timeline)).values()) == ["language", "language 2"]


def test_memory_is_bounded() -> None:
    timeline = Timeline(limit=5)
    for i in range(12):
        timeline.add("D0", "language", str(i), float(i), 0.5)
    document = json.loads(timeline.to_json())
    assert document["otherData"] == {"dropped_slices": 7, "origin_s": 7.0}
    assert [e["name"] for e in of_kind(events(timeline), "X")] == ["7", "8", "9", "10", "11"]
    assert (len(timeline), timeline.dropped_slices) == (5, 7)


def test_threads_add_at_the_same_time_as_others_read() -> None:
    timeline = Timeline(limit=100)

    def work() -> None:
        for i in range(500):
            timeline.add("D0", "language", "decode", float(i), 0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for _ in range(20):
        json.loads(timeline.to_json())
    for thread in threads:
        thread.join()
    assert len(timeline) + timeline.dropped_slices == 2000


def test_save(tmp_path: Path) -> None:
    timeline = example()
    path = tmp_path / "t.json"
    path.write_text("old")
    timeline.save(path)
    assert path.read_text(encoding="utf-8") == timeline.to_json()
    assert [each.name for each in tmp_path.iterdir()] == ["t.json"]


def test_args_that_are_not_json_are_shown_as_text() -> None:
    timeline = Timeline()
    timeline.add("D0", "language", "décode", 0.0, 0.5, {"path": Path("a"), "nan": math.nan, "ids": {1}})
    (event,) = of_kind(events(timeline), "X")
    assert event["args"] == {"path": "a", "nan": None, "ids": [1]}
    assert event["name"] == "décode"


@pytest.mark.parametrize(("start", "duration"), [(math.nan, 1.0), (0.0, math.inf), (0.0, -1e-9)])
def test_times_must_be_times(start: float, duration: float) -> None:
    timeline = Timeline()
    with pytest.raises(ConfigError, match="'step'"):
        timeline.add("D0", "language", "step", start, duration)
    assert len(timeline) == 0


def test_a_limit_is_at_least_one() -> None:
    with pytest.raises(ConfigError, match="limit"):
        Timeline(limit=0)
