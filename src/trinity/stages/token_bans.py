"""Token bans: which tokens the next one may not be, as transformers' logits processors decide it, for rows of a batch;
and biases, which favour tokens or make them rare.

transformers' own classes take a tensor of the whole vocabulary for each request and step, and look at it on the host.
Here the host lists what holds whatever the text is, and the device, which alone may know the newest tokens, finds what
follows from the text; tests hold both equal. The scores have a spare column at the end, for ids that ban nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from trinity.core.messages import Work
from trinity.stages.block_tables import upload

NO_TOKEN = (1 << 31) - 1  # an id that no vocabulary has
_MOST_ELEMENTS = 1 << 21  # comparisons of tokens at once; bounds the memory of long runs in long texts


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompt and outputs of k rows on the device, one behind the other, so that a long one widens no other.

    - ``ids`` (int64 [n], not negative): of each row ``spans`` ids, of which the first ``sizes`` are its text.
    - ``rows`` (int64 [n]): the number of each id's row.
    - ``starts``, ``lengths`` (int64 [k]): where each row begins, and its size.
    - ``spans``, ``sizes`` (int64 [k]): as the host knows them.
    """

    ids: Tensor
    rows: Tensor
    starts: Tensor
    lengths: Tensor
    spans: np.ndarray
    sizes: np.ndarray

    @classmethod
    def lay_out(cls, ids: Tensor, spans: np.ndarray, sizes: np.ndarray) -> Texts:
        """Take ids of rows of so many ``spans``."""
        told = upload(np.stack((np.cumsum(spans) - spans, sizes, spans)), ids.device)
        rows = torch.repeat_interleave(told[2], output_size=len(ids))
        return cls(ids, rows, told[0], told[1], spans, sizes)

    def select(self, rows: Sequence[int]) -> Texts:
        """Select rows."""
        if len(rows) == len(self.sizes):
            return self
        spans = self.spans[list(rows)]
        ends = np.cumsum(self.spans)[list(rows)]
        places = np.concatenate([np.arange(end - span, end) for end, span in zip(ends, spans, strict=True)])
        ids = self.ids.index_select(0, upload(places, self.ids.device))
        return self.lay_out(ids, spans, self.sizes[list(rows)])

    def newest(self, count: int) -> Tensor:
        """Return the last ``count`` ids of each row ([k, count]); -1 in place of those before its first."""
        places = self.lengths[:, None] - count + torch.arange(count, device=self.ids.device)
        found = self.ids.index_select(0, (self.starts[:, None] + places.clamp(min=0)).view(-1)).view(places.shape)
        return torch.where(places < 0, -1, found)

    def tokens(self, vocabulary: int) -> Tensor:
        """Return the ids that are tokens, and ``vocabulary`` for all else."""
        return torch.where(self.left() > 0, self.ids.clamp(max=vocabulary), vocabulary)

    def left(self) -> Tensor:
        """Return for each id how many tokens its row has from there on; none are left where it is no token."""
        places = torch.arange(len(self.ids), device=self.ids.device)
        return (self.starts + self.lengths).index_select(0, self.rows) - places


class TextSource(Protocol):
    """Texts of rows that are put on the device when they are looked at."""

    @property
    def sizes(self) -> np.ndarray:
        """Tokens of each row, int64."""
        ...

    def part(self, start: int, end: int) -> TextSource:
        """Return rows [start, end)."""
        ...

    def read(self) -> Texts:
        """Put them on the device."""
        ...


@dataclass(frozen=True, slots=True)
class HostTexts:
    """``TextSource`` of texts that the host knows."""

    texts: Sequence[np.ndarray]
    device: torch.device

    @property
    def sizes(self) -> np.ndarray:
        return np.fromiter(map(len, self.texts), dtype=np.int64, count=len(self.texts))

    def part(self, start: int, end: int) -> HostTexts:
        return HostTexts(self.texts[start:end], self.device)

    def read(self) -> Texts:
        ids = np.concatenate([*self.texts, np.empty(0, dtype=np.int64)])
        spans = self.sizes
        if not spans.all():  # a row without a token has one id, which is none
            spans = np.maximum(spans, 1)
            ids = np.concatenate([text if len(text) else np.zeros(1, dtype=np.int64) for text in self.texts])
        return Texts.lay_out(upload(np.where(ids < 0, NO_TOKEN, ids), self.device), spans, self.sizes)


