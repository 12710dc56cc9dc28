"""SLO rules in exact integers, attainment over failures too, and a trace that survives its file."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.errors import ConfigError, TraceError, UnknownName
from trinity.request import Output
from trinity.traces.trace import SLO, SLO_RULES, SLORule, Trace, TraceImage, TraceRow, attainment

BOUNDS = SLO(ttft=1.0, tbt=0.1)
GOOD, BAD = 0.05, 0.2


def served(ttft: float | None, gaps: list[float], reason: str = "stop") -> Output:
    return Output(request_id="r", ttft_s=ttft, itl_s=gaps, finish_reason=reason)


def row(**fields: Any) -> TraceRow:
    return TraceRow(**{"timestamp": 0.0, "input_length": 4, "output_length": 1, **fields})


# ---------------------------------------------------------------- SLO


@pytest.mark.parametrize("name", ["ttft", "tbt"])
@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf, "1", None, True])
def test_a_bound_is_a_positive_finite_number(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        SLO(**{"ttft": 1.0, "tbt": 1.0, name: value})


def test_whole_seconds_are_numbers() -> None:
    assert SLO(ttft=4, tbt=1).is_met(served(3, [0.5]))


def test_both_bounds_are_strict() -> None:
    assert not BOUNDS.is_met(served(1.0, []))
    assert BOUNDS.is_met(served(math.nextafter(1.0, 0), []))
    assert not BOUNDS.is_met(served(0.5, [0.1]))
    assert BOUNDS.is_met(served(0.5, [math.nextafter(0.1, 0)]))


@pytest.mark.parametrize(
    ("good", "bad", "p90", "p99"),
    [
        (0, 0, True, True),
        (9, 1, True, False),
        (8, 1, False, False),
        (99, 1, True, True),
        (98, 1, True, False),
        (90, 10, True, False),
        (89, 10, False, False),
        (198, 2, True, True),
        (197, 2, True, False),
    ],
)
def test_shares_of_gaps_are_counted_in_integers(good: int, bad: int, p90: bool, p99: bool) -> None:
    request = served(0.5, [GOOD] * good + [BAD] * bad)
    assert (BOUNDS.is_met(request, "p90"), BOUNDS.is_met(request, "p99")) == (p90, p99)


def test_the_guard_sees_one_long_stall() -> None:
    stalled = served(0.5, [GOOD] * 19 + [60.0])
    assert BOUNDS.is_met(stalled, "p90")
    assert not BOUNDS.is_met(stalled, "guard")


def test_the_guard_is_not_strict_and_counts_the_slack_of_the_first_token() -> None:
    exact = SLO(ttft=1.0, tbt=0.25)
    gaps = [0.125] * 9
    most = 1.0 + 10 * 0.25 - 0.5 - sum(gaps)
    assert exact.is_met(served(0.5, [*gaps, most]), "guard")
    assert not exact.is_met(served(0.5, [*gaps, most + 1e-9]), "guard")


def test_the_guard_holds_beside_the_share_of_gaps() -> None:
    assert not BOUNDS.is_met(served(0.1, [GOOD] * 5 + [BAD]), "guard")
    assert not BOUNDS.is_met(served(1.5, [0.001] * 100), "guard")


def test_the_mean_gap() -> None:
    assert BOUNDS.is_met(served(0.5, [0.01, 0.18]), "tpot")
    assert not BOUNDS.is_met(served(0.5, [0.1, 0.1]), "tpot")
    assert BOUNDS.is_met(served(0.5, []), "tpot")
    assert not BOUNDS.is_met(served(1.0, []), "tpot")


@pytest.mark.parametrize("rule", SLO_RULES)
@pytest.mark.parametrize("reason", ["error", "cancelled", "deadline", ""])
def test_what_did_not_end_well_was_not_in_time(rule: SLORule, reason: str) -> None:
    assert BOUNDS.is_met(served(0.1, [GOOD]), rule)
    assert not BOUNDS.is_met(served(0.1, [GOOD], reason), rule)
    assert not BOUNDS.is_met(served(None, []), rule)


def test_an_unknown_rule_is_named() -> None:
    rule: Any = "p50"
    with pytest.raises(UnknownName, match="p90"):
        BOUNDS.is_met(served(0.1, []), rule)


times = st.integers(0, 400).map(lambda n: n / 1024)


@given(st.integers(0, 3000).map(lambda n: n / 1024), st.lists(times, max_size=40))
def test_rules_in_exact_arithmetic(ttft: float, gaps: list[float]) -> None:
    slo = SLO(ttft=1.5, tbt=0.125)
    request = served(ttft, gaps)
    first = ttft < 1.5
    good = Fraction(sum(gap < 0.125 for gap in gaps), len(gaps)) if gaps else Fraction(1)
    total = Fraction(ttft) + sum(map(Fraction, gaps))
    within = total <= Fraction(3, 2) + len(gaps) * Fraction(1, 8)
    mean = not gaps or sum(map(Fraction, gaps)) / len(gaps) < Fraction(1, 8)
    assert slo.is_met(request, "p90") == (first and good >= Fraction(9, 10))
    assert slo.is_met(request, "p99") == (first and good >= Fraction(99, 100))
    assert slo.is_met(request, "guard") == (first and good >= Fraction(9, 10) and within)
    assert slo.is_met(request, "tpot") == (first and mean)


def test_attainment_counts_failures() -> None:
    requests = [served(0.1, []), served(2.0, []), served(None, [], "error"), served(0.1, [BAD])]
    assert attainment(requests, BOUNDS) == 0.25
    with pytest.raises(TraceError, match="no requests"):
        attainment([], BOUNDS)


# ---------------------------------------------------------------- rows


def test_a_trace_is_a_sequence() -> None:
    trace = Trace([row(request_id="a"), {"timestamp": 5, "input_length": 1, "output_length": 2, "request_id": "b"}])
    trace.append(row(request_id="c"))
    assert [each.request_id for each in trace] == ["a", "b", "c"]
    assert trace[-1].request_id == "c"
    assert [each.request_id for each in trace[1:]] == ["b", "c"]
    assert len(trace) == 3


def test_a_limited_trace_keeps_the_newest() -> None:
    trace = Trace(limit=2)
    for name in "abc":
        trace.append(row(request_id=name))
    assert [each.request_id for each in trace] == ["b", "c"]
    assert trace.dropped == 1


def test_a_refused_row_drops_nothing() -> None:
    trace = Trace([row()], limit=1)
    with pytest.raises(TraceError):
        trace.append({"timestamp": 0})
    assert (len(trace), trace.dropped) == (1, 0)


@pytest.mark.parametrize("limit", [0, -3])
def test_a_limit_is_at_least_one(limit: int) -> None:
    with pytest.raises(ConfigError, match="limit"):
        Trace(limit=limit)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"timestamp": "soon"},
        {"output_length": -1},
        {"input_length": 1.5},
        {"images": [{"width": -1}]},
        {"itl_s": [-1]},
    ],
)
def test_a_mapping_must_be_a_row(fields: dict[str, Any]) -> None:
    good = {"timestamp": 0, "input_length": 4, "output_length": 1} if fields else {}
    with pytest.raises(TraceError, match="not a row"):
        Trace().append({**good, **fields})


def test_fields_of_others_are_ignored_and_mooncake_loads(tmp_path: Path) -> None:
    path = tmp_path / "mooncake.jsonl"
    path.write_text('{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47], "x": 1}\n')
    (only,) = Trace.load(path)
    assert only == TraceRow(timestamp=27482, input_length=6955, output_length=52, hash_ids=[46, 47])
    Trace().append({"timestamp": 1, "input_length": 1, "output_length": 1, "images": [{"image_grid_thw": [1, 2, 2]}]})


def test_attainment_of_a_trace() -> None:
    rows = [row(ttft_s=0.5, finish_reason="stop"), row(ttft_s=0.5, finish_reason="error"), row()]
    assert Trace(rows).attainment(BOUNDS) == pytest.approx(1 / 3)
    assert Trace(rows[:1]).attainment(SLO(0.4, 1.0), "tpot") == 0.0


# ---------------------------------------------------------------- files

seconds = st.floats(0, 1e4)
images = st.builds(TraceImage, width=st.integers(0, 9) | st.none(), tokens=st.integers(0, 9) | st.none())


@st.composite
def any_rows(draw: st.DrawFn) -> TraceRow:
    gaps = draw(st.lists(seconds, max_size=4))
    return TraceRow(
        timestamp=draw(st.floats(0, 1e12)),
        input_length=draw(st.integers(0, 1 << 40)),
        output_length=len(gaps) + 1,
        text_length=draw(st.none() | st.integers(0, 99)),
        images=draw(st.lists(images, max_size=2)),
        request_id=draw(st.text(max_size=5)),
        ttft_s=draw(seconds),
        itl_s=gaps,
        finish_reason=draw(st.sampled_from(["stop", "error", ""])),
        spans=draw(st.dictionaries(st.sampled_from(["encode", "decode"]), seconds)),
    )


@given(st.lists(any_rows(), max_size=4))
def test_saved_rows_come_back_by_arrival(tmp_path_factory: pytest.TempPathFactory, rows: list[TraceRow]) -> None:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    Trace(rows).save(path)
    assert list(Trace.load(path)) == sorted(rows, key=lambda each: each.timestamp)


def test_a_saved_row_holds_only_what_is_known(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    Trace([row(timestamp=3.5)]).save(path)
    assert json.loads(path.read_text()) == {"timestamp": 3.5, "input_length": 4, "output_length": 1}


def test_save_replaces_the_file_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("old")
    Trace([row()]).save(path)
    assert [each.name for each in tmp_path.iterdir()] == ["t.jsonl"]
    assert len(Trace.load(path)) == 1


BAD_LINES = [
    "{",
    "[]",
    "null",
    '{"timestamp": 1, "input_length": 2}',
    '{"timestamp": -1, "input_length": 2, "output_length": 1}',
    '{"timestamp": NaN, "input_length": 2, "output_length": 1}',
    '{"timestamp": 1, "input_length": 2, "output_length": 3, "ttft_s": 0.1, "itl_s": [0.1]}',
    '{"timestamp": 1, "input_length": 2, "output_length": 2, "itl_s": [0.1]}',
    '{"timestamp": 1, "input_length": 2, "output_length": 1, "request_id": "\xff"}',
]


@pytest.mark.parametrize("bad", BAD_LINES)
def test_a_bad_row_is_named_by_its_line_or_skipped(tmp_path: Path, bad: str) -> None:
    good = '{"timestamp": 1, "input_length": 2, "output_length": 1}'
    path = tmp_path / "t.jsonl"
    path.write_bytes(f"{good}\n\n{bad}\n{good}\n".encode("latin-1"))
    with pytest.raises(TraceError, match=r"^line 3: ") as caught:
        Trace.load(path)
    assert caught.value.line == 3
    trace = Trace.load(path, on_error="skip")
    assert (len(trace), trace.skipped) == (2, 1)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.jsonl"):
        Trace.load(tmp_path / "none.jsonl")


def test_load_knows_two_ways_with_errors(tmp_path: Path) -> None:
    way: Any = "ignore"
    with pytest.raises(UnknownName, match="raise, skip"):
        Trace.load(tmp_path, on_error=way)
