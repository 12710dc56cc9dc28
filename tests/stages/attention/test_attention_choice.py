"""The choice of a backend by measured times: on a CPU, with real backends, real files and hostile ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from support.language_stage import PROMPT, Solo, work
from trinity.memory import native
from trinity.stages.attention import backends, choice, measurement
from trinity.stages.attention.backends import (
    BACKENDS,
    BackendSpec,
    PerStepAttention,
    choose_backends,
    make_backend,
    pick_backend,
)
from trinity.stages.attention.choice import (
    MOST_CHOICES,
    CacheKind,
    MeasuredChoice,
    StepChoice,
    choice_path,
    choose_fastest,
    keep_choice,
    make_choice_key,
    read_choice,
)
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.native import NativeAttention
from trinity.stages.attention.torch_reference import TorchAttention

CPU = torch.device("cpu")
KIND = CacheKind((2, 2, 2, 16, 8), torch.float32, CPU, 4)
SMALL = (measurement.StepCase("decode 2", 2, 20), measurement.StepCase("chunk of 9 with 1 decode", 1, 20, 9, 4))
needs_native = pytest.mark.skipif(native.extension is None, reason="the extension is not built")


@pytest.fixture(autouse=True)
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has measured nothing, an empty cache folder, and steps that take milliseconds."""
    begin_anew(monkeypatch)
    monkeypatch.setenv("TRINITY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(measurement.STEP_CASES, "cpu", SMALL)


def begin_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_known", {})


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.*"))


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Names that were measured together, in order; they are measured in truth."""
    asked: list[Sequence[str]] = []
    truth = measurement.measure_backends

    def measure(made: Any, *given: Any) -> Any:
        asked.append(tuple(made))
        return truth(made, *given)

    monkeypatch.setattr(measurement, "measure_backends", measure)
    return asked


# ---------------------------------------------------------------- the rule


def test_the_least_mean_ratio_wins_for_each_kind_of_step() -> None:
    """Not the least sum: a tenth of a millisecond counts where a step takes one."""
    times = {
        "decode 1": {"a": 1e-4, "b": 2e-4, "c": 1.5e-4},
        "decode 128": {"a": 1.1e-2, "b": 1.0e-2, "c": 1.2e-2},
        "chunk": {"a": 3e-3, "b": 2e-3, "c": 1e-3},
    }
    assert choose_fastest(times, ["a", "b", "c"], []) == StepChoice("a", "c")
    assert choose_fastest(times, ["a", "b", "c"], ["b", "c"]) == StepChoice("c", "c"), "a cannot be recorded"
    assert choose_fastest(times, ["a", "b", "c", "d"], ["d"]) == StepChoice("d", "c"), "d failed, and alone can"


@pytest.mark.parametrize(("slower", "wanted"), [(1.0, "a"), (1.02, "a"), (1.04, "b")])
def test_noise_does_not_turn_the_order(slower: float, wanted: str) -> None:
    times = {"decode": {"a": slower * 1e-3, "b": 1e-3}}
    assert choose_fastest(times, ["a", "b"], []).decodes == wanted


def test_without_times_the_first_in_line_serves() -> None:
    assert choose_fastest({}, ["a", "b"], ["b"]) == StepChoice("b", "a")
    assert choose_fastest({"decode": {"b": 1.0}}, ["a", "b"], []) == StepChoice("b", "a")


# ---------------------------------------------------------------- measured here


@needs_native
def test_the_second_start_measures_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "trinity"):
        first = choose_backends("fastest", KIND)
        assert choose_backends("fastest", KIND) == first, "within a process"
        assert counted == [("native", "torch")]
        begin_anew(monkeypatch)
        assert choose_backends("fastest", KIND) == first
    assert len(counted) == 1
    (file,) = kept(tmp_path)
    assert file == choice_path(make_choice_key(KIND, ["native", "torch"]))
    found = msgspec.json.decode(file.read_bytes(), type=MeasuredChoice)
    assert set(found.times) == {case.name for case in SMALL}
    assert all(set(each) == {"native", "torch"} and min(each.values()) > 0 for each in found.times.values())
    said = "\n".join(caplog.messages)
    assert "decode 2: native " in said
    assert f"kept in {file}" in said


@needs_native
def test_what_decides_is_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = [make_choice_key(KIND, ["native", "torch"])]

    def differs(found: Any) -> None:
        assert choice_path(found) not in map(choice_path, seen)
        seen.append(found)

    for kind in (
        replace(KIND, heads=8),
        replace(KIND, dtype=torch.bfloat16),
        replace(KIND, shape=(2, 2, 2, 32, 8)),
    ):
        differs(make_choice_key(kind, ["native", "torch"]))
    differs(make_choice_key(KIND, ["native", "triton", "torch"]))
    for owner, name, value in (
        (native, "describe", lambda: "csrc (portable)"),
        (choice, "_read_processor", lambda: "another processor"),
        (choice, "_find_version", lambda package: "9.9"),
        (choice, "_digest_kernels", lambda: "other sources"),
        (torch, "get_num_threads", lambda: 7),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            differs(make_choice_key(KIND, ["native", "torch"]))
    assert make_choice_key(KIND, ["native", "torch"]) == seen[0]
    assert len(choice._digest_kernels()) == 64


def test_a_gpus_name_and_capability_are_in_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, major, minor, multi_processor_count = "NVIDIA H200", 9, 0, 132

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    found = make_choice_key(replace(KIND, device=torch.device("cuda", 1)), ["triton"]).device
    assert found.startswith("NVIDIA H200, sm 9.0, 132 processors, CUDA ")


def make_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES: dict[str, Any] = {
    "empty": lambda path: path.write_bytes(b""),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-7]),
    "no text": lambda path: path.write_bytes(b"\xff\x00" * 99),
    "brackets": lambda path: path.write_bytes(b"[" * 60_000),
    "longer than is read": lambda path: path.write_bytes(path.read_bytes() + b" " * (1 << 16)),
    "endless": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
    "a pipe": make_fifo,
    "nobody's backend": lambda path: path.write_bytes(path.read_bytes().replace(b'"decodes":"', b'"decodes":"../')),
    "of another key": lambda path: path.write_bytes(path.read_bytes().replace(b'"heads":4', b'"heads":5')),
    "another type": lambda path: path.write_bytes(path.read_bytes().replace(b'"choice":{', b'"choice":[{')),
}


@pytest.mark.parametrize("damage", DAMAGES)
@needs_native
def test_a_hostile_file_is_measured_again_and_written_over(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[Any]
) -> None:
    choose_backends("fastest", KIND)
    (file,) = kept(tmp_path)
    whole = read_choice(make_choice_key(KIND, ["native", "torch"]))
    assert whole is not None
    DAMAGES[damage](file)
    begin_anew(monkeypatch)
    assert choose_backends("fastest", KIND).decodes in ("native", "torch")
    assert len(counted) == 2
    assert kept(tmp_path) == [file]
    assert file.is_file()
    assert not file.is_symlink()
    assert read_choice(make_choice_key(KIND, ["native", "torch"])) is not None


def test_a_folder_in_the_way_and_one_that_cannot_be_written_cost_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counted: list[Any]
) -> None:
    key = make_choice_key(KIND, ["native", "torch"])
    choice_path(key).mkdir(parents=True)
    assert not keep_choice(key, StepChoice("torch", "torch"), {})
    assert [each for each in choice_path(key).parent.iterdir() if each.is_file()] == []
    for where in ("off", "/dev/null/x", "/proc/nothing"):
        begin_anew(monkeypatch)
        monkeypatch.setenv("TRINITY_CACHE", where)
        assert choose_backends("fastest", KIND).chunks in ("native", "torch")
        assert not keep_choice(key, StepChoice("torch", "torch"), {})
    assert not Path("off").exists()


def test_the_folder_is_bounded(tmp_path: Path) -> None:
    keys = [make_choice_key(replace(KIND, heads=n + 1), ["torch"]) for n in range(MOST_CHOICES + 5)]
    for age, key in enumerate(keys):
        assert keep_choice(key, StepChoice("torch", "torch"), {})
        os.utime(choice_path(key), (age, age))
    assert len(kept(tmp_path)) == MOST_CHOICES
    assert [read_choice(key) is None for key in keys] == [True] * 5 + [False] * MOST_CHOICES


def test_auto_on_a_cpu_measures_nothing(tmp_path: Path, counted: list[Any]) -> None:
    assert choose_backends("auto", KIND).decodes == pick_backend("auto", KIND) == pick_backend("fastest", KIND)
    make_backend("auto", KIND.shape, KIND.dtype, CPU, 4)
    make_backend("torch", KIND.shape, KIND.dtype, CPU, 4)
    assert counted == []
    assert kept(tmp_path) == []


class Failing(TorchAttention):
    """Right on a small batch; ``fails`` on a larger one."""

    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__()
        self.wrong = wrong

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        if not self.wrong and len(cache) > 11:  # the probe's
            raise RuntimeError("out of memory")
        return super().attend(rows, cache, qkv, params) + self.wrong


@pytest.mark.parametrize("made", [Failing(), Failing(0.1)], ids=["fails", "wrong"])
def test_one_that_fails_or_is_wrong_is_left_out(
    made: Failing, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stands first in line, and takes no time at all."""
    spec = BackendSpec(lambda kind: None, lambda kind: made)
    monkeypatch.setattr(backends, "BACKENDS", {"bad": spec, "torch": BACKENDS["torch"]})
    assert choose_backends("fastest", KIND) == StepChoice("torch", "torch")
    assert any("attention backend bad is not" in line for line in caplog.messages)


def test_a_kept_backend_that_is_wrong_now_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that somebody else has written can name only what is tried before it serves."""
    spec = BackendSpec(lambda kind: "it is wrong", lambda kind: Failing(0.1), lambda kind: None)
    monkeypatch.setattr(backends, "BACKENDS", {"bad": spec, "torch": BACKENDS["torch"]})
    key = make_choice_key(KIND, ["bad", "torch"])
    assert keep_choice(key, StepChoice("torch", "bad"), {})
    assert choose_backends("fastest", KIND) == StepChoice("torch", "torch")


def test_where_nothing_can_be_measured_the_first_serves_and_nothing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No memory for the workload is no reason not to start, nor one to remember."""

    def full(*given: Any) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 64 MiB")

    monkeypatch.setattr(measurement, "_find_room", full)
    first = pick_backend("auto", KIND)
    monkeypatch.setattr(
        backends, "BACKENDS", {first: BACKENDS[first], "torch": BACKENDS["torch"], "more": BACKENDS["torch"]}
    )
    assert choose_backends("fastest", KIND) == StepChoice(first, first)
    assert kept(tmp_path) == []
    assert any("attention is not measured: CUDA out of memory" in line for line in caplog.messages)


def test_triton_is_measured_beside_the_others(counted: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its interpreter is a real backend, and far the slowest one."""
    pytest.importorskip("triton", reason="triton is not installed: pip install triton")
    from trinity.stages.attention.gpu.triton import TritonAttention

    if torch.cuda.is_available():
        pytest.skip("kernels are compiled here, and need tensors of the GPU")
    monkeypatch.setattr(measurement, "MEASURED_ROUNDS", 1)
    monkeypatch.setattr(measurement, "find_fault", lambda *given: None)
    monkeypatch.setitem(measurement.MEASURED_LAYERS, "cpu", 1)
    spec = BackendSpec(lambda kind: None, lambda kind: TritonAttention(1))
    monkeypatch.setattr(backends, "BACKENDS", {"triton": spec, **{n: BACKENDS[n] for n in ("native", "torch")}})
    found = choose_backends("fastest", KIND)
    assert "triton" in counted[0]
    assert "triton" not in (found.decodes, found.chunks)


# ---------------------------------------------------------------- two backends for one instance


@needs_native
def test_a_request_passes_from_one_to_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen by a kept file; greedy tokens in float32 are the same whichever reads what the other has written."""
    plain = Solo(backend=TorchAttention())
    shape = plain.model.kv_shape().shape
    kind = CacheKind(shape, torch.float32, CPU, plain.model.adapter.text_config.num_attention_heads)
    wanted = plain.serve(work(prompt=PROMPT), 6)
    for chosen in (StepChoice("native", "torch"), StepChoice("torch", "native")):
        begin_anew(monkeypatch)
        assert keep_choice(make_choice_key(kind, ["native", "torch"]), chosen, {})
        made = make_backend("fastest", shape, torch.float32, CPU, kind.heads)
        assert type(made) is PerStepAttention
        assert {type(made._decodes), type(made._chunks)} == {NativeAttention, TorchAttention}
        assert Solo(backend=made).serve(work(prompt=PROMPT), 6) == wanted
        assert str(chosen) == f"{chosen.decodes} for steps of decodes, {chosen.chunks} for steps with chunks"


# ---------------------------------------------------------------- as on a GPU


GPU_KIND = replace(KIND, device=torch.device("cuda", 0))


class Recordable(TorchAttention):
    supports_graphs = True


@pytest.fixture
def gpu_line(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Three backends of a GPU, of which graphs can hold two; those that are measured, by the table below."""
    asked: list[tuple[str, ...]] = []
    classes: dict[str, type[TorchAttention]] = {"slow": Recordable, "quick": TorchAttention, "fair": Recordable}
    seconds = {"slow": 3e-3, "quick": 1e-3, "fair": 2e-3}

    def measure(made: dict[str, Any], *given: Any) -> Any:
        asked.append(tuple(made))
        return {case: {name: seconds[name] for name in made} for case in ("decode 1", "chunk")}

    properties = SimpleNamespace(name="a GPU", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(measurement, "measure_backends", measure)
    specs = {
        name: BackendSpec(lambda kind: None, lambda kind, each=each: each())  # type: ignore[misc]
        for name, each in classes.items()
    }
    never = BackendSpec(lambda kind: None, lambda kind: TorchAttention(), None, lambda kind: "it compiles for minutes")
    monkeypatch.setattr(backends, "BACKENDS", {**specs, "late": never, "torch": BACKENDS["torch"]})
    return asked


def test_auto_on_a_gpu_measures_and_decodes_in_graphs(gpu_line: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    """The quickest cannot be recorded, so it has the chunks alone; the reference is in no line."""
    with caplog.at_level(logging.INFO, "trinity"):
        made = make_backend("auto", GPU_KIND.shape, GPU_KIND.dtype, GPU_KIND.device, 4)
    assert gpu_line == [("slow", "quick", "fair")]
    assert isinstance(made, PerStepAttention)
    assert made.supports_graphs, "decode steps are recorded"
    said = "attention on cuda:0, torch.float32: fair for steps of decodes, quick for steps with chunks"
    assert said in caplog.messages
    assert "attention, microseconds of a step: decode 1: slow 3000, quick 1000, fair 2000; chunk: slow 3000" in "".join(
        caplog.messages
    )
    assert choose_backends("late", GPU_KIND) == StepChoice("late", "late")
