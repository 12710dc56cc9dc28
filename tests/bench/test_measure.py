"""Bursts, sweeps, exactness and trials over the fake engine; what is made of a trace's rows; the machine's load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from support.checkpoint_files import checkpoint
from support.fake_servers import FakeServer, asked, engine, starter
from trinity.bench import load, machine, measure, outcome
from trinity.bench.measure import Burst, SweepPoint
from trinity.bench.search import Goal
from trinity.bench.servers import BenchRequest, BenchServer, EngineSpec, Server
from trinity.errors import ConfigError, PeerLost
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow


async def test_a_burst_counts_requests_and_cpu_time(tmp_path: Path) -> None:
    async with FakeServer(engine(), tmp_path) as server:
        seen = await measure.run_burst(server, [asked(number) for number in range(3)])
    assert seen.requests == 3
    assert seen.cpu_s > 0
    assert seen.per_s == pytest.approx(3 / seen.wall_s)


async def test_a_burst_with_too_few_tokens_is_no_figure(tmp_path: Path) -> None:
    async with FakeServer(engine(lacks=1), tmp_path) as server:
        with pytest.raises(PeerLost, match="3 of 4 tokens"):
            await measure.run_burst(server, [asked()])


async def test_a_sweep_tries_every_setting_and_says_which_did_not_run(tmp_path: Path) -> None:
    fakes = starter()
    tried = []

    def start(each: EngineSpec, at: Path) -> Server:
        tried.append(each.tokens)
        return fakes(msgspec.structs.replace(each, options={"dies": each.tokens == 64}), at)

    found = await measure.sweep(measure.sweep_settings(engine(), [64, 128]), tmp_path, [asked()], start)
    assert tried == [64, 128]
    assert "did not start" in found[0].problem
    assert found[1].per_cpu_s > 0
    assert measure.best_setting(found) == found[1]
    assert (found[0].tokens, found[1].tokens) == (64, 128)
    assert await measure.sweep([engine()], tmp_path, [asked()], start) == []


async def test_a_sweep_may_judge_by_a_trial(tmp_path: Path) -> None:
    seen: list[str] = []

    async def tried(server: BenchServer) -> float:
        seen.append(server.engine.name)
        return 0.25 * len(seen)

    found = await measure.sweep(measure.sweep_settings(engine(), [64, 128]), tmp_path, [asked()], starter(), tried)
    assert [each.attained for each in found] == [0.25, 0.5]
    assert measure.best_setting(found).tokens == 128


def test_what_is_in_time_comes_before_what_is_fast() -> None:
    slow, fast = SweepPoint(tokens=1, per_cpu_s=1.0, attained=0.5), SweepPoint(tokens=2, per_cpu_s=2.0, attained=0.4)
    even = msgspec.structs.replace(fast, tokens=3, attained=0.5)
    assert (measure.best_setting([slow, fast]).tokens, measure.best_setting([slow, fast, even]).tokens) == (1, 3)


def test_a_setting_is_said_in_words() -> None:
    wide = {"threads_of": {"EP": 2}}
    searched = {"slo": [1.05, 0.0703], "policy": "time"}
    swept = [
        SweepPoint(tokens=64),
        SweepPoint(tokens=64, options=wide),
        SweepPoint(tokens=64, options=searched, problem="no"),
    ]
    rows = outcome.sweep_table({"x": swept}).rows
    assert [row[1] for row in rows] == ["64", "64, EP x 2 threads", "searched for 1.05 s, 70.3 ms"]


def test_the_best_setting_is_by_cpu_time_or_by_wall_time() -> None:
    found = [SweepPoint(tokens=1, per_cpu_s=2.0, per_s=1.0), SweepPoint(tokens=2, per_cpu_s=1.0, per_s=2.0)]
    assert (measure.best_setting(found).tokens, measure.best_setting(found, wall=True).tokens) == (1, 2)
    with pytest.raises(ConfigError, match="no such thing"):
        measure.best_setting([SweepPoint(tokens=1, problem="no such thing")])


async def test_exactness_tells_who_differs_from_generate(tmp_path: Path) -> None:
    requests = [asked(number) for number in range(2)]
    found = await measure.count_exact([engine("good"), engine("bad")], tmp_path, requests, starter("bad"))
    assert found == {"good": 2, "bad": 0}


async def test_exactness_is_of_float32_whatever_is_measured(tmp_path: Path) -> None:
    seen: list[str] = []
    fakes = starter()

    def start(each: EngineSpec, at: Path) -> Server:
        seen.append(each.dtype)
        return fakes(each, at)

    half = msgspec.structs.replace(engine(), dtype="bfloat16")
    await measure.count_exact([half], tmp_path, [asked()], start)
    assert seen == ["float32", "float32"]


async def test_rounds_go_in_turn_and_the_first_does_not_count(tmp_path: Path) -> None:
    async with measure.start_servers([engine("a"), engine("b")], tmp_path, starter()) as servers:
        found = await measure.run_rounds(servers, [asked()], 2)
    assert {name: len(each) for name, each in found.items()} == {"a": 2, "b": 2}


def of(per_cpu_s: float, foreign: float = 0.0) -> Burst:
    return Burst(requests=1, cpu_s=1 / per_cpu_s, wall_s=1.0, foreign=foreign)


def test_pairs_and_quiet_bursts() -> None:
    assert measure.compare_rounds([of(2), of(3), of(9)], [of(1), of(1), of(1)]) == pytest.approx((3, 2, 9))
    assert measure.select_undisturbed([of(1), of(2, 0.5)]) == ([of(1)], True)
    assert measure.select_undisturbed([of(2, 0.5)]) == ([of(2, 0.5)], False)


async def test_a_trial_serves_a_stretch_of_the_trace_at_its_rate(tmp_path: Path) -> None:
    rows = [TraceRow(timestamp=100 * n, input_length=2, output_length=3) for n in range(40)]
    goals = [Goal(SLO(5.0, 5.0), "p90")]
    made: list[int] = []

    def make(row: TraceRow, number: int) -> BenchRequest:
        made.append(number)
        return asked(number, tokens=row.output_length)

    async with FakeServer(engine(), tmp_path) as server:
        seen = await measure.run_trial(server, Trace(rows), make, goals, 50.0, 1, 20)
    assert made == list(range(20))
    assert (seen.engine, seen.rate, seen.seed, seen.requests, seen.failed) == ("fake", 50.0, 1, 18, 0)
    assert seen.attainment == {goals[0].key: 1.0}
    assert seen.wall_s >= 19 / 50


# ---------------------------------------------------------------- what is served


def test_requests_are_the_same_for_every_engine_and_as_long_as_their_rows() -> None:
    with load.CheckpointRequests(checkpoint("llava"), "x") as make:
        made = make(load.burst_row(1, 20, 5), 0)
        (span,) = made.spans
        visual = set(made.ids[span[0] : span[0] + span[1]])
        again = make(load.burst_row(1, 20, 5), 0)
        other = make(load.burst_row(1, 20, 5), 1)
    assert make.takes_images
    assert len(visual) == 1
    assert 20 <= len(made.ids) - span[1] <= 21  # a line break of their own follows the image
    assert made.text.startswith("<image>\n")
    assert (made, made.tokens) == (again, 5)
    assert other.images != made.images


def test_rows_are_made_small_in_proportion() -> None:
    image = TraceImage(width=4000, height=3000, content="c")
    rows = [
        TraceRow(timestamp=n, input_length=0, text_length=n * 100, output_length=n * 10, images=[image, image])
        for n in (1, 2, 30)
    ]
    found = list(load.shrink_trace(Trace(rows), text=40, output=8, images=1))
    assert [row.text_tokens for row in found] == [20, 40, 160]
    assert [row.output_length for row in found] == [4, 8, 32]
    assert [row.timestamp for row in found] == [1, 2, 30]
    assert {(each.width, each.height, each.content) for row in found for each in row.images} == {(336, 336, "c")}
    assert {len(row.images) for row in found} == {1}
    with pytest.raises(ConfigError, match="without requests"):
        load.shrink_trace(Trace(), text=1, output=1, images=0)


def test_a_seed_draws_a_stretch_of_the_trace() -> None:
    rows = Trace(TraceRow(timestamp=n * n, input_length=n, output_length=1) for n in range(100))
    stretches = [load.draw_stretch(rows, 10, seed) for seed in range(4)]
    for found in stretches:
        lengths = [row.input_length for row in found]
        assert lengths == list(range(lengths[0], lengths[0] + 10))
        assert found[0].timestamp == 0
        assert found[9].timestamp == (lengths[0] + 9) ** 2 - lengths[0] ** 2
    assert len({found[0].input_length for found in stretches}) > 1
    assert [row.input_length for row in load.draw_stretch(rows, 10, 1)] == [row.input_length for row in stretches[1]]
    assert len(load.draw_stretch(rows, 300, 0)) == 300


# ---------------------------------------------------------------- the machine


def test_cpu_seconds_of_a_session_have_its_children_in_them() -> None:
    program = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time\\nwhile time.process_time() < .4: pass'])\n"
        "child.wait(); print('.', flush=True); time.sleep(30)"
    )
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process:
        try:
            process.stdout.read(1)
            assert machine.session_seconds([process.pid]) >= 0.3  # the system counts ticks, and may lose some
        finally:
            process.kill()
    assert machine.session_seconds([process.pid]) == 0.0
    assert machine.session_seconds([]) == 0.0


@pytest.mark.parametrize(("busy", "foreign"), [(6.0, 0.0), (9.0, 0.25), (99.0, 1.0), (5.0, 0.0)])
def test_what_client_and_engine_do_is_not_others_load(
    busy: float, foreign: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's seconds, less 2 of the client and 4 of the engine, over 6 s on two CPUs."""
    for name, last in (("busy_seconds", busy), ("own_seconds", 2.0)):
        monkeypatch.setattr(machine, name, iter([0.0, last]).__next__)
    theirs = iter([1.0, 5.0])
    monkeypatch.setattr(machine, "session_seconds", lambda _: next(theirs))
    monkeypatch.setattr("trinity.bench.machine.time.monotonic", iter([0.0, 6.0]).__next__)
    monkeypatch.setattr("trinity.bench.machine.os.cpu_count", lambda: 2)
    with machine.LoadMeter([1]) as seen:
        pass
    assert (seen.cpu_s, seen.wall_s) == (4.0, 6.0)
    assert seen.foreign == pytest.approx(foreign)


def test_facts_say_what_a_figure_depends_on(tmp_path: Path) -> None:
    found = machine.machine_facts()
    assert {"date", "cpu", "flags", "cores", "omp", "python", "torch", "transformers", "git"} <= set(found)
    assert found["torch"] != "unknown"
    assert machine.measured_commit(tmp_path) == "unknown"
