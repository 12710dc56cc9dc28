"""Paged attention over unmodified transformers models: the interface between models and attention backends.

``register_attention`` adds one function, ``trinity_paged``, to transformers' AttentionInterface. A text model that is
switched to it gets no masks and no Cache object. Its forward runs on one ragged row [1, T, hidden] with one further
keyword, ``trinity_batch``. That tells every layer where its keys and values belong and which positions each row attends
to. An ``AttentionBackend`` does the tensor work, so a kernel can replace the torch reference without a change to any
model.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from trinity.errors import UnsupportedModel
from trinity.stages.attention.kv_rows import KvRow, LayerSurvey, fit_rows
from trinity.stages.attention.latent import INDEXED, compress_rows, expand_result
from trinity.stages.block_tables import AnyTables

Int64Array = np.ndarray
PAGED_ATTENTION = "trinity_paged"
CAUSAL_LAYER = "trinity_causal"  # attribute of a layer whose rows never see what is behind them
READ_KEYWORDS = frozenset({"scaling", "sliding_window", "softcap", "s_aux", "indices"})
# They change nothing here: dropout is of training, positions are the batch's, masks come of config and batch alone, and
# the rest says what a model is to return.
UNREAD_KEYWORDS = frozenset(
    {
        *("dropout", "is_causal", "position_ids", "cache_position", "use_cache", "return_dict", "logits_to_keep"),
        *("output_attentions", "output_hidden_states", "output_router_logits"),
    }
)
_KNOWN_KEYWORDS = READ_KEYWORDS | UNREAD_KEYWORDS
LAYER_KINDS = ("full_attention", "sliding_attention", "chunked_attention", INDEXED)


@dataclass(frozen=True, slots=True)
class AttentionParams:
    """Attention of one layer.

    - ``layer``: its index in the cache.
    - ``scale``: factor of the scores.
    - ``window`` (positions, None): a row sees only the last ``window`` positions, its own included.
    - ``span`` (positions, None): a row sees only positions of its own run of ``span`` (Llama 4's chunked attention).
    - ``softcap`` (None): a score becomes softcap · tanh(score / softcap).
    - ``sinks`` ([heads], None): one more score per head that takes part in the softmax and has no value.
    - ``chosen`` ([T, most], None): positions that each row attends to among those that it sees; -1 is none.
    """

    layer: int
    scale: float
    window: int | None = None
    span: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chosen: Tensor | None = None

    def first_seen(self, positions: np.ndarray) -> np.ndarray:
        """Return the first position visible to a row at each of ``positions``."""
        first = np.zeros_like(positions)
        if self.window is not None:
            first = np.maximum(first, positions - self.window + 1)
        if self.span is not None:
            first = np.maximum(first, positions // self.span * self.span)
        return first


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Prefill chunk of one request (chunked prefill).

    - ``first``, ``length``: its rows [first, first + length) of the batch.
    - ``start``: KV position of its first row.
    - ``table``: block table [blocks]: the request's KV blocks from position 0.
    - ``groups`` ([length], None): rows of one group ≥ 0 see each other in both directions (Gemma 3's images); -1 is
      causal.
    - ``written`` (0): how many of the last rows are of tokens that the model wrote itself.
    """

    first: int
    length: int
    start: int
    table: Tensor
    groups: Tensor | None = None
    written: int = 0

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(slots=True)
class PagedRows:
    """Cache places of a ragged batch of T rows: decode rows first, then prefill chunks (vLLM's attention metadata).

    - ``blocks``, ``offsets`` ([T]): KV block of each row, and the row's place in it (vLLM's slot mapping).
    - ``tables`` ([decodes]): block tables of the decode rows, on the host.
    - ``lengths`` ([decodes]): KV positions of each decode row, its own included; ascending, so that neighbours need
      little padding.
    - ``chunks``: the prefill chunks.
    - ``there`` (int32 [decodes + chunks, width], None): block tables of all of them on the device, if they are there
      already; what lies beyond a table's end is any block.
    - ``memo``: a backend's store for what it derives once per batch.
    """

    blocks: Tensor
    offsets: Tensor
    tables: AnyTables
    lengths: np.ndarray
    chunks: tuple[ChunkRows, ...] = ()
    there: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict)

    @property
    def decodes(self) -> int:
        return len(self.lengths)

    def without_groups(self) -> PagedRows:
        """The same rows, all causal."""
        if all(chunk.groups is None for chunk in self.chunks):
            return self
        found: PagedRows | None = self.memo.get("without_groups")
        if found is None:
            causal = tuple(replace(chunk, groups=None) for chunk in self.chunks)
            found = self.memo["without_groups"] = replace(self, chunks=causal, memo={})
        return found


