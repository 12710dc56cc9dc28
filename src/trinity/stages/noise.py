"""Noise of the sampler: a counter-based function of (seed, output index, token id), in wrapping 64-bit integers.

The same on every device, and independent of the batch, the placement and the repetition of a step.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from torch import Tensor

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # odd and close to 2**64 / golden ratio: successive counters spread evenly
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 1)
_SHIFTS = (30, 27, 31)
_UNIFORM_BITS = 52

_Words = TypeVar("_Words", int, np.ndarray)  # a number, or a uint64 array


def scramble(value: _Words) -> _Words:
    """Apply SplitMix64's finaliser (Steele, Lea, Flood 2014): every input bit flips half of the output bits."""
    value = value & _MASK
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        value = (value ^ (value >> shift)) * factor & _MASK
    return value


def hash_seed(seed: int) -> int:
    """Hash a seed, any whole number, to 64 bits; once for a request."""
    return scramble(seed & _MASK)


def make_keys(seeds: np.ndarray, indexes: np.ndarray) -> np.ndarray:
    """Hash hashed seeds (uint64 [n]) and the indexes of the rows' outputs (from 0) to uint64 [n]."""
    return scramble(seeds + (indexes + 1).astype(np.uint64) * np.uint64(_STRIDE))


def make_gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Make float64 Gumbel noise of each token under its key (int64, broadcast), by ``scramble`` in wrapping int64."""
    value = _scramble_there((tokens + 1).mul_(_signed(_STRIDE)) + keys)
    uniform = _logical_shift(value, 64 - _UNIFORM_BITS).double().add_(0.5).mul_(2.0**-_UNIFORM_BITS)
    return uniform.log_().neg_().log_().neg_()  # the interval is open: neither log meets 0


def make_keys_there(seeds: Tensor, indexes: Tensor) -> Tensor:
    """Make the keys of ``make_keys`` where the seeds and indexes are, int64 [n]."""
    return _scramble_there((indexes + 1).mul_(_signed(_STRIDE)) + seeds)


def _scramble_there(value: Tensor) -> Tensor:
    """Apply ``scramble`` in place, to int64."""
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=True):
        value = value.bitwise_xor_(_logical_shift(value, shift))
        value = value if factor == 1 else value.mul_(_signed(factor))
    return value


def _logical_shift(value: Tensor, shift: int) -> Tensor:
    return (value >> shift).bitwise_and_((1 << (64 - shift)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
