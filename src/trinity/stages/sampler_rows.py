"""Sampler rows: what the requests of a batch ask of the sampler, as one array that goes to a device in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import ResolvedSampling
from trinity.stages.block_tables import upload
from trinity.stages.token_bans import TextSource, TokenBans

DRAWS, WARMS, TOP_K, TOP_P, MIN_P, LOOKS_BACK, BANS, LOGPROBS, HOST = (1 << bit for bit in range(9))
TRUNCATES = TOP_K | TOP_P | MIN_P
_COLDEST = 1e-6  # below it float32 scores overflow; well above it the draw already is the largest logit
_NO_ROWS = np.empty(0, dtype=np.int64)
_WHOLE = ("needs", "top_k", "logprobs", "slot", "length", "outputs", "key")
_REAL = ("divisor", "penalty", "presence", "frequency", "tail", "min_p")
SAMPLER = np.dtype([(name, "<i8") for name in _WHOLE[:-1]] + [("key", "<u8")] + [(name, "<f8") for name in _REAL])
"""One row, 64-bit numbers alone.

- ``needs``: what is to be done for it, bits of ``DRAWS`` to ``HOST``; 0 for a greedy row of its logits alone.
- ``top_k``, ``logprobs``, ``min_p``: as in ``ResolvedSampling``; ``tail``: 1 - top_p.
- ``slot``: in a ``RequestTable``. ``length``, ``outputs``: the tokens of its text, and those of its output alone.
- ``key``: hash of its seed, and in a batch of its seed and the index of its output.
- ``divisor``, ``penalty``, ``presence``, ``frequency``: of its logits.
"""


@dataclass(frozen=True, slots=True)
class SamplerKind:
    """Needs of the rows of a batch together: all that the host must know to launch their sampling.

    - ``some``, ``every``: what any row needs, and what all do.
    - ``top_k``, ``logprobs``: the largest that a row has.
    """

    some: int
    every: int
    top_k: int
    logprobs: int

    @classmethod
    def of(cls, given: np.ndarray) -> SamplerKind:
        """Return the kind of a batch of these ``SAMPLER`` rows."""
        if not len(given):
            return cls(0, 0, 0, 0)
        needs = given["needs"]
        some, every = int(np.bitwise_or.reduce(needs)), int(np.bitwise_and.reduce(needs))
        top_k = int(given["top_k"].max()) if some & TOP_K else 0
        return cls(some, every, top_k, int(given["logprobs"].max()) if some & LOGPROBS else 0)

    def rounded(self) -> SamplerKind:
        """Return a kind whose sampling gives these rows, and padding, the same tokens: few kinds cover all batches."""
        top_k, logprobs = (1 << (number - 1).bit_length() if number else 0 for number in (self.top_k, self.logprobs))
        return SamplerKind(self.some | WARMS, self.every & TOP_K if self.some & TOP_P else 0, top_k, logprobs)


@dataclass(frozen=True, slots=True)
class SamplerBatch:
    """Settings of the n rows of a batch.

    - ``given`` (``SAMPLER`` [n]), ``columns`` (int64 [n, 13], on the device): the same numbers.
    - ``bans``: the number of each row that has bans, these, and the index of its output.
    - ``texts``: of the rows that look back, in their order; None if none does.
    - ``kind``: what they ask for together. Where the host looks at no values it launches by this alone.
    """

    given: np.ndarray
    columns: Tensor
    bans: Sequence[tuple[int, TokenBans, int]] = ()
    texts: TextSource | None = None
    kind: SamplerKind = SamplerKind(0, 0, 0, 0)

    @property
    def some(self) -> int:
        return self.kind.some

    @property
    def every(self) -> int:
        return self.kind.every

    def find(self, need: int) -> np.ndarray:
        """Return the numbers of the rows that need any of these."""
        if not self.some & need:
            return _NO_ROWS
        return np.arange(len(self.given)) if self.every & need else np.flatnonzero(self.given["needs"] & need)

    def column(self, name: str) -> Tensor:
        """Return a field of all rows on the device, [n, 1]."""
        at = (*_WHOLE, *_REAL).index(name)
        found = self.columns.narrow(1, at, 1)
        return found if at < len(_WHOLE) else found.view(torch.float64)

    def asks(self, need: int) -> Tensor:
        """Return on the device, bool [n, 1], which rows need any of these."""
        return self.column("needs").bitwise_and(need) != 0

    def select(self, rows: np.ndarray, at: Tensor) -> SamplerBatch:
        """Select rows, whose bans and texts have been looked at; ``at`` is ``rows`` on the device."""
        given = self.given[rows]
        return SamplerBatch(given, self.columns.index_select(0, at), kind=SamplerKind.of(given))

    def part(self, start: int, end: int, looks: bool) -> SamplerBatch:
        """Return rows [start, end); of the whole batch's kind, unless the host ``looks`` at their numbers."""
        if start == 0 and end >= len(self.given):
            return self
        back, texts = np.flatnonzero(self.given["needs"][:end] & LOOKS_BACK), None
        if self.texts is not None and len(back) and back[-1] >= start:
            texts = self.texts.part(int(np.searchsorted(back, start)), len(back))
        bans = [(row - start, bans, index) for row, bans, index in self.bans if start <= row < end]
        given = self.given[start:end]
        return SamplerBatch(given, self.columns[start:end], bans, texts, SamplerKind.of(given) if looks else self.kind)


