"""What is measured of attention backends, and how; and two backends for the steps of one instance."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.attention_scenes import LAYER, Scene, Text
from trinity.stages.attention import measurement
from trinity.stages.attention.backends import PerStepAttention
from trinity.stages.attention.interface import AttentionParams, PagedRows, as_split_attention
from trinity.stages.attention.torch_reference import TorchAttention

CPU = torch.device("cpu")
SHAPE = (2, 2, 2, 16, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_is_measured_has_the_models_shape(dtype: torch.dtype) -> None:
    """Tables name blocks of the cache, each row its own place; a bfloat16 model asks an FP8 cache."""
    workload = measurement.AttentionWorkload((3, 2, 2, 16, 8), 6, dtype, CPU)
    assert workload.cache.dtype == dtype
    assert workload.cache.shape[2:] == (2, 2, 16, 8)
    assert workload.qkv[0].dtype == (torch.bfloat16 if dtype.itemsize == 1 else dtype)
    assert [part.shape[1] for part in workload.qkv] == [6, 2, 2]
    for case in workload.cases:
        rows = workload._make_rows(case)
        assert rows.decodes == case.decodes
        assert len(rows.blocks) == case.decodes + case.rows
        assert int(rows.blocks.max()) < len(workload.cache)
        workload.run(TorchAttention(), case)
    assert workload.calls == 2


def test_a_models_cases_are_of_both_kinds_and_fit_the_cache() -> None:
    for cases in (measurement.list_cases((1, 32, 128), 1024, 512), measurement.list_cases((1, 8, 32), 256, 128)):
        assert ["chunk" in case.name for case in cases] == [False, True] * 3
        assert len({case.name for case in cases}) == 6
        assert all(case.decodes + case.rows > 0 for case in cases)


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is left out, for all alike."""
    monkeypatch.setattr(measurement, "MOST_MEASURED_S", 0.0)
    made = {name: TorchAttention() for name in ("a", "b")}
    assert measurement.measure_backends(made, SHAPE, 4, torch.float32, CPU) == {}


def test_a_gpu_waits_until_all_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    log: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            log.append("record")

        def synchronize(self) -> None:
            log.append("wait")

        def elapsed_time(self, end: Any) -> float:
            return 2.5  # milliseconds

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append("sleep"), raising=False)
    assert measurement._time_on_device(lambda: log.append("run")) == 2.5e-3
    assert log == ["sleep", "record", "run", "record", "wait"]


class Noted(TorchAttention):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        self.calls.append("chunks" if rows.chunks else "decodes")
        return super().attend(rows, cache, qkv, params)

    def warm_up(self, cache: Tensor, chunks: bool, groups: bool) -> None:
        self.calls.append(f"warm up {chunks} {groups}")


def test_each_kind_of_step_has_its_own_backend() -> None:
    decodes, chunks = Noted(), Noted()
    both: Any = PerStepAttention(decodes, chunks)
    params = AttentionParams(LAYER, 0.3)
    for texts in ([Text(21, 1, True)], [Text(21, 1, True), Text(20, 7, False)]):
        scene = Scene(texts, (4, 2), 8, 16, seed=1)
        torch.testing.assert_close(scene.run(both, params), scene.oracle(params), atol=2e-5, rtol=1e-4)
    assert as_split_attention(both) is not None
    both.warm_up(scene.cache, chunks=True, groups=True)
    assert decodes.calls == ["decodes", "warm up False False"]
    assert chunks.calls == ["chunks", "warm up True True"]
    assert (both.supports_graphs, both.reads_chunks) == (False, False)
