"""LoadedModel: the parts of a model that one instance holds, and the calls that stages make: encode and forward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trinity.core.messages import IMAGE, KV, STATE
from trinity.memory.block_memory import BlockShape
from trinity.memory.cache_config import KvDtype
from trinity.memory.devices import ENCODE_BYTES
from trinity.memory.weight_digests import LoadedFiles
from trinity.stages.attention.fp8 import FP8
from trinity.stages.attention.interface import AttentionBackend, PagedBatch, StopAfterWrite, attending
from trinity.stages.attention.kv_rows import KvRow
from trinity.stages.batch import RaggedBatch
from trinity.stages.block_tables import upload
from trinity.stages.kernels.linear import count_packed_bytes
from trinity.stages.models.base import MediaInputs, ModelAdapter
from trinity.stages.models.quantizers import list_held_tensors
from trinity.stages.models.states import StateLayout, StateStep, use_states
from trinity.stages.models.whole_forward import run_model

ENCODE_PIECE = 3 << 19  # pixel values that a CPU encodes together: four images of 336 x 336
UNKNOWN_VALUE_BYTES = 256  # working memory of a pixel value, where a config does not tell: more than the largest known


def split_items(items: Sequence[MediaInputs], most: int | None) -> Iterator[slice]:
    """Split ``items`` into runs of at most ``most`` floating-point numbers, each of at least one item.

    A CPU's products do not gain from more rows. A layer's output would leave the caches and, from some 32 MB, be
    returned to the system by the C library, so that each layer would touch fresh pages.
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


