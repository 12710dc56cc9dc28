"""Sampler: draws the next token of each row of logits, independent of the rest of the batch.

Noise is a counter-based function of (seed, output index, token id), so a row's token depends on its own logits and
text and nothing else: not on the batch, the placement, or the repetition of a step. Every decision is made with
elementwise operations, integer sums and order-free comparisons, because a float sum over a row may be grouped
differently on a GPU when the number or the alignment of the rows changes.

On a device of its own nothing waits for it: no value is looked at, and all copies there are asynchronous. On a CPU a
look costs nothing and saves work, for the same tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Sampled
from trinity.errors import StageError
from trinity.stages.base import NoTokenDrawn
from trinity.stages.block_tables import upload
from trinity.stages.sampler_rows import (
    BANS,
    DRAWS,
    LOGPROBS,
    LOOKS_BACK,
    MIN_P,
    TOP_K,
    TOP_P,
    TRUNCATES,
    WARMS,
    SamplerBatch,
    list_asked,
    make_gumbel_noise,
)
from trinity.stages.token_bans import Texts, TokenBans, add_biases, ban_tokens

_WEIGHT_ONE = 1 << 40  # fixed point of exp(0) in top-p sums: 2**22 such weights stay far below 2**63
_CACHED_ELEMENTS = 1 << 18  # logits per pass on a CPU, so that they stay in its cache
_MOST_TEXT = 1 << 20  # tokens of texts per pass: a text that is longer has one of its own
_MOST_ELEMENTS = 1 << 23  # logits per pass on a device; bounds the float64 and int64 temporaries to about 400 MB
_FEW_CANDIDATES = 256  # few of the largest scores usually hold most of the weight, and a full sort is slow


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of n rows, and the log-probabilities of those that ask, where they were drawn.

    - ``flat``: all in one tensor, for one copy to the host; ``read`` takes the copy.
    - ``tokens`` (int64 [n]): -1 if a row has no largest value.
    - ``logprobs`` (float64 [m, 1 + 2 * most], None): of each row that asks, or of all: of its token, then ids and
      log-probabilities of the ``most`` likeliest.
    - ``asked``: number of each row that asks, and how many it asks for.
    """

    flat: Tensor
    tokens: Tensor
    logprobs: Tensor | None
    asked: Sequence[tuple[int, int]]

    @classmethod
    def of(cls, tokens: Tensor, logprobs: Tensor | None = None, asked: Sequence[tuple[int, int]] = ()) -> Drawn:
        """Join tokens and log-probabilities."""
        flat = tokens if logprobs is None else torch.cat((tokens.double(), logprobs.view(-1)))
        return cls(flat, tokens, logprobs, asked)

    def read(self, numbers: np.ndarray, count: int) -> tuple[np.ndarray, list[Sampled]]:
        """Read a copy of ``flat`` on the host: the first ``count`` tokens, int64, and with what was asked for.

        Raises ``NoTokenDrawn`` if a row has no largest value.
        """
        ids = numbers[:count].astype(np.int64)  # a copy: the memory is another step's next
        tokens: list[int] = ids.tolist()
        if -1 in tokens:
            raise NoTokenDrawn(
                f"row {tokens.index(-1)} of the logits holds NaN or no finite value; check the model's weights"
            )
        found = list(map(Sampled, tokens))
        if self.logprobs is not None:
            told = numbers[len(self.tokens) :].reshape(self.logprobs.shape)
            if len(told) > len(self.asked):
                told = told[[row for row, _ in self.asked]]
            own, listed, values = _split_logprobs(told)
            for (row, number), value, top, of_top in zip(self.asked, own, listed, values, strict=True):
                found[row] = Sampled(tokens[row], value, tuple(zip(top[:number], of_top, strict=False)))
        return ids, found


def _split_logprobs(told: np.ndarray) -> tuple[list[float], list[list[int]], list[list[float]]]:
    most = told.shape[1] // 2
    return told[:, 0].tolist(), told[:, 1 : 1 + most].astype(np.int64).tolist(), told[:, 1 + most :].tolist()


def sample(logits: Tensor, batch: SamplerBatch) -> list[Sampled]:
    """Draw the next token of each row and read it; ``logits`` is [n, vocab] of any float type, on any device.

    Raises ``StageError`` if a row of logits has no largest value (it holds NaN, or nothing but -inf).
    """
    if len(batch.given) != logits.shape[0]:
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(batch.given)} requests")
    slow, looks = batch.find(-1), logits.device.type == "cpu"
    if looks and 0 < len(slow) < len(batch.given):  # scores of few rows in place of all
        chosen, at = sample_greedy(logits), torch.from_numpy(slow)
        bans = [(int(np.searchsorted(slow, row)), bans, index) for row, bans, index in batch.bans]
        some = replace(batch.select(slow, at), bans=bans, texts=batch.texts)
        for row, sampled in zip(slow.tolist(), sample(logits.index_select(0, at), some), strict=True):
            chosen[row] = sampled
        return chosen
    drawn = draw(logits, batch, looks=looks)
    return drawn.read(drawn.flat.cpu().numpy(), len(batch.given))[1]


