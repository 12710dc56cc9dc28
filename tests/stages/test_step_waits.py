"""Steps with prefill chunks, alone and beside decodes, on a device for which the host never waits: on a stand-in."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from support.checkpoint_files import checkpoint
from support.device_waits import DEVICE, no_device_waits
from support.operator_tape import every_operator_is_torchs
from trinity.core.messages import Open, Prefill, ResolvedSampling, Step, Work
from trinity.memory.block_memory import BlockMemory
from trinity.stages.async_steps import LaunchedStep
from trinity.stages.attention.gpu.varlen import make_varlen_rows
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.block_tables import upload
from trinity.stages.language import LanguageStage
from trinity.stages.models import load_model
from trinity.testing.checkpoints import ARCHITECTURES

pytestmark = pytest.mark.usefixtures(every_operator_is_torchs.__name__)
OWN = {"qwen3_vl": [pytest.mark.xfail(strict=True, reason="its own code adds features of layers by a mask of rows")]}


class KernelAttention:
    """As a backend of kernels: makes its arguments as they do, and computes nothing."""

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        return self.read(rows, cache, qkv[0], params)

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        assert rows.blocks.device == rows.offsets.device == DEVICE

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        assert rows.there is not None, "tables are sent once, and not with each step"
        if "varlen" not in rows.memo:
            rows.memo["varlen"] = make_varlen_rows(rows, DEVICE)
        return torch.empty_like(query)


def stage_on_device(name: str, tmp_path: Path) -> LanguageStage:
    own = shutil.copytree(checkpoint(name), tmp_path / name)  # weights of its own, which go to the stand-in
    model = load_model(own, "PD", dtype="float32")
    shape = model.image_shape(5)
    memories: list[Any] = [BlockMemory(model.kv_shape(), 40), None if shape is None else BlockMemory(shape, 4)]
    for each in filter(None, memories):
        each.tensor = each.tensor.to(DEVICE)
    moved = replace(model, language=model.language.to(DEVICE), device=DEVICE)
    return LanguageStage(moved, memories[0], memories[1], backend=KernelAttention())


def open_request(stage: LanguageStage, name: str, first_block: int, **sampling: Any) -> None:
    prompt = tuple(range(20, 110))
    work = Work(request=name, prompt=prompt, max_tokens=9, sampling=ResolvedSampling(**sampling))
    stage.open(Open(work=work, blocks=tuple(range(first_block, first_block + 7))))
    if stage.image is not None:
        row = stage._requests.find(name)
        row.feature_at, row.feature_rows = np.array([2, 3, 50, 70]), np.array([7, 8, 0, 1])


@pytest.mark.parametrize(
    "name", ["llama", *(pytest.param(each, marks=[pytest.mark.slow, *OWN.get(each, ())]) for each in ARCHITECTURES)]
)
def test_no_step_with_chunks_waits(name: str, tmp_path: Path) -> None:
    """Chunks that end a prompt or do not, long enough that the last layer skips rows; decodes of unread tokens."""
    stage = stage_on_device(name, tmp_path)
    for number in range(4):
        open_request(stage, f"r{number}", 8 * number, temperature=float(number == 1), seed=number)
    steps = [
        Step(0, "joint", prefills=(Prefill("r0", 0, 40, False),)),
        Step(1, "joint", prefills=(Prefill("r0", 40, 50, True), Prefill("r1", 0, 90, True))),
        Step(2, "joint", prefills=(Prefill("r2", 0, 64, False),), decodes=("r0", "r1")),
        Step(3, "joint", prefills=(Prefill("r2", 64, 26, True), Prefill("r3", 0, 3, False)), decodes=("r0", "r1")),
        Step(4, "joint", prefills=(Prefill("r3", 3, 87, True),), decodes=("r0", "r1", "r2")),
    ]
    with no_device_waits():
        assert upload(torch.zeros(3), DEVICE).is_meta
        pending = [stage.launch_on_device(step) for step in steps]
    assert [type(each) for each in pending] == [LaunchedStep] * len(steps)
    assert stage._requests.steps_in_flight == len(steps)
