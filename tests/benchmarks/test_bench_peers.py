"""The repository's benchmarks against other engines: what their tables say, and that they run without any."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import run
from benchmarks.peers import cpu_second, served
from benchmarks.peers import install as install_peers
from benchmarks.setting import Setting
from support.checkpoint_files import checkpoint
from support.fake_servers import FakeServer
from trinity.bench import search
from trinity.bench.measure import Burst, SweepPoint
from trinity.bench.search import EngineGoodput, Goal
from trinity.bench.servers import EngineSpec, Server
from trinity.traces.trace import SLO


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No peer is installed, every engine is the fake one, and a busy machine costs no time."""
    monkeypatch.setenv("TRINITY_PEERS", str(tmp_path / "nothing"))
    monkeypatch.setattr(Server, "_command", FakeServer._command)
    monkeypatch.setattr(search, "MAX_TRIES", 1)


@pytest.mark.usefixtures("alone")
def test_requests_per_cpu_second_name_the_peers_that_are_not_there() -> None:
    found = cpu_second.run(Setting(quick=True, checkpoint=checkpoint))
    rows = {row[0].removesuffix(" (disturbed)"): row for row in found.tables[0].rows}
    assert rows["openvino"][1] == rows["vllm"][1] == "not installed: make bench-peers"
    assert rows["trinity EPD"][3] == rows["generate_batch"][3] == "3 of 3"
    assert [each["dtype"] for each in found.values["found"]] == ["float32", "bfloat16"]
    json.dumps(found.values)
    assert found.markdown()


@pytest.mark.parametrize(
    ("flags", "dtype"), [("avx2 fma", "float32"), ("avx2 avx512_bf16", "bfloat16"), ("amx_bf16", "bfloat16")]
)
def test_goodput_is_measured_in_what_the_processor_multiplies(
    flags: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "read_cpu_field", {"flags": flags}.__getitem__)
    whole = served.choose_sizes(Setting(quick=False, minutes=served.WHOLE_MINUTES))
    short = served.choose_sizes(Setting(quick=False, minutes=served.WHOLE_MINUTES / 2))
    assert (whole.dtype, whole.seeds, len(whole.sweep)) == (dtype, 3, 3)
    assert (short.dtype, short.seeds, len(short.sweep)) == (dtype, 1, 1)
    assert served.choose_sizes(Setting(quick=True, minutes=served.WHOLE_MINUTES)) == served.QUICK


def of(per_cpu_s: float, count: int = 3) -> list[Burst]:
    return [Burst(requests=8, cpu_s=8 / per_cpu_s, wall_s=1.0, foreign=0.0)] * count


@pytest.mark.parametrize(("ours", "met"), [(1.4, [True, True]), (1.29, [False, False]), (1.31, [True, False])])
def test_the_aim_is_a_figure_and_to_be_ahead_of_every_peer(ours: float, met: list[bool]) -> None:
    swept = {"vllm": [SweepPoint(tokens=1, per_cpu_s=1.0), SweepPoint(tokens=2, problem="too small")]}
    one = cpu_second.Found(dtype="float32", swept=swept, bursts={"trinity EPD": of(ours), "vllm": of(1.35)})
    found = cpu_second.result([one], {"trinity EPD": 3}, [], "605 + 32")
    assert [aim.met for aim in found.aims] == met
    assert found.notes == ["vllm in float32 with 2 tokens a step: too small"]


def test_an_engine_of_which_no_setting_ran_has_a_row_that_says_so() -> None:
    swept = {"vllm": [SweepPoint(tokens=1, problem="no such kernel")]}
    one = cpu_second.Found(dtype="float32", swept=swept, bursts={"trinity EPD": of(1.5)})
    found = cpu_second.result([one], {}, ["openvino"], "605 + 32")
    assert [row[:2] for row in found.tables[0].rows[1:]] == [
        ["openvino", "not installed: make bench-peers"],
        ["vllm", "no setting ran: see below"],
    ]
    assert found.notes == ["vllm in float32 with 1 tokens a step: no such kernel"]


