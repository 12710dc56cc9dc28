"""Benchmarks run, and say what they measured. No time is asserted: what is checked is what figures are made of."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks import run, setting
from benchmarks.memory import epdserve_tables, memory, shapes
from benchmarks.peers import versus_generate_batch
from benchmarks.report import Aim, Result, Table, load, save
from benchmarks.serving import ttft_methods
from benchmarks.steps import launched_steps, step_overhead
from benchmarks.transfers import transports
from support.checkpoint_files import checkpoint

QUICK = setting.Setting(quick=True, checkpoint=checkpoint)


@pytest.fixture(scope="module")
def quick() -> Callable[[str], Result]:
    """A benchmark's quick result, run once."""
    modules = {"step": step_overhead, "versus": versus_generate_batch, "memory": memory, "ttft": ttft_methods}
    modules["transports"] = transports
    done: dict[str, Result] = {}

    def result(name: str) -> Result:
        if name not in done:
            done[name] = modules[name].run(QUICK)
        return done[name]

    return result


# ---------------------------------------------------------------- the benchmarks themselves


def test_every_part_of_a_step_is_measured_at_every_number_of_requests(quick: Callable[[str], Result]) -> None:
    found = quick("step").values["microseconds"]
    assert list(found) == ["1", "4"]
    for parts in found.values():
        assert set(parts) == {*step_overhead.PARTS, "gap", "core_warm"}
        assert parts.pop("core_thread") >= 0  # where the lane decides, the core's own thread sleeps
        assert all(0 < value < 1e7 for value in parts.values())


def test_launches_are_measured_for_every_way_to_sample(quick: Callable[[str], Result]) -> None:
    found = quick("step").values["launched"]
    assert list(found) == list(launched_steps.WAYS)
    for parts in (parts for each in found.values() for parts in each.values()):
        assert set(parts) == set(launched_steps.PARTS)
        assert all(0 < value < 1e7 for value in parts.values())


def test_notes_keep_full_steps_alone() -> None:
    notes = step_overhead.Notes(running=2)
    for part in (*step_overhead.PARTS, "gap"):
        for rows, seconds in ((1, 9.0), (2, 5.0), (2, 1e-6), (2, 3e-6), (0, 9.0)):
            notes.add(part, seconds, rows)
    assert notes.medians(skip=1) == pytest.approx(dict.fromkeys((*step_overhead.PARTS, "gap"), 2.0))


def test_the_aims_of_a_step_are_judged_by_the_largest_batch() -> None:
    fast, slow = (dict.fromkeys([*step_overhead.PARTS, "gap", "core_warm"], each) for each in (10.0, 200.0))
    model = {**fast, "model": 1e4}

    def met(*at: dict[str, float], larger: dict[str, float], waiting: float) -> list[bool | None]:
        depth = dict(zip((1, 64), at, strict=True))
        found = step_overhead.Found({1: depth, 2: depth}, {8: larger}, {10: 10.0, 10_000: waiting})
        return [aim.met for aim in step_overhead.result(found, 1, 1).aims]

    assert met(fast, fast, larger=model, waiting=11.0) == [True] * 5
    assert met(fast, slow, larger=fast, waiting=13.0) == [False] * 5


def test_generate_batch_and_trinity_serve_the_same_tokens(quick: Callable[[str], Result]) -> None:
    (values,) = quick("versus").values.values()
    assert values["equal_requests"] == values["requests"] == versus_generate_batch.BATCH
    assert len(values["ratios"]) == 1
    assert {"generate_batch", "trinity"} <= set(values)


def sample(step_cpu_s: float, tokens: list[list[int]]) -> versus_generate_batch.Sample:
    return versus_generate_batch.Sample(step_cpu_s, 0.5, 1.0, tokens)


@pytest.mark.parametrize(("ours", "met"), [(0.7, True), (0.71, False)])
def test_the_ratio_is_the_median_of_pairs(ours: float, met: bool) -> None:
    theirs = [sample(each, [[1], [2]]) for each in (1.0, 2.0, 4.0)]
    mine = [sample(each, [[1], [3]]) for each in (0.1, 2 * ours, 400.0)]
    pairs = versus_generate_batch.Pairs(64, theirs, mine)
    assert pairs.ratios == pytest.approx([0.1, ours, 100.0])
    assert pairs.equal == 1
    aim = versus_generate_batch.aim(pairs)
    assert aim.met is met
    assert versus_generate_batch.row(pairs)[-1] == "1 of 2"


