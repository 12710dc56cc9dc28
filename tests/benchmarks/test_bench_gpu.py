"""The GPU benchmark in its tiny form on the CPU: what it does on a GPU is the same code with other sizes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import gpu, placements
from benchmarks.gpu import model as gpu_model
from benchmarks.gpu import moves as gpu_moves
from benchmarks.gpu.cases import Cases
from benchmarks.report import Result
from benchmarks.setting import Setting
from trinity.costs.model_config import read_model_shape
from trinity.stages.attention.backends import BACKENDS
from trinity.stages.models import load_model

PLACED = (placements.PlacedRun("EPD", "thread", 1), placements.PlacedRun("EP+D", "thread", 2))
SMALL = replace(gpu.TINY, media=("inproc",), prefills=(20, 33), placed=PLACED)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("results")


@pytest.fixture(scope="module")
def found(kept: Path) -> Result:
    return gpu.measure(SMALL, 60, kept)


@pytest.mark.slow
def test_every_section_runs(found: Result) -> None:
    assert {"attention", "steps", "moves", "generate_batch", "dual_stream", "placements", "full_load"} <= set(
        found.values
    )
    assert [note for note in found.notes if not note.startswith("attention")] == []
    assert set(found.values["attention"]) == {*BACKENDS, "auto"}
    assert found.values["attention"]["torch"] == "runs"


@pytest.mark.slow
def test_steps_stand_beside_the_models_roofline(found: Result) -> None:
    steps = found.values["steps"]
    assert [(each["what"], each["n"]) for each in steps] == [
        *(("decode", n) for n in SMALL.rows),
        *(("encode", n) for n in SMALL.images),
        ("chunk", 8),
        ("mixed", 6),
        *(("prefill", n) for n in SMALL.prefills),
    ]
    assert not any(each["graphs"] for each in steps), "there are no CUDA graphs here"
    assert all(min(each["seconds"]) > 0 and each["limit_s"] > 0 for each in steps)
    limits = {(each["what"], each["n"]): each["limit_s"] for each in steps}
    assert limits["decode", 3] > limits["decode", 1]
    assert limits["prefill", 33] > limits["prefill", 20]
    assert len(found.aims) == len(steps) + len(found.values["moves"])


@pytest.mark.slow
def test_both_sides_serve_and_agree(found: Result) -> None:
    """Random weights made twice are the same, and in float32 so are the tokens."""
    assert found.values["generate_batch"]["equal_tokens"] == 1.0
    assert len(found.values["generate_batch"]["ours_s"]) == SMALL.rounds + 1
    dual = found.values["dual_stream"]
    assert dual["equal_requests"] == dual["requests"] == SMALL.dual.requests
    assert len(dual["dual"]) == len(dual["sequential"]) == SMALL.rounds


@pytest.mark.slow
def test_encode_and_decode_are_measured_beside_each_other(found: Result) -> None:
    loads = found.values["full_load"]
    assert [each["rows"] for each in loads] == list(SMALL.rows)
    assert all(seconds > 0 for each in loads for way in ("alone_s", "beside_s") for seconds in each[way].values())
    assert all(each["work"] > 0 for each in loads)


@pytest.mark.slow
def test_every_placement_serves_the_same_tokens(found: Result) -> None:
    one, other = found.values["placements"]
    assert (one["way"], other["way"]) == ("EPD, threads, depth 1", "EP+D, threads, depth 2")
    assert one["tokens"] == other["tokens"]
    assert one["output_tokens"] == SMALL.dual.tokens
    assert (one["transfers"], other["transfers"]) == (0, SMALL.dual.requests)
    assert other["moved_bytes"] > 0
    assert min(one["requests_per_s"]) > 0


@pytest.mark.slow
def test_moves_are_checked(found: Result) -> None:
    moves = found.values["moves"]
    assert [each["blocks"] for each in moves] == [2, 3, 1]
    assert all(len(each["seconds"]) == SMALL.reads for each in moves)
    assert "Migrations" in found.text()


@pytest.mark.slow
def test_what_is_known_is_not_measured_again(found: Result, kept: Path) -> None:
    """No minute is left, and everything is there: out of the file that the first call has left."""
    again = gpu.measure(SMALL, 0, kept)
    names = set(found.values) - {"weight_bytes"}
    assert {name: again.values[name] for name in names} == {name: found.values[name] for name in names}
    assert again.notes == found.notes


@pytest.mark.slow
def test_what_no_time_is_left_for_is_named(found: Result, kept: Path) -> None:
    """Other sizes are other cases."""
    short = gpu.measure(replace(SMALL, repeats=2), 0.05, kept)
    assert "steps: decode 1: no time was left: run it again, it goes on from here" in short.notes
    assert short.values["steps"] == short.values["placements"] == []
    assert "generate_batch" not in short.values


@pytest.mark.slow
def test_instances_in_processes_serve_the_same_tokens(tmp_path: Path) -> None:
    sizes = replace(SMALL, placed=(placements.PlacedRun("1E1P1D", "process", 2), *PLACED), rows=(), prefills=())
    values = gpu.measure(sizes, 60, tmp_path).values
    assert len({each["tokens"] for each in values["placements"]}) == 1
    assert values["placements"][0]["transfers"] == 2 * SMALL.dual.requests


@pytest.mark.slow
def test_moves_from_another_process() -> None:
    moved = gpu_moves.measure("cpu", "shm", [("KV", 3, 4096)], 2, 1e9)
    assert [(each.medium, each.bytes, len(each.seconds)) for each in moved] == [("shm", 3 * 4096, 2)]


def test_every_way_is_served_the_most_telling_first() -> None:
    runs = placements.list_runs()
    assert [run.name for run in runs[:2]] == ["EPD, threads, depth 2", "E+PD, threads, depth 2"]
    assert {run.placement for run in runs} == set(placements.PLACEMENTS)
    assert {(run.hosting, run.depth) for run in runs} == {(w, d) for w in ("thread", "process") for d in (1, 2)}
    assert len({run.name for run in runs}) == len(runs)


# ------------------------------------------------------------ cases that are kept


def test_a_case_is_measured_once(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "cases.jsonl"
    until, calls = time.monotonic() + 60, list[int]()

    def measure() -> int:
        calls.append(1)
        return len(calls)

    assert [Cases(path, "key", until).run("one", measure, 1) for _ in range(2)] == [1, 1]
    assert Cases(path, "another key", until).run("one", measure, 1) == 2
    assert Cases(None, "key", until).run("one", measure, 1) == 3


def test_a_line_that_was_cut_short_costs_its_case_alone(tmp_path: Path) -> None:
    path = tmp_path / "cases.jsonl"
    until = time.monotonic() + 60
    Cases(path, "key", until).run("one", lambda: 1, 1)
    whole = path.read_text()
    path.write_text(whole + whole[: len(whole) // 2] + "\n[1]\n")
    assert Cases(path, "key", until).records == {"one": 1}


def test_what_fails_or_has_no_time_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    cleaned: list[int] = []
    cases = Cases(None, "key", time.monotonic() + 60, lambda: cleaned.append(1))
    assert cases.run("steps", lambda: 1 // 0, 1) is None
    assert cases.run("moves", lambda: 1, 1000) is None
    assert cases.run("attention", lambda: {"torch": "runs"}, 1) == {"torch": "runs"}
    assert list(cases.failed) == ["steps"]
    assert cases.failed["steps"].startswith("ZeroDivisionError")
    assert list(cases.skipped) == ["moves"]
    assert len(cleaned) == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: it would be measured")
def test_without_a_gpu_it_says_so() -> None:
    assert gpu.run(Setting()).notes == [gpu.MISSING]


def test_the_model_has_the_published_shape(tmp_path: Path) -> None:
    model = read_model_shape(gpu_model.folder(tmp_path, tiny=False))
    language, vision = model.language, model.vision
    assert vision is not None
    assert (language.layers, language.width, language.kv_heads, language.head_dim) == (32, 4096, 32, 128)
    assert (vision.layers.layers, vision.layers.width, model.image_tokens, model.vocabulary) == (24, 1024, 576, 32064)
    assert 13.4e9 < model.weight_bytes("EPD") < 14.4e9


def test_random_weights_leave_other_checkpoints_alone(tmp_path: Path) -> None:
    folder = gpu_model.folder(tmp_path, tiny=True)
    with gpu_model.random_weights("cpu"):
        one, other = (load_model(folder, letters, dtype="bfloat16") for letters in ("EPD", "D"))
    assert one.language is other.language
    assert {each.dtype for each in one.language.parameters()} == {torch.bfloat16}
    assert other.vision is None
    del one, other
    with pytest.raises(Exception, match="weights"):
        load_model(folder, "D")
