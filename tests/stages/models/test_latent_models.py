"""Models with latent attention cache one row per token and layer, and give what ``generate()`` gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from support.known_classes import packs
from support.stage_driver import Pool
from support.text_models import make_prompt
from support.text_oracle import check_text
from trinity.core.messages import Open, Prefill, ResolvedSampling, Step, Work
from trinity.memory.block_memory import BlockMemory
from trinity.stages.attention.interface import PAGED_ATTENTION
from trinity.stages.kernels import linear
from trinity.stages.kernels.linear import PackedLinear
from trinity.stages.language import LanguageStage
from trinity.stages.models import LoadedModel, load_model
from trinity.testing.any_text_checkpoint import build_any_text

LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "youtu")
SOON = ("deepseek_v3",)
RANK, ROPE, VOCABULARY = 24, 8, 300


@pytest.fixture(autouse=True)
def packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_is_packing_faster", packs)


@pytest.mark.parametrize(
    "model_type", [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in LATENT]
)
def test_tokens_and_logits_over_latent_rows(model_type: str, tmp_path: Path) -> None:
    directory = build_any_text(model_type, tmp_path)
    check_text(directory, make_prompt(75, VOCABULARY))
    model = load_model(directory, "PD", dtype="float32")
    layers = model.adapter.text_config.num_hidden_layers
    assert model.kv_shape(16).shape == (layers, 1, 1, 16, RANK + ROPE)
    assert model.kv_shape(16).block_bytes == layers * 16 * (RANK + ROPE) * 4


def test_half_precision_passes_its_check_and_packing_leaves_the_projection(tmp_path: Path) -> None:
    model = load_model(build_any_text("deepseek_v3", tmp_path), "PD", dtype="bfloat16", packed=True)
    attention = model.language.model.layers[0].self_attn
    assert not isinstance(attention.kv_b_proj, PackedLinear)
    assert attention.kv_b_proj.weight.device.type == "cpu"
    assert isinstance(attention.o_proj, PackedLinear) or not packs(torch.bfloat16)
    assert model.language.config._attn_implementation == PAGED_ATTENTION


# ---------------------------------------------------------------- several requests in one batch


class Batch:
    """A language stage with requests whose prompts differ in length."""

    def __init__(self, model: LoadedModel, prompts: dict[str, list[int]]) -> None:
        self.pool = Pool(BlockMemory(model.kv_shape(), 64), 0)
        self.logits: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
        self.stage = LanguageStage(model, self.pool.memory, None, "PD", self.observe)
        self.prompts = prompts
        for name, prompt in prompts.items():
            work = Work(request=name, prompt=tuple(prompt), max_tokens=12, sampling=ResolvedSampling())
            self.stage.open(Open(work=work, blocks=self.pool.take(8), tokens=()))

    def observe(self, name: str, index: int, logits: torch.Tensor) -> None:
        self.logits[name].append(logits.clone())

    def step(self, *prefills: tuple[str, int, int], decodes: tuple[str, ...] = ()) -> None:
        pieces = tuple(
            Prefill(name, start, length, start + length == len(self.prompts[name])) for name, start, length in prefills
        )
        self.stage.forward(Step(0, "joint", prefills=pieces, decodes=decodes))


PROMPTS = {"a": make_prompt(9, VOCABULARY), "b": make_prompt(61, VOCABULARY), "c": make_prompt(38, VOCABULARY)}


def run_mixed(model: LoadedModel) -> Batch:
    """Chunks of one prompt beside the decodes of others."""
    batch = Batch(model, PROMPTS)
    batch.step(("a", 0, 9), ("b", 0, 20))
    batch.step(("b", 20, 30), ("c", 0, 7), decodes=("a",))
    batch.step(("b", 50, 11), ("c", 7, 31), decodes=("a",))
    for _ in range(4):
        batch.step(decodes=("a", "b", "c"))
    return batch


def run_alone(model: LoadedModel, name: str, outputs: int) -> list[torch.Tensor]:
    batch = Batch(model, {name: PROMPTS[name]})
    batch.step((name, 0, len(PROMPTS[name])))
    for _ in range(outputs - 1):
        batch.step(decodes=(name,))
    return batch.logits[name]


@pytest.mark.parametrize("model_type", ["deepseek_v3", pytest.param("longcat_flash", marks=pytest.mark.slow)])
def test_requests_of_a_batch_do_not_touch_each_other(model_type: str, tmp_path: Path) -> None:
    model = load_model(build_any_text(model_type, tmp_path), "PD", dtype="float32")
    for name, found in run_mixed(model).logits.items():
        alone = run_alone(model, name, len(found))
        for mixed, single in zip(found, alone, strict=True):
            assert float((mixed - single).abs().max()) < 1e-4 * float(single.abs().max()), name


def test_latent_rows_that_are_zeroed_change_what_follows(tmp_path: Path) -> None:
    """The control: decodes read the prompt from its latent rows and from nowhere else."""
    model = load_model(build_any_text("deepseek_v3", tmp_path), "PD", dtype="float32")
    kept, wiped = (Batch(model, {"b": PROMPTS["b"]}) for _ in range(2))
    for batch in (kept, wiped):
        batch.step(("b", 0, 61))
    wiped.pool.memory.tensor.zero_()
    for batch in (kept, wiped):
        for _ in range(4):
            batch.step(decodes=("b",))
    chosen = [[int(each.argmax()) for each in batch.logits["b"]] for batch in (kept, wiped)]
    assert chosen[0][0] == chosen[1][0]
    assert chosen[0] != chosen[1]
