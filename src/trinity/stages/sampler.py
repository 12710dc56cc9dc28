"""Sampler: draws the next token of each row of logits, independent of the rest of the batch.

Noise is a counter-based function of (seed, output index, token id), so a row's token depends on its own logits and
nothing else: not on the batch, the placement, or the repetition of a step. Every decision is made with elementwise
operations, integer sums and order-free comparisons, because a float sum over a row may be grouped differently on a GPU
when the number or the alignment of the rows changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec
import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import ResolvedSampling, Sampled
from trinity.errors import StageError
from trinity.stages.token_bans import TokenBans, find_banned

_MASK = (1 << 64) - 1
_STRIDE = 0x9E3779B97F4A7C15  # odd and close to 2**64 / golden ratio: successive counters spread evenly
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_WEIGHT_ONE = 1 << 40  # fixed point of exp(0) in top-p sums: 2**22 such weights stay far below 2**63
_COLDEST = 1e-6  # below it float32 scores overflow; well above it the draw already is the largest logit
_ELEMENTS = {"cpu": 1 << 18}  # logits per pass, so that they stay in a CPU's cache
_MOST_ELEMENTS = 1 << 22  # logits per pass on other devices; bounds the float64 and int64 temporaries to about 200 MB


class SamplerRow(msgspec.Struct, frozen=True, gc=False):
    """Sampling of one row, the index of its output token (from 0), its ids so far (int64), and its bans."""

    sampling: ResolvedSampling
    index: int
    ids: np.ndarray
    bans: TokenBans | None = None


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    """Draw the next token of each row; ``logits`` is [n, vocab] of any float type, on any device.

    Rows that are not greedy need ``sampling.seed``. Raises ``StageError`` if a row of logits has no largest value (it
    holds NaN, or nothing but -inf).
    """
    if len(rows) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} requests")
    slow = [i for i, row in enumerate(rows) if _needs_scores(row.sampling)]
    if len(slow) == len(rows):
        return _sample_parts(logits, rows)
    chosen = sample_greedy(logits)
    if slow:
        picked = logits[torch.tensor(slow, device=logits.device)]
        for i, sampled in zip(slow, _sample_parts(picked, [rows[i] for i in slow]), strict=True):
            chosen[i] = sampled
    return chosen


def sample_greedy(logits: Tensor) -> list[Sampled]:
    """Take the largest logit of each row, as ``sample`` does for greedy rows without penalty or logprobs."""
    return [Sampled(token) for token in _argmax(logits)]


def sample_on_device(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Draw as ``sample`` does, but leave the tokens [n] on the logits' device; -1 if a row has no largest value.

    Each row must pass ``can_sample_on_device``.
    """
    if all(row.sampling.is_greedy for row in rows):
        return _argmax_on_device(logits)
    size = max(1, _MOST_ELEMENTS // logits.shape[1])
    return torch.cat(
        [_sample_part_on_device(logits[i : i + size], rows[i : i + size]) for i in range(0, len(rows), size)]
    )


def can_sample_on_device(sampling: ResolvedSampling) -> bool:
    """Tell if drawing needs nothing from the host: no earlier tokens and no logprobs."""
    return not sampling.needs_history and sampling.logprobs is None


def _sample_part_on_device(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    scores = warp(logits, rows)
    best = _argmax_on_device(scores)
    drawn = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if not drawn:
        return best
    at, some = _upload(np.array(drawn), scores), [rows[i] for i in drawn]
    found = _argmax_on_device(_perturb(truncate(scores[at], some), some))
    return best.index_copy(0, at, torch.where(best[at] < 0, best[at], found))


def _argmax_on_device(scores: Tensor) -> Tensor:
    tokens = scores.argmax(dim=-1, keepdim=True)
    return torch.where(scores.gather(1, tokens) > -torch.inf, tokens, -1).flatten()


def _needs_scores(sampling: ResolvedSampling) -> bool:
    return not sampling.is_greedy or sampling.needs_history or sampling.logprobs is not None


def _argmax(scores: Tensor) -> list[int]:
    """Return the token with the largest score of each row, the first of ties; one copy from the device."""
    found = _argmax_cpu(scores) if scores.device.type == "cpu" else _argmax_on_device(scores).tolist()
    if -1 in found:
        raise StageError(
            f"row {found.index(-1)} of the logits holds NaN or no finite value; check the model's weights, and that "
            "not every token is suppressed"
        )
    return found


def _argmax_cpu(scores: Tensor) -> list[int]:
    """Take the argmax with numpy, in a tenth of torch's time: with a large vocabulary that saves milliseconds."""
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    values = wide.detach().numpy()
    tokens = values.argmax(axis=1)
    largest = values[np.arange(len(tokens)), tokens]
    found: list[int] = np.where(largest > -np.inf, tokens, -1).tolist()
    return found


def _sample_parts(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    size = max(1, _ELEMENTS.get(logits.device.type, _MOST_ELEMENTS) // logits.shape[1])
    starts = range(0, len(rows), size)
    return [sampled for i in starts for sampled in _sample(logits[i : i + size], rows[i : i + size])]


def _sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[Sampled]:
    scores = warp(logits, rows)
    best = _argmax(scores)  # also refuses NaN before noise could hide it
    drawn = [i for i, row in enumerate(rows) if not row.sampling.is_greedy]
    if drawn:
        some = [rows[i] for i in drawn]
        kept = truncate(scores[torch.tensor(drawn, device=scores.device)], some)
        for i, token in zip(drawn, _argmax(_perturb(kept, some)), strict=True):
            best[i] = token
    return _with_logprobs(scores, rows, best)


def warp(logits: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Apply repetition penalty, bans, then temperature, as transformers' processors do; float32 [n, vocab]."""
    scores = logits.float()
    penalised = [i for i, row in enumerate(rows) if row.sampling.repetition_penalty != 1.0]
    banned = [i for i, row in enumerate(rows) if row.bans is not None]
    if penalised or banned:
        scores = scores.clone()
    if penalised:
        scores = _penalise(scores, rows, penalised)
    if banned:
        scores = _ban(scores, rows, banned)
    if any(row.sampling.temperature not in (0.0, 1.0) for row in rows):
        scores = scores / _column(rows, _divisor, scores)
    return scores


def _divisor(sampling: ResolvedSampling) -> float:
    return 1.0 if sampling.is_greedy else max(sampling.temperature, _COLDEST)


def _penalise(scores: Tensor, rows: Sequence[SamplerRow], penalised: Sequence[int]) -> Tensor:
    """Make each token that the row holds less likely, once however often it occurs; ignore ids beyond the logits."""
    held = [ids[(ids >= 0) & (ids < scores.shape[1])] for ids in (rows[i].ids for i in penalised)]
    lengths = [len(ids) for ids in held]
    penalties = np.asarray([rows[i].sampling.repetition_penalty for i in penalised], dtype=np.float32)
    at = (_upload(np.repeat(penalised, lengths), scores), _upload(np.concatenate(held), scores))
    penalty = _upload(np.repeat(penalties, lengths), scores)
    score = scores[at]
    scores[at] = torch.where(score < 0, score * penalty, score / penalty)
    return scores


def _ban(scores: Tensor, rows: Sequence[SamplerRow], banned: Sequence[int]) -> Tensor:
    """Make -inf of the tokens that these rows may not take; of a forced row's allowed tokens 0, of all others -inf."""
    found = [find_banned(rows[i].bans, rows[i].ids, rows[i].index, scores.shape[1]) for i in banned]
    for i, each in zip(banned, found, strict=True):
        if each.forced is not None:
            scores[i] = -torch.inf
            scores[i, _upload(each.forced, scores)] = 0.0
    at = np.repeat(banned, [len(each.banned) for each in found])
    scores[_upload(at, scores), _upload(np.concatenate([each.banned for each in found]), scores)] = -torch.inf
    return scores


def truncate(scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Apply top-k, then top-p, then min-p to ``scores`` [n, vocab]; dropped tokens become -inf.

    Order and meaning are those of transformers' logits processors, except that top-p never splits tokens that tie.
    """
    for name, off, cut in (("top_k", 0, _top_k), ("top_p", 1.0, _top_p), ("min_p", 0.0, _min_p)):
        chosen = [i for i, row in enumerate(rows) if getattr(row.sampling, name) != off]
        if len(chosen) == len(rows):
            scores = cut(scores, rows)
        elif chosen:
            at = torch.tensor(chosen, device=scores.device)
            scores = scores.index_copy(0, at, cut(scores[at], [rows[i] for i in chosen]))
    return scores


def _top_k(scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    counts = [min(row.sampling.top_k, scores.shape[1]) for row in rows]
    best = scores.topk(max(counts), dim=-1).values
    least = best.gather(1, torch.tensor(counts, device=scores.device)[:, None] - 1)
    return scores.masked_fill(scores < least, -torch.inf)


def _top_p(scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Apply top-p. Tokens that tie with the last one kept stay, so that the result does not depend on sort order."""
    total = _weights(scores).sum(dim=-1, keepdim=True)
    limit = total * _column(rows, lambda sampling: 1.0 - sampling.top_p, total.double())
    for size in _candidate_counts(scores.shape[1]):
        best = scores.topk(size, dim=-1).values
        weights = _weights(best)
        left = total - (weights.cumsum(dim=-1) - weights)  # weight of this token and of all below it
        kept = (left > limit).sum(dim=-1, keepdim=True).clamp_(min=1)
        if size == scores.shape[1] or bool((kept < size).all()):
            break
    return scores.masked_fill(scores < best.gather(1, kept - 1), -torch.inf)


def _weights(scores: Tensor) -> Tensor:
    """Compute exp(score − largest score) in fixed point, int64, so that sums are exact in any order."""
    exponent = (scores - scores.amax(dim=-1, keepdim=True)).double()
    return exponent.exp_().mul_(_WEIGHT_ONE).round_().long()


def _candidate_counts(vocab: int) -> Iterator[int]:
    """Yield growing numbers of largest scores to sort: few usually hold most of the weight, and a full sort is slow."""
    size = 256
    while size < vocab:
        yield size
        size *= 16
    yield vocab


def _min_p(scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    floor = _column(rows, lambda sampling: sampling.min_p, scores).log()
    return scores.masked_fill(scores - scores.amax(dim=-1, keepdim=True) < floor, -torch.inf)


def _perturb(scores: Tensor, rows: Sequence[SamplerRow]) -> Tensor:
    """Add Gumbel noise, float64: the argmax of the result is a draw from softmax(scores)."""
    keys = torch.tensor([_hash_key(row) for row in rows], device=scores.device)
    if not any(_truncates(row.sampling) for row in rows):
        return _gumbel_noise(keys[:, None], torch.arange(scores.shape[1], device=scores.device)).add_(scores)
    at, tokens = torch.nonzero(scores > -torch.inf, as_tuple=True)  # only the few tokens left need noise
    noisy = torch.full(scores.shape, -torch.inf, dtype=torch.float64, device=scores.device)
    noisy[at, tokens] = scores[at, tokens].double() + _gumbel_noise(keys[at], tokens)
    return noisy


def _truncates(sampling: ResolvedSampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def _hash_key(row: SamplerRow) -> int:
    """Hash (seed, index) to 64 bits, as a signed number."""
    if row.sampling.seed is None:
        raise ValueError("a row that samples needs a seed: set sampling.seed when the request is submitted")
    key = _scramble(_scramble(row.sampling.seed & _MASK) + (row.index + 1) * _STRIDE)
    return _signed(key)


def _scramble(value: int) -> int:
    """Apply SplitMix64's finaliser (Steele, Lea, Flood 2014): every input bit flips half of the output bits."""
    value &= _MASK
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        value = (value ^ (value >> shift)) * factor & _MASK
    return value


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _gumbel_noise(keys: Tensor, tokens: Tensor) -> Tensor:
    """Make float64 Gumbel noise of each token under its key (broadcast), by ``_scramble`` in wrapping int64."""
    value = keys + (tokens + 1) * _signed(_STRIDE)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        value = (value ^ _logical_shift(value, shift)) * _signed(factor)
    uniform = (_logical_shift(value, 12).double() + 0.5) * 2.0**-52  # open interval: neither log meets 0
    return uniform.log_().neg_().log_().neg_()


def _logical_shift(value: Tensor, shift: int) -> Tensor:
    return (value >> shift) & ((1 << (64 - shift)) - 1)


def _with_logprobs(scores: Tensor, rows: Sequence[SamplerRow], tokens: list[int]) -> list[Sampled]:
    chosen = [Sampled(token) for token in tokens]
    asked = {i: row.sampling.logprobs for i, row in enumerate(rows) if row.sampling.logprobs is not None}
    if not asked:
        return chosen
    at = torch.tensor(list(asked), device=scores.device)
    logprobs = scores[at].log_softmax(dim=-1)
    own = logprobs.gather(1, torch.tensor([[tokens[i]] for i in asked], device=scores.device)).tolist()
    top = logprobs.topk(min(max(asked.values()), logprobs.shape[1]), dim=-1)
    for (i, number), (value,), ids, values in zip(
        asked.items(), own, top.indices.tolist(), top.values.tolist(), strict=True
    ):
        listed = tuple(zip(ids[:number], values[:number], strict=True))
        chosen[i] = Sampled(tokens[i], value, listed)
    return chosen


def _column(rows: Sequence[SamplerRow], pick: Callable[[ResolvedSampling], float], like: Tensor) -> Tensor:
    values = [pick(row.sampling) for row in rows]
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _upload(values: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(like.device)
