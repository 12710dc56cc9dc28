"""`make plan` and its notebook: they plan the shipped trace, print the plan, write the report."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import plan as example
from support.notebooks import printed, run_notebook
from trinity.planner import Plan
from trinity.simulation import compiled_engine

needs_twin = pytest.mark.skipif(
    bool(compiled_engine.why_unavailable()), reason=f"needs the compiled engine: {compiled_engine.why_unavailable()}"
)


@needs_twin
def test_it_plans_prints_and_writes_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "plan.html"
    assert example.main(["--instances", "2", "--minutes", "3", "--html", str(page)]) == 0
    said = capsys.readouterr().out
    made = Plan.load(page.with_suffix(".json"))
    assert said.startswith(f"Run {made.best.placement} ")
    assert "Algorithm 2" in said
    assert f"The report is {page}" in said
    assert made.best.placement in page.read_text(encoding="utf-8")
    assert page.read_text(encoding="utf-8").count("<img") > 4  # timelines of the best one as well


def test_what_cannot_be_planned_is_said_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--device", "H1000", "--minutes", "3"]) == 2
    assert capsys.readouterr().err.startswith("UnknownName: unknown device 'H1000'; known: A10, A100,")
    assert example.main(["--instances", "0", "--minutes", "3"]) == 2
    assert "instances is a whole number of at least 1" in capsys.readouterr().err


def test_without_the_compiled_engine_it_plans_on_less_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compiled_engine, "why_unavailable", lambda: "no compiler")
    assert 1000 < len(example.traffic(None)) < 10_000
    assert "no compiled engine (no compiler): planned on the first 5 minutes" in capsys.readouterr().out
    assert len(example.traffic(1)) < 1000


def test_the_whole_hour_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_engine, "why_unavailable", lambda: "")
    assert len(example.traffic(None)) == 36_856


@needs_twin
@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    cells = run_notebook("plan.ipynb", tmp_path, tmp_path)
    outputs = [one for cell in cells for one in cell.get("outputs", [])]
    assert sum("image/png" in one.get("data", {}) for one in outputs) == 2, "both pictures, without a magic line"
    shown = "".join(map(printed, cells))
    assert "Run " in shown
    assert "Algorithm 2" in shown
    assert "True" in shown
    assert (tmp_path / "plan.html").stat().st_size > 10_000