class AttentionBackend(Protocol):
    """Writes and reads the paged KV cache. One object serves one thread at a time.

    If it also has the methods of ``SplitAttention``, the last layer skips rows whose output is not used. If it has
    ``warm_up(cache, chunks, groups)``, that is called after a first batch and compiles all that serving may ask for.
    """

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """Write this layer's keys and values, then attend.

        ``cache`` is [blocks, layers, 2, kv_heads, block_rows, head_dim]; ``qkv`` are the batch's query
        [T, heads, head_dim], key and value [T, kv_heads, head_dim]. Returns [T, heads, head_dim]. A cache of latent
        rows is [blocks, layers, 1, 1, block_rows, width]: key and value are the same row, which is held once. If these
        are narrower than the cache, its rows end in keys of an indexer, which are written already.
        """
        ...


class SplitAttention(Protocol):
    """``attend`` split in two, for a last layer with few sampled rows (``stages/kernels/decoder_layers.py``)."""

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """Write this layer's keys and values, as ``attend`` does."""
        ...

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """Attend from decode rows to keys and values already written; ``rows`` has no chunk.

        ``query`` is [decodes, heads, head_dim], as is the result.
        """
        ...


def as_split_attention(backend: AttentionBackend) -> SplitAttention | None:
    """Return ``backend`` if it can write and read separately, else None."""
    found: Any = backend
    inner = getattr(backend, "inner", backend)
    return found if hasattr(inner, "write") and hasattr(inner, "read") else None


class StopAfterWrite(Exception):
    """Ends a layer's forward once its keys and values are in their blocks, because no further output is needed."""


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """Argument of the ``trinity_batch`` keyword, for every layer of one forward.

    - ``rows``, ``cache``, ``backend``: the batch, the KV cache and the backend that reads and writes it.
    - ``sampled`` (None): the rows whose states the last layer must give, as decode rows, if skipping the others pays.
    - ``last`` ([len(sampled)], None): indices of these rows among ``rows``.
    - ``half`` (""): the half that a layer runs if it runs in two.
    """

    rows: PagedRows
    cache: Tensor
    backend: AttentionBackend
    sampled: PagedRows | None = None
    last: Tensor | None = None
    half: Literal["", "write", "read"] = ""


def register_attention() -> None:
    """Register ``trinity_paged`` with transformers; may be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(PAGED_ATTENTION, paged_attention)


_running = threading.local()  # batch: of this thread's forward, for layers that do not pass keywords on


@contextmanager
def attending(batch: PagedBatch | LayerSurvey) -> Iterator[None]:
    """Have all attention of this thread serve ``batch``, also where no keyword says so."""
    before = getattr(_running, "batch", None)
    _running.batch = batch
    try:
        yield
    finally:
        _running.batch = before


def find_batch(given: PagedBatch | None = None) -> PagedBatch | LayerSurvey | None:
    """Return the batch that this thread's forward serves, as its keyword says or else the context; None outside."""
    return given or getattr(_running, "batch", None)


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
    """Attend for a transformers attention layer: [1, heads, T, head_dim] in, [1, T, heads, head_dim] out.

    Raises ``UnsupportedModel`` if the layer's keys and values do not go into the cache, if it is not called within a
    forward of trinity's, or if it asks for what is not done here.
    """
    refuse_keywords(module, asked)
    batch = find_batch(trinity_batch)
    if isinstance(batch, LayerSurvey):
        return batch.note(module.layer_idx, query, key, value), None
    if batch is None:
        raise UnsupportedModel(
            f"{type(module).__name__} does not pass keywords on to its attention; write a ModelAdapter for this model"
        )
    params = read_attention_params(module, query.shape[-1], asked)
    if getattr(module, CAUSAL_LAYER, False):
        batch = replace(batch, rows=batch.rows.without_groups())
    if batch.cache.shape[2] == 1:
        compressed, rows = compress_rows(module, query, key)
        seen = expand_result(module, _run_half(batch, (compressed, rows, rows), params))
    else:
        fitted = _fit(module, query, key, value, batch.cache)
        qkv = (fitted[0][0].transpose(0, 1), fitted[1][0].transpose(0, 1), fitted[2][0].transpose(0, 1))
        seen = _run_half(batch, qkv, params)[..., : value.shape[-1]]
    return seen[None].contiguous(), None