# ---------------------------------------------------------------- served


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_served_keeps_its_trials_and_goes_on_from_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(quick=True, checkpoint=checkpoint, kept=tmp_path)
    first = served.run(setting)
    assert {row[0].partition(" at ")[0] for row in first.tables[2].rows} == {
        "trinity EPD",
        "trinity 2EPD",
        "trinity E+PD",
    }
    assert len(first.tables[0].rows) == 3 * len(served.TIMES)
    json.dumps(first.values)
    lines = (tmp_path / "served-trials.jsonl").read_text().splitlines()
    assert len(lines) == 1 + len(first.values["trials"])
    monkeypatch.setattr(served.measure, "run_trial", None)  # nothing is left to be tried
    monkeypatch.setattr(served, "prepare", None)
    again = served.run(setting)
    assert again.values == first.values


def test_records_of_other_sources_or_sizes_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "kept.jsonl"
    served.Kept(path, served.Sizes()).add("trial", {"a": 1})
    assert served.Kept(path, served.Sizes()).of("trial") == [{"a": 1}]
    assert served.Kept(path, served.Sizes()).of("ready") == []
    assert served.Kept(path, served.QUICK).of("trial") == []
    monkeypatch.setattr(served, "sources", lambda: "others")
    assert served.Kept(path, served.Sizes()).of("trial") == []


def test_every_engine_has_two_cores() -> None:
    engines = served.engines_of(served.Sizes(), ["vllm"])
    assert [each.name for each in engines] == [
        "trinity EPD x 2 threads",
        "trinity 2EPD",
        "trinity E+PD",
        "trinity EP+D",
        "trinity ED+P",
        "vllm x 2 threads",
    ]
    assert {each.dtype for each in engines} == {"bfloat16"}


GOALS = [Goal(SLO(1.0, 0.1), rule) for rule in ("p90", "p99")]


def found(engine: str, *rates: float) -> list[EngineGoodput]:
    both = zip(GOALS, rates, strict=True)
    return [EngineGoodput(engine=engine, goal=goal.key, by_seed={0: rate}, open=False) for goal, rate in both]


def test_it_is_said_plainly_where_disaggregation_loses() -> None:
    seen = [*found("trinity EPD", 1.0, 1.0), *found("trinity E+PD", 0.5, 2.0), *found("vllm", 1.5, 0.1)]
    names = ["trinity EPD", "trinity E+PD", "vllm"]
    first, second = served.plainly(seen, GOALS, names, ["trinity E+PD"])
    assert "p90: disaggregation loses: trinity E+PD 0.50 requests/s, the best without it vllm 1.50" in first
    assert "p99: disaggregation wins: trinity E+PD 2.00 requests/s, the best without it trinity EPD 1.00" in second
    assert [aim.met for aim in served.aims(seen, GOALS, names, ["trinity E+PD"])] == [False, True]


def test_no_verdict_rests_on_disturbed_trials() -> None:
    goal = GOALS[0]
    seen = [
        EngineGoodput(engine=name, goal=goal.key, by_seed={0: rate}, open=False, disturbed=rate > 1)
        for name, rate in (("trinity EPD", 1.0), ("trinity E+PD", 2.0))
    ]
    (said,) = served.plainly(seen, [goal], ["trinity EPD", "trinity E+PD"], ["trinity E+PD"])
    assert said.endswith("Others disturbed some of it: no verdict.")


def test_nothing_is_said_of_what_has_not_run() -> None:
    nothing = [EngineGoodput(engine="trinity EPD", goal=goal.key, by_seed={}, open=False) for goal in GOALS]
    assert served.plainly(nothing, GOALS, ["trinity EPD"], []) == []
    assert served.aims(nothing, GOALS, ["trinity EPD"], []) == []


async def test_an_engine_of_which_no_setting_runs_is_left_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def swept(settings: Sequence[EngineSpec], *_: object, **__: object) -> list[SweepPoint]:
        engine = settings[0]
        late = engine.placement == "EP+D"
        found = [SweepPoint(tokens=tokens, per_s=tokens / 10, attained=late * 64 / tokens) for tokens in (64, 128)]
        return [SweepPoint(tokens=64, problem="no")] if engine.kind == "vllm" else found

    async def tried(_: object) -> float:
        return 1.0

    monkeypatch.setattr(served.measure, "sweep", swept)
    engines = served.engines_of(served.Sizes(), ["openvino", "vllm"])
    settings = [served.settings_of(each, (64, 128), SLO(1.0, 0.1)) for each in engines]
    chosen, seen = await served.tuned(settings, tmp_path, [], tried)
    assert [each.kind for each in chosen] == ["trinity"] * 5 + ["openvino"]
    assert [each.placement for each in chosen if each.tokens == 64] == ["EP+D"]  # the others tie, and 128 is faster
    assert set(seen) == {each.name for each in engines}


