"""Metrics: exact counts, percentiles over a bounded window, attainment with failures, tables."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity.errors import BadMedia, ConfigError, RequestTooLarge
from trinity.metrics import PERCENTILES, SPANS, Metrics, percentile
from trinity.request import Output
from trinity.traces.trace import SLO


def output(reason: str = "length", ttft: float | None = 0.5, gaps: list[float] | None = None, **fields: Any) -> Output:
    gaps = [0.02, 0.04] if gaps is None else gaps
    ids = list(range(len(gaps) + 1)) if ttft is not None else []
    return Output(request_id="r", finish_reason=reason, ttft_s=ttft, itl_s=gaps, token_ids=ids, **fields)


def filled() -> Metrics:
    metrics = Metrics(SLO(ttft=1.0, tbt=0.05))
    pulled = {"kind": "kv", "outcome": "pulled", "bytes": 3 << 20}
    cached = {"kind": "image", "outcome": "cached", "bytes": 0}
    image = {"kind": "image", "outcome": "pulled", "bytes": 1 << 20}
    spans = {name: float(i) for i, name in enumerate(SPANS)}
    metrics.add(output(prompt_tokens=10, media_tokens=4, cached_tokens=2, transfers=[image, pulled], spans=spans))
    metrics.add(output("stop", 2.0, [0.2], prompt_tokens=5, transfers=[cached, pulled], spans={"decode": 1.0}))
    metrics.add(output("cancelled", None, [], spans={"encode": 100.0}))
    metrics.add_refused(BadMedia("corrupt", "x"))
    return metrics


def test_the_spans_are_those_of_figure_11() -> None:
    assert len(SPANS) == 8
    assert SPANS[0] == "encode_queue"
    assert SPANS[-1] == "decode"


def test_counts_are_exact() -> None:
    summary = filled().summary()
    assert summary["requests"] == 4
    assert summary["finished"] == {"length": 1, "stop": 1, "cancelled": 1, "refused": 1}
    assert summary["refused"] == {"BadMedia": 1}
    assert summary["tokens"] == {"prompt": 15, "media": 4, "cached": 2, "output": 5}
    assert summary["prefix_hits"] == 1


def test_migrations_by_kind() -> None:
    assert filled().summary()["migrations"] == {
        "image": {"pulled": 1, "cached": 1, "bytes": 1 << 20},
        "kv": {"pulled": 2, "cached": 0, "bytes": 6 << 20},
    }


def test_mean_spans_are_over_requests_served_to_their_end() -> None:
    spans = filled().summary()["spans_s"]
    assert spans == {**{name: i / 2 for i, name in enumerate(SPANS)}, "decode": (7 + 1) / 2}


def test_latencies() -> None:
    summary = filled().summary()
    assert summary["ttft_s"]["mean"] == 1.25
    assert summary["ttft_s"]["max"] == 2.0
    assert summary["itl_s"]["p50"] == pytest.approx(0.04)
    assert summary["tpot_s"]["p50"] == pytest.approx((0.03 + 0.2) / 2)


def test_attainment_is_over_all_requests_and_each_rule() -> None:
    metrics = Metrics(SLO(ttft=1.0, tbt=0.05))
    metrics.add(output(gaps=[0.01] * 9 + [60.0]))
    metrics.add(output(gaps=[0.01] * 10))
    metrics.add(output("error"))
    metrics.add_refused(RequestTooLarge("too large"))
    assert metrics.summary()["attainment"] == {"p90": 0.5, "p99": 0.25, "guard": 0.25, "tpot": 0.25}


@pytest.mark.parametrize("reason", ["encoded", "error", "cancelled", "deadline", "refused"])
def test_requests_for_features_are_in_no_attainment_and_no_latency_however_they_end(reason: str) -> None:
    """At 66797f0 one that failed or was refused was a request that was not in time, with a prompt of no tokens."""
    metrics = Metrics(SLO(ttft=1.0, tbt=0.05))
    metrics.add(output(gaps=[0.01], spans={"prefill": 0.1}))
    before = {name: list(each.counts) for name, each in metrics.histograms.items()}
    if reason == "refused":
        metrics.add_refused(RequestTooLarge("too large"), encode_only=True)
    else:
        metrics.add(output(reason, None, [], media_tokens=4, spans={"encode_queue": 0.0}), encode_only=True)
    summary, counts = metrics.summary(), metrics.counts()
    assert summary["attainment"] == {"p90": 1.0, "p99": 1.0, "guard": 1.0, "tpot": 1.0}
    assert (summary["requests"], summary["finished"][reason]) == (2, 1)
    assert (counts["judged"], counts["met"]["p90"]) == (1, 1)
    assert {name: list(each.counts) for name, each in metrics.histograms.items()} == before


def test_a_span_that_a_request_for_features_had_is_in_its_histogram() -> None:
    metrics = Metrics()
    metrics.add(output("encoded", None, [], spans={"encode": 0.25, "encode_queue": 0.0}), encode_only=True)
    counted = {name for name, each in metrics.histograms.items() if any(each.counts)}
    assert counted == {"encode_span_s"}, "a queue that took no time is none"


def test_without_requests_or_slo_nothing_is_made_up() -> None:
    summary = Metrics(SLO(1.0, 1.0)).summary()
    assert summary["requests"] == 0
    for name in ("ttft_s", "itl_s", "tpot_s", "attainment", "spans_s"):
        assert summary[name] is None
    metrics = Metrics()
    metrics.add(output())
    assert metrics.summary()["attainment"] is metrics.summary()["slo"] is None


def test_one_token_has_no_gaps() -> None:
    metrics = Metrics()
    metrics.add(output(gaps=[]))
    assert metrics.summary()["tpot_s"] is None
    assert metrics.summary()["ttft_s"]["p99"] == 0.5


def test_memory_is_bounded_and_counts_are_not() -> None:
    metrics = Metrics(last=3)
    for i in range(200):
        metrics.add(output(ttft=float(i), gaps=[float(i)] * 10))
    summary = metrics.summary()
    assert summary["requests"] == 200
    assert summary["tokens"]["output"] == 2200
    assert summary["ttft_s"]["p50"] == 198
    assert {name: len(values) for name, values in metrics._values.items()} == {"ttft_s": 3, "itl_s": 48, "tpot_s": 3}


def test_room_for_no_output_is_refused() -> None:
    with pytest.raises(ConfigError, match="last is a whole number of at least 1, got 0"):
        Metrics(last=0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.sampled_from(PERCENTILES))
def test_percentiles_are_those_of_numpy(values: list[float], percent: int) -> None:
    expected = float(np.percentile(values, percent))
    assert percentile(sorted(values), percent) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_a_summary_is_json() -> None:
    summary = filled().summary()
    assert json.loads(json.dumps(summary)) == summary


def test_an_incomplete_transfer_record_is_counted() -> None:
    metrics = Metrics()
    metrics.add(output(transfers=[{}, {"kind": "kv", "outcome": "failed"}]))
    assert metrics.summary()["migrations"]["?"] == {"pulled": 1, "cached": 0, "bytes": 0}
    assert metrics.summary()["migrations"]["kv"]["failed"] == 1


# ---------------------------------------------------------------- tables


def test_the_table_shows_what_was_measured() -> None:
    lines = str(filled()).splitlines()
    assert lines[0].split() == ["count"]
    assert "requests" in lines[1]
    cells = [line.split() for line in lines]
    assert ["ms", "mean", "p50", "p90", "p95", "p99", "max"] in cells
    assert ["TTFT", "1250.0", "1250.0", "1850.0", "1925.0", "1985.0", "2000.0"] in cells
    assert ["90", "%", "of", "gaps", "25.0%"] in cells
    assert ["kv", "2", "0", "6.00"] in cells
    assert ["pd_migration", "2500.00"] in cells


def test_columns_are_aligned() -> None:
    block = str(filled()).split("\n\n")[1].splitlines()
    ends = {line.rindex(cell) + len(cell) for line in block for cell in [line.split()[-1]]}
    assert len(block) == 4
    assert len(ends) == 1


def test_an_empty_table_has_only_counts() -> None:
    assert len(str(Metrics()).split("\n\n")) == 1
    assert "0" in str(Metrics())


class Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


def test_html_is_well_formed_and_escaped() -> None:
    metrics = filled()
    metrics.add(output(transfers=[{"kind": "<b>"}]))
    tags = Tags()
    tags.feed(metrics._repr_html_())
    assert tags.open == []
    assert "TTFT" in tags.cells
    assert "<b>" in "".join(tags.cells)
