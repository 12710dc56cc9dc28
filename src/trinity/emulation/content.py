"""What paced stages write into blocks in place of features, keys and values: words that tell where they belong.

A wrong, stale or misplaced block is seen: a row of an image block is a function of the image's content and of the row;
a row of a KV block is one of every token and image row up to its position, of the layer and of the word. An output
token is a function of rows read from every block of its request. Words are uint64; arithmetic wraps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trinity.core.messages import Work

Words = npt.NDArray[np.uint64]
PLACEHOLDER = 1  # the prompt's token in place of an image row
FIRST_TOKEN = 8  # smaller ids are left to placeholders
_FOLD, _SPREAD = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xD6E8FEB86659FD93)
_HALF = np.uint64(32)


def mixed(values: Words) -> Words:
    """Words in which every bit hangs on every bit of ``values``."""
    for factor in (_FOLD, _SPREAD):
        values = (values ^ (values >> _HALF)) * factor
    return values ^ (values >> _HALF)


def seed_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def counted(start: int, length: int) -> Words:
    return np.arange(start, start + length, dtype=np.uint64)


def features(content: str, rows: int) -> Words:
    """What stands for an image's features: a word for each row."""
    return mixed(counted(0, rows) + np.uint64(seed_of(content)))


def salts(*shape: int) -> Words:
    """What tells apart the words of a row, [words] or [layers, words]."""
    return mixed(counted(1, int(np.prod(shape)))).reshape(shape)


def prompt_ids(text: str, length: int, vocabulary: int) -> list[int]:
    """Token ids of a text that exists by its name alone; a longer one of the same name begins with it."""
    drawn = mixed(counted(0, length) + np.uint64(seed_of(text)))
    found: list[int] = (drawn % np.uint64(vocabulary - FIRST_TOKEN) + np.uint64(FIRST_TOKEN)).tolist()
    return found


def identities(work: Work) -> Words:
    """A word for each position of the prompt: its token id, or its image row."""
    ids = np.array(work.prompt, dtype=np.uint64)
    for span in work.media:
        ids[span.offset : span.end] = features(span.content, span.tokens)
    return ids


def terms(ids: Words, positions: Words) -> Words:
    """What each position adds to the sum over all positions before it."""
    return mixed(ids + positions * _SPREAD)


def prefix_words(ids: Words) -> tuple[Words, Words]:
    """(sums, words) of every position: what stands for its keys and values, a function of all ids up to it."""
    sums = np.cumsum(terms(ids, counted(0, len(ids))), dtype=np.uint64)
    return sums, mixed(sums)


def probes(index: int, length: int, block_rows: int) -> npt.NDArray[np.int64]:
    """Positions that output ``index`` looks at where ``length`` are held: a row of each full block, and the last."""
    inside = np.arange(length // block_rows) * block_rows + index % block_rows
    return np.append(inside, length - 1)


def tokens_of(read: Words, indices: Words, vocabulary: int) -> Words:
    """Output tokens: of the rows read for each, folded into one word, and of its index."""
    drawn = mixed(read ^ mixed(indices + np.uint64(1)))
    return drawn % np.uint64(vocabulary - FIRST_TOKEN) + np.uint64(FIRST_TOKEN)


def folded(words: Words, counts: Sequence[int]) -> Words:
    """One word for each of several runs of words, ``counts`` long."""
    starts = np.concatenate(([0], np.cumsum(counts)[:-1])).astype(np.int64)
    found: Words = np.add.reduceat(words, starts)
    return found


def expected_tokens(work: Work, block_rows: int, vocabulary: int) -> list[int]:
    """The output that blocks with the right content give: what tests compare with."""
    prompt = len(work.prompt)
    ids = np.concatenate((identities(work), np.zeros(work.max_tokens, dtype=np.uint64)))
    found: list[int] = []
    for index in range(work.max_tokens):
        words = prefix_words(ids[: prompt + index])[1]
        read = np.add.reduce(words[probes(index, prompt + index, block_rows)], keepdims=True)
        token = int(tokens_of(read, counted(index, 1), vocabulary)[0])
        found.append(token)
        ids[prompt + index] = token
    return found