def count_value_bytes(config: Any, itemsize: int) -> float:
    """Count the bytes of working memory that encoding takes for a pixel value, by an encoder's config.

    A patch has six rows of the hidden size and two of the feed-forward part's in the widest layer, and so many pixel
    values as its area and its three colours.
    """
    vision = getattr(config, "vision_config", None)
    hidden = getattr(vision, "hidden_size", None) or getattr(vision, "embed_dim", None)
    patch = getattr(vision, "patch_size", None)
    if not isinstance(hidden, int) or not patch:
        return UNKNOWN_VALUE_BYTES
    height, width = patch if isinstance(patch, (list, tuple)) else (patch, patch)
    inner = getattr(vision, "intermediate_size", None) or 4 * hidden
    values: int = 3 * height * width * (getattr(vision, "temporal_patch_size", None) or 1)
    return itemsize * float(6 * hidden + 2 * inner) / values


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """Parts of one checkpoint that an instance needs.

    - ``directory``, ``config``, ``dtype``, ``device``: where and how the checkpoint was loaded.
    - ``letters``: roles that it was loaded for.
    - ``adapter``: the adapter of its family.
    - ``fingerprint``: equal if config, dtype and weight files are equal, as far as sampled pages of each tensor tell.
    - ``vision`` (None): part for the letter E.
    - ``language`` (None): part for P and D.
    - ``files`` (()): of the checkpoint, as they were when it was loaded.
    - ``kv_row`` (None): what the KV cache holds of a token in one layer, as surveyed; None: by the adapter.
    - ``whole`` (False): the text model runs by the whole model's own forward, head included: nobody has said that its
      parts make no difference.

    Each part is a transformers model of the checkpoint's own class without the other parts' weights. Parts may be
    shared by several LoadedModels of one process and called from several threads.
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
    files: LoadedFiles = ()
    kv_row: KvRow | None = None
    whole: bool = False

    @property
    def multimodal(self) -> bool:
        return self.adapter.multimodal

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return int(self.adapter.text_config.vocab_size)

    @property
    def media_token_ids(self) -> frozenset[int]:
        """Placeholder token ids; such a position within a media span takes a feature row."""
        return frozenset(self.adapter.media_tokens.values()) if self.multimodal else frozenset()

    @property
    def weight_bytes(self) -> int:
        """Bytes of this instance's weights, each tensor once, shared ones included."""
        tensors: dict[tuple[int, torch.Size], int] = {}
        packed = 0
        for part in (self.vision, self.language):
            if part is not None:
                packed += count_packed_bytes(part)
                for tensor in list_held_tensors(part):
                    if not tensor.is_meta:
                        tensors[tensor.data_ptr(), tensor.shape] = tensor.nbytes
        return packed + sum(tensors.values())

    def image_shape(self, rows: int = 576) -> BlockShape | None:
        """Return the image-cache block of ``rows`` feature rows of hidden * (1 + deepstack); None for text only."""
        if not self.multimodal:
            return None
        width = self.adapter.text_config.hidden_size * (1 + self.adapter.deepstack)
        return BlockShape(IMAGE, (rows, width), self.dtype)

    def kv_shape(self, block: int = 16, kv_dtype: KvDtype = "auto") -> BlockShape:
        """Return the KV block of ``block`` tokens: [layers, 2, kv_heads, block, head_dim], or of latent rows.

        These are [layers, 1, 1, block, rank + rotated width].
        """
        parts, heads, width = self.kv_row or self.adapter.kv_row
        dtype = self.dtype if kv_dtype == "auto" else FP8
        states = self.states
        layers = self.adapter.text_config.num_hidden_layers if states is None else len(states.kv_layers)
        return BlockShape(KV, (layers, parts, heads, block, width), dtype)

    @property
    def states(self) -> StateLayout | None:
        """Layout of the states that the language part's layers keep; None where all of them attend."""
        found: StateLayout | None = getattr(self.language, "trinity_states", None)
        return found

    @property
    def counts_rows(self) -> bool:
        """Tell if layers of the language part ask how many tokens a cache holds, which no CUDA graph may keep."""
        return self.adapter.reads_types or bool(getattr(self.language, "trinity_counts", False))

    def state_shape(self) -> BlockShape | None:
        """Return the block of one request's states, as bytes; None for a model without."""
        return None if self.states is None else BlockShape(STATE, (self.states.size,), torch.uint8)

    @property
    def encode_piece(self) -> int:
        """Pixel values that are encoded together; on a GPU so many as ``ENCODE_BYTES`` of working memory allow."""
        if self.device.type == "cpu":
            return ENCODE_PIECE
        return int(ENCODE_BYTES / count_value_bytes(self.config, self.dtype.itemsize))

    @torch.inference_mode()
    def encode(self, kind: str, items: Sequence[MediaInputs], counts: Sequence[int]) -> list[Tensor]:
        """Compute features [counts[i], width] of media items of one kind; see ``ModelAdapter.encode``."""
        found = []
        for some in split_items(items, self.encode_piece):
            found += self.adapter.encode(
                self.vision, kind, [self._upload_item(item) for item in items[some]], counts[some]
            )
        return found

    def _upload_item(self, item: MediaInputs) -> dict[str, Tensor]:
        return {
            name: upload(value, self.device, self.dtype if value.is_floating_point() else value.dtype)
            for name, value in item.items()
            if isinstance(value, Tensor)
        }

    def _embed(self, embeds: Tensor, batch: RaggedBatch, image: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
        """Put features in place of their tokens' embeddings; returns these and further inputs of the text model."""
        if batch.feature_rows is None or image is None:
            return embeds, {}
        held, hidden, placeholder = image.view(-1, image.shape[-1]), embeds.shape[-1], self._embed_placeholder(embeds)
        if batch.feature_at is None:
            rows = held.index_select(0, batch.feature_rows.clamp(min=0))[:, :hidden].to(embeds.dtype) + placeholder
            return torch.where((batch.feature_rows >= 0)[:, None], rows, embeds), {}
        rows = held.index_select(0, batch.feature_rows).to(embeds.dtype)
        embeds.index_copy_(0, batch.feature_at, rows[:, :hidden] + placeholder)
        return embeds, self.adapter.language_inputs(rows[:, hidden:], batch.feature_at, len(embeds))

    def _embed_placeholder(self, like: Tensor) -> Tensor | float:
        """Embed the placeholder to which features are added, [1, hidden]; 0 where they take its place."""
        if self.adapter.added_to is None:
            return 0.0
        embedding = self.adapter.language(self.language).get_input_embeddings()
        found: Tensor = embedding(torch.full((1,), self.adapter.added_to, device=like.device))
        return found

    @torch.inference_mode()
    def forward(
        self,
        batch: RaggedBatch,
        kv: Tensor,
        image: Tensor | None,
        backend: AttentionBackend,
        states: StateStep | None = None,
    ) -> Tensor:
        """Run a ragged batch; returns logits [rows of ``batch.last``, vocabulary].

        If no row is needed, the result has no row, of any width.
        Writes the batch's keys and values into ``kv`` [blocks, layers, 2, kv_heads, block_rows, head_dim] and reads
        features from ``image`` [blocks, rows, width]. A model whose layers keep states needs ``states``; the caller
        commits them.
        """
        paged = PagedBatch(batch.rows, kv, backend, batch.sampled, batch.last)
        assert (states is None) is (self.states is None), "states of another model, or none for one that keeps some"
        with attending(paged), use_states(states):
            return self._run_whole(batch, paged) if self.whole else self._run_text(batch, paged, image)

    def _run_whole(self, batch: RaggedBatch, paged: PagedBatch) -> Tensor:
        """Run the whole model over ids, as ``generate()`` does."""
        kept = {} if batch.last is None else {"logits_to_keep": batch.last}
        output = run_model(self.language, batch.ids[None], batch.position_ids, paged, **kept)
        logits: Tensor = output.logits[0]
        return logits if batch.last is None or len(logits) == len(batch.last) else logits[batch.last]

    def _run_text(self, batch: RaggedBatch, paged: PagedBatch, image: Tensor | None) -> Tensor:
        text = self.adapter.language(self.language)
        embeds, further = self._embed(text.get_input_embeddings()(batch.ids), batch, image)
        written, media = batch.written if self.adapter.reads_types else None, batch.media
        further |= self.adapter.token_inputs(text, batch.ids, media, written)
        try:
            output = text(
                inputs_embeds=embeds[None],
                position_ids=self.adapter.place(batch.ids, media, batch.position_ids),
                use_cache=False,
                trinity_batch=paged,
                **further,
            )
        except StopAfterWrite:
            return embeds[:0]
        found: Tensor = output.last_hidden_state[0]
        if batch.last is not None and not len(batch.last):
            return found[:0]
        every = batch.last is None or len(found) == len(batch.last)
        return self.adapter.head(self.language, found if every else found[batch.last])
