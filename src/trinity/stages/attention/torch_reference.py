"""TorchAttention: paged attention in plain torch for every device, the reference that faster kernels are held to.

Decode rows of many requests are one batched gather and two batched products, with the query heads of one KV head
packed as rows of one matrix (SDPA with grouped heads is many times slower on a CPU). The gather goes into memory that
is kept from layer to layer and step to step, since fresh pages would cost several times the copy itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from trinity.stages.attention.fp8 import round_like, round_to, storage
from trinity.stages.attention.interface import AttentionParams, ChunkRows, PagedRows, build_mask
from trinity.stages.block_tables import BlockTables

_GATHER_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decode rows [first, first + rows), their part of the cache in layer 0, and the mask of what each may see."""

    first: int
    rows: int
    pieces: Tensor  # [parts * rows * kv_heads * blocks] indices of [block_rows * head_dim] pieces: all keys, all values
    bias: Tensor  # [rows * kv_heads, 1, positions]: 0 or -inf

    @property
    def positions(self) -> int:
        return self.bias.shape[2]


@dataclass(frozen=True, slots=True)
class _ChunkPlan:
    """Part of the cache in layer 0 that a chunk reads (None: only the chunk itself), and its mask (None: causal)."""

    pieces: Tensor | None
    mask: Tensor | None


