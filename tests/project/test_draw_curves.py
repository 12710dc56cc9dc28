"""A plot of goodput over time: where its points, moments and labels lie."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tools.draw_curves import HIGH, LEFT, TOP, WIDE, Curve, Mark, draw_plot, read_plot, spread

ROWS = [["-60", "3.00", "3.00"], ["-30", "3.00", "3.00"], ["0", "0.00", "1.50"], ["30", "0.00", "3.00"]]
DECIDED = [
    ["12", "4EPD instead of 3EP1D applies: it gains 2.54"],
    ["20", "4EPD instead of 3EP1D applied: D0 is EPD"],
]
CURVES = [Curve("left as it is", "#111111", "", []), Curve("applied", "#222222", "5 4", [])]


def drawn() -> ElementTree.Element:
    return ElementTree.fromstring("<svg>" + "".join(draw_plot(read_plot(ROWS, DECIDED, CURVES))) + "</svg>")


def points(path: ElementTree.Element) -> list[tuple[float, float]]:
    numbers = [float(each) for each in re.findall(r"[\d.]+", path.attrib["d"])]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_a_table_becomes_curves_and_applies_become_moments() -> None:
    plot = read_plot(ROWS, DECIDED, CURVES)
    assert [(each.label, each.values) for each in plot.curves] == [
        ("left as it is", [3, 3, 0, 0]),
        ("applied", [3, 3, 1.5, 3]),
    ]
    assert plot.marks == [Mark(0.0, "traffic shifts"), Mark(12.0, "plan found"), Mark(20.0, "plan runs")]
    assert (plot.step, plot.top) == (30, 3)
    assert CURVES[0].values == [], "the looks are another plot's too"


def test_each_point_lies_in_the_middle_of_its_seconds_and_at_its_value() -> None:
    lines = [each for each in drawn().iter("path") if each.attrib.get("stroke-width") == "2"]
    left, applied = (points(each) for each in lines)
    assert [x for x, _ in left] == [
        pytest.approx(LEFT + WIDE * share, abs=0.1) for share in (1 / 8, 3 / 8, 5 / 8, 7 / 8)
    ]
    assert [y for _, y in left] == [TOP, TOP, TOP + HIGH, TOP + HIGH]
    assert [y for _, y in applied] == [TOP, TOP, TOP + HIGH / 2, TOP]
    assert [each.attrib.get("stroke-dasharray") for each in lines] == [None, "5 4"]


def test_axes_and_moments_say_where_they_are() -> None:
    texts = {each.text: float(each.attrib["x"]) for each in drawn().iter("text")}
    assert {"0", "1", "2", "3", "60", "seconds since the shift", "left as it is", "applied"} <= set(texts)
    assert texts["traffic shifts"] == pytest.approx(LEFT + WIDE / 2)
    assert texts["plan runs"] > texts["traffic shifts"]


def test_labels_that_would_lie_on_each_other_are_moved_apart() -> None:
    assert spread([50.0, 10.0, 52.0], 16) == [50.0, 10.0, 66.0]
    assert spread([10.0, 10.0, 10.0], 16) == [10.0, 26.0, 42.0]
    assert spread([], 16) == []
