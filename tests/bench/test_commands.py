"""python -m trinity.bench: what it prints, writes and refuses; over the fake engine, and once for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from support.checkpoint_files import checkpoint
from support.fake_servers import FakeServer
from trinity.bench import commands, outcome, search
from trinity.bench.__main__ import main
from trinity.bench.measure import Burst, SweepPoint
from trinity.bench.search import EngineGoodput, Goal, Trial
from trinity.bench.servers import Server
from trinity.traces.trace import SLO, Trace, TraceRow


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine is the fake one, which has the tokens of the fake ``generate()``; a busy machine costs no time."""
    monkeypatch.setattr(search, "MAX_TRIES", 1)
    monkeypatch.setattr(Server, "_command", FakeServer._command)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [TraceRow(timestamp=100 * n, input_length=30, output_length=3) for n in range(60)]
    Trace(rows).save(tmp_path / "trace.jsonl")
    return tmp_path / "trace.jsonl"


@pytest.mark.usefixtures("faked")
def test_cpu_writes_every_run_with_its_sweep_and_exactness(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "out.json"
    arguments = ["cpu", str(checkpoint("llava")), "--peer", "generate_batch", "--rounds", "2", "--requests", "2"]
    main(
        [*arguments, "--prompt", "8", "--output", "3", "--sweep", "64,128", "--dtype", "float32", "--json", str(found)]
    )
    said = capsys.readouterr().out
    assert "sweep of tokens a step" in said
    assert "trinity EPD / engine" in said
    assert "2 of 2" in said
    run = json.loads(found.read_text())["runs"]["float32, caches off"]
    assert {name: len(each) for name, each in run["bursts"].items()} == {"trinity EPD": 2, "generate_batch": 2}
    assert [each["tokens"] for each in run["sweep"]["generate_batch"]] == [64, 128]
    assert run["exact"]["trinity EPD"] == [2, 2]
    assert run["about"]["trinity EPD"]["omp"]["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.usefixtures("faked")
def test_serve_finds_goodput_under_both_rules_and_writes_it(
    tmp_path: Path, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, plot = tmp_path / "out.json", tmp_path / "out.png"
    arguments = ["serve", str(checkpoint("llava")), "--trace", str(trace), "--slo", "5,1", "--rates", "100,200"]
    arguments += ["--placement", "EPD", "--placement", "E+PD", "--seeds", "3", "--requests", "10", "--sweep", "64"]
    main([*arguments, "--prompt", "8", "--output", "3", "--json", str(found), "--plot", str(plot)])
    said = capsys.readouterr().out
    assert "p90 / trinity EPD" in said
    assert "trinity E+PD 3 of 3" in said
    written = json.loads(found.read_text())
    assert {each["engine"] for each in written["trials"]} == {"trinity EPD", "trinity E+PD"}
    assert {each["seed"] for each in written["trials"]} == {0, 1, 2}
    assert {"machine", "trace", "rates", "exact", "goodput", "sweep"} <= set(written)
    assert {"p50", "p90", "p95", "p99"} <= set(written["trials"][0]["ttft_s"])
    assert len(written["goodput"]) == 4  # two engines under two rules
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("faked")
def test_caches_are_off_for_all_or_on_for_all_and_both_are_shown(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "serve",
        str(checkpoint("llava")),
        "--trace",
        str(trace),
        "--slo",
        "5,1",
        "--rates",
        "80",
        "--seeds",
        "1",
    ]
    main([*arguments, "--caches", "both", "--requests", "8", "--sweep", "64", "--prompt", "8", "--output", "2"])
    said = capsys.readouterr().out
    assert "trinity EPD at" in said
    assert "trinity EPD with caches at" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["cpu", "nowhere"], "does not exist"),
        (["cpu", "{llava}", "--peer", "vllm"], "make bench-peers"),
        (["serve", "{llava}", "--trace", "gone.jsonl", "--slo", "1,1", "--rates", "1"], "cannot read gone.jsonl"),
        (["serve", "{llava}", "--trace", "servegen-image-1h", "--slo", "1,1", "--rates", "0"], "requests a second"),
        (["serve", "{llava}", "--trace", "servegen-image-1h", "--slo", "0,1", "--rates", "1"], "--slo"),
        (["serve", "{llava}", "--trace", "servegen-image-1h", "--slo", "1", "--rates", "1"], "--slo"),
        (["serve", "{llava}", "--trace", "servegen-image-1h", "--slo", "1,1", "--rates", "x"], "--rates"),
        (["cpu", "{llava}", "--requests", "0"], "--requests: give 1 or more, got 0"),
        (["cpu", "{llava}", "--rounds", "-1"], "--rounds: give 1 or more"),
    ],
)
def test_what_cannot_be_run_is_said(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRINITY_PEERS", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        main([each.format(llava=checkpoint("llava")) for each in arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


# ---------------------------------------------------------------- tables


def test_the_cpu_table_pairs_rounds_and_marks_what_was_disturbed() -> None:
    def of(cpu_s: float, foreign: float = 0.0) -> Burst:
        return Burst(requests=8, cpu_s=cpu_s, wall_s=1.0, foreign=foreign)

    found = {"ours": [of(4), of(8), of(2, 0.9)], "theirs": [of(8, 0.5), of(8, 0.5), of(8, 0.5)]}
    ours, theirs = outcome.cpu_table(found, "ours", {"ours": 3}, 3).rows
    assert ours == ("ours", "1.50 (1.00 to 2.00)", "", "3 of 3")
    assert theirs == ("theirs (disturbed)", "1.00 (1.00 to 1.00)", "2.00 (1.00 to 4.00)", "not checked")


def test_a_setting_that_did_not_run_has_no_figure() -> None:
    table = outcome.sweep_table(
        {"a": [SweepPoint(tokens=1, per_cpu_s=2.0, per_s=3.0), SweepPoint(tokens=2, problem="no")]}
    )
    assert table.rows == [("a", "1", "2.00", "3.00"), ("a", "2", "-", "-")]
    tried = outcome.sweep_table(
        {"a": [SweepPoint(tokens=1, per_s=3.0, attained=0.5), SweepPoint(tokens=2, problem="no")]}
    )
    assert tried.header[-1] == "in time"
    assert [row[-1] for row in tried.rows] == ["50%", "-"]


GOALS = [Goal(SLO(1.0, 0.1), rule) for rule in ("p90", "p99")]


def test_the_goodput_table_says_who_is_ahead_seed_by_seed() -> None:
    rates = {"a": ({0: 1.0, 1: 2.0}, {0: 0.5, 1: 0.0}), "b": ({0: 2.0, 1: 3.0}, {0: 1.0, 1: 1.0})}
    found = [
        EngineGoodput(engine=name, goal=goal.key, by_seed=each, open=False)
        for name, both in rates.items()
        for goal, each in zip(GOALS, both, strict=True)
    ]
    first, second = outcome.goodput_table(found, GOALS, ["a", "b"], "a").rows
    assert first == ("1 s, 100 ms: a", "1.50 (1.00 to 2.00)", "0.25 (0.00 to 0.50)", "", "")
    assert second[1:] == ("2.50 (2.00 to 3.00)", "1.00 (1.00 to 1.00)", "1.75 (1.50 to 2.00)", "2.00 (2.00 to 2.00)")


def test_trials_say_whether_they_count() -> None:
    base = Trial(
        engine="a",
        rate=1.0,
        seed=0,
        requests=9,
        failed=1,
        attainment={},
        ttft_s=None,
        tbt_s=None,
        late_p95_s=0.0,
        cpu_s=1.0,
        wall_s=2.0,
        foreign=0.0,
    )
    late, rough = msgspec.structs.replace(base, late_p95_s=1.0), msgspec.structs.replace(base, foreign=0.5)
    rows = outcome.trials_table([base, late, rough]).rows
    assert [row[-1] for row in rows] == ["yes", "INVALID: client late", "discarded: others 50%"]
    assert rows[0][-2] == "0.50"


@pytest.mark.slow
def test_serve_from_end_to_end(tmp_path: Path, trace: Path) -> None:
    found = tmp_path / "out.json"
    arguments = [str(checkpoint("llava")), "--trace", str(trace), "--slo", "20,5", "--rates", "4", "--seeds", "1"]
    arguments += ["--requests", "8", "--sweep", "64", "--prompt", "8", "--output", "3", "--json", str(found)]
    command = [sys.executable, "-m", "trinity.bench", "serve", *arguments]
    subprocess.run(command, check=True, timeout=110, env={**os.environ, "PYTHONPATH": str(Path("src").absolute())})
    written = json.loads(found.read_text())
    assert written["exact"] == {"trinity EPD": [3, 3]}
    assert [each["failed"] for each in written["trials"]] == [0] * len(written["trials"])
    assert written["about"]["trinity EPD"]["process"] != os.getpid()


def test_shipped_traces_go_by_their_names() -> None:
    assert len(commands.load_trace("servegen-image-1h")) > 1000
