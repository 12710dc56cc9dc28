"""Rows that were cut short when they were recorded are replayed with the outputs expected of them, by every engine."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import MODELS
from trinity.simulation.simulator import Simulator
from trinity.simulation.workload import jobs_of
from trinity.traces.cut_short import count_cut_short, fill_cut_outputs
from trinity.traces.trace import SLO, Trace, TraceRow

LLAVA = MODELS["llava-1.5-7b"]
REASONS = st.sampled_from(["", "stop", "cancelled", "refused"])


def row(at: float, output: int, reason: str = "", **fields: Any) -> TraceRow:
    return TraceRow(timestamp=at, input_length=40, output_length=output, text_length=40, finish_reason=reason, **fields)


WHOLE = [row(0, 10, "stop"), row(1, 20, "length"), row(2, 60)]


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (row(3, 0, "refused"), 30),
        (row(3, 15, "cancelled"), 40),
        (row(3, 59, "deadline"), 60),
        (row(3, 60, "error"), 60),
        (row(3, 60, "cancelled", max_tokens=100), 100),
        (row(3, 0, "refused", max_tokens=12), 12),
        (row(3, 15, "cancelled", max_tokens=16), 16),
        (row(3, 15, "stop"), 15),
        (row(3, 0), 0),
    ],
)
def test_the_expected_output_is_the_mean_of_those_that_were_longer(cut: TraceRow, expected: int) -> None:
    filled = fill_cut_outputs(Trace([*WHOLE, cut]))
    assert [each.output_length for each in filled] == [10, 20, 60, expected]
    assert not count_cut_short(filled)


def test_nothing_cut_short_is_the_trace_itself() -> None:
    trace = Trace(WHOLE)
    assert fill_cut_outputs(trace) is trace


def test_a_trace_of_refusals_asks_for_what_it_may() -> None:
    filled = fill_cut_outputs(Trace([row(0, 0, "refused"), row(1, 0, "refused", max_tokens=7)]))
    assert [each.output_length for each in filled] == [1, 7]


@pytest.mark.parametrize("change", ["scale", "head", "window", "jitter", "load"])
def test_what_changes_a_trace_keeps_the_mark(change: str, tmp_path: Any) -> None:
    trace = Trace([row(1000.0 * n, 5 + n, "cancelled" if n % 2 else "") for n in range(6)])
    if change == "load":
        trace.save(tmp_path / "t.jsonl")
        made = Trace.load(tmp_path / "t.jsonl")
    else:
        given_: dict[str, tuple[Any, ...]] = {"scale": (2.0,), "head": (6,), "window": (0, 9), "jitter": (0.1, 0)}
        made = getattr(trace, change)(*given_[change])
    assert count_cut_short(made) == 3
    assert [each.output_length for each in fill_cut_outputs(made)] == [
        each.output_length for each in fill_cut_outputs(trace)
    ]


@pytest.mark.parametrize("backend", ["python", "auto"])
def test_the_simulator_serves_the_expected_output(backend: str) -> None:
    trace = Trace([*WHOLE, row(3, 0, "refused"), row(4, 15, "cancelled")])
    simulator = Simulator(LLAVA, SLO(2.0, 0.1), cluster=Cluster.of("H100", 2), backend=backend)
    outcomes = simulator.replay(trace, "1EP1D").outcomes
    assert [1 + len(each.itl_s) for each in outcomes] == [10, 20, 60, 30, 40]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 50), st.sampled_from(["", "stop", "cancelled", "refused"]), st.none() | st.integers(1, 60)
        )
    )
)
def test_no_output_becomes_shorter_or_longer_than_any(rows: list[tuple[int, str, int | None]]) -> None:
    trace = Trace([row(n, output, reason, max_tokens=most) for n, (output, reason, most) in enumerate(rows)])
    longest = max((max(each.output_length, each.max_tokens or 0) for each in trace), default=0)
    for before, after in zip(trace, fill_cut_outputs(trace), strict=True):
        assert before.output_length <= after.output_length <= max(1, longest)
    assert [job.max_tokens for job in jobs_of(trace, LLAVA)] == [
        max(1, each.output_length) for each in fill_cut_outputs(trace)
    ]
