"""Weights in huge pages: which memory is asked for, and that it stays what it was."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trinity.stages.kernels import huge_pages, linear
from trinity.stages.kernels.huge_pages import HUGE_PAGE_BYTES, find_dense_runs, use_huge_pages


@pytest.mark.parametrize(
    ("pieces", "wanted"),
    [
        ([], []),
        ([(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)], [(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)]),
        ([(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES - 4096)], [(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)]),
        ([(HUGE_PAGE_BYTES + 8, 100)], []),
        (
            [(3 * HUGE_PAGE_BYTES + 8, HUGE_PAGE_BYTES), (HUGE_PAGE_BYTES + 8, HUGE_PAGE_BYTES)],
            [(HUGE_PAGE_BYTES, 4 * HUGE_PAGE_BYTES)],
        ),
        (
            [(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES), (9 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)],
            [(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES), (9 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)],
        ),
        (
            [(HUGE_PAGE_BYTES, 9), (9 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)],
            [(9 * HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES)],
        ),
        (
            [(HUGE_PAGE_BYTES + i * HUGE_PAGE_BYTES // 4, HUGE_PAGE_BYTES // 4) for i in range(4)],
            [(HUGE_PAGE_BYTES, HUGE_PAGE_BYTES)],
        ),
    ],
)
def test_runs_that_are_half_full_at_least(pieces: list[tuple[int, int]], wanted: list[tuple[int, int]]) -> None:
    assert list(find_dense_runs(pieces)) == wanted


def _setting(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    (folder / "enabled").write_text(text)
    monkeypatch.setattr(huge_pages, "_SETTING", folder / "enabled")


def test_nothing_is_asked_for_where_the_system_says_never(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = [(HUGE_PAGE_BYTES * 1000, HUGE_PAGE_BYTES)]
    _setting(monkeypatch, tmp_path, "always madvise [never]\n")
    assert use_huge_pages(asked) == 0
    monkeypatch.setattr(huge_pages, "_SETTING", tmp_path / "nowhere")
    assert use_huge_pages(asked) == 0


def _huge_bytes(address: int) -> int:
    """Of the mapping that ``address`` is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            low, high = (int(bound, 16) for bound in bounds.groups())
            inside = low <= address < high
        elif inside and line.startswith("AnonHugePages:"):
            return int(line.split()[1]) * 1024
    return 0


def _collapses() -> bool:
    """Can this system make a huge page of small ones, and has it one free?"""
    with mmap.mmap(-1, 3 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"1" * 3 * HUGE_PAGE_BYTES)
        place = ctypes.c_char.from_buffer(memory)
        start = -(-ctypes.addressof(place) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        del place
        return (
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(HUGE_PAGE_BYTES), huge_pages._COLLAPSE)
            == 0
        )


@pytest.mark.skipif(
    not huge_pages._is_allowed() or not _collapses(), reason="no huge page is free here, or Linux is older than 6.1"
)
def test_memory_that_is_in_use_already_is_moved_and_keeps_its_bytes() -> None:
    with mmap.mmap(-1, 6 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_NOHUGEPAGE)
        numbers = np.frombuffer(memory, np.uint8)
        numbers[:] = np.arange(6 * HUGE_PAGE_BYTES) % 251
        start = -(-int(numbers.ctypes.data) // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        assert use_huge_pages([(start, 4 * HUGE_PAGE_BYTES)]) == 4 * HUGE_PAGE_BYTES
        assert np.array_equal(numbers, np.arange(6 * HUGE_PAGE_BYTES) % 251)
        found = _huge_bytes(start + HUGE_PAGE_BYTES)
        del numbers
    assert found >= HUGE_PAGE_BYTES


def test_packed_layers_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(linear, "is_packing_faster", lambda dtype: True)
    monkeypatch.setattr(linear, "use_huge_pages", lambda pieces: asked.extend(pieces))
    layers = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32)).requires_grad_(False)
    rows = torch.randn(3, 64)
    wanted = layers(rows)
    linear.pack_weights(layers)
    torch.testing.assert_close(layers(rows), wanted, atol=1e-5, rtol=1e-5)
    assert [size >= weights * 4 for (_, size), weights in zip(asked, (64 * 96, 96 * 32), strict=True)] == [True, True]
    assert all(address % 64 == 0 and address > 0 for address, _ in asked)
