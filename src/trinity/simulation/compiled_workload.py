"""Requests as the compiled twin is told of them: counts, and numbers for equal content."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from math import inf
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trinity.core.instance.state import Settings
from trinity.core.messages import MediaSpan, Work
from trinity.memory.native import extension
from trinity.simulation.workload import HASHED, OUTPUT, Job, Sizes, asked_tokens, sizes_of, work_of

Runs = Sequence[tuple[int, int]]  # of equal tokens: which, how many
Inside = tuple[tuple[str, int], ...]  # media in a block: content, where it begins from there
Ints = npt.NDArray[np.int32]


class Asked(NamedTuple):
    """One request, of ``outputs`` tokens (0: all that it asks for).

    ``runs`` of its prompt matter only where prefixes are cached; no two neighbours are equal.
    """

    length: int
    max_tokens: int
    media: Sequence[MediaSpan] = ()
    runs: Runs = ()
    deadline_s: float | None = None
    name: str = ""
    outputs: int = 0

    @classmethod
    def of(cls, work: Work, outputs: int = 0) -> Asked:
        runs = [(token, sum(1 for _ in same)) for token, same in groupby(work.prompt)]
        return cls(len(work.prompt), work.max_tokens, work.media, runs, work.deadline_s, work.request, outputs)


class Workload:
    """Requests in the twin's form, to be replayed at any times and on any placement with the same blocks and caches."""

    def __init__(self, asked: Iterable[Asked], like: Settings) -> None:
        self._contents: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._chains: dict[tuple[int, int | Runs, Inside], list[int]] = {}
        self._media_keys = self._prefix_keys = 0
        self.like = like
        rows: list[tuple[int, ...]] = []
        items: list[tuple[int, ...]] = []
        keys: list[int] = []
        given = list(asked)
        ranks = _ranks([each.name for each in given])
        for each, rank in zip(given, ranks, strict=True):
            own = self.prefix_keys(each) if like.prefix_cache else ()
            fewer = each.outputs or each.max_tokens
            rows.append((each.length, each.max_tokens, fewer, len(each.media), len(own), rank))
            items += [self._item(span) for span in each.media]
            keys += own
        deadlines = np.array([inf if each.deadline_s is None else each.deadline_s for each in given], np.float64)
        self._make(rows_of(rows, 6, np.int32), deadlines, rows_of(items, 6, np.int32), np.array(keys, np.int32))

    def _make(self, rows: Ints, deadlines: npt.NDArray[np.float64], items: Ints, keys: Ints) -> None:
        ends = np.cumsum(rows[:, 2], dtype=np.int64)
        self.first = ends - rows[:, 2]
        self.made = extension.sim_workload(
            rows, deadlines, items, keys, self.like.image_block_size, self.like.kv_block_size
        )

    @classmethod
    def of(
        cls, jobs: Sequence[Job], like: Settings, ask: int = 0, context: int = 0, sizes: Sizes | None = None
    ) -> Workload:
        """Of a trace, whose requests ask for so many tokens of the ``context``; prompts are looked at where they are
        cached. ``sizes`` as ``sizes_of(jobs)``."""
        most = [1 if job.refused else asked_tokens(job, ask, context) for job in jobs]
        if like.prefix_cache:
            return cls(map(asked_of, jobs, range(len(jobs)), most), like)
        made, sizes = cls.__new__(cls), sizes or sizes_of(jobs)
        made.like = like
        rows = np.zeros((len(jobs), 6), np.int32)
        rows[:, 1], rows[:, 5] = most, np.arange(len(jobs))
        rows[:, 0] = rows[:, 2] = 1  # of those that are refused
        for column, counts in ((0, sizes.prompt), (2, sizes.output), (3, sizes.images)):
            rows[sizes.taken, column] = counts[sizes.taken]
        images = [image for job in jobs if not job.refused for image in job.images]
        made._make(
            rows, np.full(len(jobs), inf), _items(images, rows[:, 3], like.image_block_size), np.zeros(0, np.int32)
        )
        return made

    def _item(self, span: MediaSpan) -> tuple[int, ...]:
        known = self._contents.get((span.kind, span.content))
        if known is None:
            known = self._contents[span.kind, span.content] = (len(self._contents), self._media_keys, span.tokens)
            self._media_keys += -(-span.tokens // self.like.image_block_size)
        content, key, tokens = known
        assert tokens == span.tokens, f"{span.content} has {tokens} and {span.tokens} tokens"
        return span.tokens, content, key, span.offset, span.end, int(span.atomic)

    def _whole(self, asked: Asked) -> Runs:
        """What may be prefilled of it: its outputs too, where it may be preempted and come again."""
        fed = (asked.outputs or asked.max_tokens) - 1
        if self.like.reservation == "full" or not fed:
            return asked.runs
        *before, (token, length) = asked.runs
        return (*before, (OUTPUT, length + fed)) if token == OUTPUT else (*asked.runs, (OUTPUT, fed))

    def prefix_keys(self, asked: Asked) -> list[int]:
        """As ``blocks.prefix_keys``, with numbers in place of digests and runs in place of tokens.

        Blocks that differ from the one before only by their place are numbered together: what comes after a key, as
        long as the same token and the same media go on, is one list for all requests.
        """
        keys: list[int] = []
        for piece, count in _cut(self._whole(asked), self.like.kv_block_size):
            end = len(keys) + count
            while len(keys) < end:
                inside, change = self._inside(asked.media, len(keys))
                following = self._chains.setdefault((keys[-1] if keys else -1, piece, inside), [])
                alike = min(end, change) - len(keys)
                more = range(self._prefix_keys, self._prefix_keys + max(0, alike - len(following)))
                following.extend(more)
                self._prefix_keys += len(more)
                keys += following[:alike]
        return keys

    def _inside(self, media: Sequence[MediaSpan], number: int) -> tuple[Inside, int]:
        """The media in a block, by where they begin from there; and the next block that has other ones."""
        block = self.like.kv_block_size
        start, end = number * block, (number + 1) * block
        here = [m for m in media if m.offset < end and m.end > start]
        ends = [-(-m.end // block) for m in here]
        begins = [m.offset // block for m in media if m.offset >= end]
        return tuple((m.content, m.offset - start) for m in here), min([*ends, *begins], default=sys.maxsize)


def _cut(runs: Runs, block: int) -> Iterator[tuple[int | Runs, int]]:
    """The full blocks of a prompt: their token, or their own runs where that is not one, and how many there are."""
    parts: list[tuple[int, int]] = []
    room = block
    for token, count in runs:
        if parts:
            taken = min(room, count)
            parts.append((token, taken))
            room, count = room - taken, count - taken
            if room:
                continue
            yield tuple(parts), 1
            parts, room = [], block
        if count >= block:
            yield token, count // block
        if count % block:
            parts, room = [(token, count % block)], block - count % block


def asked_of(job: Job, number: int, most: int) -> Asked:
    """As ``work_of``, for up to ``most`` tokens, with runs in place of its prompt."""
    if job.refused:
        return Asked(1, 1)
    media = work_of(job, number, False).media if job.images else ()
    return Asked(job.prompt, most, media, _runs(job, number), outputs=job.max_tokens)


def _items(images: Sequence[tuple[int, str]], each: Ints, block: int) -> Ints:
    """All images of a trace, of which every request has so many: tokens, content, first key, offset, end, atomic."""
    if not images:
        return np.zeros((0, 6), np.int32)
    numbers: dict[tuple[int, str], int] = {}
    contents = np.array([numbers.setdefault(image, len(numbers)) for image in images], np.int64)
    tokens = np.array([count for count, _ in images], np.int64)
    blocks = -(-np.array([count for count, _ in numbers], np.int64) // block)
    ends = np.cumsum(tokens)
    before = np.concatenate([np.zeros(1, np.int64), ends])[np.cumsum(each) - each]  # of each request's first image
    ends -= np.repeat(before, each)
    keys = (np.cumsum(blocks) - blocks)[contents]
    return np.stack([tokens, contents, keys, ends - tokens, ends, np.zeros_like(ends)], axis=1).astype(np.int32)


def _runs(job: Job, number: int) -> Runs:
    """What ``workload.work_of`` puts there: images are all alike, then what hashes stand for, then its own."""
    visual = sum(count for count, _ in job.images)
    runs = [(0, visual)] if visual else []
    for place, name in enumerate((*(1 + each for each in job.hash_ids), -1 - number)):
        start = max(visual, place * HASHED)
        end = min(job.prompt, (place + 1) * HASHED) if place < len(job.hash_ids) else job.prompt
        if start >= end:
            continue
        if runs and runs[-1][0] == name:
            runs[-1] = (name, runs[-1][1] + end - start)
        else:
            runs.append((name, end - start))
    return runs


def _ranks(names: list[str]) -> list[int]:
    ranks = [0] * len(names)
    for rank, number in enumerate(sorted(range(len(names)), key=names.__getitem__)):
        ranks[number] = rank
    return ranks


def rows_of(rows: list[tuple[int, ...]], width: int, dtype: Any) -> npt.NDArray[Any]:
    """A table, also of no rows."""
    return np.array(rows, dtype).reshape(-1, width)
