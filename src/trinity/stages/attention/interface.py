"""Paged attention over unmodified transformers models.

``register_attention`` adds one function, ``trinity_paged``, to transformers' AttentionInterface. A text model that is
switched to it gets no masks and no Cache object: its forward is called on one ragged row [1, T, hidden] with one
further keyword, ``trinity_batch``, from which every layer learns where its keys and values belong and whom each row
attends to. The tensor work is an ``AttentionBackend``'s, so that a kernel takes the place of the torch reference
without a change to any model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from trinity.errors import UnsupportedModel

PAGED = "trinity_paged"
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


@dataclass(frozen=True, slots=True)
class LayerAsk:
    """What one layer asks for.

    ``window``: a row sees the last ``window`` positions, itself included. ``span``: it sees only positions of its own
    run of ``span`` positions (Llama 4's chunked attention). ``softcap`` c: scores become c·tanh(score / c).
    ``sinks`` [heads]: one more score per head that takes part in the softmax and has no value.
    """

    layer: int
    scale: float
    window: int | None = None
    span: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def first_seen(self, positions: np.ndarray) -> np.ndarray:
        """The first position that a row at each of ``positions`` may see."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.span is not None:
            first = np.maximum(first, positions // self.span * self.span)
        return first


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """A prefill chunk: ``length`` rows from row ``first`` of the batch on, at positions from ``start`` on.

    ``table``: int64 tensor, the request's KV blocks from its first position on. ``groups`` [length]: rows of one
    group ≥ 0 see each other in both directions (Gemma 3's images); -1 is causal.
    """

    first: int
    length: int
    start: int
    table: Tensor
    groups: Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(slots=True)
class PagedRows:
    """Where the rows of a ragged batch of T rows live: decode rows first, then prefill chunks.

    ``blocks``, ``offsets`` [T]: the KV block of each row and its place in it. ``tables`` [decodes, width]: block
    tables of the decode rows, padded with a block of the same request, so that no row ever reads another's block.
    ``lengths`` [decodes]: KV positions of each, its own included, ascending so that neighbours need little padding.
    ``kept`` is a backend's own store for what it derives once per batch.
    """

    blocks: Tensor
    offsets: Tensor
    tables: np.ndarray
    lengths: np.ndarray
    chunks: tuple[ChunkRows, ...] = ()
    kept: dict[Any, Any] = field(default_factory=dict)

    @property
    def decodes(self) -> int:
        return len(self.lengths)


class AttentionBackend(Protocol):
    """Writes and reads the paged KV cache. One object serves one thread at a time.

    One that has the methods of ``Halves`` besides is not asked for rows of the last layer that nobody looks at.
    """

    def attend(self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], ask: LayerAsk) -> Tensor:
        """Write this layer's keys and values, then attend.

        ``cache`` is [blocks, layers, 2, kv_heads, block_rows, head_dim]; ``qkv`` are the batch's query
        [T, heads, head_dim], key and value [T, kv_heads, head_dim]. Returns [T, heads, head_dim].
        """
        ...


class Halves(Protocol):
    """``attend`` in two: what the last layer needs where few rows are sampled (``stages/kernels/last_layer.py``)."""

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """Write this layer's keys and values, as ``attend`` does."""
        ...

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, ask: LayerAsk) -> Tensor:
        """What decode rows see of what is written; ``rows`` has no chunk."""
        ...


def halves(backend: AttentionBackend) -> Halves | None:
    """The backend, where it can do either half alone."""
    found: Any = backend
    inner = getattr(backend, "inner", backend)
    return found if hasattr(inner, "write") and hasattr(inner, "read") else None


class KeysWritten(Exception):
    """Ends a layer whose keys and values are in their blocks, where nothing more of it is asked for."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The ``trinity_batch`` keyword: what every layer of one forward needs.

    ``sampled``: the rows whose states are asked of the last layer, as decode rows, where that is worth while; ``last``
    [len(sampled)] says which of ``rows`` they are. ``half``: what is asked of a layer that is run in two halves.
    """

    rows: PagedRows
    cache: Tensor
    backend: AttentionBackend
    sampled: PagedRows | None = None
    last: Tensor | None = None
    half: Literal["", "write", "read"] = ""


def register_attention() -> None:
    """Make ``trinity_paged`` known to transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED, paged_attention)


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    trinity_batch: PagedBatch | None = None,
    **asked: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention layers call: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out.

    Raises ``UnsupportedModel`` where a layer's keys and values do not have the cache's shape, or where the layer is
    called otherwise than through trinity.
    """
    if trinity_batch is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not hand keywords on to its attention; it needs an adapter of its own"
        )
    _check_shapes(module, key, value, trinity_batch.cache)
    qkv = (query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1))
    ask = layer_ask(module, query.shape[-1], asked)
    seen = _attended(trinity_batch, qkv, ask)
    return seen[None].contiguous(), None


def _attended(batch: PagedBatch, qkv: tuple[Tensor, Tensor, Tensor], ask: LayerAsk) -> Tensor:
    if not batch.half:
        return batch.backend.attend(batch.rows, batch.cache, qkv, ask)
    backend: Any = batch.backend
    if batch.half == "write":
        backend.write(batch.rows, batch.cache, *qkv[1:], ask.layer)
        raise KeysWritten
    seen: Tensor = backend.read(batch.rows, batch.cache, qkv[0], ask)
    return seen


def layer_ask(module: Any, head_dim: int, asked: dict[str, Any]) -> LayerAsk:
    """What ``module`` asks for by keyword or, where transformers would say it by a mask alone, by its config."""
    scale, window, span = asked.get("scaling"), asked.get("sliding_window"), None
    kinds = getattr(module.config, "layer_types", None)
    if kinds is not None:
        kind = kinds[module.layer_idx]
        if kind == "sliding_attention" and window is None:
            window = module.config.sliding_window
        elif kind == "chunked_attention":
            span = module.config.attention_chunk_size
    return LayerAsk(
        layer=module.layer_idx,
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        span=span,
        softcap=asked.get("softcap"),
        sinks=asked.get("s_aux"),
    )


def _check_shapes(module: Any, key: Tensor, value: Tensor, cache: Tensor) -> None:
    layers, _, heads, _, width = cache.shape[1:]
    held = (heads, width)
    for name, tensor in (("keys", key), ("values", value)):
        found = (tensor.shape[1], tensor.shape[3])
        if found != held or module.layer_idx >= layers:
            raise UnsupportedModel(
                f"layer {module.layer_idx} ({type(module).__name__}) has {name} of {found} heads x width; "
                f"the paged cache has {held} and {layers} layers: one shape must serve all layers"
            )


def seen_mask(rows: Tensor, keys: Tensor, ask: LayerAsk, groups: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Bool [len(rows), len(keys)]: may the row at this position see the key at that position?

    ``groups`` are the rows' and the keys' groups (-1: none).
    """
    across, down = keys[None, :], rows[:, None]
    seen = across <= down
    if groups is not None:
        same, own = groups[1][None, :], groups[0][:, None]
        seen |= (same == own) & (own >= 0)
    if ask.window is not None:
        seen &= across > down - ask.window
    if ask.span is not None:
        seen &= torch.eq(across // ask.span, down // ask.span)
    return seen
