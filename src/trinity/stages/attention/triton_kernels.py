"""Triton kernels of paged attention over the block-major cache; ``attention/triton.py`` launches them.

The cache is contiguous [blocks, layers, 2, kv_heads, block_rows, head_dim]. A program of ``attend_tile`` has a tile of
query rows of one sequence, with the query heads of one KV head packed beside each other, so that keys and values are
read once for all of them. It passes over the keys with a running softmax (Milakov and Gimelshein 2018; Dao et al.
2022). Long texts of few rows are split among programs, and ``combine_splits`` joins their results (split-K, as in
flash decoding). Scores are in units of log2, because the hardware has exp2. With TRITON_INTERPRET=1 the same code runs
on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


# fmt: off
@triton.jit
def write_kv(
    keys, values, blocks, offsets, cache, layer, layers, block_rows, key_row, key_head, value_row, value_head,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, WIDTH_2: tl.constexpr,
):
    # fmt: on
    """Write keys and values of AT_ONCE heads of one row into the cache; skip a row whose block is negative."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.load(blocks + row).to(tl.int64)
    offset = tl.load(offsets + row).to(tl.int64)
    heads = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    columns = tl.arange(0, WIDTH_2)[None, :]
    inside = (heads < tl.where(block < 0, 0, HEADS)) & (columns < WIDTH)
    place = ((((block * layers + layer) * 2) * HEADS + heads) * block_rows + offset) * WIDTH + columns
    key = tl.load(keys + row * key_row + heads * key_head + columns, mask=inside)
    value = tl.load(values + row * value_row + heads * value_head + columns, mask=inside)
    tl.store(cache + place, key, mask=inside)
    tl.store(cache + place + HEADS * block_rows * WIDTH, value, mask=inside)


# fmt: off
@triton.jit
def attend_tile(
    query, cache, tables, begins, lengths, tiles, groups, sinks, out, sums,
    layer, layers, block_rows, table_width, tile_count, first_row, row_count, query_row, query_head,
    scale, softcap, window, span,
    HEADS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr,
    SINKS: tl.constexpr, GROUPS: tl.constexpr, PRECISION: tl.constexpr,
):
    # fmt: on
    """Attend from a tile of rows of one sequence and KV head (``tiles`` [2, tile_count]: sequence, first row).

    With SPLITS > 1 ``combine_splits`` joins partial sums (``out``), largest scores and sums of weights (``sums``).
    """
    tile, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first = tl.load(tiles + tile), tl.load(tiles + tile_count + tile)
    begin, length = tl.load(begins + sequence), tl.load(lengths + sequence)
    start = length + begin - tl.load(begins + sequence + 1)
    packed, columns = tl.arange(0, M), tl.arange(0, WIDTH_2)
    row, own_head = first + packed // GROUP, head * GROUP + packed % GROUP
    real = (start + row < length) & (packed < M // GROUP * GROUP)
    inside = real[:, None] & (columns < WIDTH)[None, :]
    asked = (begin + row) * query_row + own_head * query_head
    q = tl.load(query + asked[:, None] + columns[None, :], mask=inside, other=0.0)
    own_group = _load_groups(groups, begin + row, real, GROUPS)
    last = length if GROUPS else tl.minimum(start + first + M // GROUP, length)
    low, end = _split_keys(start + first, last, window, span, split, N, SPLITS, WINDOW, SPAN)
    most, found = tl.full([M], float("-inf"), tl.float32), tl.zeros([M, WIDTH_2], tl.float32)
    total = tl.zeros([M], tl.float32)
    for at in range(low, end, N):
        key = at + tl.arange(0, N)
        held = key < end
        block = tl.load(tables + sequence * table_width + key // block_rows, mask=held, other=0)
        place = (((block * layers + layer) * 2 * HEADS + head) * block_rows + key % block_rows) * WIDTH
        there = held[:, None] & (columns < WIDTH)[None, :]
        k = tl.load(cache + place[:, None] + columns[None, :], mask=there, other=0.0)
        v = tl.load(cache + (place + HEADS * block_rows * WIDTH)[:, None] + columns[None, :], mask=there, other=0.0)
        score = _cap(tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
        key_group = _load_groups(groups, begin + key - start, held & (key >= start), GROUPS)
        seen = _build_mask(key, start + row, key_group, own_group, window, span, WINDOW, SPAN, GROUPS) & held[None, :]
        weight, shrink, most = _update_weights(tl.where(seen, score * LOG2_E, float("-inf")), most)
        total = total * shrink + tl.sum(weight, 1)
        found = found * shrink[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
    if SPLITS == 1:
        found = _normalize(found, total, most, sinks + own_head, real, SINKS)
        spot = (begin + row) * (HEADS * GROUP) + own_head
    else:
        spot = (split * row_count + begin + row - first_row) * (HEADS * GROUP) + own_head
        tl.store(sums + spot, most, mask=real)
        tl.store(sums + SPLITS * row_count * (HEADS * GROUP) + spot, total, mask=real)
    tl.store(out + spot[:, None] * WIDTH + columns[None, :], found.to(out.dtype.element_ty), mask=inside)


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
def _load_groups(groups, row, real, GROUPS: tl.constexpr):
    """Load the groups of rows of the batch; -1: none."""
    if GROUPS:
        return tl.load(groups + row, mask=real, other=-1)
    return row


@triton.jit
def _split_keys(
    position, end, window, span, split, N: tl.constexpr, SPLITS: tl.constexpr, WINDOW: tl.constexpr, SPAN: tl.constexpr
):
    """Return the keys [low, end) of one split, from a multiple of N; none before those that ``position`` sees."""
    low = position * 0
    if WINDOW:
        low = tl.maximum(low, position - window + 1)
    if SPAN:
        low = tl.maximum(low, position // span * span)
    low = low // N * N
    each = tl.cdiv(tl.cdiv(tl.maximum(end - low, 0), N), SPLITS) * N
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
@triton.jit
def combine_splits(
    parts, sums, sinks, out, first_row, row_count, QUERY_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    WIDTH_2: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
):
    # fmt: on
    """Join the results of ``attend_tile``'s splits for one row and query head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    columns = tl.arange(0, WIDTH_2)
    spot = (tl.arange(0, SPLITS) * row_count + row) * QUERY_HEADS + head
    most = tl.load(sums + spot)
    total = tl.load(sums + SPLITS * row_count * QUERY_HEADS + spot)
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
