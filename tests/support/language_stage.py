"""One language stage of a text model with a pool of its own, driven by hand."""

from __future__ import annotations

from typing import Any

import torch

from support.checkpoint_files import checkpoint
from support.stage_driver import Pool
from trinity.core.messages import Open, Prefill, ResolvedSampling, Sampled, Step, Work
from trinity.memory.block_memory import BlockMemory
from trinity.memory.cache_config import KvDtype
from trinity.stages.language import LanguageStage
from trinity.stages.models import load_model

PROMPT = tuple(range(20, 57))


def work(name: str = "a", prompt: tuple[int, ...] = PROMPT, max_tokens: int = 40, **sampling: Any) -> Work:
    return Work(request=name, prompt=prompt, max_tokens=max_tokens, sampling=ResolvedSampling(**sampling))


class Solo:
    """One PD stage of a text model with a pool of its own."""

    def __init__(
        self,
        name: str = "llama",
        letters: str = "PD",
        backend: Any = None,
        blocks: int = 120,
        kv_dtype: KvDtype = "auto",
    ) -> None:
        self.model = load_model(checkpoint(name), letters, dtype="float32")
        self.pool = Pool(BlockMemory(self.model.kv_shape(kv_dtype=kv_dtype), blocks), 0)
        self.seen: dict[tuple[str, int], torch.Tensor] = {}
        self.stage = LanguageStage(self.model, self.pool.memory, None, letters, self._observe, backend)

    def _observe(self, request: str, index: int, logits: torch.Tensor) -> None:
        self.seen[request, index] = logits.clone()

    def open(self, asked: Work, tokens: tuple[int, ...] = (), blocks: tuple[int, ...] | None = None) -> Open:
        need = -(-(len(asked.prompt) + asked.max_tokens) // 16)
        opened = Open(work=asked, blocks=self.pool.take(need) if blocks is None else blocks, tokens=tokens)
        self.stage.open(opened)
        return opened

    def step(self, *prefills: Prefill, decodes: tuple[str, ...] = ()) -> dict[str, Sampled]:
        return self.stage.forward(Step(0, "joint", prefills=prefills, decodes=decodes))

    def fill(self, asked: Work) -> int:
        return self.step(Prefill(asked.request, 0, len(asked.prompt), True))[asked.request].token

    def serve(self, asked: Work, outputs: int = 12) -> list[int]:
        """Alone, from open to close."""
        self.open(asked)
        tokens = [self.fill(asked)]
        tokens += [self.step(decodes=(asked.request,))[asked.request].token for _ in range(outputs - 1)]
        self.stage.close(asked.request)
        return tokens
