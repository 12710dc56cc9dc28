"""The GPU benchmark in its tiny form on the CPU: what it does on a GPU is the same code with other sizes."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import gpu
from benchmarks.gpu import model as gpu_model
from benchmarks.gpu import moves as gpu_moves
from benchmarks.report import Result
from benchmarks.setting import Setting
from trinity.costs.model_config import read_model_shape
from trinity.costs.step_cost import Device
from trinity.stages.attention.backends import BACKENDS
from trinity.stages.models import load_model

SMALL = replace(gpu.TINY, media=("inproc",), prefills=(20, 33))


@pytest.fixture(scope="module")
def found() -> Result:
    return gpu.measure(SMALL, 5)


def test_every_section_runs(found: Result) -> None:
    assert set(found.values["section_s"]) == {"attention", "steps", "moves", "generate_batch", "dual_stream"}
    assert [note for note in found.notes if "failed" in note or "no time" in note] == []
    assert set(found.values["attention"]) == {*BACKENDS, "auto"}
    assert found.values["attention"]["torch"] == "runs"


def test_steps_stand_beside_the_models_roofline(found: Result) -> None:
    steps = found.values["steps"]
    assert [(each["what"], each["n"]) for each in steps] == [
        *(("decode", n) for n in SMALL.rows),
        *(("encode", n) for n in SMALL.images),
        *(("prefill", n) for n in SMALL.prefills),
    ]
    assert not any(each["graphs"] for each in steps), "there are no CUDA graphs here"
    assert all(min(each["seconds"]) > 0 and each["limit_s"] > 0 for each in steps)
    limits = {(each["what"], each["n"]): each["limit_s"] for each in steps}
    assert limits["decode", 3] > limits["decode", 1]
    assert limits["prefill", 33] > limits["prefill", 20]
    assert len(found.aims) == len(steps)


def test_both_sides_serve_and_agree(found: Result) -> None:
    """Random weights made twice are the same, and in float32 so are the tokens."""
    assert found.values["generate_batch"]["equal_tokens"] == 1.0
    assert len(found.values["generate_batch"]["ours_s"]) == SMALL.rounds + 1
    dual = found.values["dual_stream"]
    assert dual["equal_requests"] == dual["requests"] == SMALL.dual.requests
    assert len(dual["dual"]) == len(dual["sequential"]) == SMALL.rounds


def test_moves_are_checked(found: Result) -> None:
    moves = found.values["moves"]
    assert [each["blocks"] for each in moves] == [2, 3, 1]
    assert all(len(each["seconds"]) == SMALL.reads for each in moves)
    assert "Migrations" in found.text()


@pytest.mark.slow
def test_moves_from_another_process() -> None:
    moved = gpu_moves.measure("cpu", "shm", [("KV", 3, 4096)], 2, 1e9)
    assert [(each.medium, each.bytes, len(each.seconds)) for each in moved] == [("shm", 3 * 4096, 2)]


def test_what_fails_or_has_no_time_ends_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(name="some", flops=1.0, bandwidth=1.0, memory=1.0)
    work = gpu.Work(SMALL, Path(), device, time.monotonic() + 60, {"limit": gpu.limit_of(device), "model": "a model"})
    work.section("steps", lambda: 1 // 0, 1)
    work.section("moves", lambda: 1, 1000)
    work.section("attention", lambda: {"torch": "runs"}, 1)
    text = gpu.result(SMALL, work.found).text()
    assert "steps: ZeroDivisionError" in text
    assert "moves: no time was left" in text
    assert "attention torch: runs" in text


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
