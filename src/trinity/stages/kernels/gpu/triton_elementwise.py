"""Triton kernels of what lies between the products of a decoder layer; ``device_elementwise.py`` launches them.

Each rounds where transformers' module rounds: a norm before its weight (Llama) or after it (OLMo 2), a rotary embedding
after each of its two products, a gated activation before the product with its other half. All sums are in float32. A
program has one row, or a piece of it, so the number of rows is part of no kernel: whatever a batch holds, nothing is
compiled again. With TRITON_INTERPRET=1 the same code runs on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trinity.stages.attention.gpu.triton_kernels import round_to_cache

SILU, GELU, GELU_TANH = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
MOST_EXPONENT = tl.constexpr(88.0)  # of e, in float32
ROOT_HALF = tl.constexpr(0.7071067811865476)
GELU_SLOPE, GELU_CUBIC = tl.constexpr(0.7978845608028654), tl.constexpr(0.044715)


# fmt: off
@triton.jit
def norm_row(
    rows, added, weight, sums, out, eps,
    WIDTH: tl.constexpr, WIDTH_2: tl.constexpr, ADDS: tl.constexpr, NORMS: tl.constexpr, ROUNDS_FIRST: tl.constexpr,
):
    # fmt: on
    """Write ``rows`` + ``added`` into ``sums`` (ADDS) and the RMS norm of what is then the row into ``out`` (NORMS)."""
    columns = tl.arange(0, WIDTH_2)
    inside = columns < WIDTH
    place = tl.program_id(0).to(tl.int64) * WIDTH + columns
    state = tl.load(rows + place, mask=inside, other=0.0)
    if ADDS:
        more = tl.load(added + place, mask=inside, other=0.0)
        state = (state.to(tl.float32) + more.to(tl.float32)).to(state.dtype)
        tl.store(sums + place, state, mask=inside)
    if NORMS:
        wide = state.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
        if ROUNDS_FIRST:
            normed = normed.to(state.dtype).to(tl.float32)
        factor = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + place, (normed * factor).to(state.dtype), mask=inside)


# fmt: off
@triton.jit(
    do_not_specialize=["layer", "layers", "block_rows"],
    do_not_specialize_on_alignment=["blocks", "offsets", "cosine", "sine"],  # rows of a step's one upload
)
def rotate_heads(
    states, cosine, sine, blocks, offsets, cache, layer, layers, block_rows,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, HALF_2: tl.constexpr, AT_ONCE: tl.constexpr,
    WRITES: tl.constexpr,
):
    # fmt: on
    """Apply the rotary embedding by halves to some heads of one row of ``states``: queries, keys, values side by side.

    Queries are written over. With WRITES, keys and values go into the cache instead, and those of a row whose block is
    negative nowhere; without, keys are written over and there are no values to touch.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)[:, None]
    column = tl.arange(0, HALF_2)[None, :]
    half: tl.constexpr = WIDTH // 2
    held: tl.constexpr = QUERIES + (2 * KEYS if WRITES else KEYS)
    stride: tl.constexpr = (QUERIES + 2 * KEYS) * WIDTH
    inside = (head < held) & (column < half)
    near = states + row * stride + head * WIDTH + column
    first, second = tl.load(near, mask=inside, other=0.0), tl.load(near + half, mask=inside, other=0.0)
    angle = row * WIDTH + column
    real = column < half
    low_cos = tl.load(cosine + angle, mask=real, other=0.0).to(tl.float32)
    high_cos = tl.load(cosine + angle + half, mask=real, other=0.0).to(tl.float32)
    low_sin = tl.load(sine + angle, mask=real, other=0.0).to(tl.float32)
    high_sin = tl.load(sine + angle + half, mask=real, other=0.0).to(tl.float32)
    turned = head < QUERIES + KEYS
    low = tl.where(turned, _add_rounded(first, low_cos, -second.to(tl.float32), low_sin), first)
    high = tl.where(turned, _add_rounded(second, high_cos, first.to(tl.float32), high_sin), second)
    stays = inside
    if WRITES:
        stays = inside & (head < QUERIES)
        block, offset = tl.load(blocks + row).to(tl.int64), tl.load(offsets + row).to(tl.int64)
        goes = (head >= QUERIES) & (head < tl.where(block < 0, 0, held)) & real
        pair = ((block * layers + layer) * 2) * KEYS + head - QUERIES  # values lie behind all keys
        into = cache + (pair * block_rows + offset) * WIDTH + column
        tl.store(into, round_to_cache(low, cache), mask=goes)
        tl.store(into + half, round_to_cache(high, cache), mask=goes)
    tl.store(near, low, mask=stays)
    tl.store(near + half, high, mask=stays)


@triton.jit
def _add_rounded(one, cosine, other, sine):
    """Return ``one`` * ``cosine`` + ``other`` * ``sine``, each of the three rounded to the type of ``one``."""
    left = (one.to(tl.float32) * cosine).to(one.dtype)
    right = (other * sine).to(one.dtype)
    return (left.to(tl.float32) + right.to(tl.float32)).to(one.dtype)


@triton.jit
def gate_row(both, out, WIDTH: tl.constexpr, AT_ONCE: tl.constexpr, ACTIVATION: tl.constexpr):
    """Write activation(gate) * up of a piece of one row into ``out``; ``both`` holds gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    inside = columns < WIDTH
    near = both + row * (2 * WIDTH) + columns
    given = tl.load(near, mask=inside, other=0.0)
    up = tl.load(near + WIDTH, mask=inside, other=0.0).to(tl.float32)
    active = _activate(given.to(tl.float32), ACTIVATION).to(given.dtype)
    tl.store(out + row * WIDTH + columns, (active.to(tl.float32) * up).to(given.dtype), mask=inside)


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    if ACTIVATION == SILU:
        return gate / (1.0 + tl.exp(tl.minimum(-gate, MOST_EXPONENT)))
    if ACTIVATION == GELU:
        return gate * 0.5 * (1.0 + tl.erf(gate * ROOT_HALF))
    inner = GELU_SLOPE * (gate + GELU_CUBIC * gate * gate * gate)
    return gate * (1.0 - 1.0 / (tl.exp(tl.minimum(2.0 * inner, MOST_EXPONENT)) + 1.0))
