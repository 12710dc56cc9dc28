"""LoadedModel: the parts of a model that one instance holds, and the two calls that stages make on it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity.core.messages import IMAGE, KV
from trinity.memory.block_memory import BlockShape
from trinity.stages.attention.interface import AttentionBackend, PagedBatch, StopAfterWrite
from trinity.stages.batch import RaggedBatch
from trinity.stages.kernels.linear import count_packed_bytes
from trinity.stages.models.base import Inputs, ModelAdapter
from trinity.stages.uploads import upload

PIECE = 3 << 19  # numbers of pixel values that a CPU encodes together: four images of 336 pixels


def pieces(items: Sequence[Inputs], most: int | None) -> Iterator[slice]:
    """Runs of ``items``, as long as they hold ``most`` floating-point numbers or fewer; at least one each.

    A processor gains nothing from more rows than these in a product, and what a layer makes of them leaves its caches
    and, at some 32 MB, the memory that the C library keeps: at each layer its pages would be the system's again.
    """
    first = held = 0
    for index, item in enumerate(items):
        size = sum(each.numel() for each in item.values() if isinstance(each, Tensor) and each.is_floating_point())
        if most is not None and index > first and held + size > most:
            yield slice(first, index)
            first = index
            held = 0
        held += size
    yield slice(first, len(items))


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """Parts of the checkpoint in ``directory``: ``vision`` for the letter E, ``language`` for P and D.

    Each part is a transformers model of the checkpoint's own class that lacks the other parts' weights, or None.
    Parts may be shared by several LoadedModels of one process and may be called from several threads.
    ``fingerprint`` is equal wherever config, dtype and weight files are.
    """

    directory: Path
    letters: str
    config: Any
    adapter: ModelAdapter
    dtype: torch.dtype
    device: torch.device
    fingerprint: str
    vision: Any = None
    language: Any = None

    @property
    def multimodal(self) -> bool:
        return self.adapter.multimodal

    @property
    def media_token_ids(self) -> frozenset[int]:
        """Placeholder ids; a prompt position that holds one of them within a media span takes a feature row."""
        return frozenset(self.adapter.media_tokens.values()) if self.multimodal else frozenset()

    @property
    def weight_bytes(self) -> int:
        """Bytes of this instance's weights, shared ones included, each tensor once."""
        tensors: dict[tuple[int, torch.Size], int] = {}
        packed = 0
        for part in (self.vision, self.language):
            if part is not None:
                packed += count_packed_bytes(part)
                for tensor in (*part.parameters(), *part.buffers()):
                    if not tensor.is_meta:
                        tensors[tensor.data_ptr(), tensor.shape] = tensor.nbytes
        return packed + sum(tensors.values())

    def image_shape(self, rows: int = 576) -> BlockShape | None:
        """An image-cache block: ``rows`` feature rows of hidden * (1 + deepstack layers); None for text only."""
        if not self.multimodal:
            return None
        width = self.adapter.text_config.hidden_size * (1 + self.adapter.deepstack)
        return BlockShape(IMAGE, (rows, width), self.dtype)

    def kv_shape(self, block: int = 16) -> BlockShape:
        """A KV-cache block of ``block`` tokens: [layers, 2, kv_heads, block, head_dim]."""
        heads, width = self.adapter.kv_heads
        return BlockShape(KV, (self.adapter.text_config.num_hidden_layers, 2, heads, block, width), self.dtype)

    @torch.inference_mode()
    def encode(self, kind: str, items: Sequence[Inputs], counts: Sequence[int]) -> list[Tensor]:
        """Features [counts[i], width] of media items of one kind; see ``ModelAdapter.encode``."""
        most = PIECE if self.device.type == "cpu" else None
        found = []
        for some in pieces(items, most):
            found += self.adapter.encode(self.vision, kind, [self._placed(item) for item in items[some]], counts[some])
        return found

    def _placed(self, item: Inputs) -> dict[str, Tensor]:
        return {
            name: upload(value, self.device, self.dtype if value.is_floating_point() else value.dtype)
            for name, value in item.items()
            if isinstance(value, Tensor)
        }

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, kv: Tensor, image: Tensor | None, backend: AttentionBackend) -> Tensor:
        """Logits [wanted rows, vocabulary] of a ragged batch; no row, of any width, where none is wanted.

        Writes the batch's keys and values into ``kv`` [blocks, layers, 2, kv_heads, block_rows, head_dim] and reads
        features from ``image`` [blocks, rows, width].
        """
        text = self.adapter.language(self.language)
        embeds: Tensor = text.get_input_embeddings()(batch.ids)
        further = {}
        if batch.feature_rows is not None and batch.feature_at is not None and image is not None:
            rows = image.view(-1, image.shape[-1]).index_select(0, batch.feature_rows).to(embeds.dtype)
            hidden = embeds.shape[-1]
            embeds.index_copy_(0, batch.feature_at, rows[:, :hidden])
            further = self.adapter.language_inputs(rows[:, hidden:], batch.feature_at, len(embeds))
        try:
            output = text(
                inputs_embeds=embeds[None],
                position_ids=batch.position_ids,
                use_cache=False,
                trinity_batch=PagedBatch(batch.rows, kv, backend, batch.sampled, batch.last),
                **further,
            )
        except StopAfterWrite:
            return embeds[:0]
        states: Tensor = output.last_hidden_state[0]
        if batch.last is not None and not len(batch.last):
            return states[:0]
        every = batch.last is None or len(states) == len(batch.last)
        return self.adapter.head(self.language, states if every else states[batch.last])
