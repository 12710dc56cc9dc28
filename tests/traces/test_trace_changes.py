"""What makes a trace of a trace: rates, windows, jitter, parts; its figures; synthetic ones."""

from __future__ import annotations

import math
import random
import tracemalloc
from bisect import bisect_left
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinity import traces
from trinity.errors import ConfigError, TraceError, UnknownName
from trinity.traces import synthetic
from trinity.traces.statistics import arrival_cv, arrival_rate
from trinity.traces.trace import Trace, TraceImage, TraceRow


def trace_at(*seconds: float, **fields: Any) -> Trace:
    given = {"input_length": 10, "output_length": 2, **fields}
    return Trace(TraceRow(timestamp=1000 * at, request_id=str(n), **given) for n, at in enumerate(seconds))


def seconds(trace: Trace) -> list[float]:
    return [row.timestamp / 1000 for row in trace]


def names(trace: Trace) -> list[str]:
    return [row.request_id for row in trace]


def test_a_rate_is_scaled_by_a_factor_or_to_a_target() -> None:
    trace = trace_at(0, 1, 2, 6)
    assert seconds(trace.scale(2)) == [0, 0.5, 1, 3]
    assert seconds(trace.scale(rate=1)) == [0, 0.5, 1, 3]
    assert seconds(trace) == [0, 1, 2, 6]


@given(st.lists(st.floats(0, 1e5), min_size=2, max_size=30), st.floats(0.01, 1000))
def test_a_scaled_trace_has_the_rate_that_was_asked_for(times: list[float], rate: float) -> None:
    if max(times) - min(times) < 1e-3:
        return
    scaled = trace_at(*times).scale(rate=rate)
    assert scaled.statistics().rate == pytest.approx(rate, rel=1e-6)
    assert sorted(names(scaled), key=int) == [str(n) for n in range(len(times))]


