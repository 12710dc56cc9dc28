"""Rows that are kept packed: the newest, within bytes and rows, and equal to those that were added."""

from __future__ import annotations

import copy
import pickle
import sys
import threading
import tracemalloc
from collections import deque
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.errors import ConfigError, TraceError
from trinity.pipeline.pipeline import TRACE_BYTES
from trinity.traces.trace import PackedRows, Trace, TraceImage, TraceRow

SPANS = ("encode_queue", "encode", "ep_migration", "prefill_queue", "prefill", "pd_migration", "decode_queue", "decode")


def served(number: int, tokens: int = 24) -> TraceRow:
    """A row as a pipeline records it."""
    gaps = [0.01 + 1e-9 * each for each in range(tokens - 1)]
    return TraceRow(
        timestamp=float(number),
        request_id=f"request-{number:032}",
        input_length=600,
        text_length=24,
        output_length=tokens,
        max_tokens=tokens,
        images=[TraceImage(width=336, height=336, tokens=576, content="c" * 32)],
        finish_reason="length",
        ttft_s=0.25,
        itl_s=gaps,
        latency_s=0.25 + sum(gaps),
        spans=dict.fromkeys(SPANS, 0.01 * number),
    )


def size(row: TraceRow) -> int:
    return sys.getsizeof(msgspec.msgpack.encode(row))


@st.composite
def rows(draw: st.DrawFn) -> list[TraceRow]:
    counts = draw(st.lists(st.integers(1, 40), max_size=40))
    return [served(number, count) for number, count in enumerate(counts)]


@given(rows(), st.integers(1, 6000), st.none() | st.integers(1, 12))
def test_the_newest_rows_that_fit_are_kept(added: list[TraceRow], most: int, limit: int | None) -> None:
    kept, wanted = PackedRows(TraceRow, most, limit), deque[TraceRow](maxlen=limit)
    for row in added:
        kept.append(row)
        wanted.append(row)
        while len(wanted) > 1 and sum(map(size, wanted)) > most:
            wanted.popleft()
        assert list(kept) == list(wanted)
        assert kept.bytes == sum(map(size, wanted))
    assert kept[:] == list(wanted)
    assert list(reversed(kept)) == list(wanted)[::-1]
    if added:
        assert (kept[0], kept[-1]) == (wanted[0], wanted[-1])


def test_a_row_beyond_the_bound_is_kept_alone() -> None:
    kept = PackedRows(TraceRow, 100)
    for number in range(3):
        kept.append(served(number, 500))
    assert [row.timestamp for row in kept] == [2.0]


@pytest.mark.parametrize("bounds", [(0, None), (-1, None), (100, 0)])
def test_a_bound_is_at_least_one(bounds: tuple[int, int | None]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        PackedRows(TraceRow, *bounds)


@pytest.mark.parametrize("bad", [0, -1, 1.5, True])
def test_a_trace_says_which_bound_is_wrong(bad: Any) -> None:
    with pytest.raises(ConfigError):
        Trace(limit_bytes=bad)


def test_an_index_beyond_the_rows_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        PackedRows(TraceRow, 100)[0]


def test_copies_and_pickles_hold_the_same_rows() -> None:
    trace = Trace(map(served, range(5)), limit_bytes=1 << 20)
    for again in (copy.deepcopy(trace), pickle.loads(pickle.dumps(trace))):
        again.append(served(9))
        assert [row.timestamp for row in again] == [0.0, 1.0, 2.0, 3.0, 4.0, 9.0]
    assert len(trace) == 5


def test_a_bounded_trace_does_what_another_does() -> None:
    plain, bounded = (Trace(map(served, range(30)), limit_bytes=bound) for bound in (None, 1 << 20))
    assert list(bounded) == list(plain)
    assert list(bounded.window(0.005, 0.02)) == list(plain.window(0.005, 0.02))
    assert list(bounded.scale(2.0)) == list(plain.scale(2.0))
    assert bounded.statistics() == plain.statistics()


def test_dropped_rows_are_counted() -> None:
    row = served(0)
    trace = Trace(limit_bytes=3 * size(row))
    for _ in range(10):
        trace.append(row)
    assert (len(trace), trace.dropped) == (3, 7)
    trace.append(served(1, 100))  # takes the place of several
    assert len(trace) + trace.dropped == 11
    with pytest.raises(TraceError):
        trace.append({"timestamp": 0})
    assert len(trace) + trace.dropped == 11


def test_both_limits_hold() -> None:
    trace = Trace(map(served, range(10)), limit=4, limit_bytes=1 << 20)
    assert (len(trace), trace.dropped) == (4, 6)


def test_others_may_append_while_one_reads() -> None:
    trace, done = Trace(limit_bytes=200_000), threading.Event()

    def add() -> None:
        for number in range(3_000):
            trace.append(served(number))
        done.set()

    adding = threading.Thread(target=add)
    adding.start()
    while not done.is_set():
        read = [row.timestamp for row in trace]
        assert read == sorted(read)
    adding.join()


@pytest.mark.parametrize("tokens", [1, 24, 500])
def test_memory_of_a_full_trace_is_what_was_said(tokens: int) -> None:
    """As objects, 1 MiB would be full of 60 rows of 500 tokens; what is counted is what Python has taken."""
    row = served(0, tokens)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        trace = Trace(limit_bytes=1 << 20)
        while not trace.dropped:
            trace.append(row)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert 0.9 * 2**20 < after - before < 1.1 * 2**20
    assert len(trace) > {1: 2_000, 24: 1_000, 500: 180}[tokens]


def test_a_pipeline_keeps_as_many_rows_as_is_said() -> None:
    assert [TRACE_BYTES // size(served(0, tokens)) // 1_000 for tokens in (24, 500)] == [98, 13]


FIRST = TraceRow(timestamp=0.0, input_length=1, output_length=1)
BEYOND: list[dict[str, Any]] = [{"timestamp": 2**64}, {"hash_ids": [2**70]}]


@pytest.mark.parametrize("fields", BEYOND, ids=["time", "hash"])
def test_a_number_beyond_64_bits_is_told_and_the_other_rows_stay(fields: dict[str, Any]) -> None:
    kept = Trace([FIRST], limit_bytes=4096)
    with pytest.raises(TraceError, match=r"below 2\*\*64"):
        kept.append(msgspec.structs.replace(FIRST, **fields))
    assert list(kept) == [FIRST]
