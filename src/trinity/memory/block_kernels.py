"""Triton kernels over blocks of bytes; ``triton_blocks.py`` launches them.

Addresses, strides and lengths count in grains of GRAIN words of WORD bytes, 16 bytes together wherever the pools allow
it: constants that Triton needs to load and store 16 bytes at a time. All else may differ from call to call without
another compilation. With TRITON_INTERPRET=1 the same code runs on a CPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from trinity.memory.digest_function import DIGEST_MIX, DIGEST_STEP

STEP, MIX = tl.constexpr(DIGEST_STEP), tl.constexpr(DIGEST_MIX)
_jit = triton.jit(do_not_specialize=("target", "source", "units", "count", "unit", "length", "slices", "sums"))


# fmt: off
@_jit
def copy_pieces_kernel(
    target: tl.int64, source: tl.int64, units, count: tl.int64, unit: tl.int64, length: tl.int64, slices: tl.int64,
    WORD: tl.constexpr, GRAIN: tl.constexpr, AT_ONCE: tl.constexpr,
):
    # fmt: on
    """Copy one slice, AT_ONCE words, of a piece of ``length``.

    ``target``, ``source``: addresses of the pieces of the pools' first units. ``units`` (int64 [2, count]): numbers of
    target and source units. ``unit``: size of a unit. ``slices``: of one piece.
    """
    program = tl.program_id(0).to(tl.int64)
    piece, at = program // slices, program % slices * AT_ONCE + tl.arange(0, AT_ONCE)
    into = _as_pointer(target + tl.load(units + piece) * unit, WORD, GRAIN)
    out = _as_pointer(source + tl.load(units + count + piece) * unit, WORD, GRAIN)
    held = at < length * GRAIN
    tl.store(into + at, tl.load(out + at, mask=held), mask=held)


# fmt: off
@_jit
def digest_pieces_kernel(
    source: tl.int64, units, sums, unit: tl.int64, length: tl.int64, slices: tl.int64,
    WORD: tl.constexpr, GRAIN: tl.constexpr, AT_ONCE: tl.constexpr, PASSES: tl.constexpr,
):
    # fmt: on
    """Sum the mixed 64-bit words of one slice, AT_ONCE in each of PASSES, of a piece (csrc/blocks/digest.cpp).

    ``source``, ``unit``, ``length``, ``slices``: as in ``copy_pieces_kernel``. ``units``: int64 [count]. ``sums``
    (int64 [count, slices]) takes the result.
    """
    program = tl.program_id(0).to(tl.int64)
    piece, first = program // slices, program % slices * (AT_ONCE * PASSES)
    words = length * GRAIN if WORD == 8 else tl.cdiv(length, 8)
    out = _as_pointer(source + tl.load(units + piece) * unit, WORD, GRAIN)
    total = tl.zeros([AT_ONCE], tl.uint64)
    for start in range(first, tl.minimum(first + AT_ONCE * PASSES, words), AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        x = _mix(_load_words(out, at, words, length, WORD) + (at + 1).to(tl.uint64) * STEP)
        total += tl.where(at < words, x, 0)
    tl.store(sums + program, tl.sum(total, 0).to(tl.int64))


@triton.jit
def _as_pointer(grains, WORD: tl.constexpr, GRAIN: tl.constexpr):
    """Return the address, which counts in grains, as a pointer to words."""
    pointer = (grains * (WORD * GRAIN)).to(tl.pointer_type(tl.int64 if WORD == 8 else tl.uint8))
    return tl.multiple_of(pointer, WORD * GRAIN)  # the compiler forgets it at the conversion


@triton.jit
def _load_words(out, at, words, length, WORD: tl.constexpr):
    """Load the 64-bit words ``at`` of ``words``; what lies beyond a piece of ``length`` is zeros."""
    word = tl.zeros_like(at).to(tl.uint64)
    if WORD == 8:
        word = tl.load(out + at, mask=at < words, other=0).to(tl.uint64)
    else:
        for byte in tl.static_range(8):
            spot = at * 8 + byte
            word |= tl.load(out + spot, mask=spot < length, other=0).to(tl.uint64) << (8 * byte)
    return word


@triton.jit
def _mix(x):
    x ^= x >> 32
    x *= MIX
    return x ^ (x >> 32)