@pytest.mark.parametrize("arguments", [{}, {"factor": 1, "rate": 1}, {"factor": 0}, {"factor": -1}, {"rate": math.nan}])
def test_scaling_needs_one_positive_number(arguments: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        trace_at(0, 1).scale(**arguments)


@pytest.mark.parametrize("trace", [trace_at(), trace_at(3), trace_at(3, 3)])
def test_what_comes_at_once_has_no_rate(trace: Trace) -> None:
    assert trace.statistics().rate is None
    with pytest.raises(TraceError, match="no rate"):
        trace.scale(rate=1)


def test_a_changed_trace_forgets_what_was_measured_and_keeps_what_was_asked() -> None:
    image = TraceImage(width=4, height=5, tokens=6, content="c")
    asked = {"text_length": 4, "images": [image], "hash_ids": [1], "session": "s", "max_tokens": 9}
    measured = {"ttft_s": 1.0, "itl_s": [0.5], "latency_s": 1.5, "finish_reason": "stop", "spans": {"decode": 1.0}}
    (row,) = trace_at(2, **asked, **measured, emulated=True).scale(2)
    (expected,) = trace_at(1, **asked)
    assert row == expected


def test_a_window_counts_from_its_start_and_leaves_its_end_out() -> None:
    window = trace_at(0, 1, 2, 3, 2).window(1, 3)
    assert (names(window), seconds(window)) == (["1", "2", "4"], [0, 1, 1])
    for start, end in [(1, 1), (2, 1), (-1, 1), (math.nan, 1)]:
        with pytest.raises(ConfigError, match=r"window|is a number"):
            trace_at(0).window(start, end)


def test_jitter_stays_inside_its_tick_and_hangs_on_the_seed() -> None:
    trace = trace_at(*(3.0 * (n // 10) for n in range(500)))
    jittered = trace.jitter(3, seed=1)
    assert [int(at / 3) for at in seconds(jittered)] == [n // 10 for n in range(500)]
    assert len(set(seconds(jittered))) == 500
    assert 1.4 < np.mean([at % 3 for at in seconds(jittered)]) < 1.6
    assert seconds(jittered) == seconds(trace.jitter(3, seed=1)) != seconds(trace.jitter(3, seed=2))
    with pytest.raises(ConfigError, match="tick_s"):
        trace.jitter(0, seed=1)


def test_head_and_split_go_by_arrival() -> None:
    trace = trace_at(5, 1, 3, 9, 7)
    assert names(trace.head(2)) == ["1", "2"]
    assert names(trace.head(9)) == ["1", "2", "0", "4", "3"]
    first, rest = trace.split(0.4)
    assert (seconds(first), seconds(rest)) == ([0, 2], [0, 2, 4])
    assert names(first) + names(rest) == names(trace.head(5))
    assert [len(part) for part in trace_at(0).split(0.1)] == [0, 1]
    for wrong in (0, 1, -1, math.nan):
        with pytest.raises(ConfigError, match="share"):
            trace.split(wrong)
    with pytest.raises(ConfigError, match="count"):
        trace.head(-1)


def test_a_report_goes_with_the_trace() -> None:
    trace = traces.read_shipped("servegen-image-1h")
    assert trace.window(0, 1).report is trace.report is not None


# ---------------------------------------------------------------- figures


def test_figures_by_hand() -> None:
    images = [TraceImage(tokens=100), TraceImage(tokens=300), TraceImage()]
    rows = [
        TraceRow(timestamp=0, input_length=450, output_length=10, images=images),
        TraceRow(timestamp=2000, input_length=30, output_length=20, text_length=25),
        TraceRow(timestamp=4000, input_length=20, output_length=60),
    ]
    found = Trace(rows).statistics()
    assert (found.requests, found.duration_s, found.rate, found.cv) == (3, 4, 0.5, None)
    assert found.image_share == pytest.approx(1 / 3)
    assert found.text_tokens is not None
    assert found.text_tokens["mean"] == pytest.approx((50 + 25 + 20) / 3)
    assert found.images is not None
    assert found.images["max"] == 3
    assert found.image_tokens is not None
    assert found.image_tokens["p50"] == 100
    assert found.visual_tokens is not None
    assert found.visual_tokens["mean"] == 400
    assert found.output_tokens is not None
    assert (found.output_tokens["p50"], found.output_tokens["max"]) == (20, 60)
    assert "0.500 requests/s" in str(found)
    assert "<td>3</td>" in found._repr_html_() == Trace(rows)._repr_html_()


def test_figures_of_nothing_say_so() -> None:
    empty = Trace().statistics()
    assert (empty.requests, empty.rate, empty.cv, empty.text_tokens) == (0, None, None, None)
    assert "unknown" in str(empty)
    assert "<table>" in Trace()._repr_html_()


def test_variation_by_hand() -> None:
    assert arrival_cv([0, 1, 2, 10, 20]) == pytest.approx(0.5)  # full bins of 3 and 1 arrivals
    assert arrival_cv([0, 10, 20, 30]) == 0
    assert arrival_cv([0, 19.9]) is None
    assert arrival_cv([0, 1, 5, 40, 41]) == pytest.approx(math.sqrt(27) / 3)  # 3, 0, 0 and 0; the last is not full


@pytest.mark.parametrize("last", [1e10, 1.7e12, 1e300, 1e308])
def test_statistics_of_a_long_gap_cost_what_its_rows_cost(last: float) -> None:
    """A row at 0 beside times since 1970, in ms: one bin of 170 million has an arrival, and the last is not full."""
    rows = [TraceRow(timestamp=at, input_length=1, output_length=1) for at in (0.0, last)]
    tracemalloc.start()
    found = Trace(rows).statistics()
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most < 1 << 20
    bins = int(last / 1e4)
    assert found.cv == pytest.approx(math.sqrt(bins - 1))
    assert arrival_cv([]) is None


def test_a_poisson_process_varies_by_the_root_of_its_mean() -> None:
    trace = traces.synthesise("MME", 20_000, visual_tokens=lambda width, height: 1, rate=10, seed=3)
    assert trace.statistics().cv == pytest.approx(0.1**0.5 * 0.1**0.5, rel=0.2)
    assert trace.statistics().rate == pytest.approx(10, rel=0.03)


# ---------------------------------------------------------------- synthetic


def pixels(width: int, height: int) -> int:
    return width * height // 784


@pytest.mark.parametrize("name", traces.DATASETS)
def test_a_synthetic_dataset_has_its_parameters(name: str) -> None:
    dataset = traces.DATASETS[name]
    trace = traces.synthesise(name, 4000, visual_tokens=pixels, rate=8, seed=1)
    found = trace.statistics()
    assert (found.image_share, found.video_share) == (bool(dataset.sizes), bool(dataset.videos))
    assert found.text_tokens is not None
    assert found.output_tokens is not None
    assert found.text_tokens["mean"] == pytest.approx(dataset.prompt[0], rel=0.05)
    assert found.output_tokens["mean"] == pytest.approx(dataset.output[0], rel=0.05)
    assert np.std([row.output_length for row in trace]) == pytest.approx(dataset.output[1], rel=0.2, abs=0.3)
    for sizes in filter(None, (dataset.sizes, dataset.videos)):
        assert sum(each[-1] for each in sizes) == pytest.approx(1)
    if dataset.sizes:
        assert found.image_tokens is not None
        expected = sum(pixels(width, height) * share for width, height, share in dataset.sizes)
        assert found.image_tokens["mean"] == pytest.approx(expected, rel=0.03)
    if dataset.videos:
        assert found.frames is not None
        expected = sum(frames * share for frames, _, _, share in dataset.videos)
        assert found.frames["mean"] == pytest.approx(expected, rel=0.03)
    assert all(row.input_length == row.text_tokens + row.visual_tokens for row in trace)


def test_equal_seeds_make_equal_traces() -> None:
    made = [list(traces.synthesise("POPE", 50, visual_tokens=pixels, rate=1, seed=seed)) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_arrivals_of_another_trace_are_used_from_its_start_again_and_scaled() -> None:
    arrivals = trace_at(1, 2, 4)
    made = traces.synthesise("POPE", 7, visual_tokens=pixels, arrivals=arrivals)
    assert seconds(made) == pytest.approx([0, 1, 3, 4.5, 5.5, 7.5, 9])
    fast = traces.synthesise("POPE", 7, visual_tokens=pixels, arrivals=arrivals, rate=6)
    assert seconds(fast) == pytest.approx([at / 9 for at in seconds(made)])


def test_a_synthetic_trace_needs_a_dataset_requests_and_a_rate() -> None:
    with pytest.raises(UnknownName, match="TextCaps"):
        traces.synthesise("textcaps", 1, visual_tokens=pixels, rate=1)
    with pytest.raises(ConfigError, match="at least 1 request"):
        traces.synthesise("POPE", 0, visual_tokens=pixels, rate=1)
    for rate in (None, 0, math.nan, math.inf):
        with pytest.raises(ConfigError, match="rate"):
            traces.synthesise("POPE", 1, visual_tokens=pixels, rate=rate)
    with pytest.raises(TraceError, match="no rate"):
        traces.synthesise("POPE", 1, visual_tokens=pixels, arrivals=trace_at(1))
    with pytest.raises(ConfigError, match="positive"):
        traces.Dataset(name="none", sizes=(), prompt=(1, 0), output=(1, 0))
    with pytest.raises(ConfigError, match="positive"):
        traces.Dataset(name="none", sizes=((1, 1, 1.0),), prompt=(1, -1), output=(1, 0))


def test_a_dataset_of_ones_own() -> None:
    mine = traces.Dataset(name="mine", sizes=((8, 8, 1.0),), prompt=(5, 0), output=(7, 0))
    trace = traces.synthesise(mine, 3, visual_tokens=lambda width, height: width + height, rate=1)
    assert {(row.text_tokens, row.visual_tokens, row.output_length) for row in trace} == {(5, 16, 7)}


def test_a_resampled_trace_is_like_the_one_it_was_drawn_from() -> None:
    noise = random.Random(0)
    bursts = [100 * burst + 3 + noise.random() for burst in range(100) for _ in range(1 + 40 * (burst % 2))]
    trace = trace_at(0, *sorted(bursts))
    made = traces.resample(trace, 4000, seed=1)
    assert len(made) == 4000
    assert made.statistics().rate == pytest.approx(trace.statistics().rate, rel=0.2)
    assert made.statistics().cv == pytest.approx(trace.statistics().cv, rel=0.2)
    assert set(names(made)) <= set(names(trace))
    assert list(made) == list(traces.resample(trace, 4000, seed=1)) != list(traces.resample(trace, 4000, seed=2))
    assert traces.resample(trace, 100, rate=5).statistics().rate == pytest.approx(5)


def test_stretches_end_before_the_trace_does() -> None:
    even = trace_at(*(0.1 * n for n in range(250)))
    assert traces.resample(even, 3000, seed=2).statistics().rate == pytest.approx(10, rel=0.02)


@pytest.mark.parametrize("trace", [trace_at(4), trace_at(4, 4), trace_at(4, 5)])
def test_a_short_trace_can_be_drawn_from(trace: Trace) -> None:
    made = traces.resample(trace, 9)
    assert len(made) == 9
    assert seconds(made) == sorted(seconds(made))


@pytest.mark.parametrize("pause", [1e4, 1e6, 1e9])
def test_a_trace_of_long_pauses_costs_what_its_requests_do(pause: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million empty stretches between two requests were drawn one by one. Its rate and its bursts stay."""
    bursts = [pause * burst + 0.01 * n for burst in range(40) for n in range(5)]
    trace, looks = trace_at(*bursts), 0

    def count(*given: Any) -> int:
        nonlocal looks
        looks += 1
        return bisect_left(*given)

    monkeypatch.setattr(synthetic, "bisect_left", count)
    made = traces.resample(trace, 4000, seed=3)
    assert looks < 5 * len(made)
    assert arrival_rate(seconds(made)) == pytest.approx(arrival_rate(seconds(trace)), rel=0.15)
    apart = [later - sooner for sooner, later in pairwise(seconds(made))]
    assert sum(gap < 0.011 for gap in apart) == pytest.approx(0.8 * len(apart), rel=0.05)
    assert len(set(names(made))) >= 190, "all bursts but those at the ends, which few stretches hold"


def test_a_sparse_and_a_dense_way_draw_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same trace, one way and the other: as many requests a second, as far apart."""
    trace = trace_at(*(100.0 * n + 3 * (n % 3) for n in range(300)))
    drawn = traces.resample(trace, 6000, seed=1)
    monkeypatch.setattr(synthetic, "_EMPTY_STRETCHES", 1)
    counted = traces.resample(trace, 6000, seed=1)
    assert list(drawn) != list(counted)
    assert arrival_rate(seconds(counted)) == pytest.approx(arrival_rate(seconds(drawn)), rel=0.1)


def test_nothing_cannot_be_drawn_from() -> None:
    with pytest.raises(TraceError, match="empty"):
        traces.resample(Trace(), 1)
    for requests, block in ((0, 1.0), (1, 0.0), (1, math.inf)):
        with pytest.raises(ConfigError, match="at least 1"):
            traces.resample(trace_at(0, 1), requests, block_s=block)


def test_a_denser_trace_keeps_the_day_and_loses_the_noise() -> None:
    noise = random.Random(0)
    calm = [3600 * noise.random() for _ in range(400)]
    busy = [3600 + 3600 * noise.random() for _ in range(1600)]
    thin = trace_at(*sorted(calm + busy))
    made = traces.densify(thin, 12.5, seed=1, within_s=600)
    times = seconds(made)
    assert times == sorted(times)
    assert seconds(thin)[0] <= times[0] <= times[-1] <= seconds(thin)[-1]
    assert len(made) == pytest.approx(12.5 * 2000, rel=0.05)
    assert len(made.window(600, 3000)) == pytest.approx(12.5 * 400 * 2 / 3, rel=0.1)  # nothing from the busy hour
    even, one = (traces.densify(thin, factor, within_s=600).window(3600, 7200).statistics().cv for factor in (12, 1))
    assert even is not None
    assert one is not None
    assert even < one / 2
    assert names(made) == names(traces.densify(thin, 12.5, seed=1, within_s=600))
    assert names(made) != names(traces.densify(thin, 12.5, seed=2, within_s=600))


def test_a_stretch_is_taken_as_it_is() -> None:
    bursts = trace_at(*(60 * n + at for n in range(20) for at in (0.1, 0.2, 0.3)))
    made = seconds(traces.densify(bursts, 1, within_s=0))
    assert made == pytest.approx(seconds(bursts))
    assert len(traces.densify(bursts, 0.5, seed=3)) < 45  # half of them, more or less
    assert seconds(traces.densify(trace_at(1, 2), 2)) == [1, 1, 2, 2]


def test_what_cannot_be_made_denser() -> None:
    for trace in (Trace(), trace_at(4), trace_at(4, 4)):
        with pytest.raises(TraceError, match="no rate"):
            traces.densify(trace, 2)
    for wrong in ({"factor": 0}, {"factor": math.inf}, {"factor": 1, "stretch_s": 0}, {"factor": 1, "within_s": -1}):
        with pytest.raises(ConfigError, match="positive"):
            traces.densify(trace_at(0, 1), **wrong)