def test_the_two_lengths_differ_by_decode_steps_alone() -> None:
    load = versus_generate_batch.Load(["a"], [[1]], few=2, many=10)
    assert load.steps == 8


@pytest.mark.slow
def test_an_encode_instance_lacks_the_language_model(quick: Callable[[str], Result]) -> None:
    values = quick("memory").values
    encode, whole = values["resident"]["E"], values["resident"]["EPD"]
    assert 0 < encode["weight_bytes"] < whole["weight_bytes"]
    assert set(encode["block_bytes"]) == {"image"}
    assert set(whole["block_bytes"]) == {"image", "kv"}
    assert encode["worked"]["rss"] > encode["imported"]["rss"] > 1 << 20
    assert all(encode["worked"][kind] <= encode["worked"]["rss"] for kind in ("pss", "private"))


@pytest.mark.slow
def test_instances_apart_hold_no_less_than_together(quick: Callable[[str], Result]) -> None:
    for name, kinds in quick("memory").values["capacity"].items():
        assert set(kinds) == set(memory.KINDS)
        assert kinds["E"]["kv_tokens"] == 0 < kinds["P"]["kv_tokens"], name
        for alone in ("E", "P"):
            assert kinds[alone]["images_per_request"] >= kinds["EP"]["images_per_request"], name
            assert kinds[alone]["batch"] >= kinds["EP"]["batch"], name
        assert kinds["D"]["kv_tokens"] >= kinds["PD"]["kv_tokens"] >= kinds["EPD"]["kv_tokens"]


def test_a_probe_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)probe of E failed.*config.json"):
        memory.probe(tmp_path, "E", 1)


@pytest.mark.parametrize(("together", "apart", "text"), [(7, 49, "7 → 49 (7.0 ×)"), (0, 4, "0 → 4")])
def test_ratios_of_what_does_not_fit_are_left_out(together: int, apart: int, text: str) -> None:
    assert memory.times(together, apart) == text


def test_shapes_have_the_weights_of_the_published_models() -> None:
    import torch
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    with torch.device("meta"):
        whole = LlavaForConditionalGeneration(LlavaConfig())
    expected = sum(each.numel() for each in whole.parameters()) * shapes.BYTES
    found = shapes.LLAVA_7B.memory(32)
    assert found.vision_bytes + found.language_bytes == pytest.approx(expected, rel=0.01)
    assert found.kv_bytes == 2 * 32 * 4096 * 2  # keys and values of 32 layers, bfloat16
    sizes = {each.name: each.memory(0) for each in shapes.SHAPES}
    billions = {name: (each.vision_bytes + each.language_bytes) / 2e9 for name, each in sizes.items()}
    assert billions["MiniCPM-V 2.6"] == pytest.approx(8.1, abs=0.2)
    assert billions["InternVL2-8B"] == pytest.approx(8.1, abs=0.2)
    assert billions["InternVL2-26B"] == pytest.approx(25.5, abs=0.6)


def test_epdserves_tables_are_beside_ours_row_by_row() -> None:
    images, batches, shares = epdserve_tables.tables()
    assert [len(each.rows) for each in (images, batches, shares)] == [9, 9, 12]
    assert images.rows[0][:3] == ["MiniCPM-V 2.6", "313 × 234", "77"]
    assert batches.rows[-1][2::2] == ["OOM", "6", "1"]
    assert [row[4] for row in shares.rows[:5]] == ["99%", "97%", "95%", "92%", "OOCL"]


def test_our_counts_are_near_epdserves() -> None:
    """Of the encoder alone, whose memory the tables determine best; and EPD is never behind, as there."""
    for _, _, (_, encode, _), (together, ours, prefill) in epdserve_tables.batch_rows():
        assert 0.7 < ours / encode < 1.6
        assert isinstance(together, str) or together <= min(ours, prefill)
    for name, _, (_, theirs), (_, ours) in epdserve_tables.image_rows():
        assert name == "InternVL2-8B" or 0.9 < ours / theirs < 1.7
    for _, images, (_, paper), (less, apart) in epdserve_tables.kv_share_rows():
        assert isinstance(paper, str) == isinstance(apart, str), images
        assert isinstance(paper, str) or isinstance(apart, str) or apart >= paper - 1
        assert isinstance(less, str) or isinstance(apart, str) or less <= apart


