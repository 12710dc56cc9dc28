"""Pictures of plans: what is drawn is what the plan says, and what it does not know is said."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from support.figure_contents import axes, cells, legend, lines, words
from support.plans import BEST, LOWER, PAPER, plan, point
from trinity.errors import ConfigError
from trinity.planner import Candidate
from trinity.planner.candidates import list_placements
from trinity.traces.goodput import RatePoint
from trinity.traces.trace import SLO

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'trinity-epd[plot]'")

from trinity.report import plots

# ---------------------------------------------------------------- attainment


def test_attainment_has_every_point_in_percent_and_the_line_that_must_be_reached() -> None:
    picture = plots.plot_attainment(plan())
    found = lines(axes(picture))
    assert found["2EP2D"] == ([10, 12.5, 12.75], [99, 91, 88])
    assert found["90% must be in time"][1] == [90, 90]
    assert set(found) == {"2EP2D", "90% must be in time"}  # no rate was tried of the others
    assert axes(picture).get_xlabel() == "request rate (requests/s)"
    assert "rule guard" in axes(picture).get_ylabel()
    assert "llava-1.5-7b on 4 x H100, TTFT 1 s, TBT 0.05 s" in words(picture)
    assert "Below" not in words(picture)


def test_rates_that_were_not_kept_up_with_are_hollow() -> None:
    shaky = RatePoint(rate=2, duration_s=9, attainment={"p90": 1.0, "guard": 0.5}, completed=0.9)
    sure = RatePoint(rate=1, duration_s=9, attainment={"p90": 0.95, "guard": 0.6}, completed=1.0)
    picture = plots.plot_attainment({"mine": [shaky, sure]}, rule="p90")
    drawn = axes(picture).lines
    assert lines(axes(picture))["mine"] == ([1, 2], [95, 100])
    (hollow,) = [line for line in drawn if line.get_markerfacecolor() == "white"]
    assert (list(hollow.get_xdata()), list(hollow.get_ydata())) == ([2], [100])
    assert "Hollow: completions did not keep up" in words(picture)
    assert "Below 90% at every rate tried: mine." in words(plots.plot_attainment({"mine": [shaky, sure]}))


def test_algorithm_2s_own_choice_is_shown_however_far_down_it_is() -> None:
    many = tuple(msgspec.structs.replace(BEST, placement=f"{n}EP1D", attainment=(point(n, 0.95),)) for n in range(1, 9))
    paper = msgspec.structs.replace(PAPER, attainment=(point(3, 0.5),))
    picture = plots.plot_attainment(plan(best=many[0], candidates=(*many, paper), paper=paper), most=2)
    assert legend(axes(picture)) == ["1EP1D", "2EP1D", "1E1P2D (Algorithm 2)", "90% must be in time"]
    assert "Below 90% at every rate tried: 1E1P2D (Algorithm 2)." in words(picture)


def test_long_notes_fit_below_the_picture() -> None:
    picture = plots.plot_attainment({f"{n}EP{n}D with=a-knob": [point(n, 0.5)] for n in range(1, 12)})
    looks = {(line.get_color(), line.get_marker()) for line in axes(picture).lines[:11]}
    assert len(looks) == 11
    note = picture.get_supxlabel()
    assert note.count("\n") >= 2
    assert " ".join(note.split()).endswith("11EP11D with=a-knob.")
    picture.draw_without_rendering()
    (drawn,) = [text for text in picture.texts if text.get_text() == note]
    assert drawn.get_window_extent().x1 <= picture.bbox.x1


def test_where_no_rate_was_tried_it_is_said() -> None:
    assert "No rate was tried." in words(plots.plot_attainment({}))
    assert "No rate was tried." in words(plots.plot_attainment(plan(candidates=(LOWER,), paper=None)))


def test_low_rates_at_which_all_held_are_left_out_and_it_is_said() -> None:
    picture = plots.plot_attainment({"x": [point(1, 1), point(9, 1), point(40, 0.95), point(50, 0.1)]})
    assert axes(picture).get_xlim()[0] == 10
    assert axes(picture).get_xscale() == "linear"
    assert "Left out: rates below 10 requests/s, all at 90% or more." in words(picture)
    for points in ([point(1, 0.8), point(40, 0.95)], [point(10, 1), point(40, 0.95)], [point(1, 0.1), point(9, 0.1)]):
        whole = plots.plot_attainment({"x": points})
        assert axes(whole).get_xlim()[0] < points[0].rate
        assert "Left out" not in words(whole)


def test_rates_far_apart_are_on_a_logarithmic_axis() -> None:
    near, far = (axes(plots.plot_attainment({"x": [point(1, 0), point(high, 1)]})) for high in (19, 21))
    assert (near.get_xscale(), far.get_xscale()) == ("linear", "log")
    assert {"1", "2", "5", "10", "20"} <= {far.xaxis.get_major_formatter()(at) for at in far.get_xticks()}


# ---------------------------------------------------------------- ratios


def searched(count: int, **changes: Any) -> tuple[Candidate, ...]:
    found = [
        Candidate(
            placement=str(each), method=each.method, exact=True, score=float(n), goodput={"guard": n, "p90": 2 * n}
        )
        for n, each in enumerate(list_placements(count))
    ]
    return tuple(sorted(found, key=lambda each: -(each.score or 0)))


def test_every_ratio_has_a_cell_at_its_counts() -> None:
    candidates = searched(5)
    picture = plots.plot_ratios(plan(best=candidates[0], candidates=candidates, paper=candidates[3]))
    triangle, rows = axes(picture, 0), axes(picture, 1)
    three = cells(triangle)
    assert three["1E1P3D"] == (1, 1)
    assert three["2E1P2D"] == (1, 2)
    assert len(three) == 6
    assert len(cells(rows)) == 4 * 3 + 1
    names = [label.get_text() for label in rows.get_yticklabels()]
    assert names == ["EPD", "EP+D", "ED+P", "PD+E"]
    assert cells(rows)["2EP3D"] == (2, 1 + names.index("EP+D"))
    assert cells(rows)["5EPD"] == (5, 1 + names.index("EPD"))
    assert (triangle.get_xlabel(), triangle.get_ylabel()) == ("P instances", "E instances")
    written = [text.get_text() for each in (triangle, rows) for text in each.texts]
    assert sorted(written) == sorted(["none", *(f"{n}" for n in range(1, 19))])
    assert '"none": at no rate' in words(picture)
    assert picture.axes[2].get_ylabel() == "goodput (requests/s)"
    assert "Goodput, rule guard, over ratios" in words(picture)


def test_a_darker_cell_is_a_lower_goodput() -> None:
    candidates = searched(4)
    picture = plots.plot_ratios(plan(best=candidates[0], candidates=candidates, paper=None))
    faces: dict[str | None, Any] = {
        patch.get_gid(): patch.get_facecolor() for each in picture.axes for patch in each.patches if patch.get_gid()
    }
    light = [sum(faces[each.placement][:3]) for each in candidates]
    assert light == sorted(light, reverse=True)


def test_the_choices_are_outlined_and_what_was_not_searched_is_grey_with_its_bound() -> None:
    picture = plots.plot_ratios(plan())
    outlines = [patch for each in picture.axes for patch in each.patches if patch.get_linewidth() == 2.5]
    assert sorted(patch.get_linestyle() for patch in outlines) == ["-", ":"]
    assert "Outlined: the plan's choice, 2EP2D; dotted: Algorithm 2's own, 1E1P2D." in words(picture)
    assert "≤ 12.5" in words(picture)
    assert "Grey: not searched to the end" in words(picture)
    unknown = msgspec.structs.replace(LOWER, bound=None)
    assert "\n?" in words(plots.plot_ratios(plan(candidates=(BEST, unknown))))


def test_of_several_candidates_for_a_placement_the_best_is_shown() -> None:
    worse = msgspec.structs.replace(BEST, score=3.0, devices=("L40S",) * 4)
    picture = plots.plot_ratios(plan(candidates=(BEST, worse), paper=None))
    assert [text.get_text() for text in axes(picture).texts] == ["12.5"]


def test_goodput_by_another_rule() -> None:
    candidates = searched(3)
    picture = plots.plot_ratios(plan(best=candidates[0], candidates=candidates, paper=None), rule="p90")
    assert "Goodput, rule p90" in words(picture)
    written = {text.get_text() for each in picture.axes[:2] for text in each.texts}
    assert written == {"none", *(f"{2 * n}" for n in range(1, len(candidates)))}


def test_another_objective_is_named_with_its_unit_and_bounds_of_goodput_are_left_out() -> None:
    picture = plots.plot_ratios(plan(objective="goodput_per_cost"))
    assert "requests per unit of price" in picture.axes[-1].get_ylabel()
    assert "≤ 12.5" not in words(picture)
    offline = plots.plot_ratios(plan(objective="throughput", slo=None))
    assert "Throughput, over ratios" in words(offline)
    assert "rule" not in words(offline)


def test_many_instances_have_cells_without_figures_and_other_sizes_are_left_out() -> None:
    candidates = (*searched(20), *searched(4))
    picture = plots.plot_ratios(plan(best=candidates[0], candidates=candidates, paper=None))
    assert len(cells(axes(picture))) == 19 * 18 // 2
    assert not axes(picture).texts
    assert "4EPD" not in cells(axes(picture, 1))


def test_one_instance_and_text_alone() -> None:
    for count, methods in ((1, ("EPD",)), (3, ("P+D", "PD"))):
        found = tuple(
            Candidate(placement=str(each), method=each.method, exact=True, score=1.0, goodput={"guard": 1.0})
            for each in list_placements(count, methods)
        )
        picture = plots.plot_ratios(plan(best=found[0], candidates=found, paper=None))
        assert set(cells(axes(picture))) == {each.placement for each in found}


# ---------------------------------------------------------------- methods over SLOs


def under(ttft: float, tbt: float, best: Candidate = BEST, **changes: Any) -> Any:
    return plan(slo=SLO(ttft, tbt), best=best, **changes)


def test_the_best_method_of_each_slo() -> None:
    found = [under(0.5, 0.05), under(1, 0.05, PAPER), under(1, 0.1), under(0.5, 0.1, met=False)]
    picture = plots.plot_best_method(found)
    drawn = axes(picture)
    assert [label.get_text() for label in drawn.get_xticklabels()] == ["0.05", "0.1"]
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["0.5", "1"]
    where = {text.get_position(): text.get_text() for text in drawn.texts}
    assert where == {(0, 0): "2EP2D\n12.5", (0, 1): "1E1P2D\n10", (1, 1): "2EP2D\n12.5", (1, 0): "none: 99%\nat best"}
    assert sorted(legend(drawn)) == ["E+P+D", "EP+D", "none meets it"]
    shades = {tuple(patch.get_facecolor()) for patch in drawn.patches}
    assert len(shades) == 3
    assert (drawn.get_xlabel(), drawn.get_ylabel()) == ("TBT bound (s)", "TTFT bound (s)")


def test_plans_that_have_no_place_in_it() -> None:
    for wrong, why in (
        ([], "at least one"),
        ([plan(slo=None)], "without an SLO"),
        ([under(1, 1), under(1, 1)], "two plans"),
    ):
        with pytest.raises(ConfigError, match=why):
            plots.plot_best_method(wrong)


# ---------------------------------------------------------------- utilisation


def test_time_at_work_is_stacked_by_stage() -> None:
    drawn = axes(plots.plot_utilisation(BEST))
    bars = {(round(bar.get_x(), 6), round(bar.get_width(), 6), bar.get_y() + 0.4) for bar in drawn.patches}
    assert {(0, 10, 0), (10, 50, 0), (10, 40, 1), (0, 90, 2), (0, 80, 3)} <= bars
    assert [label.get_text() for label in drawn.get_yticklabels()] == ["EP0", "EP1", "D0", "D1"]
    assert legend(drawn) == ["encode (E)", "prefill (P)", "decode (D)"]
    assert "nothing is known" in words(plots.plot_utilisation(LOWER))


# ---------------------------------------------------------------- without matplotlib; files


def test_without_matplotlib_a_typed_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for draw in (
        lambda: plots.plot_attainment({}),
        lambda: plots.plot_ratios(plan()),
        lambda: plots.plot_best_method([]),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'trinity-epd\[plot\]'"):
            draw()


def test_pictures_leave_matplotlib_alone_until_asked_and_its_settings_as_they_were() -> None:
    script = (
        "import sys; from trinity.report import plots; assert 'matplotlib' not in sys.modules\n"
        "import matplotlib; matplotlib.rcParams['font.size'] = 7; plots.plot_attainment({})\n"
        "assert 'matplotlib.pyplot' not in sys.modules; print(matplotlib.rcParams['font.size'])\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert run.stdout.strip() == "7.0", run.stderr


def test_all_of_them_can_be_rendered() -> None:
    candidates = searched(4)
    found = plan(best=candidates[0], candidates=(*candidates, LOWER))
    for picture in (plots.plot_ratios(found), plots.plot_best_method([plan()]), plots.plot_utilisation(BEST)):
        assert plots.render_png(picture, dpi=20).startswith(b"\x89PNG")


def test_equal_plans_give_equal_files() -> None:
    first, second = (plots.render_svg(plots.plot_attainment(plan())) for _ in range(2))
    assert first == second
    assert first.startswith(b"<?xml")
    assert b"<script" not in first


def test_a_notebook_shows_a_picture_without_a_magic_line() -> None:
    """IPython asks a value for its forms; matplotlib's own figure has none before ``%matplotlib inline``."""
    formatter = pytest.importorskip("IPython.core.formatters").DisplayFormatter()
    shown, _ = formatter.format(plots.plot_attainment(plan()))
    assert shown["image/png"].startswith(b"\x89PNG")
    from matplotlib.figure import Figure

    bare, _ = formatter.format(Figure())
    assert "image/png" not in bare