def refuse_keywords(module: Any, asked: dict[str, Any]) -> None:
    """Raise ``UnsupportedModel`` if a layer gives its attention a keyword that is not known here, and not None."""
    unknown = sorted(name for name in asked.keys() - _KNOWN_KEYWORDS if asked[name] is not None)
    if unknown:
        said = f"gives its attention {', '.join(unknown)}, and paged attention knows no such keyword"
        raise UnsupportedModel(f"{type(module).__name__} {said}")


def _run_half(batch: PagedBatch, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams) -> Tensor:
    if not batch.half:
        return batch.backend.attend(batch.rows, batch.cache, qkv, params)
    backend: Any = batch.backend
    if batch.half == "write":
        backend.write(batch.rows, batch.cache, *qkv[1:], params.layer)
        raise StopAfterWrite
    seen: Tensor = backend.read(batch.rows, batch.cache, qkv[0], params)
    return seen


def find_attention_name(config: Any) -> Any:
    """Return the name of the attention that a config asks for; transformers' public ways only set it."""
    return config._attn_implementation


def read_attention_params(module: Any, head_dim: int, asked: dict[str, Any]) -> AttentionParams:
    """Read a layer's attention from its keywords, or from its config where transformers would only use a mask."""
    scale, window, span = asked.get("scaling"), asked.get("sliding_window"), None
    chosen = asked.get("indices")
    kinds = getattr(module.config, "layer_types", None)
    if kinds is not None:
        kind = kinds[module.layer_idx]
        if kind == "sliding_attention" and window is None:
            window = module.config.sliding_window
        elif kind == "chunked_attention":
            span = module.config.attention_chunk_size
        elif kind == INDEXED and chosen is None:
            raise UnsupportedModel(f"layer {module.layer_idx} ({type(module).__name__}) chooses no tokens by indices")
    return AttentionParams(
        layer=kv_layer(module),
        scale=head_dim**-0.5 if scale is None else scale,
        window=window,
        span=span,
        softcap=asked.get("softcap"),
        sinks=asked.get("s_aux"),
        chosen=None if chosen is None else chosen[0],
    )


def kv_layer(module: Any) -> int:
    """Return the index in the cache of an attention layer: those that keep states instead are not counted."""
    found: int = getattr(module, "trinity_kv_layer", module.layer_idx)
    return found


def _fit(module: Any, query: Tensor, key: Tensor, value: Tensor, cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    layers, parts, heads, _, width = cache.shape[1:]
    fitted = fit_rows(query, key, value, KvRow(parts, heads, width)) if kv_layer(module) < layers else None
    if fitted is None:
        shapes = [(part.shape[1], part.shape[3]) for part in (key, value)]
        raise UnsupportedModel(
            f"layer {module.layer_idx} ({type(module).__name__}) has keys of {shapes[0]} and values of {shapes[1]} "
            f"heads x width; the paged cache has {(heads, width)} and {layers} layers: one shape must serve all layers"
        )
    return fitted


def build_mask(
    rows: Tensor, keys: Tensor, params: AttentionParams, groups: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Build the bool mask [len(rows), len(keys)] of which positions ``keys`` the rows at positions ``rows`` see.

    ``groups``: the rows' and the keys' groups (-1: none).
    """
    across, down = keys[None, :], rows[:, None]
    seen = across <= down
    if groups is not None:
        same, own = groups[1][None, :], groups[0][:, None]
        seen |= (same == own) & (own >= 0)
    if params.window is not None:
        seen &= across > down - params.window
    if params.span is not None:
        seen &= torch.eq(across // params.span, down // params.span)
    return seen
