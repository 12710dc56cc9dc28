"""EncodeStage: media items in, rows of the image cache out (the E of E-P-D)."""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor

from trinity.errors import StageError
from trinity.memory import BlockMemory
from trinity.messages import IMAGE, Encode, Open, Sampled, Step
from trinity.stages.models import LoadedModel


class EncodeStage:
    """Encodes the media of a step into ``image``, whose blocks are [rows, width]; implements ``stages.base.Stage``.

    An item's features fill its blocks in order, the last one partly. Items go through the encoder together where
    their shapes allow.
    """

    letters = "E"
    consumes: tuple[str, ...] = ()
    produces: tuple[str, ...] = (IMAGE,)

    def __init__(self, model: LoadedModel, image: BlockMemory) -> None:
        self.model, self.image = model, image

    def open(self, request: Open) -> None:
        """Nothing is kept of a request here."""

    def close(self, request: str) -> None:
        """Nothing is kept of a request here."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Encode ``step.encodes``. Raises ``StageError`` where features do not fit placeholders or blocks."""
        kinds: dict[str, list[Encode]] = defaultdict(list)
        for item in step.encodes:
            kinds[item.span.kind].append(item)
        for kind, items in kinds.items():
            counts = [item.span.tokens for item in items]
            features = self.model.encode(kind, [item.inputs for item in items], counts)
            for item, rows in zip(items, features, strict=True):
                self._store(rows, item)
        return {}

    @torch.inference_mode()
    def _store(self, features: Tensor, item: Encode) -> None:
        height = self.image.shape.shape[0]
        if len(features) > height * len(item.blocks):
            problem = f"{len(features)} feature rows do not fit {len(item.blocks)} blocks of {height}"
            raise StageError(problem, item.request, "E")
        for block, rows in zip(item.blocks, torch.split(features, height), strict=False):
            self.image.tensor[block, : len(rows)] = rows