class TorchAttention:
    """``AttentionBackend`` in torch; ``gather_bytes`` bounds the keys and values that decode rows copy at once."""

    def __init__(self, gather_bytes: int = _GATHER_BYTES) -> None:
        self._gather_bytes = gather_bytes
        self._scratch: Tensor | None = None

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """See ``AttentionBackend.attend``."""
        self.write(rows, cache, *qkv[1:], params.layer)
        parts = self._decodes(rows, cache, qkv[0], params)
        parts += [self._chunk(rows, chunk, cache, qkv, params) for chunk in rows.chunks]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``."""
        return torch.cat(self._decodes(rows, cache, query, params))

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``SplitAttention.write``."""
        parts, heads, height, width = cache.shape[2:]
        places = rows.memo.get("places")
        if places is None:
            places = rows.memo["places"] = _cache_rows(rows, cache)
        both = torch.cat((key, value)) if parts == 2 else key
        own = both.shape[-1]  # narrower than the cache where its rows end in keys of an indexer
        fresh = round_to(both.reshape(-1, own), cache.dtype)
        held = storage(cache).view(-1, width)[:, :own]
        held.index_copy_(0, places + layer * parts * heads * height, storage(fresh))

    # ------------------------------------------------------------ decode rows

    def _decodes(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> list[Tensor]:
        groups = self._groups(rows, cache, params, query.dtype)
        return [self._decode(group, cache, query, params) for group in groups]

    def _groups(
        self, rows: PagedRows, cache: Tensor, params: AttentionParams, dtype: torch.dtype
    ) -> list[_DecodeGroup]:
        key = ("decodes", params.window, params.span)
        groups: list[_DecodeGroup] | None = rows.memo.get(key)
        if groups is None:
            groups = rows.memo[key] = list(self._plan_decodes(rows, cache, params, dtype))
        return groups

    def _plan_decodes(
        self, rows: PagedRows, cache: Tensor, params: AttentionParams, dtype: torch.dtype
    ) -> Iterator[_DecodeGroup]:
        _, _, parts, heads, height, width = cache.shape
        block_bytes = parts * heads * height * width * dtype.itemsize  # as they are attended to
        firsts = params.first_seen(rows.lengths - 1) // height
        counts = -(-rows.lengths // height) - firsts
        start = 0
        while start < rows.decodes:
            stop = start + 1
            most = int(counts[start])
            while stop < rows.decodes:
                most = max(most, int(counts[stop]))
                if most * (stop + 1 - start) * block_bytes > self._gather_bytes:
                    break
                stop += 1
            yield _make_decode_group(rows, cache, params, slice(start, stop), firsts[start:stop], dtype)
            start = stop

    def _decode(self, group: _DecodeGroup, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        parts, heads, width = cache.shape[2], cache.shape[3], cache.shape[5]
        pairs = group.rows * heads
        own = query[group.first : group.first + group.rows].reshape(pairs, -1, query.shape[-1])
        held = self._gather(cache, group.pieces, params.layer).view(parts, pairs, -1, width)
        held = held[..., : own.shape[-1]].to(query.dtype)
        bias = group.bias if params.chosen is None else _choose_decodes(group, params.chosen)
        if params.softcap is None:
            scores = torch.baddbmm(bias, own, held[0].transpose(1, 2), alpha=params.scale)
        else:
            scores = _cap(own @ held[0].transpose(1, 2) * params.scale, params.softcap) + bias
        sinks = None if params.sinks is None else params.sinks.view(heads, -1).repeat(group.rows, 1)
        return torch.bmm(_softmax(scores, sinks), held[-1]).view(group.rows, -1, own.shape[-1])

    def _gather(self, cache: Tensor, pieces: Tensor, layer: int) -> Tensor:
        """Gather the pieces of one layer into memory that the next gather overwrites."""
        parts, heads, height, width = cache.shape[2:]
        size = len(pieces) * height * width
        held_as = storage(cache)
        if self._scratch is None or self._scratch.numel() < size or self._scratch.dtype != held_as.dtype:
            self._scratch = held_as.new_empty(size)
        held = self._scratch[:size].view(-1, height * width)
        torch.index_select(held_as.view(-1, height * width), 0, pieces + layer * parts * heads, out=held)
        return held.view(cache.dtype)

    # ------------------------------------------------------------ prefill chunks

    def _chunk(
        self,
        rows: PagedRows,
        chunk: ChunkRows,
        cache: Tensor,
        qkv: tuple[Tensor, Tensor, Tensor],
        params: AttentionParams,
    ) -> Tensor:
        key = (chunk.first, params.window, params.span)
        plan = rows.memo.get(key)
        if plan is None:
            plan = rows.memo[key] = _plan_chunk(chunk, cache, params)
        query, keys, values = (part[chunk.first : chunk.first + chunk.length].transpose(0, 1) for part in qkv)
        if plan.pieces is not None:
            held = self._gather(cache, plan.pieces, params.layer).to(query.dtype)
            both = held.view(*cache.shape[2:4], -1, cache.shape[5])[..., : query.shape[-1]]
            keys, values = both[0], both[-1]
        elif cache.dtype != query.dtype:  # as later chunks will see them
            keys, values = (round_like(part, cache.dtype) for part in (keys, values))
        group = query.shape[0] // keys.shape[0]
        keys, values = (_repeat_heads(part, group) for part in (keys, values))
        mask = plan.mask if params.chosen is None else _choose_rows(chunk, plan.mask, keys.shape[1], params.chosen)
        if params.softcap is not None or params.sinks is not None:
            return _attend_explicitly(query, keys, values, mask, params)
        seen = scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask, is_causal=mask is None, scale=params.scale
        )
        return seen[0].transpose(0, 1)


def _repeat_heads(part: Tensor, times: int) -> Tensor:
    """Give each of ``times`` query heads its KV head: a view where there is but one, as in a latent row."""
    if len(part) == 1:
        return part.expand(times, -1, -1)
    return part.repeat_interleave(times, 0) if times > 1 else part


def _cache_rows(rows: PagedRows, cache: Tensor) -> Tensor:
    """Return the cache rows of head_dim for layer 0's keys, then values, of each row and head; int64, flat."""
    _, layers, parts, heads, height, _ = cache.shape
    base = rows.blocks * (layers * parts * heads * height) + rows.offsets
    keys = base[:, None] + torch.arange(heads, device=base.device) * height
    return torch.cat([keys + part * heads * height for part in range(parts)]).view(-1)


def _cache_pieces(table: Tensor, cache: Tensor) -> Tensor:
    """Return indices of layer 0's pieces [block_rows, head_dim]: [2 (keys, values), ..., kv_heads, blocks], flat.

    ``table`` is [..., blocks]. Of latent rows there is one part.
    """
    _, layers, parts, heads, _, _ = cache.shape
    across = torch.arange(heads, device=table.device)[:, None]
    keys = (table.long() * (layers * parts * heads))[..., None, :] + across
    return torch.stack([keys + part * heads for part in range(parts)]).view(-1)


def _make_decode_group(
    rows: PagedRows,
    cache: Tensor,
    params: AttentionParams,
    chosen: slice,
    first_blocks: np.ndarray,
    dtype: torch.dtype,
) -> _DecodeGroup:
    heads, height = cache.shape[3:5]
    lengths = rows.lengths[chosen]
    most = int((-(-lengths // height) - first_blocks).max())
    columns = first_blocks[:, None] + np.arange(most)
    table = BlockTables.join(rows.tables).take(columns, chosen)
    positions = (columns[:, :, None] * height + np.arange(height)).reshape(len(lengths), -1)
    seen = (positions < lengths[:, None]) & (positions >= params.first_seen(lengths - 1)[:, None])
    bias = torch.from_numpy(seen).to(cache.device).repeat_interleave(heads, 0)[:, None, :]
    hidden = torch.zeros(bias.shape, dtype=dtype, device=cache.device).masked_fill_(~bias, -torch.inf)
    pieces = _cache_pieces(torch.from_numpy(table).to(cache.device), cache)
    return _DecodeGroup(chosen.start, len(lengths), pieces, hidden)


def _plan_chunk(chunk: ChunkRows, cache: Tensor, params: AttentionParams) -> _ChunkPlan:
    height, device = cache.shape[4], cache.device
    positions = torch.arange(chunk.start, chunk.end, device=device)
    groups = None if chunk.groups is None else (chunk.groups, chunk.groups)
    if chunk.start == 0:
        limits = [limit for limit in (params.window, params.span) if limit is not None]
        plain = groups is None and all(chunk.length <= limit for limit in limits)
        return _ChunkPlan(None, None if plain else build_mask(positions, positions, params, groups))
    first = int(params.first_seen(np.array(chunk.start))) // height
    table = chunk.table[first : -(-chunk.end // height)]
    keys = torch.arange(first * height, (first + len(table)) * height, device=device)
    if chunk.groups is not None:
        groups = (chunk.groups, _align_groups(chunk.groups, chunk.start - first * height, len(keys)))
    return _ChunkPlan(_cache_pieces(table, cache), build_mask(positions, keys, params, groups))


def _align_groups(groups: Tensor, before: int, total: int) -> Tensor:
    spread = groups.new_full((total,), -1)
    spread[before : before + len(groups)] = groups
    return spread


def _choose_decodes(group: _DecodeGroup, chosen: Tensor) -> Tensor:
    """Hide from decode rows what they did not choose: a bias as the group's."""
    kept = _spread(chosen[group.first : group.first + group.rows], group.positions)
    heads = len(group.bias) // group.rows
    return group.bias.masked_fill(~kept.repeat_interleave(heads, 0)[:, None], -torch.inf)


def _choose_rows(chunk: ChunkRows, mask: Tensor | None, keys: int, chosen: Tensor) -> Tensor:
    """Hide from a chunk's rows what they did not choose of ``keys`` positions.

    ``mask``: what they see; None: what is causal.
    """
    kept = _spread(chosen[chunk.first : chunk.first + chunk.length], keys)
    return kept.tril_(chunk.start) if mask is None else kept & mask


def _spread(chosen: Tensor, positions: int) -> Tensor:
    """Turn positions [rows, most] that are chosen into a mask [rows, positions]; negative ones are none."""
    kept = torch.zeros((len(chosen), positions + 1), dtype=torch.bool, device=chosen.device)
    kept.scatter_(1, torch.where(chosen < 0, positions, chosen).long(), True)
    return kept[:, :positions]


def _attend_explicitly(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams
) -> Tensor:
    """Attend with a softcap or sinks, which SDPA lacks: [heads, rows, head_dim] in, [rows, heads, head_dim] out."""
    scores = query @ keys.transpose(1, 2) * params.scale
    if params.softcap is not None:
        scores = _cap(scores, params.softcap)
    seen = mask if mask is not None else torch.ones(scores.shape[1:], dtype=torch.bool, device=scores.device).tril_()
    scores = scores.masked_fill(~seen, -torch.inf)
    sinks = None if params.sinks is None else params.sinks[:, None].expand(-1, scores.shape[1])
    return (_softmax(scores, sinks) @ values).transpose(0, 1)


def _cap(scores: Tensor, softcap: float) -> Tensor:
    return torch.tanh(scores / softcap) * softcap


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Take the softmax over the last axis; ``sinks`` (the scores' shape without it) take a share but get no weight."""
    if sinks is None:
        return scores.softmax(-1)
    joined = torch.cat((scores, sinks.to(scores.dtype)[..., None]), -1)
    return joined.softmax(-1)[..., :-1]
