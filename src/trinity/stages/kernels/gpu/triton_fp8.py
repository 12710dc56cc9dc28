"""Triton kernels of linear layers with FP8 weights in blocks; ``fp8_linear.py`` launches them.

The arithmetic is that of DeepSeek-V3 (2412.19437, section 3.3) as transformers has it: the inputs of a row are rounded
to E4M3 in groups as wide as a block, each by its own scale, the largest divided by 448; products of FP8 are summed over
a group by the matrix units, and the sums of groups, each times both scales, in float32. With TRITON_INTERPRET=1 the
same code runs on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_INPUT = tl.constexpr(448.0)
LEAST_SCALE = tl.constexpr(1e-12)  # a group of zeros is divided by it
_VARYING = ("count", "groups", "grains")
_PARTS = ("weight_scales", "bias")  # of a merged product they begin anywhere


@triton.jit(do_not_specialize=["groups"])
def quantize_groups(rows, rounded, scales, groups, GROUP: tl.constexpr, AT_ONCE: tl.constexpr):
    """Round AT_ONCE groups of GROUP inputs of one row to E4M3, and write their scales [rows, groups]."""
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * AT_ONCE + tl.arange(0, AT_ONCE)
    place = (row * groups + group)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    inside = group < groups
    part = tl.load(rows + place, mask=inside[:, None], other=0.0).to(tl.float32)
    scale = tl.max(tl.abs(part), 1) / LARGEST_INPUT
    small = part / tl.maximum(scale, LEAST_SCALE)[:, None]
    tl.store(rounded + place, small.to(tl.float8e4nv), mask=inside[:, None])
    tl.store(scales + row * groups + group, scale, mask=inside)


# fmt: off
@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_PARTS)
def multiply_groups(
    rounded, scales, weight, weight_scales, bias, out, count, groups, grains,
    GROUP: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr, GRAIN: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr,
):
    # fmt: on
    """Write a tile [M, N] of rows and outputs: ``weight`` is [outputs, groups * GROUP], ``out`` [count, outputs].

    ``weight_scales`` are [outputs / BLOCK_OUTPUTS, groups]; outputs count in grains of GRAIN.
    """
    outputs, inputs = grains.to(tl.int64) * GRAIN, groups.to(tl.int64) * GROUP
    output = tl.program_id(0) * N + tl.arange(0, N)
    row = tl.program_id(1) * M + tl.arange(0, M)
    real, there = row < count, output < outputs
    column = tl.arange(0, GROUP)
    left = rounded + row.to(tl.int64)[:, None] * inputs + column[None, :]
    right = weight + output.to(tl.int64)[:, None] * inputs + column[None, :]
    own, theirs = scales + row * groups, weight_scales + output // BLOCK_OUTPUTS * groups
    total = tl.zeros([M, N], tl.float32)
    for group in range(0, groups):
        a = tl.load(left + group * GROUP, mask=real[:, None], other=0.0)
        b = tl.load(right + group * GROUP, mask=there[:, None], other=0.0)
        scale = tl.load(own + group, mask=real, other=0.0)
        factor = tl.load(theirs + group, mask=there, other=0.0)
        total += tl.dot(a, tl.trans(b)) * scale[:, None] * factor[None, :]
    found = total.to(out.dtype.element_ty)
    inside = real[:, None] & there[None, :]
    if BIAS:
        found = (found.to(tl.float32) + tl.load(bias + output, mask=there, other=0.0).to(tl.float32)[None, :]).to(
            out.dtype.element_ty
        )
    tl.store(out + row.to(tl.int64)[:, None] * outputs + output[None, :], found, mask=inside)