def describe_sampler(sampling: ResolvedSampling, bans: TokenBans | None = None) -> np.ndarray:
    """Describe a request's sampling as a ``SAMPLER`` [], its slot, length and output index left out.

    Raises ``ValueError`` if it draws and has no seed.
    """
    if not sampling.is_greedy and sampling.seed is None:
        raise ValueError("a row that samples needs a seed: set sampling.seed when the request is submitted")
    made = np.zeros((), dtype=SAMPLER)
    made["needs"], made["key"] = _list_needs(sampling, bans), hash_seed(sampling.seed or 0)
    made["top_k"], made["logprobs"] = min(sampling.top_k, 1 << 62), sampling.logprobs or 0
    made["divisor"] = 1.0 if sampling.is_greedy else max(sampling.temperature, _COLDEST)
    made["penalty"], made["tail"], made["min_p"] = sampling.repetition_penalty, 1.0 - sampling.top_p, sampling.min_p
    made["presence"], made["frequency"] = sampling.presence_penalty, sampling.frequency_penalty
    return made


def _list_needs(sampling: ResolvedSampling, bans: TokenBans | None) -> int:
    draws = not sampling.is_greedy
    needs = {
        DRAWS: draws,
        WARMS: sampling.temperature not in (0.0, 1.0),
        TOP_K: draws and sampling.top_k > 0,
        TOP_P: draws and sampling.top_p != 1.0,
        MIN_P: draws and sampling.min_p != 0.0,
        LOOKS_BACK: sampling.repetition_penalty != 1.0 or sampling.discounts or (bans is not None and bans.looks_back),
        BANS: bans is not None,
        LOGPROBS: sampling.logprobs is not None,
        HOST: sampling.needs_host,
    }
    return sum(bit for bit, needed in needs.items() if needed)


def list_asked(given: np.ndarray) -> list[tuple[int, int]]:
    """List the number of each ``SAMPLER`` row that asks for log-probabilities, and how many."""
    asking = np.flatnonzero(given["needs"] & LOGPROBS)
    return list(zip(asking.tolist(), given["logprobs"][asking].tolist(), strict=True))


def as_columns(given: np.ndarray) -> np.ndarray:
    """Return ``SAMPLER`` rows as int64 [n, 13], without a copy."""
    found: np.ndarray = given.view(np.int64).reshape(len(given), len(_WHOLE) + len(_REAL))
    return found


def make_batch(
    given: np.ndarray,
    indexes: np.ndarray,
    bans: Sequence[tuple[int, TokenBans, int]],
    device: torch.device,
    texts: TextSource | None = None,
) -> SamplerBatch:
    """Make the batch of the rows ``given``, whose keys become those of the outputs of these indexes (int64 [n])."""
    given["key"], given["outputs"] = make_keys(given["key"], indexes), indexes
    columns = upload(as_columns(given), device)
    return SamplerBatch(given, columns, bans, texts, SamplerKind.of(given))


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
