"""Triton kernels of paged attention over the block-major cache; ``attention/gpu/triton.py`` launches them.

The cache is contiguous [blocks, layers, 2, kv_heads, block_rows, head_dim]. A program of ``attend_tile`` has a tile of
query rows of one sequence, with the query heads of one KV head packed beside each other, so that keys and values are
read once for all of them. It passes over the keys with a running softmax (Milakov and Gimelshein 2018; Dao et al.
2022). Long texts of few rows are split among programs, and ``combine_splits`` joins their results (split-K, as in
flash decoding). Scores are in units of log2, because the hardware has exp2. With TRITON_INTERPRET=1 the same code runs
on a CPU.

Triton compiles a kernel anew for each set of its constants, and by default for every integer that is 1 or a multiple of
16 and every address that is a multiple of 16 bytes. What changes from step to step is therefore neither a constant nor
specialised (``_VARYING``). Positions are 32-bit; only addresses are 64-bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_E4M3 = tl.constexpr(448.0)
_VARYING = (  # arguments that change from layer to layer, step to step or batch to batch
    *("layer", "layers", "table_width", "tile_count", "first_row", "row_count", "splits", "window", "span"),
    *("query_row", "query_head", "key_row", "key_head", "value_row", "value_head"),
    *("blocks", "offsets", "tables", "begins", "lengths", "tiles", "groups", "sinks"),
)
_jit = triton.jit(do_not_specialize=_VARYING)


# fmt: off
@_jit
def write_kv(
    keys, values, blocks, offsets, cache, layer, layers, key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, BLOCK_ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, GRAIN: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    # fmt: on
    """Write keys and values of AT_ONCE heads of one row into the cache; skip a row whose block is negative.

    Strides count in GRAIN elements.
    """
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + row).to(tl.int64)
    offset = tl.load(offsets + row).to(tl.int64)
    heads = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    columns = tl.arange(0, WIDTH_2)[None, :]
    inside = (heads < tl.where(block < 0, 0, HEADS)) & (columns < WIDTH)
    place = (((block * layers + layer) * 2 * HEADS + heads) * BLOCK_ROWS + offset) * WIDTH + columns
    key = tl.load(keys + (row * key_row + heads * key_head) * GRAIN + columns, mask=inside)
    value = tl.load(values + (row * value_row + heads * value_head) * GRAIN + columns, mask=inside)
    tl.store(cache + place, round_to_cache(key, cache), mask=inside)
    tl.store(cache + place + HEADS * BLOCK_ROWS * WIDTH, round_to_cache(value, cache), mask=inside)


@triton.jit
def round_to_cache(part, cache):
    """Round ``part`` as ``fp8.round_to`` does, to the type of ``cache``: too large is the largest, NaN stays NaN."""
    if cache.dtype.element_ty != tl.float8e4nv:
        return part
    else:  # Triton compiles one of two branches, but all that follows them
        wide = part.to(tl.float32)
        return tl.clamp(wide, -LARGEST_E4M3, LARGEST_E4M3, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)


# fmt: off
@_jit
def attend_tile(
    query, cache, tables, begins, lengths, tiles, groups, sinks, out, sums,
    layer, layers, table_width, tile_count, first_row, row_count, splits, query_row, query_head,
    scale, softcap, window, span,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr,
    GRAIN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, SPLIT: tl.constexpr, SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr, SPAN: tl.constexpr, SINKS: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Attend from a tile of rows of one sequence and KV head (``tiles`` [2, tile_count]: sequence, first row).

    With SPLIT ``combine_splits`` joins partial sums (``out``), largest scores and sums of weights (``sums``).
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first, begin, length, start = _load_tile(tiles, begins, lengths, tile, tile_count)
    packed, columns = tl.arange(0, M), tl.arange(0, WIDTH_2)
    row, own_head = first + packed // GROUP, head * GROUP + packed % GROUP
    real = (start + row < length) & (packed < M // GROUP * GROUP)
    inside = _mask_columns(real, columns, WIDTH, WIDTH_2)
    asked = ((begin + row) * query_row + own_head * query_head) * GRAIN
    q = tl.load(query + asked[:, None] + columns[None, :], mask=inside, other=0.0)
    own_group = _load_groups(groups, begin, row, real, GROUPS)
    last = length if GROUPS else tl.minimum(start + first + M // GROUP, length)
    low, end = _split_keys(start + first, last, window, span, split, splits, N, WINDOW, SPAN)
    most, found = tl.full([M], float("-inf"), tl.float32), tl.zeros([M, WIDTH_2], tl.float32)
    total, table = tl.zeros([M], tl.float32), tables + sequence * table_width
    keys, block_size = _locate_head(cache, layer, layers, head, HEADS, BLOCK_ROWS * WIDTH)
    block = _load_blocks(table, low + tl.arange(0, N), end, BLOCK_ROWS)
    for at in range(low, end, N):
        key = at + tl.arange(0, N)
        held = key < end
        place = keys + block.to(tl.int64) * block_size + key % BLOCK_ROWS * WIDTH
        block = _load_blocks(table, key + N, end, BLOCK_ROWS)  # a tile ahead: else no load is in flight meanwhile
        there = _mask_columns(held, columns, WIDTH, WIDTH_2)
        k = _load_held(place[:, None] + columns[None, :], there, q)
        v = _load_held(place[:, None] + (HEADS * BLOCK_ROWS * WIDTH + columns)[None, :], there, q)
        score = _cap(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
        key_group = _load_groups(groups, begin, key - start, held & (key >= start), GROUPS)
        seen = _build_mask(key, start + row, key_group, own_group, window, span, WINDOW, SPAN, GROUPS) & held[None, :]
        weight, shrink, most = _update_weights(tl.where(seen, score * LOG2_E, float("-inf")), most)
        total = total * shrink + tl.sum(weight, 1)
        found = found * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    spot = (begin + row) * (HEADS * GROUP) + own_head
    if SPLIT:
        spot += (split * row_count - first_row) * (HEADS * GROUP)
        tl.store(sums + spot, most, mask=real)
        tl.store(sums + splits * row_count * (HEADS * GROUP) + spot, total, mask=real)
    else:
        found = _normalize(found, total, most, sinks + own_head, real, SINKS)
    tl.store(out + spot[:, None] * WIDTH + columns[None, :], found.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_held(place, there, like):
    """Load what the cache holds, in the type of ``like``; by float32, since hardware has no way from FP8 to bf16."""
    part = tl.load(place, mask=there, other=0.0)
    return part if part.dtype == like.dtype else part.to(tl.float32).to(like.dtype)


@triton.jit
def _load_tile(tiles, begins, lengths, tile, tile_count):
    """Load a tile's sequence and first row, then the sequence's first row in the batch, length and first position."""
    sequence, first = tl.load(tiles + tile), tl.load(tiles + tile_count + tile).to(tl.int32)
    begin, length = tl.load(begins + sequence), tl.load(lengths + sequence).to(tl.int32)
    start = length - (tl.load(begins + sequence + 1) - begin).to(tl.int32)
    return sequence, first, begin, length, start


@triton.jit
def _locate_head(cache, layer, layers, head, HEADS: tl.constexpr, SIZE: tl.constexpr):
    """Return where a head's keys of a layer begin in block 0, and the size of a block; ``SIZE``: of a head's keys."""
    return cache + (layer.to(tl.int64) * 2 * HEADS + head) * SIZE, layers.to(tl.int64) * (2 * HEADS * SIZE)


@triton.jit
def _load_blocks(table, key, end, BLOCK_ROWS: tl.constexpr):
    """Load the blocks of keys below ``end``, as 32-bit numbers."""
    return tl.load(table + key // BLOCK_ROWS, mask=key < end, other=0).to(tl.int32)


@triton.jit
def _mask_columns(rows, columns, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr):
    """Return the mask [rows, WIDTH_2] of ``rows`` and of the columns that there are."""
    mask = rows[:, None]
    if WIDTH != WIDTH_2:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def _cap(score, softcap, SOFTCAP: tl.constexpr):
    if SOFTCAP:
        return (1.0 - 2.0 / (tl.exp(2.0 * score / softcap) + 1.0)) * softcap
    return score


@triton.jit
def _update_weights(score, most):
    """Return weights [rows, keys] against the new largest score, the factor of earlier weights, and that score."""
    now = tl.maximum(most, tl.max(score, 1))
    against = tl.where(now == float("-inf"), 0.0, now)
    return tl.exp2(score - against[:, None]), tl.exp2(most - against), now


@triton.jit
def _load_groups(groups, begin, row, real, GROUPS: tl.constexpr):
    """Load the groups of rows ``begin + row`` of the batch; -1: none."""
    if GROUPS:
        return tl.load(groups + begin + row, mask=real, other=-1).to(tl.int32)
    return row


@triton.jit
def _split_keys(
    position, end, window, span, split, splits, N: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr
):
    """Return the keys [low, end) of one split, from a multiple of N; none before those that ``position`` sees."""
    low = position * 0
    if WINDOW:
        low = tl.maximum(low, position - window + 1)
    if SPAN:
        low = tl.maximum(low, position // span * span)
    low = low // N * N
    each = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), N), splits) * N
    low += split * each
    return low, tl.minimum(end, low + each)


@triton.jit
def _build_mask(
    key, position, key_group, own_group, window, span, WINDOW: tl.constexpr, SPAN: tl.constexpr, GROUPS: tl.constexpr
):
    """Build ``interface.build_mask``'s mask [rows, keys]."""
    seen = key[None, :] <= position[:, None]
    if GROUPS:
        seen = seen | ((key_group[None, :] == own_group[:, None]) & (own_group >= 0)[:, None])
    if WINDOW:
        seen = seen & (key[None, :] > position[:, None] - window)
    if SPAN:
        seen = seen & (key[None, :] // span == position[:, None] // span)
    return seen


@triton.jit
def _normalize(found, total, most, sinks, real, SINKS: tl.constexpr):
    """Divide by the sum of weights; a row's sink takes a share of it and has no value."""
    if SINKS:
        sink = tl.load(sinks, mask=real, other=0.0).to(tl.float32) * LOG2_E
        now = tl.maximum(most, sink)
        found = found * tl.exp2(most - now)[:, None]
        total = total * tl.exp2(most - now) + tl.exp2(sink - now)
    return found / tl.where(total == 0.0, 1.0, total)[:, None]


# fmt: off
@_jit
def combine_splits(
    parts, sums, sinks, out, first_row, row_count, splits, QUERY_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr, MOST_SPLITS: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    """Join the results of ``attend_tile``'s splits, at most MOST_SPLITS, for one row and query head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH_2)
    split = tl.arange(0, MOST_SPLITS)
    spot = (split * row_count + row) * QUERY_HEADS + head
    most = tl.load(sums + spot, mask=split < splits, other=float("-inf"))
    total = tl.load(sums + splits * row_count * QUERY_HEADS + spot, mask=split < splits, other=0.0)
    real = (columns < WIDTH)[None, :] & (total > 0)[:, None]
    found = tl.load(parts + spot[:, None] * WIDTH + columns[None, :], mask=real, other=0.0)
    largest = tl.max(most, 0)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    largest = tl.where(largest == float("-inf"), 0.0, largest)
    share = tl.exp2(most - largest)
    whole = tl.sum(total * share, 0)
    if SINKS:
        whole += tl.exp2(sink - largest)
    joined = tl.sum(found * share[:, None], 0) / tl.where(whole == 0.0, 1.0, whole)
    into = ((first_row + row) * QUERY_HEADS + head) * WIDTH + columns
    tl.store(out + into, joined.to(out.dtype.element_ty), mask=columns < WIDTH)
