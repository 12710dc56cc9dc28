"""Texts on the device of requests whose samplers look back, in pages, so that each takes what it is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trinity.stages.token_bans import NO_TOKEN, Texts
from trinity.stages.uploads import upload

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
