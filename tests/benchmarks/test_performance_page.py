"""docs/performance.md: what fell short first, short sections, and everything in the data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import run
from benchmarks.performance_page import FEW_NOTES, FEW_ROWS, page, section, whole
from benchmarks.report import Aim, Result, Table, load, publish, save
from tools.check_docs import anchors

FACTS: dict[str, Any] = {
    "date": "2026-01-02",
    "cpu": "A CPU",
    "cores": 2,
    "memory_gib": 24,
    "threads": 1,
    "python": "3.11",
    "torch": "2.13",
    "transformers": "5.23",
    "git": "abc",
    "foreign_load": 0.25,
}


@pytest.fixture
def result() -> Result:
    rows = [[f"{n} | {n}", str(n)] for n in range(FEW_ROWS + 1)]
    return Result(
        name="memory",
        title="A thing's size (figure 3)",
        method="Looked at it.",
        tables=[Table("Sizes", ("what", "much"), rows), Table("Few", ("what", "much"), rows[:2])],
        aims=[Aim("size", "≤ 1", "2", False), Aim("price", "≤ 3", "2", True), Aim("taste", "good", "-", None)],
        notes=["Take care."],
        values={"sizes": [1, 22]},
    )


def test_what_fell_short_comes_first_then_what_was_met(result: Result) -> None:
    text = page([(result, FACTS)], ["gpu"])
    short, met = text.index("| size | ≤ 1 | 2 | abc |"), text.index("| 1 of 2 | price: 2 (aim ≤ 3) | abc |")
    assert text.index("1 aims are met, 1 are not, and 1 are open.") < short < met < text.index("## A thing's size")
    assert "Measured on: A CPU, 2 cores, 24 GiB, 1 thread, Python 3.11, torch 2.13, transformers 5.23." in text
    assert "have not run to their end: gpu.**" in text
    assert "(#a-things-size-figure-3)" in text
    assert "a-things-size-figure-3" in anchors(text)


def test_two_machines_are_both_named(result: Result) -> None:
    text = page([(result, FACTS), (replace(result, aims=[]), FACTS | {"cpu": "Another"})])
    assert "Measured on: A CPU, 2 cores" in text
    assert "; Another, 2 cores" in text
    assert "Without figures" not in text


def test_a_section_has_its_small_tables_and_says_what_only_the_data_have(result: Result) -> None:
    text = section(result, FACTS)
    assert "| size | ≤ 1 | 2 | FELL SHORT |\n| price | ≤ 3 | 2 | met |\n| taste | good | - | open |" in text
    assert "Few:\n\n| what | much |\n| --- | ---: |\n| 0 \\| 0 | 0 |\n| 1 \\| 1 | 1 |" in text
    assert "Sizes:" not in text
    assert "Take care." in text
    said = "_2026-01-02, git abc, foreign CPU load 25%. [Everything measured](data/memory.json): "
    assert text.endswith(f"{said}Sizes ({FEW_ROWS + 1} rows)._")


def test_many_notes_stay_in_the_data(result: Result) -> None:
    text = section(replace(result, notes=["Take care."] * (FEW_NOTES + 1)), FACTS)
    assert "Take care." not in text
    assert text.endswith(f"; {FEW_NOTES + 1} notes._")


def test_the_whole_of_a_benchmark_leaves_nothing_out(result: Result) -> None:
    text = whole(replace(result, notes=["Take care."] * 9), FACTS)
    assert text.startswith("# A thing's size (figure 3)\n\nLooked at it.\n")
    assert text.count("Take care.") == 9
    assert f"| {FEW_ROWS} \\| {FEW_ROWS} | {FEW_ROWS} |" in text
    assert text.endswith("git abc, foreign CPU load 25%_\n")


def test_published_data_have_a_line_for_each_row_and_no_values(result: Result, tmp_path: Path) -> None:
    path = publish(result, FACTS, tmp_path / "new")
    assert load(path) == (replace(result, values={}), FACTS)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert '    ["0 | 0", "0"],' in lines
    assert '  {"what": "size", "aim": "≤ 1", "measured": "2", "met": false},' in lines


def test_writing_the_page_keeps_what_did_not_run_this_time(result: Result, tmp_path: Path) -> None:
    results, data, written = tmp_path / "results", tmp_path / "data", tmp_path / "page.md"
    with pytest.raises(FileNotFoundError, match="no results"):
        run.write_page(results, written, data)
    for name in run.NAMES:
        save(replace(result, name=name), FACTS, results)
    run.write_page(results, written, data)
    assert "Without figures" not in written.read_text(encoding="utf-8")
    assert len(list(data.glob("*.json"))) == len(run.NAMES)
    for path in results.glob("*.json"):
        path.unlink()
    save(replace(result, method="Looked again."), FACTS, results)
    run.write_page(results, written, data)
    text = written.read_text(encoding="utf-8")
    assert text.count("Looked at it.") == len(run.NAMES) - 1
    assert text.count("Looked again.") == 1
    (data / "memory.json").unlink()
    (results / "memory.json").unlink()
    run.write_page(results, written, data)
    assert "have not run to their end: memory.**" in written.read_text(encoding="utf-8")


def test_the_page_is_what_the_data_say(tmp_path: Path) -> None:
    run.write_page(tmp_path / "none", tmp_path / "page.md")
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == run.PAGE.read_text(encoding="utf-8")


def test_data_are_small_text() -> None:
    for path in run.DATA.glob("*.json"):
        assert path.stat().st_size < 100_000
        assert json.loads(path.read_text(encoding="utf-8"))["values"] == {}
        assert path.stem in run.NAMES