@dataclass(frozen=True, slots=True)
class TokenBans:
    """Rules of one request, from its ``ResolvedSampling``.

    - ``suppressed``, ``first``: token ids banned at every output and at the first.
    - ``early``, ``min_tokens``: token ids that would end the output, banned before it has ``min_tokens`` tokens.
    - ``words``, ``sequences``: banned token ids, and arrays [n, length] of banned sequences, one for each length.
    - ``ngram``: no run of so many tokens may occur twice; 0 is off.
    - ``last``, ``forced``: at output index ``last`` only the token ids ``forced`` are left; none for no such rule.
    - ``biased``, ``biases``: token ids, and float32 to add to their logits before all else.
    """

    suppressed: np.ndarray
    first: np.ndarray
    early: np.ndarray
    min_tokens: int
    words: np.ndarray
    sequences: tuple[np.ndarray, ...]
    ngram: int
    last: int
    forced: np.ndarray
    biased: np.ndarray
    biases: np.ndarray

    @property
    def looks_back(self) -> bool:
        """True if something is banned by the text."""
        return bool(self.ngram or self.sequences)

    def forces(self, index: int) -> bool:
        """Tell if output ``index`` must be one of ``forced``."""
        return index == self.last and len(self.forced) > 0

    def fixed(self, index: int) -> np.ndarray:
        """Return the token ids that output ``index`` may not be, whatever the text.

        A forced token replaces every ban but ``suppressed`` and ``first``: transformers applies these after it.
        """
        found = [self.suppressed, self.first] if index == 0 else [self.suppressed]
        if not self.forces(index):
            found += [self.words, self.early] if index < self.min_tokens else [self.words]
        return np.concatenate(found)


def make_bans(work: Work) -> TokenBans | None:
    """Make the rules of a request; None if it has none.

    A sequence of one token that ends the output is no bad word, as in transformers' ``NoBadWordsLogitsProcessor``.
    Tokens that a stop string names are none of those: they end it at any time, as by its ``StopStringCriteria``.
    No token is forced at the end of an output that a grammar rules: it ends where that is complete.
    """
    sampling = work.sampling
    if not (sampling.bans_tokens or sampling.logit_bias):
        return None
    ends = work.stop_ids - work.named_stop_ids
    words = [word for word in sampling.bad_words_ids if not (len(word) == 1 and word[0] in ends)]
    words = [word for word in words if min(word) >= 0]  # no text has others
    sizes = sorted({len(word) for word in words} - {1})
    return TokenBans(
        suppressed=_ids(sampling.suppress_tokens),
        first=_ids(sampling.begin_suppress_tokens),
        early=_ids(sorted(ends)),
        min_tokens=sampling.min_tokens,
        words=_ids([word[0] for word in words if len(word) == 1]),
        sequences=tuple(_ids([word for word in words if len(word) == size]) for size in sizes),
        ngram=sampling.no_repeat_ngram_size,
        last=work.max_tokens - 1,
        forced=_ids(() if sampling.structured else sampling.forced_eos_token_id),
        biased=_ids([token for token, _ in sampling.logit_bias]),
        biases=np.array([bias for _, bias in sampling.logit_bias], dtype=np.float32),
    )


def lift_bans(
    rules: Sequence[tuple[int, TokenBans, int]], complete: Collection[int]
) -> Sequence[tuple[int, TokenBans, int]]:
    """Let rows that may only end do so: ``min_tokens`` gives way where a grammar has no other token."""
    if not complete:
        return rules
    none = np.empty(0, dtype=np.int64)
    return [(row, replace(bans, early=none) if row in complete else bans, index) for row, bans, index in rules]


def add_biases(scores: Tensor, rules: Sequence[tuple[int, TokenBans, int]]) -> None:
    """Add the biases of rows, in place; ``scores`` and ``rules`` as ``ban_tokens`` has them."""
    width = scores.shape[1]
    biased = [(row, bans) for row, bans, _ in rules if len(bans.biased)]
    if biased:
        places = np.concatenate([np.minimum(bans.biased, width - 1) + row * width for row, bans in biased])
        biases = upload(np.concatenate([bans.biases for _, bans in biased]), scores.device)
        flat = scores.view(-1)
        at = upload(places, scores.device)
        flat.index_copy_(0, at, flat.index_select(0, at) + biases)  # no row has a token twice


