"""EncodeStage: media items in, rows of the image cache out (the E of E-P-D)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from trinity.core.messages import Encode, Open, Sampled, Step
from trinity.errors import StageError
from trinity.memory.block_memory import BlockMemory
from trinity.stages.graphs import Graphs, Tensors
from trinity.stages.models import LoadedModel
from trinity.stages.models.base import Inputs

FEW = 4  # items of a step that are recorded
MOST_NUMBERS = 64


class EncodeStage:
    """Encodes the media of a step into ``image``, whose blocks are [rows, width]; implements ``stages.base.Stage``.

    An item's features fill its blocks in order, the last one partly. Items go through the encoder together where
    their shapes allow.
    """

    letters = "E"

    def __init__(self, model: LoadedModel, image: BlockMemory, graphs: Graphs | None = None) -> None:
        self.model, self.image, self._graphs = model, image, graphs

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
            features = self._encode(kind, [item.inputs for item in items], counts)
            for item, rows in zip(items, features, strict=True):
                self._store(rows, item)
        return {}

    @torch.inference_mode()
    def _encode(self, kind: str, items: Sequence[Inputs], counts: Sequence[int]) -> Sequence[Tensor]:
        key = None if self._graphs is None else recorded_as(kind, items, counts)
        if self._graphs is None or key is None:
            return self.model.encode(kind, items, counts)
        places = [
            (i, name) for i, item in enumerate(items) for name, value in item.items() if isinstance(value, Tensor)
        ]

        def run(inputs: Tensors) -> Tensors:
            given: list[dict[str, Tensor]] = [{} for _ in items]
            for (i, name), value in zip(places, inputs, strict=True):
                given[i][name] = value
            return self.model.encode(kind, given, counts)

        found = self._graphs.call(key, run, [items[i][name] for i, name in places])
        return self.model.encode(kind, items, counts) if found is None else found

    @torch.inference_mode()
    def _store(self, features: Tensor, item: Encode) -> None:
        height = self.image.shape.shape[0]
        if len(features) > height * len(item.blocks):
            problem = f"{len(features)} feature rows do not fit {len(item.blocks)} blocks of {height}"
            raise StageError(problem, item.request, "E")
        for block, rows in zip(item.blocks, torch.split(features, height), strict=False):
            self.image.tensor[block, : len(rows)] = rows


def recorded_as(kind: str, items: Sequence[Inputs], counts: Sequence[int]) -> Hashable | None:
    """What items must have in common to be one recorded call; None where they are not to be recorded.

    Numbers that are no pixels (grids, sizes) are part of it by value: encoders look at them on the host.
    """
    tensors = [(name, value) for item in items for name, value in item.items() if isinstance(value, Tensor)]
    numbers = [value for _, value in tensors if not value.is_floating_point()]
    if len(items) > FEW or sum(value.numel() for value in numbers) > MOST_NUMBERS:
        return None
    shapes = tuple((name, value.shape, value.dtype) for name, value in tensors)
    return ("encode", kind, tuple(counts), shapes, tuple(str(value.tolist()) for value in numbers))
