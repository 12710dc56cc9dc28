"""Content of emulated blocks: words that identify the position they belong to, in place of features, keys and values.

Wrong, stale or misplaced blocks are detected: a row of an image block is a function of the image's content and the row;
a row of a KV block is a function of every token and image row up to its position, the layer and the word. An output
token is a function of rows read from every block of its request. Words are uint64; arithmetic wraps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trinity.core.messages import Work

Words = npt.NDArray[np.uint64]
PLACEHOLDER = 1  # the prompt's token id in place of an image row
FIRST_TOKEN = 8  # smallest id of text; smaller ones are left to placeholders
_FOLD, _SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def mix_words(values: Words) -> Words:
    """Mix words so that every bit of the result depends on every bit of ``values``."""
    for factor in (_FOLD, _SPREAD):
        values = (values ^ (values >> _HALF)) * factor
    return values ^ (values >> _HALF)


def seed_of(text: str) -> int:
    """Hash a text to 64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def count_words(start: int, length: int) -> Words:
    """Count from ``start``, as ``length`` words."""
    return np.arange(start, start + length, dtype=np.uint64)


def feature_words(content: str, rows: int) -> Words:
    """Words of an image in place of its features, one for each row."""
    return mix_words(count_words(0, rows) + np.uint64(seed_of(content)))


def salt_words(*shape: int) -> Words:
    """Words that tell the words of a row apart, [words] or [layers, words]."""
    return mix_words(count_words(1, int(np.prod(shape)))).reshape(shape)


def prompt_ids(text: str, length: int, vocabulary: int) -> list[int]:
    """Draw the token ids of a text known by its name alone; longer texts of the same name begin with shorter ones."""
    drawn = mix_words(count_words(0, length) + np.uint64(seed_of(text)))
    found: list[int] = (drawn % np.uint64(vocabulary - FIRST_TOKEN) + np.uint64(FIRST_TOKEN)).tolist()
    return found


def identity_words(work: Work) -> Words:
    """Words of the prompt's positions: token ids, or image rows."""
    ids = np.array(work.prompt, dtype=np.uint64)
    for span in work.media:
        ids[span.offset : span.end] = feature_words(span.content, span.tokens)
    return ids


def prefix_terms(ids: Words, positions: Words) -> Words:
    """Words that each position adds to the sum over all positions up to it."""
    return mix_words(ids + positions * _SPREAD)


def prefix_words(ids: Words) -> tuple[Words, Words]:
    """Compute (sums, words) of every position, functions of all ids up to it; words stand for keys and values."""
    sums = np.cumsum(prefix_terms(ids, count_words(0, len(ids))), dtype=np.uint64)
    return sums, mix_words(sums)


def probe_positions(index: int, length: int, block_rows: int) -> npt.NDArray[np.int64]:
    """Positions that output ``index`` reads of ``length`` ones: a row of each full block, and the last."""
    inside = np.arange(length // block_rows) * block_rows + index % block_rows
    return np.append(inside, length - 1)


def choose_tokens(read: Words, indices: Words, vocabulary: int) -> Words:
    """Choose output tokens from the rows read for each, folded into one word, and from their indices."""
    drawn = mix_words(read ^ mix_words(indices + np.uint64(1)))
    return drawn % np.uint64(vocabulary - FIRST_TOKEN) + np.uint64(FIRST_TOKEN)


def fold_words(words: Words, counts: Sequence[int]) -> Words:
    """Fold runs of words, ``counts`` long, into one word each."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
    found: Words = np.add.reduceat(words, starts)
    return found


def expected_tokens(work: Work, block_rows: int, vocabulary: int) -> list[int]:
    """Compute the output that blocks with the right content give, for tests to compare with."""
    prompt = len(work.prompt)
    ids = np.concatenate((identity_words(work), np.zeros(work.max_tokens, dtype=np.uint64)))
    found: list[int] = []
    for index in range(work.max_tokens):
        words = prefix_words(ids[: prompt + index])[1]
        read = np.add.reduce(words[probe_positions(index, prompt + index, block_rows)], keepdims=True)
        token = int(choose_tokens(read, count_words(index, 1), vocabulary)[0])
        found.append(token)
        ids[prompt + index] = token
    return found