def test_every_method_moves_what_it_must_and_nothing_else(quick: Callable[[str], Result]) -> None:
    values = quick("ttft").values
    assert set(values) == {"EPD", "E+P+D"}
    assert values["EPD"]["reads"] == {}
    assert set(values["E+P+D"]["reads"]) == {"image", "kv"}
    for each in values.values():
        assert each["requests"] in (2, 4)  # a disturbed round is repeated, and counts where the second is as well
        assert 0 < each["ttft_s"]["p50"] <= each["ttft_s"]["p95"]
        assert each["late_s"]["p50"] >= 0
    assert all(size > 0 for size in values["E+P+D"]["reads"]["kv"]["bytes"])


def test_noisy_rounds_are_named() -> None:
    served = ttft_methods.Served(ttft_s=[1.0], late_s=[0.0], wall_s=[1.0], cpu_s=[1.0], foreign=[0.5])
    output = ttft_methods.Output(request_id="r", itl_s=[0.1], spans={"decode": 0.1})
    served.outputs.append(output)
    schedule = ttft_methods.Schedule(1, 1.0, 2)
    assert "EPD" in ttft_methods.result({"EPD": served}, schedule, 1).notes[0]
    served.foreign[:] = [0.0]
    assert ttft_methods.result({"EPD": served}, schedule, 1).notes == []


@pytest.mark.slow
def test_transports_are_measured_beside_their_limit(quick: Callable[[str], Result]) -> None:
    result = quick("transports")
    assert set(result.values) == {"inproc", "shm"}
    for cases in result.values.values():
        assert [(case["count"], case["bytes"]) for case in cases] == [(1, 1 << 20), (16, 16 << 20)]
        assert all(len(case["reads"]) == len(case["copies"]) == len(case["digests"]) >= 5 for case in cases)
        assert all(min(case["reads"]) > 0 and 0 < case["share"] < 100 for case in cases)
    assert [table.title for table in result.tables] == ["inproc", "shm"]
    assert len(result.aims) == 4


def transport_case(block_bytes: int, count: int, share: float) -> transports.Case:
    return transports.Case(block_bytes, count, block_bytes * count, [1.0, 2.0, 9.0], [2.0 * share], [0.5])


def test_the_aims_of_transports_are_judged_by_their_worst_large_blocks() -> None:
    small, one, many = ((16 << 10, 4096, 0.1), (1 << 20, 1, 0.85), (1 << 20, 16, 0.95))
    cases = [transport_case(*each) for each in (small, one, many)]
    local, remote = transports.MEDIA[1], transports.MEDIA[2]
    found = [transports.aim(medium, cases, least) for medium in (local, remote) for least in (0, 16 << 20)]
    assert [each.met for each in found] == [False, True, True, True]
    assert (found[0].measured, found[1].measured) == ("85% (1 of 1 MiB)", "95% (16 of 1 MiB)")
    assert cases[0].row()[:4] == ["16 KiB", "4096", "2000000", "9000000"]


def test_a_transport_that_is_missing_is_named() -> None:
    assert transports.available(transports.MEDIA[0]) == ""
    result = transports.result([], {}, {"nixl": "not installed"}, ["shm, 1 MiB"])
    assert "Not measured: nixl: not installed" in result.notes
    assert "shm, 1 MiB" in result.notes[1]


def test_a_probe_of_a_transport_that_fails_says_so() -> None:
    medium = transports.Medium("none", "no-such-transport")
    with pytest.raises(RuntimeError, match="the lender of none ended without an answer"):
        transports.measure(medium, 1 << 20, (1,), 1 << 20, 0.01)


# ---------------------------------------------------------------- what they stand on


