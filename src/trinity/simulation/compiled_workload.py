"""Converts requests to the compiled engine's form: counts of tokens, and numbers for equal content."""

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
from trinity.simulation.workload import HASH_TOKENS, OUTPUT, Job, Sizes, asked_tokens, sizes_of, work_of

Runs = Sequence[tuple[int, int]]  # of equal tokens: (token, count)
Inside = tuple[tuple[str, int], ...]  # media in a block: (content, its offset from the block's start)
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int32]


class CompiledRequest(NamedTuple):
    """One request that ends after ``outputs`` tokens (0: after ``max_tokens``).

    ``runs`` of its prompt matter only with a prefix cache; no two neighbours have the same token.
    """

    length: int
    max_tokens: int
    media: Sequence[MediaSpan] = ()
    runs: Runs = ()
    deadline_s: float | None = None
    name: str = ""
    outputs: int = 0

    @classmethod
    def of(cls, work: Work, outputs: int = 0) -> CompiledRequest:
        runs = [(token, sum(1 for _ in same)) for token, same in groupby(work.prompt)]
        return cls(len(work.prompt), work.max_tokens, work.media, runs, work.deadline_s, work.request, outputs)


class CompiledWorkload:
    """Requests in the engine's form, to replay at any times on any placement with the same block sizes and caches."""

    def __init__(self, requests: Iterable[CompiledRequest], like: Settings) -> None:
        self._contents: dict[tuple[str, str], tuple[int, int, int]] = {}
        self._chains: dict[tuple[int, int | Runs, Inside], list[int]] = {}
        self._media_keys = self._prefix_keys = 0
        self.like = like
        rows: list[tuple[int, ...]] = []
        items: list[tuple[int, ...]] = []
        keys: list[int] = []
        given = list(requests)
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
    ) -> CompiledWorkload:
        """Convert a trace's jobs, which ask for ``ask`` tokens as far as the ``context`` has room.

        Prompts are hashed only with a prefix cache. ``sizes``: ``sizes_of(jobs)``, if known.
        """
        most = [1 if job.refused else asked_tokens(job, ask, context) for job in jobs]
        if like.prefix_cache:
            return cls(map(compile_request, jobs, range(len(jobs)), most), like)
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
        start, end = span.uncut if span.whole else (span.offset, span.end)  # one chunk then needs all features
        return span.tokens, content, key, start, end, int(span.atomic or span.whole > 0)

    def _whole(self, request: CompiledRequest) -> Runs:
        """Return the tokens that may be prefilled: also outputs, where a preempted request is recomputed."""
        fed = (request.outputs or request.max_tokens) - 1
        if self.like.reservation == "full" or not fed:
            return request.runs
        *before, (token, length) = request.runs
        return (*before, (OUTPUT, length + fed)) if token == OUTPUT else (*request.runs, (OUTPUT, fed))

    def prefix_keys(self, request: CompiledRequest) -> list[int]:
        """Number the full blocks of a prompt for the prefix cache, as ``memory.digests`` hashes them.

        Blocks that differ from the one before only by their place are numbered together: the numbers after a key,
        while the same token and the same media go on, are one list for all requests.
        """
        keys: list[int] = []
        for piece, count in _cut(self._whole(request), self.like.kv_block_size):
            end = len(keys) + count
            while len(keys) < end:
                inside, change = self._inside(request.media, len(keys))
                following = self._chains.setdefault((keys[-1] if keys else -1, piece, inside), [])
                alike = min(end, change) - len(keys)
                more = range(self._prefix_keys, self._prefix_keys + max(0, alike - len(following)))
                following.extend(more)
                self._prefix_keys += len(more)
                keys += following[:alike]
        return keys

    def _inside(self, media: Sequence[MediaSpan], number: int) -> tuple[Inside, int]:
        """Return the media in a block, with their offsets from its start, and the next block that has other media."""
        block = self.like.kv_block_size
        start, end = number * block, (number + 1) * block
        here = [m for m in media if m.offset < end and m.end > start]
        ends = [-(-m.end // block) for m in here]
        begins = [m.offset // block for m in media if m.offset >= end]
        return tuple((m.content, m.offset - start) for m in here), min([*ends, *begins], default=sys.maxsize)


def _cut(runs: Runs, block: int) -> Iterator[tuple[int | Runs, int]]:
    """Cut a prompt into full blocks: (the token, or the runs of a block with several; how many such blocks)."""
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


def compile_request(job: Job, number: int, most: int) -> CompiledRequest:
    """Convert a job that asks for ``most`` tokens, as ``work_of``, with runs in place of its prompt."""
    if job.refused:
        return CompiledRequest(1, 1)
    media = work_of(job, number, False).media if job.images else ()
    return CompiledRequest(job.prompt, most, media, _runs(job, number), outputs=job.max_tokens)


def _items(images: Sequence[tuple[int, str]], each: Ints, block: int) -> Ints:
    """Return a row for each image of a trace: tokens, content, first key, offset, end, atomic.

    ``each``: the number of images of each request.
    """
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
    """Return the prompt of ``workload.work_of`` as runs: images, then the hashes' tokens, then the request's own."""
    visual = sum(count for count, _ in job.images)
    runs = [(0, visual)] if visual else []
    for place, name in enumerate((*(1 + each for each in job.hash_ids), -1 - number)):
        start = max(visual, place * HASH_TOKENS)
        end = min(job.prompt, (place + 1) * HASH_TOKENS) if place < len(job.hash_ids) else job.prompt
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
    """Build a table [rows, width], also of no rows."""
    return np.array(rows, dtype).reshape(-1, width)