def sample_greedy(logits: Tensor) -> list[Sampled]:
    """Take the largest logit of each row, as ``sample`` does for greedy rows without penalty or logprobs."""
    drawn = draw_greedy(logits, looks=logits.device.type == "cpu")
    return drawn.read(drawn.tokens.cpu().numpy(), logits.shape[0])[1]


def draw_greedy(logits: Tensor, *, looks: bool = False) -> Drawn:
    """Take the largest logit of each row, where the logits are."""
    return Drawn.of(_find_largest(logits, looks))


def draw(logits: Tensor, batch: SamplerBatch, *, looks: bool = False) -> Drawn:
    """Draw the next token of each row, where the logits are; only with ``looks`` may the host look at values."""
    if not batch.some:
        return draw_greedy(logits, looks=looks)
    size = max(1, (_CACHED_ELEMENTS if looks else _MOST_ELEMENTS) // logits.shape[1])
    most = min(batch.kind.logprobs, logits.shape[1])
    found = [
        _draw_part(logits[start:end], batch.part(start, end, looks), most, looks)
        for start, end in _split_rows(batch, size)
    ]
    told = [logprobs for _, logprobs in found if logprobs is not None]
    return Drawn.of(_join([tokens for tokens, _ in found]), _join(told) if told else None, list_asked(batch.given))


def _split_rows(batch: SamplerBatch, size: int) -> Iterator[tuple[int, int]]:
    """Split rows into passes (start, end) of at most ``size`` rows, and of so much text."""
    texts = np.zeros(len(batch.given), dtype=np.int64)
    if batch.texts is not None:
        texts[batch.find(LOOKS_BACK)] = batch.texts.sizes
    start, held = 0, 0
    for row, tokens in enumerate(texts.tolist()):
        if row - start == size or (row > start and held + tokens > _MOST_TEXT):
            yield start, row
            start, held = row, 0
        held += tokens
    yield start, len(texts)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _draw_part(logits: Tensor, batch: SamplerBatch, most: int, looks: bool) -> tuple[Tensor, Tensor | None]:
    scores = warp(logits, batch)
    tokens = _find_largest(scores, looks)  # also finds NaN before noise could hide it
    if batch.every & DRAWS:
        tokens = _draw_rows(scores, batch, tokens, looks)
    elif batch.some & DRAWS and looks:
        rows = batch.find(DRAWS)
        at = torch.from_numpy(rows)
        some = _draw_rows(scores.index_select(0, at), batch.select(rows, at), tokens.index_select(0, at), looks)
        tokens = tokens.index_copy(0, at, some)
    elif batch.some & DRAWS:
        tokens = torch.where(batch.asks(DRAWS)[:, 0], _draw_rows(scores, batch, tokens, looks), tokens)
    return tokens, _take_logprobs(scores, tokens, batch, most, looks)


def _draw_rows(scores: Tensor, batch: SamplerBatch, largest: Tensor, looks: bool) -> Tensor:
    found = _find_largest(_perturb(truncate(scores, batch, looks=looks), batch, looks), looks)
    return torch.where(largest < 0, largest, found)


def _find_largest(scores: Tensor, looks: bool) -> Tensor:
    """Return the token with the largest score of each row, the first of ties; -1 if there is none."""
    if looks:
        return torch.from_numpy(_argmax_cpu(scores))
    largest, tokens = scores.max(dim=-1)
    return torch.where(largest > -torch.inf, tokens, -1)


def _argmax_cpu(scores: Tensor) -> np.ndarray:
    """Take the argmax with numpy, in a tenth of torch's time: with a large vocabulary that saves milliseconds."""
    wide = scores if scores.dtype in (torch.float32, torch.float64) else scores.float()
    values = wide.detach().numpy()
    tokens = values.argmax(axis=1)
    return np.where(values[np.arange(len(tokens)), tokens] > -np.inf, tokens, -1)


def warp(logits: Tensor, batch: SamplerBatch) -> Tensor:
    """Apply biases, penalties, bans, then temperature; float32 [n, vocab].

    In the order of transformers' processors, and of vLLM's for the biases and penalties that transformers lacks.
    """
    scores = logits.float()
    if batch.some & (LOOKS_BACK | BANS):
        wide = torch.nn.functional.pad(scores, (0, 1))  # a copy, with a spare column for ids that no logit has
        back, texts = batch.find(LOOKS_BACK), None if batch.texts is None else batch.texts.read()
        add_biases(wide, batch.bans)
        if texts is not None and (batch.given["penalty"][back] != 1.0).any():
            _penalise(wide, batch, back, texts)
        if texts is not None and ((batch.given["presence"][back] != 0) | (batch.given["frequency"][back] != 0)).any():
            _discount(wide, batch, back, texts)
        ban_tokens(wide, batch.bans, back, texts)
        scores = wide[:, :-1]
    return scores / batch.column("divisor").float() if batch.some & WARMS else scores


def _penalise(scores: Tensor, batch: SamplerBatch, back: np.ndarray, texts: Texts) -> None:
    """Make each token that a row's text holds less likely, once however often it occurs, in place."""
    rows, flat, width = upload(back, scores.device).index_select(0, texts.rows), scores.view(-1), scores.shape[1]
    places = rows * width + texts.tokens(width - 1)
    penalty, score = batch.column("penalty").float().view(-1).index_select(0, rows), flat.index_select(0, places)
    flat.index_copy_(0, places, torch.where(score < 0, score * penalty, score / penalty))


def _discount(scores: Tensor, batch: SamplerBatch, back: np.ndarray, texts: Texts) -> None:
    """Subtract from tokens that a row's output holds, by their number and once more, in place.

    Counts are whole numbers, which add up to the same in any order. Tokens of the prompt count in the spare column.
    """
    at, width = upload(back, scores.device), scores.shape[1]
    outputs = batch.column("outputs").view(-1).index_select(0, at).index_select(0, texts.rows)
    tokens = torch.where(texts.left() <= outputs, texts.tokens(width - 1), width - 1)
    counts = torch.zeros((len(back), width), dtype=torch.float32, device=scores.device)
    counts.view(-1).index_add_(0, texts.rows * width + tokens, torch.ones_like(tokens, dtype=torch.float32))
    for name, times in (("frequency", counts), ("presence", (counts > 0).float())):
        scores.index_add_(0, at, times * batch.column(name).float().index_select(0, at), alpha=-1)


def truncate(scores: Tensor, batch: SamplerBatch, *, looks: bool = False) -> Tensor:
    """Apply top-k, then top-p, then min-p to ``scores`` [n, vocab]; dropped tokens become -inf.

    Order and meaning are those of transformers' logits processors, except that top-p never splits tokens that tie.
    """
    for need, find_dropped in ((TOP_K, _below_top_k), (TOP_P, _beyond_top_p), (MIN_P, _below_min_p)):
        if looks and batch.some & need and not batch.every & need:
            rows = batch.find(need)
            at = torch.from_numpy(rows)
            some = scores.index_select(0, at)
            dropped = find_dropped(some, batch.select(rows, at), looks)
            scores = scores.index_copy(0, at, some.masked_fill_(dropped, -torch.inf))
        elif batch.some & need:
            dropped = find_dropped(scores, batch, looks)
            if not batch.every & need:
                dropped &= batch.asks(need)
            scores = scores.masked_fill(dropped, -torch.inf)
    return scores


def _below_top_k(scores: Tensor, batch: SamplerBatch, looks: bool) -> Tensor:
    most = min(batch.kind.top_k, scores.shape[1])
    best = scores.topk(most, dim=-1).values
    return scores < best.gather(1, batch.column("top_k").clamp(1, most) - 1)


def _beyond_top_p(scores: Tensor, batch: SamplerBatch, looks: bool) -> Tensor:
    """Find what top-p drops. Tokens that tie with the last one kept stay, so that no order of sorting matters."""
    total = _weights(scores).sum(dim=-1, keepdim=True)
    limit = total * batch.column("tail")
    for size in _candidate_counts(batch, scores.shape[1], looks):
        best = scores.topk(size, dim=-1).values
        weights = _weights(best)
        left = total - (weights.cumsum(dim=-1) - weights)  # weight of this token and of all below it
        kept = (left > limit).sum(dim=-1, keepdim=True).clamp_(min=1)
        if looks and bool((kept < size).all()):
            break
    return scores < best.gather(1, kept - 1)


def _weights(scores: Tensor) -> Tensor:
    """Compute exp(score − largest score) in fixed point, int64, so that sums are exact in any order."""
    exponent = (scores - scores.amax(dim=-1, keepdim=True)).double()
    return exponent.exp_().mul_(_WEIGHT_ONE).round_().long()


def _candidate_counts(batch: SamplerBatch, vocab: int, looks: bool) -> list[int]:
    """List growing numbers of largest scores to sort, the last one surely enough.

    Behind a top-k those are enough: what else it has left ties with the least of them.
    """
    enough = vocab
    if batch.every & TOP_K:
        enough = min(vocab, batch.kind.top_k)
    few, counts = _FEW_CANDIDATES, list[int]()
    while looks and few < enough:
        counts.append(few)
        few *= 16
    return [*counts, enough]


def _below_min_p(scores: Tensor, batch: SamplerBatch, looks: bool) -> Tensor:
    floor = batch.column("min_p").float().log()
    return scores - scores.amax(dim=-1, keepdim=True) < floor


def _perturb(scores: Tensor, batch: SamplerBatch, looks: bool) -> Tensor:
    """Add Gumbel noise, float64: the argmax of the result is a draw from softmax(scores)."""
    keys = batch.column("key")
    if not looks or not batch.some & TRUNCATES:
        tokens = torch.arange(scores.shape[1], device=scores.device)
        return make_gumbel_noise(keys, tokens).add_(scores)
    at, tokens = torch.nonzero(scores > -torch.inf, as_tuple=True)  # only the few tokens left need noise
    noisy = torch.full(scores.shape, -torch.inf, dtype=torch.float64)
    noisy[at, tokens] = scores[at, tokens].double() + make_gumbel_noise(keys.view(-1)[at], tokens)
    return noisy


def _take_logprobs(scores: Tensor, tokens: Tensor, batch: SamplerBatch, most: int, looks: bool) -> Tensor | None:
    """Return the ``Drawn.logprobs`` of the rows that ask; of all, where the host looks at nothing."""
    if not batch.some & LOGPROBS:
        return None
    if looks and not batch.every & LOGPROBS:
        at = torch.from_numpy(batch.find(LOGPROBS))
        scores, tokens = scores.index_select(0, at), tokens.index_select(0, at)
    logprobs = scores.log_softmax(dim=-1)
    own = logprobs.gather(1, tokens.clamp(min=0)[:, None])
    top = logprobs.topk(most, dim=-1)
    return torch.cat((own.double(), top.indices.double(), top.values.double()), dim=1)


def sample_open_rows(
    logits: Tensor, batch: SamplerBatch, forms: Mapping[int, str]
) -> tuple[list[Sampled], dict[int, str]]:
    """Draw the next token of each row as ``sample`` does; returns besides why rows have none, by their number.

    ``forms``: what rules the output of rows that have a grammar, such as "the regex". A barred row's own token means
    nothing. Raises ``StageError`` if a row of logits has no largest value before anything is banned.
    """
    try:
        return sample(logits, batch), {}
    except StageError:
        barred = _find_barred(logits, batch)
        if not barred:
            raise
    free = logits.clone()
    free[barred] = 0.0
    why = {row: _explain(bans, index, forms.get(row, "")) for row, bans, index in batch.bans if row in barred}
    left = [each for each in batch.bans if each[0] not in why]
    return sample(free, replace(batch, bans=left)), why


def _find_barred(logits: Tensor, batch: SamplerBatch) -> list[int]:
    """List the rows of numbers that have a token until bans take it."""
    banned = {row for row, _, _ in batch.bans}
    given = ~logits.isnan().any(dim=1) & (logits > -torch.inf).any(dim=1)
    left = (warp(logits, batch) > -torch.inf).any(dim=1)
    return [row for row in torch.nonzero(given & ~left).flatten().tolist() if row in banned]


def _explain(bans: TokenBans, index: int, form: str) -> str:
    names = ", ".join(_name_bans(bans, index))
    tokens, other = (f"all tokens that {form} allows", ", or ask for another form") if form else ("all tokens", "")
    return (
        f"nothing is left for token {index} of the output: {names} of the request, or of the checkpoint's generation "
        f"config where the request says nothing, ban {tokens}; take some out, or give an empty value{other}"
    )


def _name_bans(bans: TokenBans, index: int) -> list[str]:
    """Name the fields of ``Sampling`` that ban something at output ``index``."""
    forces = bans.forces(index)
    in_force = {
        "suppress_tokens": len(bans.suppressed),
        "begin_suppress_tokens": index == 0 and len(bans.first),
        "forced_eos_token_id": forces,
        "bad_words_ids": not forces and (len(bans.words) or bans.sequences),
        "no_repeat_ngram_size": not forces and bans.ngram,
        "min_tokens": not forces and index < bans.min_tokens and len(bans.early),
    }
    return [name for name, active in in_force.items() if active]