def test_prompts_have_about_the_tokens_asked_for_and_differ() -> None:
    def by_letter(text: str) -> dict[str, list[int]]:
        return {"input_ids": list(range(len(text)))}

    texts = [setting.prompt_of(by_letter, 64, seed) for seed in range(4)]
    assert len(set(texts)) == 4
    assert all(50 <= len(text) <= 64 for text in texts)
    assert texts[0] == setting.prompt_of(by_letter, 64, 0)


def test_foreign_load_counts_others_and_not_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter([100.0, 104.0])
    own = iter([10.0, 11.0])
    wall = iter([0.0, 5.0])
    monkeypatch.setattr(setting, "busy_seconds", lambda: next(busy))
    monkeypatch.setattr(setting, "_own_seconds", lambda: next(own))
    monkeypatch.setattr(setting.time, "monotonic", lambda: next(wall))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    with setting.ForeignLoad() as load:
        pass
    assert load.share == pytest.approx(3.0 / 10.0)


@pytest.mark.parametrize(
    ("shares", "patience", "waited"), [((0.9, 0.5, 0.0), 60, 3), ((0.9,) * 9, 4, 4), ((0.9,), 0, 0)]
)
def test_a_round_waits_for_a_quiet_machine_and_not_for_ever(
    shares: tuple[float, ...], patience: float, waited: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    found = iter(shares)

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr(setting.time, "sleep", sleep)
    monkeypatch.setattr(setting.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(setting.ForeignLoad, "__exit__", lambda load, *_: setattr(load, "share", next(found)))
    setting.Setting(patience_s=patience).settle()
    assert clock[0] == waited


def test_disturbed_rounds_do_not_count_unless_there_are_no_others() -> None:
    assert setting.calm([(0.5, "a"), (0.05, "b"), (0.1, "c")]) == (["b", "c"], True)
    assert setting.calm([(0.5, "a"), (0.2, "b")]) == (["a", "b"], False)
    assert setting.disturbed([]) == []
    assert "EPD, 64" in setting.disturbed(["EPD", 64])[0]


def test_facts_name_what_figures_depend_on() -> None:
    facts = setting.facts(0.25)
    for name in ("date", "cpu", "cores", "threads", "python", "torch", "transformers", "git"):
        assert facts[name], name
    assert facts["foreign_load"] == 0.25
    json.dumps(facts)


@pytest.fixture
def result() -> Result:
    return Result(
        name="thing",
        title="A thing",
        method="Looked at it.",
        tables=[Table("Sizes", ("what", "much"), [["a", "1"], ["long", "22"]])],
        aims=[Aim("size", "≤ 1", "2", False), Aim("price", "≤ 3", "2", True)],
        notes=["Take care."],
        values={"sizes": [1, 22]},
    )


def test_printed_tables_are_aligned_and_say_what_fell_short(result: Result) -> None:
    text = result.text()
    assert "  what  much\n  a        1\n  long    22" in text
    assert "FELL SHORT: size: 2 (aim ≤ 1)" in text
    assert "met: price" in text
    assert text.endswith("Take care.")


def test_json_brings_everything_back(result: Result, tmp_path: Path) -> None:
    path = save(result, {"git": "abc"}, tmp_path / "new")
    assert path.name == "thing.json"
    assert load(path) == (result, {"git": "abc"})


def test_one_benchmark_is_run_printed_and_saved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], result: Result
) -> None:
    asked: list[setting.Setting] = []

    def quickly(given: setting.Setting) -> Result:
        asked.append(given)
        return result

    monkeypatch.setattr(memory, "run", quickly)
    run.main(["--only", "memory", "--quick", "--results", str(tmp_path)])
    assert [each.quick for each in asked] == [True]
    assert "== A thing" in capsys.readouterr().out
    assert load(tmp_path / "thing.json")[0] == result


def test_quick_figures_do_not_reach_the_documents(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--quick", "--write-docs"])
    assert "mean nothing" in capsys.readouterr().err


def test_the_script_runs_by_itself() -> None:
    script = Path(run.__file__)
    done = subprocess.run(
        [sys.executable, str(script), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    assert "--write-docs" in done.stdout


def test_medians_of_nothing_are_no_figures() -> None:
    assert ttft_methods.distribution([]) == {}
    assert ttft_methods.ms([], 50) == "-"
    assert not math.isnan(ttft_methods.at([1.0], 95))
