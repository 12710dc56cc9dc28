"""Token bans: which tokens the next one may not be, as transformers' logits processors decide it, for rows of a batch.

transformers' own classes take a tensor of the whole vocabulary for each request and step. Here each row yields the few
token ids concerned, and one write covers the batch; tests hold the two equal.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trinity.core.messages import Work

_NONE = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class TokenBans:
    """Rules of one request, from its ``ResolvedSampling``.

    - ``suppressed``, ``first``: token ids banned at every output and at the first.
    - ``early``, ``min_tokens``: token ids that would end the output, banned before it has ``min_tokens`` tokens.
    - ``sequences``: arrays [n, length] of banned sequences of tokens, one for each length.
    - ``ngram``: no run of so many tokens may occur twice; 0 is off.
    - ``last``, ``forced``: at output index ``last`` only the token ids ``forced`` are left; none for no such rule.
    """

    suppressed: np.ndarray
    first: np.ndarray
    early: np.ndarray
    min_tokens: int
    sequences: tuple[np.ndarray, ...]
    ngram: int
    last: int
    forced: np.ndarray


@dataclass(frozen=True, slots=True)
class FoundBans:
    """Rules for one output token: ``banned`` ids (some may occur twice), and ``forced`` ids, None for no force."""

    banned: np.ndarray
    forced: np.ndarray | None = None


def make_bans(work: Work) -> TokenBans | None:
    """Make the rules of a request; None if it has none.

    A sequence of one token that ends the output is no bad word, as in transformers' ``NoBadWordsLogitsProcessor``.
    """
    sampling = work.sampling
    if not sampling.bans_tokens:
        return None
    words = [word for word in sampling.bad_words_ids if not (len(word) == 1 and word[0] in work.stop_ids)]
    return TokenBans(
        suppressed=_ids(sampling.suppress_tokens),
        first=_ids(sampling.begin_suppress_tokens),
        early=_ids(sorted(work.stop_ids)),
        min_tokens=sampling.min_tokens,
        sequences=tuple(_ids([word for word in words if len(word) == size]) for size in sorted(set(map(len, words)))),
        ngram=sampling.no_repeat_ngram_size,
        last=work.max_tokens - 1,
        forced=_ids(sampling.forced_eos_token_id),
    )


def find_banned(bans: TokenBans | None, ids: np.ndarray, index: int, vocabulary: int) -> FoundBans:
    """Find what holds for output ``index`` after ``ids`` (prompt and outputs, int64); ids in [0, vocabulary) alone.

    A forced token replaces every ban but ``suppressed`` and ``first``: transformers applies these after it.
    """
    if bans is None:
        return FoundBans(_NONE)
    found = [bans.suppressed]
    if index == 0:
        found.append(bans.first)
    if index == bans.last and len(bans.forced):
        return FoundBans(_within(found, vocabulary), _within([bans.forced], vocabulary))
    if index < bans.min_tokens:
        found.append(bans.early)
    found += [_completions(sequences, ids) for sequences in bans.sequences]
    if bans.ngram:
        found.append(_repeats(ids, bans.ngram))
    return FoundBans(_within(found, vocabulary))


def _completions(sequences: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Return the last token of each sequence whose other tokens are the newest of ``ids``."""
    before = sequences.shape[1] - 1
    if before > len(ids):
        return _NONE
    found: np.ndarray = sequences[(sequences[:, :-1] == ids[len(ids) - before :]).all(axis=1), -1]
    return found


def _repeats(ids: np.ndarray, size: int) -> np.ndarray:
    """Return the tokens with which a run of ``size`` tokens would occur again."""
    if len(ids) < size:
        return _NONE
    runs = np.lib.stride_tricks.sliding_window_view(ids, size)
    newest = ids[len(ids) - size + 1 :]
    found: np.ndarray = runs[(runs[:, :-1] == newest).all(axis=1), -1]
    return found


def _within(parts: list[np.ndarray], vocabulary: int) -> np.ndarray:
    ids = np.concatenate(parts)
    return ids[(ids >= 0) & (ids < vocabulary)]


def _ids(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int64)
