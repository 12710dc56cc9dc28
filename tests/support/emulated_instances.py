"""The memory and the stage of one emulated instance, driven by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trinity.core.messages import IMAGE, KV, Encode, Open, Prefill, Step, Work
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.emulation.processor import EmulatedProcessor
from trinity.emulation.stages import EmulatedStage, build_emulated_stages
from trinity.memory.block_memory import BlockMemory

SHAPE = EmulatedShape(name="small", layers=3, kv_heads=2, head_dim=16, image_width=64, image_tokens=6, vocabulary=1000)
MODEL = EmulatedModel(shape=SHAPE, cost=LinearCost(source="nothing takes time"), scale=8)
ROWS, HEIGHT = 4, 4  # rows of an image block, tokens of a KV block


def work_of(text: int = 9, images: tuple[int, ...] = (6,), tokens: int = 12, **named: Any) -> Work:
    request = EmulatedRequest(text_tokens=text, image_tokens=images, max_tokens=tokens, request_id="r", **named)
    return EmulatedProcessor(MODEL).process(request).work


@dataclass
class Site:
    """One instance's memory and stage."""

    letters: str
    model: EmulatedModel = MODEL
    memory: dict[str, BlockMemory] = field(init=False)
    stage: EmulatedStage = field(init=False)

    def __post_init__(self) -> None:
        image = self.model.image_shape(ROWS)
        assert image is not None
        self.memory = {IMAGE: BlockMemory(image, 8), KV: BlockMemory(self.model.kv_shape(HEIGHT), 16)}
        self.stage = build_emulated_stages(self.model, self.letters, ("joint",), self.memory)[0]

    def raw(self, kind: str) -> np.ndarray:
        found = self.memory[kind].raw
        assert found is not None
        return found

    def encode(self, work: Work, blocks: tuple[int, ...]) -> None:
        row = Encode("r", 0, work.media[0], blocks, None)
        self.stage.forward(Step(1, "joint", encodes=(row,)))

    def prefill(self, work: Work, start: int, end: int) -> list[int]:
        row = Prefill("r", start, end - start, end == len(work.prompt))
        return [one.token for one in self.stage.forward(Step(2, "joint", prefills=(row,))).values()]

    def decode(self) -> int:
        return self.stage.forward(Step(3, "joint", decodes=("r",)))["r"].token


IMAGES, SOURCE, TARGET = (5, 2), (3, 9, 1, 4), (8, 0, 15, 6, 7, 10, 11)


def prefilled(work: Work) -> tuple[Site, int]:
    """Encoded, and prefilled in two chunks; the first token."""
    site = Site("EP")
    site.encode(work, IMAGES)
    site.stage.open(Open(work=work, blocks=SOURCE, images=(IMAGES,)))
    assert site.prefill(work, 0, 4) == []
    (token,) = site.prefill(work, 4, len(work.prompt))
    return site, token


def moved(work: Work, site: Site, token: int, spoil: Callable[[np.ndarray], None] = lambda raw: None) -> Site:
    """A decode instance that has pulled the blocks of ``site``."""
    there = Site("D")
    there.raw(KV)[list(TARGET[: len(SOURCE)])] = site.raw(KV)[list(SOURCE)]
    spoil(there.raw(KV))
    there.stage.open(Open(work=work, blocks=TARGET, tokens=(token,)))
    return there