def ban_tokens(
    scores: Tensor, rules: Sequence[tuple[int, TokenBans, int]], back: np.ndarray, texts: Texts | None
) -> None:
    """Make -inf, in place, of the tokens that rows may not take; of a forced row's tokens 0, of all others -inf.

    - ``scores``: float32 [n, vocabulary + 1], the last column spare.
    - ``rules``: the number of each row that has some, its rules and the index of its output.
    - ``back``, ``texts``: numbers of the rows whose texts these are.
    """
    width, flat = scores.shape[1], scores.view(-1)
    forced = [(row, bans) for row, bans, index in rules if bans.forces(index)]
    if forced:
        scores.index_fill_(0, upload(np.array([row for row, _ in forced]), scores.device), -torch.inf)
        _fill(flat, [_places(row, bans.forced, width) for row, bans in forced], 0.0)
    _fill(flat, [_places(row, bans.fixed(index), width) for row, bans, index in rules], -torch.inf)
    free = [(row, bans) for row, bans, index in rules if bans.looks_back and not bans.forces(index)]
    if free and texts is not None:
        at = {row: number for number, row in enumerate(back.tolist())}
        looking = [(row, at[row], bans) for row, bans in free]
        for places in (*_complete(looking, texts, width), *_repeat(looking, texts, width)):
            flat.index_fill_(0, places, -torch.inf)


def _places(row: int, ids: np.ndarray, width: int) -> np.ndarray:
    found: np.ndarray = ids[(ids >= 0) & (ids < width - 1)] + row * width
    return found


def _fill(flat: Tensor, places: Sequence[np.ndarray], value: float) -> None:
    joined = np.concatenate(places) if places else np.empty(0, dtype=np.int64)
    if len(joined):
        flat.index_fill_(0, upload(joined, flat.device), value)


_Looking = Sequence[tuple[int, int, TokenBans]]  # number of the row in the batch and in the texts, its rules


def _complete(looking: _Looking, texts: Texts, width: int) -> list[Tensor]:
    """Return the places of tokens that would complete a banned sequence, one tensor for each length of sequences."""
    found = defaultdict[int, list[np.ndarray]](list)
    for row, text, bans in looking:
        for each in bans.sequences:
            told = np.broadcast_to(np.array([row, text]), (len(each), 2))
            found[each.shape[1]].append(np.concatenate((told, each), axis=1))
    return [_complete_one(upload(np.concatenate(each), texts.ids.device), texts, width) for each in found.values()]


def _complete_one(sequences: Tensor, texts: Texts, width: int) -> Tensor:
    """``sequences`` ([m, 2 + length]): the row in the batch, that in the texts, and the tokens."""
    before = texts.newest(sequences.shape[1] - 3).index_select(0, sequences[:, 1])
    fits = (sequences[:, 2:-1] == before).all(dim=1)
    last = torch.where(fits, sequences[:, -1].clamp(max=width - 1), width - 1)
    return sequences[:, 0] * width + last


def _repeat(looking: _Looking, texts: Texts, width: int) -> list[Tensor]:
    """Return the places of tokens with which a run would occur again, one tensor for each length of runs."""
    found = defaultdict[int, list[tuple[int, int]]](list)
    for row, text, bans in looking:
        if 0 < bans.ngram <= texts.sizes[text]:
            found[bans.ngram].append((row, text))
    return [
        _repeat_one(upload(np.array([row for row, _ in at]), texts.ids.device), own, size, width)
        for size, at in found.items()
        for own in (texts.select([text for _, text in at]),)
    ]


