"""Pictures of what was served: bars where steps ran, a dot a request, ranks by hand, spans in milliseconds."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from support.figure_contents import STEPS, axes, legend, outcome, replay, words
from trinity.errors import ConfigError
from trinity.metrics import SPANS, Metrics
from trinity.request import Output
from trinity.simulation.simulator import Replay
from trinity.timeline import Slice, Timeline
from trinity.traces.trace import SLO, Trace

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'trinity-epd[plot]'")

from trinity.report import plots

# ---------------------------------------------------------------- timeline


def bars(of: Any) -> dict[str, list[tuple[float, float]]]:
    """(start, end) of the bars by instance and kind."""
    found = {}
    for each in of.collections:
        edges = [path.vertices[:, 0] for path in each.get_paths()]
        found[each.get_gid()] = [(round(edge.min(), 9), round(edge.max(), 9)) for edge in edges]
    return found


def test_every_step_is_a_bar_from_the_first_one_on() -> None:
    picture = plots.plot_timeline(replay(timeline=STEPS))
    drawn = axes(picture)
    assert bars(drawn) == {
        "EP0 encode": [(0, 0.25)],
        "EP0 several stages in one step": [(0.25, 0.75)],
        "D0 migration": [(0.75, 0.76)],
        "D0 decode": [(1, 2)],
    }
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["D0", "EP0"]
    assert legend(drawn) == ["encode", "decode", "several stages in one step", "migration"]
    assert drawn.get_xlim() == (0, 2)
    assert "All steps are simulated, none was computed by a model." in words(picture)
    assert "Shown are" not in words(picture)


def test_an_instances_lanes_lie_below_each_other_within_its_row() -> None:
    drawn = axes(plots.plot_timeline(STEPS))
    heights = {each.get_gid(): each.get_paths()[0].vertices[:, 1] for each in drawn.collections}
    assert heights["D0 decode"].max() <= heights["D0 migration"].min() + 1e-9
    for name, row in (("D0 decode", 0), ("D0 migration", 0), ("EP0 encode", 1)):
        assert row - 0.5 < heights[name].min() < heights[name].max() < row + 0.5


def test_a_part_of_a_timeline_says_so() -> None:
    picture = plots.plot_timeline(Timeline.of(STEPS), start_s=0.5, end_s=0.9, title="1EP1D")
    assert set(bars(axes(picture))) == {"EP0 several stages in one step", "D0 migration"}
    assert axes(picture).get_xlim() == (0.5, 0.9)
    assert "Shown are 0.5 s to 0.9 s of 2 s." in words(picture)
    assert axes(picture).get_title() == "1EP1D"


def test_ten_instances_are_in_their_order() -> None:
    slices = [Slice(f"D{n}", "joint", "decode", float(n), 1.0, {}) for n in (10, 2, 0)]
    picture = plots.plot_timeline(slices)
    assert [label.get_text() for label in axes(picture).get_yticklabels()] == ["D0", "D2", "D10"]
    assert "computed" not in words(picture)  # nothing was simulated


def test_many_steps_are_drawn_in_pixels() -> None:
    slices = [Slice("D0", "joint", "decode", 0.01 * n, 0.01, {}) for n in range(600)]
    (many,), (few,) = (axes(plots.plot_timeline(slices[:count])).collections for count in (600, 400))
    assert many.get_rasterized()
    assert not few.get_rasterized()


def test_nothing_recorded_and_nothing_in_a_window() -> None:
    assert "replay with record=True" in words(plots.plot_timeline(replay()))
    assert "Nothing ran in this time" in words(plots.plot_timeline(STEPS, start_s=50))
    with pytest.raises(ConfigError, match="start_s must be before end_s"):
        plots.plot_timeline(STEPS, start_s=2, end_s=1)


def test_a_replays_timeline_can_be_had_for_perfetto() -> None:
    timeline = Timeline.of(STEPS)
    assert timeline.slices() == STEPS
    assert timeline.dropped_slices == 0
    found = [event for event in json.loads(timeline.to_json())["traceEvents"] if event["ph"] == "X"]
    assert len(found) == len(STEPS) + 1  # the migration at its source too
    assert Timeline.of([]).slices() == ()


# ---------------------------------------------------------------- every request

SLOW = replay(outcome(0.9, (0.1,)), outcome(0.2, (9.0,), "error"), outcome(0.7, ()), duration_s=20)
FAST = replay(*[outcome(seconds) for seconds in (0.1, 0.2, 0.3, 0.45)], duration_s=10)


def dots(of: Any) -> dict[str, list[tuple[float, float]]]:
    return {each.get_gid(): [(float(x), float(y)) for x, y in each.get_offsets()] for each in of.collections}


def test_a_dot_for_every_request_at_its_rate_and_deployment() -> None:
    picture = plots.plot_scatter({"a": {5: FAST, 9: SLOW}, "b": {9: FAST}}, SLO(0.5, 0.05))
    upper, lower = axes(picture, 0), axes(picture, 1)
    found = dots(upper)
    assert [y for _, y in found["a"]] == pytest.approx([0.1, 0.2, 0.3, 0.45, 0.9, 0.7])
    assert [x for x, _ in found["a"]][:4] == pytest.approx([-0.2] * 4, abs=0.21)  # left half of the first rate
    assert all(0.6 <= x <= 1 for x, _ in found["a"][4:])
    assert all(1 <= x <= 1.4 for x, _ in found["b"])
    assert [y for _, y in dots(lower)["a"]] == pytest.approx([0.03] * 4 + [0.1])  # one token has no gap
    assert [label.get_text() for label in lower.get_xticklabels()] == ["5", "9"]
    medians = {line.get_ydata()[0] for line in upper.lines if line.get_linewidth() == 2}
    assert sorted(medians) == pytest.approx([0.25, 0.8])
    assert legend(upper) == ["a", "b"]
    assert "Not served by a at 9 requests/s: 1 error of 3." in words(picture)
    assert "Dashed: the SLO's bounds, TTFT 0.5 s and TBT 0.05 s." in words(picture)
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("TTFT (s)", "TPOT (s)")


def bounds(of: Any) -> list[float]:
    return [line.get_ydata()[0] for line in of.lines if line.get_linestyle() == "--"]


def test_bounds_are_lines_where_there_is_an_slo() -> None:
    with_slo, without = (plots.plot_scatter({"a": {5: FAST}}, slo) for slo in (SLO(0.5, 0.05), None))
    assert [bounds(each) for each in with_slo.axes] == [[0.5], [0.05]]
    assert [bounds(each) for each in without.axes] == [[], []]
    assert "Dashed" not in words(without)


def test_of_very_many_requests_some_are_drawn_and_that_is_said() -> None:
    many = replay(*[outcome(0.001 * (n + 1)) for n in range(4000)])
    picture = plots.plot_scatter({"a": {5: many}})
    assert 1000 < len(dots(axes(picture))["a"]) <= 1500
    assert "every second, third" in words(picture)
    assert axes(picture).get_yscale() == "log"
    assert axes(picture).lines[0].get_ydata()[0] == pytest.approx(2.0005)  # the median is of all


# ---------------------------------------------------------------- ranks


def ranks(of: Any, worst: int) -> dict[str, list[int]]:
    """By name: ranks of TTFT, TPOT, throughput, read off the rings."""
    return {line.get_label(): [round(worst + 1 - away) for away in line.get_ydata()[:3]] for line in of.lines}


def test_ranks_by_hand() -> None:
    best_first = replay(outcome(0.1, (0.09,)), duration_s=2.0)
    even = replay(outcome(0.3, (0.05,)), duration_s=1.0)
    same = replay(outcome(0.302, (0.02,)), duration_s=1.005)  # within 1 % of the one before
    runs = {"x": {4.0: best_first}, "y": {4.0: even}, "z": {4.0: same}}
    picture = plots.plot_radar(runs)
    assert ranks(axes(picture), 3) == {"x": [1, 3, 3], "y": [2, 2, 1], "z": [2, 1, 1]}
    assert [label.get_text() for label in axes(picture).get_xticklabels()] == ["mean TTFT", "mean TPOT", "throughput"]
    angles = axes(picture).lines[0].get_xdata()
    assert list(angles) == pytest.approx([0, 2 * math.pi / 3, 4 * math.pi / 3, 0])
    assert [text.get_text() for text in picture.legends[0].get_texts()] == ["x", "y", "z"]
    assert "1, outermost, is best" in words(picture)


def test_who_served_nothing_has_no_rank_and_it_is_said() -> None:
    nothing = replay(outcome(None, (), "error"))
    picture = plots.plot_radar({"x": {2: FAST, 4: FAST}, "y": {2: FAST, 4: nothing}, "z": {4: SLOW}})
    assert [axes(picture, n).get_title() for n in (0, 1)] == ["2 requests/s", "4 requests/s"]
    assert set(ranks(axes(picture, 0), 3)) == {"x", "y"}
    assert set(ranks(axes(picture, 1), 3)) == {"x", "z"}
    assert "Served nothing, so without a rank: y at 4." in words(picture)


def test_panels_without_a_rate_are_empty() -> None:
    picture = plots.plot_radar({"x": dict.fromkeys((1, 2, 3, 4), FAST)})
    assert [each.get_visible() and each.axison for each in picture.axes] == [True] * 4 + [False] * 2


def test_no_replays_are_no_picture() -> None:
    nothings: tuple[dict[str, dict[float, Replay]], ...] = ({}, {"x": {}})
    for draw in (plots.plot_scatter, plots.plot_radar):
        for nothing in nothings:
            with pytest.raises(ConfigError, match="nothing to show"):
                draw(nothing)


# ---------------------------------------------------------------- where the time goes


def widths(picture: Any) -> dict[str, list[float]]:
    return {bar.get_label(): [round(each.get_width(), 6) for each in bar] for bar in axes(picture).containers}


def test_spans_are_stacked_in_milliseconds_and_migrations_told() -> None:
    spans = {"encode": 0.1, "ep_migration": 0.002, "pd_migration": 0.003, "decode": 0.395}
    picture = plots.plot_breakdown({"1E1P1D": spans, "3EPD": {"decode": 1.0}})
    found = widths(picture)
    assert found["encode"] == [100, 0]
    assert found["EP migration"] == [2, 0]
    assert found["decode"] == [395, 1000]
    assert list(found) == [
        "encode queue", "encode", "EP migration", "prefill queue", "prefill", "PD migration", "decode queue", "decode",
    ]  # fmt: skip
    assert axes(picture).containers[-1][0].get_x() == pytest.approx(105)
    assert [text.get_text() for text in axes(picture).texts] == [
        " 500 ms, migrations 1.0%",
        " 1,000 ms, migrations 0.0%",
    ]
    assert [label.get_text() for label in axes(picture).get_yticklabels()] == ["1E1P1D", "3EPD"]


def test_spans_of_a_trace_and_of_metrics_are_means_over_what_was_served() -> None:
    def row(reason: str, spans: dict[str, float]) -> dict[str, Any]:
        return {"timestamp": 0, "input_length": 1, "output_length": 1, "finish_reason": reason, "spans": spans}

    trace = Trace(
        [row("stop", {"decode": 1.0}), row("length", {"decode": 3.0, "encode": 1.0}), row("error", {"decode": 99.0})]
    )
    metrics = Metrics()
    metrics.add(Output(request_id="1", finish_reason="stop", spans={"prefill": 0.25}))
    found = widths(plots.plot_breakdown({"traced": trace, "measured": metrics}))
    assert (found["decode"], found["encode"], found["prefill"]) == ([2000, 0], [500, 0], [0, 250])


def test_what_was_emulated_or_simulated_is_said_to_be() -> None:
    row = {"timestamp": 0, "input_length": 1, "output_length": 1, "finish_reason": "stop", "spans": {"decode": 1.0}}
    metrics = Metrics()
    metrics.add(Output(request_id="1", finish_reason="stop", spans={"decode": 1.0}, emulated=True))
    paced, real = Trace([{**row, "emulated": True}]), Trace([row])
    picture = plots.plot_breakdown({"a": paced, "b": real, "c": metrics})
    assert "Emulated, not computed: a, c." in words(picture)
    assert "Emulated" not in words(plots.plot_breakdown({"b": real}))
    for draw in (plots.plot_scatter, plots.plot_radar):
        assert "From replays in the simulator." in words(draw({"a": {5.0: FAST}}))


def test_nothing_served_and_spans_that_are_none() -> None:
    nothings: tuple[Trace | Metrics | dict[str, float], ...] = (Trace(), Metrics(), {})
    for nothing in nothings:
        with pytest.raises(ConfigError, match="nothing was served by mine"):
            plots.plot_breakdown({"mine": nothing})
    with pytest.raises(ConfigError, match="nothing to show"):
        plots.plot_breakdown({})
    with pytest.raises(ConfigError, match=f"spans of mine that are none: sleep; they are {SPANS[0]}"):
        plots.plot_breakdown({"mine": {"sleep": 1.0}})


def test_all_of_them_can_be_rendered() -> None:
    runs = {"a": {5.0: FAST, 9.0: SLOW}, "b": {9.0: FAST}}
    for picture in (plots.plot_timeline(STEPS), plots.plot_scatter(runs, SLO(1, 1)), plots.plot_radar(runs)):
        assert plots.render_png(picture, dpi=20).startswith(b"\x89PNG")
    assert plots.render_svg(plots.plot_breakdown({"a": {"decode": 1.0}})).startswith(b"<?xml")
