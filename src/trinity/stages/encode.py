"""EncodeStage: runs the vision encoder and writes features to the image cache, the E of E-P-D."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from trinity.core.messages import Encode, Open, Sampled, Step
from trinity.errors import StageError
from trinity.memory.block_memory import BlockMemory
from trinity.memory.freed_memory import release_at_times
from trinity.stage_kinds import ENCODE
from trinity.stages.gpu.cuda_graphs import GraphCache, Tensors
from trinity.stages.models import LoadedModel
from trinity.stages.models.base import MediaInputs

MOST_GRAPH_ITEMS = 4  # items of one CUDA graph
MOST_KEY_NUMBERS = 64  # host numbers (grids, sizes) in the key of a CUDA graph
MOST_SEEN_KEYS = 4096  # keys of encodes that came once


class EncodeStage:
    """Encodes the media of a step into ``image``, whose blocks are [rows, width]; implements ``stages.base.Stage``.

    - ``model``: the loaded vision part.
    - ``image``: the image cache.
    - ``graphs`` (None): CUDA graphs, for encodes of few items. One is recorded when its shapes come for the second
      time: many images of a day have a size that no other has.

    An item's features fill its blocks in order, the last one partly. Items are batched if their shapes allow it.
    """

    letters = ENCODE.letter

    def __init__(self, model: LoadedModel, image: BlockMemory, graphs: GraphCache | None = None) -> None:
        self.model, self.image, self._graphs = model, image, graphs
        self._seen: set[Hashable] = set()

    def open(self, request: Open) -> None:
        """Do nothing: this stage keeps no state of requests."""

    def close(self, request: str) -> None:
        """Do nothing: this stage keeps no state of requests."""

    def forward(self, step: Step) -> dict[str, Sampled]:
        """Encode ``step.encodes``. Raises ``StageError`` if features do not fit the placeholders or blocks."""
        kinds: dict[str, list[Encode]] = defaultdict(list)
        for item in step.encodes:
            kinds[item.span.kind].append(item)
        for kind, items in kinds.items():
            counts = [item.span.tokens for item in items]
            features = self._encode(kind, [item.inputs for item in items], counts)
            for item, rows in zip(items, features, strict=True):
                self._store(rows, item)
            del features
        if kinds and self.image.raw is not None:
            release_at_times()  # an encoder's buffers are as large as a third of its weights
        return {}

    @torch.inference_mode()
    def _encode(self, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> Sequence[Tensor]:
        found = None
        if self._graphs is not None and self._is_repeated(key := make_graph_key(kind, items, counts)):
            found = self._replay(self._graphs, key, kind, items, counts)
        return self.model.encode(kind, items, counts) if found is None else found

    def _is_repeated(self, key: Hashable | None) -> bool:
        """Tell if this key came before; note that it came."""
        if key is None or key in self._seen:
            return key is not None
        if len(self._seen) >= MOST_SEEN_KEYS:
            self._seen.clear()
        self._seen.add(key)
        return False

    def _replay(
        self, graphs: GraphCache, key: Hashable, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]
    ) -> Tensors | None:
        """Return the features by a CUDA graph, to which only pixels are given: all other numbers are in ``key``."""
        tensors = [(i, *pair) for i, item in enumerate(items) for pair in item.items() if isinstance(pair[1], Tensor)]
        pixels = [(i, name) for i, name, value in tensors if value.is_floating_point()]
        numbers = [each for each in tensors if not each[2].is_floating_point()]

        def run(inputs: Tensors) -> Tensors:
            given: list[dict[str, Tensor]] = [{} for _ in items]
            for i, name, value in numbers:
                given[i][name] = value
            for (i, name), value in zip(pixels, inputs, strict=True):
                given[i][name] = value
            return self.model.encode(kind, given, counts)

        return graphs.call(key, run, [items[i][name] for i, name in pixels], ("encode", kind))

    @torch.inference_mode()
    def _store(self, features: Tensor, item: Encode) -> None:
        height = self.image.shape.shape[0]
        if len(features) > height * len(item.blocks):
            problem = f"{len(features)} feature rows do not fit {len(item.blocks)} blocks of {height}"
            raise StageError(problem, item.request, ENCODE.letter)
        for block, rows in zip(item.blocks, torch.split(features, height), strict=False):
            self.image.tensor[block, : len(rows)] = rows


def make_graph_key(kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> Hashable | None:
    """Make the key that items of one CUDA graph share; None if they should not be recorded.

    Numbers that are no pixels (grids, sizes) enter it by value: encoders read them on the host, and a recording holds
    what they made of them.
    """
    tensors = [(name, value) for item in items for name, value in item.items() if isinstance(value, Tensor)]
    numbers = [value for _, value in tensors if not value.is_floating_point()]
    if len(items) > MOST_GRAPH_ITEMS or sum(value.numel() for value in numbers) > MOST_KEY_NUMBERS:
        return None
    shapes = tuple((name, value.shape, value.dtype) for name, value in tensors)
    return ("encode", kind, tuple(counts), shapes, tuple(str(value.tolist()) for value in numbers))