def test_every_engine_has_as_many_settings_and_trinity_what_a_user_would_try() -> None:
    sizes = served.Sizes()
    engines = served.engines_of(sizes, sizes.peers)
    settings = {each.placement + each.kind: served.settings_of(each, sizes.sweep, SLO(1.0, 0.1)) for each in engines}
    assert {len(each) for each in settings.values()} == {len(sizes.sweep)}
    assert {each.name for one in settings.values() for each in one} == {each.name for each in engines}
    tried = {name: [(each.tokens, each.options) for each in one] for name, one in settings.items()}
    assert tried["EPDvllm"] == tried["EPDopenvino"] == [(128, {}), (512, {}), (2048, {})]
    assert tried["EPDtrinity"][2][1] == {"slo": [1.0, 0.1], "policy": "time"}
    assert tried["EP+Dtrinity"] == [(512, {}), (2048, {}), (2048, {"threads_of": {"EP": 2}})]
    assert tried["E+PDtrinity"][1] == tried["EPDtrinity"][2]
    assert tried["E+PDtrinity"][::2] == [(128, {}), (128, {"threads_of": {"PD": 2}})]
    assert [each.tokens for each in served.settings_of(engines[0], (64,), SLO(1.0, 0.1))] == [64]


async def test_the_setting_that_is_chosen_is_the_one_that_is_served(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def swept(settings: Sequence[EngineSpec], *_: object, **__: object) -> list[SweepPoint]:
        shares = [0.5, 0.6, 0.9]
        return [
            SweepPoint(tokens=one.tokens, options=one.options, attained=share)
            for one, share in zip(settings, shares, strict=True)
        ]

    async def tried(_: object) -> float:
        return 1.0

    monkeypatch.setattr(served.measure, "sweep", swept)
    engine = EngineSpec(placement="EP+D")
    (chosen,), _ = await served.tuned([served.settings_of(engine, (1, 2, 3), SLO(1.0, 0.1))], tmp_path, [], tried)
    assert (chosen.tokens, chosen.options) == (3, {"threads_of": {"EP": 2}})


def test_no_rate_lies_between_two_of_the_grid() -> None:
    """So that a goal's trials are those of a bisection of the grid alone: about log2 of it."""
    rates = [round(share * 4.016, 3) for share in served.SHARES]
    for limit in (0.5, 1.5, 3.0, 6.0, 10.0, 20.0):
        trials: list[search.Trial] = []
        while (rate := search.next_rate(trials, GOALS, rates, served.TOLERANCE)) is not None:
            assert rate in rates
            trials.append(trial(rate, rate <= limit))
        assert len(trials) <= 4


def trial(rate: float, holds: bool) -> search.Trial:
    return search.Trial(
        engine="a",
        rate=rate,
        seed=0,
        requests=9,
        failed=0,
        attainment={goal.key: float(holds) for goal in GOALS},
        ttft_s=None,
        tbt_s=None,
        late_p95_s=0.0,
        cpu_s=1.0,
        wall_s=1.0,
        foreign=0.0,
    )


# ---------------------------------------------------------------- installing


def test_peers_are_installed_apart_with_torch_first(tmp_path: Path) -> None:
    done: list[Sequence[str]] = []

    def note(command: Sequence[str]) -> int:
        done.append(command)
        return 0

    assert install_peers.install("vllm", tmp_path, note) == ""
    assert done[0] == (sys.executable, "-m", "venv", str(tmp_path / "vllm"))
    assert all(each[0] == str(tmp_path / "vllm" / "bin" / "python") for each in done[1:])
    assert done[1][-1] == install_peers.TORCH
    assert install_peers.TORCH in done[3]  # held where it is by what comes after


def test_a_torch_for_cuda_ends_the_installation(tmp_path: Path) -> None:
    def refuse(command: Sequence[str]) -> int:
        return int(command[-1] == install_peers.CPU_ONLY)

    assert "built for CUDA" in install_peers.install("openvino", tmp_path, refuse)


def test_both_are_registered() -> None:
    assert {"cpu_second", "served"} <= set(run.NAMES)
