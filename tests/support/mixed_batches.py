"""A language stage with several requests of different lengths in one batch, and each of them alone."""

from __future__ import annotations

import torch

from support.stage_driver import Pool
from support.text_models import make_prompt
from trinity.core.messages import Open, Prefill, ResolvedSampling, Step, Work
from trinity.memory.block_memory import BlockMemory
from trinity.stages.language import LanguageStage
from trinity.stages.models import LoadedModel

VOCABULARY = 300


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


def check_mixed(model: LoadedModel, within: float = 1e-4) -> None:
    """Compare every sampled row of the mixed batches with that of its request alone."""
    for name, found in run_mixed(model).logits.items():
        alone = run_alone(model, name, len(found))
        for mixed, single in zip(found, alone, strict=True):
            assert float((mixed - single).abs().max()) < within * float(single.abs().max()), name
