"""``trinity plan``: plans a trace, prints the plan, writes it and a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinity.commands import main
from trinity.commands.plan import read_traffic
from trinity.planner import Plan
from trinity.simulation import compiled_engine

needs_twin = pytest.mark.skipif(
    bool(compiled_engine.why_unavailable()), reason=f"needs the compiled engine: {compiled_engine.why_unavailable()}"
)
SHIPPED = ["--trace", "servegen-image-1h", "--minutes", "3"]


@needs_twin
def test_it_prints_the_plan_and_writes_it_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "plan.json", tmp_path / "plan.html"
    arguments = ["plan", "qwen2-vl-7b", *SHIPPED, "--slo", "2,0.08", "--instances", "2", "--out", str(out)]
    assert main([*arguments, "--html", str(page)]) == 0
    said, made = capsys.readouterr().out, Plan.load(out)
    assert said.startswith(f"Run {made.best.placement} ")
    assert made.explain() in said
    assert made.best.placement in page.read_text(encoding="utf-8")


def test_the_first_minutes_of_a_trace_are_taken() -> None:
    assert 0 < len(read_traffic("servegen-image-1h", 3)) < len(read_traffic("servegen-image-1h", None)) == 36_856


@pytest.mark.parametrize("given", ["2", "2,x", "0,1", "2,1,1"])
def test_bounds_that_are_none_are_refused(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "qwen2-vl-7b", *SHIPPED, "--slo", given])
    assert ended.value.code == 2
    assert "TTFT,TBT in seconds" in capsys.readouterr().err
