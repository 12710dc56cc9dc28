"""The benchmark of a redeploy: its traffic, what it would call a failure, and that it runs."""

from __future__ import annotations

from statistics import fmean

import pytest

from benchmarks.planning.redeploy import (
    BOUND,
    KINDS,
    LONGEST_OUTPUT,
    LONGEST_PROMPT,
    RATE,
    SHORTER,
    Served,
    in_time,
    requests,
    result,
    run,
    shifted,
)
from benchmarks.planning.watch import hour
from benchmarks.setting import Setting
from trinity.traces.trace import TraceRow


def row(at_s: float, ttft_s: float | None = 0.5, gap_s: float = 0.1) -> TraceRow:
    reason = "length" if ttft_s is not None else "refused"
    return TraceRow(
        timestamp=1000 * at_s, input_length=9, output_length=3, ttft_s=ttft_s, itl_s=[gap_s] * 2, finish_reason=reason
    )


def test_the_requests_are_recorded_ones_at_their_times() -> None:
    rows, recorded = requests(seed=0), {(each.timestamp, each.input_length, each.output_length) for each in hour()}
    assert {(each.timestamp, each.input_length, each.output_length) for each in rows} <= recorded
    assert len(rows) / (rows[-1].timestamp / 1000) == pytest.approx(RATE, rel=0.05)
    assert max(each.output_length for each in rows) <= LONGEST_OUTPUT
    assert max(each.input_length for each in rows) <= LONGEST_PROMPT
    assert max(each.timestamp for each in rows) > 600_000


def test_outputs_are_a_quarter_as_long_until_the_shift() -> None:
    rows = requests(seed=0)
    found = shifted(rows, 200, 300)
    assert [each.timestamp for each in found] == [each.timestamp for each in rows if each.timestamp < 500_000]
    for made, was in zip(found, rows, strict=False):
        late = was.timestamp >= 200_000
        assert made.output_length == (was.output_length if late else max(1, was.output_length // SHORTER))
    before, after = ([each.output_length for each in found if (each.timestamp >= 200_000) == late] for late in (0, 1))
    assert fmean(after) == pytest.approx(SHORTER * fmean(before), rel=0.15)


def test_what_is_in_time_counts_where_it_came() -> None:
    rows = [row(0), row(1, ttft_s=None), row(2, ttft_s=BOUND.ttft + 0.1), row(3, gap_s=BOUND.tbt + 0.1), row(4), row(9)]
    assert in_time(rows, 0, 5) == 2 / 5
    assert in_time(rows, 4, 9) == 1 / 5
    assert in_time(rows, 5, 9) == 0


@pytest.mark.parametrize(("late", "met"), [(9, True), (8, False)])
def test_less_than_nine_in_ten_of_the_best_falls_short(late: int, met: bool) -> None:
    """Of ten requests a window, from three minutes after the shift on; what comes sooner does not tell."""
    whole = [row(at) for at in range(0, 600, 6)]
    some = [row(at, ttft_s=0.5 if at < 180 or at % 60 < 6 * late else None) for at in range(0, 600, 6)]
    none = [row(at, ttft_s=0.5 if at < 180 else None) for at in range(0, 600, 6)]
    served = {"stays": Served(none, [], "3EP1D"), "best fixed": Served(whole, [], "4EPD")}
    served["watched"] = Served(some, [(331.4, "4EPD instead of 3EP1D applies: it gains 2.54")], "4EPD")
    found = result(served, 180, 420, ("3EP1D", "4EPD"))
    (aim,) = found.aims
    assert aim.met is met
    assert found.tables[0].rows[-1] == ["390", "0.00", f"{(late - 5) / 30:.2f}", "0.17"]
    assert found.tables[1].rows == [["151", "4EPD instead of 3EP1D applies: it gains 2.54"]]
    assert "ended as 4EPD" in found.notes[0]


def test_nothing_served_by_the_best_is_no_success() -> None:
    served = {kind: Served([row(0, ttft_s=None)], [], "4EPD") for kind in KINDS}
    (aim,) = result(served, 180, 420, ("3EP1D", "4EPD")).aims
    assert aim.met is False


@pytest.mark.slow
def test_it_runs() -> None:
    """Six seconds, too few to find a shift in: all three pipelines serve, and nothing is applied."""
    found = run(Setting(quick=True))
    assert [len(each) for each in found.tables[0].rows] == [4] * 6
    assert found.tables[1].rows == []
    assert sum(float(each[1]) for each in found.tables[0].rows) > 0
    assert "4EPD throughout" in found.method
