"""The pictures of the first page: drawn from docs/data, and nothing that runs or loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from support.paths import ROOT
from tools import draw_pictures
from tools.draw_pictures import DRAWN, FOLDER, Bar, Chart, Group, draw_chart, number, wrap

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_what_is_drawn_from_the_data(name: str) -> None:
    there = (ROOT / FOLDER / name).read_text(encoding="utf-8")
    assert there == DRAWN[name](ROOT), "python tools/draw_pictures.py draws it anew"


@pytest.mark.parametrize("name", DRAWN)
def test_the_first_page_shows_it_and_it_runs_and_loads_nothing(name: str) -> None:
    assert f"]({FOLDER.as_posix()}/{name})" in (ROOT / "README.md").read_text(encoding="utf-8")
    root = ElementTree.fromstring((ROOT / FOLDER / name).read_text(encoding="utf-8"))
    assert {each.tag.removeprefix(SVG) for each in root.iter()} <= {"svg", "title", "rect", "text", "path"}
    assert not [key for each in root.iter() for key in each.attrib if key.startswith("on") or "href" in key]


@pytest.mark.parametrize("name", DRAWN)
def test_everything_is_within_the_sheet(name: str) -> None:
    root = ElementTree.fromstring((ROOT / FOLDER / name).read_text(encoding="utf-8"))
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for each in root.iter(f"{SVG}text"):
        letters, size = len(each.text or ""), float(each.attrib["font-size"])
        long = 0.55 * size * letters  # about as wide as the fonts of browsers are
        begin = float(each.attrib["x"]) - long * {"end": 1, "middle": 0.5}.get(each.attrib.get("text-anchor", ""), 0)
        assert begin >= -1, each.text
        assert begin + long <= width, each.text
        assert float(each.attrib["y"]) + size <= height, each.text


def test_a_bar_is_as_long_as_its_value_and_says_it() -> None:
    chart = Chart("t", [Group("", [Bar("EPD", 4.0, "4 s"), Bar("EP+D", 1.0, "1 s")])], "a note")
    root = ElementTree.fromstring(draw_chart(chart))
    bars = [each for each in root.iter(f"{SVG}rect") if each.attrib.get("rx") == "2"]
    assert [float(each.attrib["width"]) for each in bars] == [draw_pictures.BAR, draw_pictures.BAR / 4]
    assert bars[0].attrib["fill"] != bars[1].attrib["fill"], "one instance for all, and stages apart"
    assert {"4 s", "1 s", "EPD", "EP+D", "a note"} <= {each.text for each in root.iter(f"{SVG}text")}


def test_figures_are_read_from_cells() -> None:
    assert number("≥ 6.52 (0.00 to 6.52)") == 6.52
    assert number("706.0") == 706.0
    assert all(len(line) <= 104 for line in wrap("word " * 100))
    assert " ".join(wrap("word " * 100)).split() == ["word"] * 100


def test_other_data_give_another_picture(tmp_path: Path) -> None:
    (tmp_path / "docs" / "data").mkdir(parents=True)
    for name in ("ttft_methods", "served", "scale", "redeploy"):
        text = (ROOT / "docs" / "data" / f"{name}.json").read_text(encoding="utf-8")
        (tmp_path / "docs" / "data" / f"{name}.json").write_text(re.sub(r'"706\.0"', '"123.0"', text))
    assert json.loads((tmp_path / "docs" / "data" / "ttft_methods.json").read_text())
    assert draw_pictures.main(tmp_path) == 0
    assert "123 ms" in (tmp_path / FOLDER / "waits.svg").read_text(encoding="utf-8")
    assert "123 ms" not in (ROOT / FOLDER / "waits.svg").read_text(encoding="utf-8")