def _repeat_one(batch_rows: Tensor, texts: Texts, size: int, width: int) -> Tensor:
    """``batch_rows`` ([k]): the row in the batch of each text."""
    runs, newest = texts.ids.unfold(0, size, 1), texts.newest(size - 1)
    count = len(runs)
    rows, fits = texts.rows[:count], texts.left()[:count] >= size
    step = max(1, _MOST_ELEMENTS // count)
    for first in range(0, size - 1, step):
        end = min(first + step, size - 1)
        fits = fits & (runs[:, first:end] == newest[:, first:end].index_select(0, rows)).all(dim=1)
    last = torch.where(fits, texts.ids[size - 1 :].clamp(max=width - 1), width - 1)
    return batch_rows.index_select(0, rows) * width + last


def _ids(values: object) -> np.ndarray:
    return np.array(values, dtype=np.int64)


TEXT_PAGE = 256  # tokens
MOST_PAGES = 1 << 16  # 64 MiB; with more text open, steps run at once, by the host's own
_FIRST_PAGES = 64


@dataclass(frozen=True, slots=True)
class PagedTexts:
    """``TextSource`` of texts in pages; ``pages`` are those of each row."""

    ids: Tensor
    pages: Sequence[np.ndarray]
    sizes: np.ndarray

    def part(self, start: int, end: int) -> PagedTexts:
        return PagedTexts(self.ids, self.pages[start:end], self.sizes[start:end])

    def read(self) -> Texts:
        pages = upload(np.concatenate(self.pages), self.ids.device)
        spans = np.array([TEXT_PAGE * len(each) for each in self.pages], dtype=np.int64)
        return Texts.lay_out(self.ids.index_select(0, pages).view(-1).long(), spans, self.sizes)


class DeviceTexts:
    """Prompt and outputs by slot.

    A slot's pages are its next request's, or free after ``release``. ``ids``: int32 [pages, TEXT_PAGE].
    """

    def __init__(self, device: torch.device) -> None:
        self.ids = torch.zeros((0, TEXT_PAGE), dtype=torch.int32, device=device)
        self._pages: dict[int, np.ndarray] = {}
        self._free: list[int] = []

    def reserve(self, slots: np.ndarray, sizes: np.ndarray) -> bool:
        """Make room for texts of these sizes; False, and nothing is changed, if there is none."""
        held = {slot: self._pages.get(slot, np.empty(0, dtype=np.int64)) for slot in slots.tolist()}
        wanted = zip(held.items(), (-(-sizes // TEXT_PAGE)).tolist(), strict=True)
        lacking = {slot: count - len(pages) for (slot, pages), count in wanted if count > len(pages)}
        total = sum(lacking.values())
        if total > len(self._free) + MOST_PAGES - len(self.ids):
            return False
        if total > len(self._free):
            self._grow(total - len(self._free))
        for slot, count in lacking.items():
            taken = np.array([self._free.pop() for _ in range(count)], dtype=np.int64)
            self._pages[slot] = np.concatenate((held[slot], taken))
        return True

    def release(self, slot: int) -> None:
        """Free a slot's pages."""
        self._free.extend(self._pages.pop(slot, np.empty(0, dtype=np.int64)).tolist())

    def write(self, slot: int, start: int, ids: np.ndarray) -> None:
        """Write the part of a text that begins at ``start``, for which there is room."""
        places = np.arange(start, start + len(ids))
        known = np.where(ids < 0, NO_TOKEN, ids).astype(np.int32)
        self._put(
            self._pages[slot][places // TEXT_PAGE] * TEXT_PAGE + places % TEXT_PAGE, upload(known, self.ids.device)
        )

    def append(self, slots: np.ndarray, sizes: np.ndarray, tokens: Tensor) -> None:
        """Append a token [k] to each of these texts, for which there is room."""
        pages = np.array([self._pages[slot][size // TEXT_PAGE] for slot, size in zip(slots, sizes, strict=True)])
        self._put(pages * TEXT_PAGE + sizes % TEXT_PAGE, tokens.clamp(min=0).int())

    def select(self, slots: np.ndarray, sizes: np.ndarray) -> PagedTexts:
        """Return the texts of these slots, of these sizes."""
        pages = zip(slots.tolist(), (-(-sizes // TEXT_PAGE)).tolist(), strict=True)
        return PagedTexts(self.ids, [self._pages[slot][:count] for slot, count in pages], sizes)

    def _put(self, places: np.ndarray, ids: Tensor) -> None:
        self.ids.view(-1).index_copy_(0, upload(places, self.ids.device), ids)

    def _grow(self, pages: int) -> None:
        held = len(self.ids)
        count = min(MOST_PAGES, max(_FIRST_PAGES, 2 * held, held + pages))
        wider = torch.zeros((count, TEXT_PAGE), dtype=torch.int32, device=self.ids.device)
        wider[:held].copy_(self.ids)
        self.ids = wider
        self._free.extend(range(count - 1, held - 1, -1))
