"""Freed memory goes back to the system: measured as resident pages of this process, in one of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from math import inf
from pathlib import Path

import numpy as np
import pytest
import torch

from trinity.memory import freed_memory
from trinity.memory.block_memory import BlockMemory, BlockShape

KEPT = """
import threading
from pathlib import Path
import runpy, sys
release_freed_memory = runpy.run_path(sys.argv[1])["release_freed_memory"]

def resident():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))

import ctypes
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
kept = []

def work():
    pieces = []
    for _ in range(500):
        pieces.append(libc.malloc(100_000))
        ctypes.memset(ctypes.c_void_p(pieces[-1]), 1, 100_000)
        kept.append(libc.malloc(64))  # lives on
    for piece in pieces:
        libc.free(piece)

before = resident()
thread = threading.Thread(target=work)
thread.start(); thread.join()
held = resident() - before
assert release_freed_memory()
print(held >> 20, (resident() - before) >> 20)
"""


find_trim = freed_memory._find_trim


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(freed_memory, "_last_s", -inf)
    yield
    find_trim.cache_clear()


@pytest.mark.skipif(freed_memory._find_trim() is None, reason="the C library has no malloc_trim")
def test_heaps_that_small_pieces_keep_open_are_given_back() -> None:
    command = [sys.executable, "-c", KEPT, str(freed_memory.__file__)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    kept, left = map(int, run.stdout.split())
    assert kept > 30, "the C library kept nothing: this test has lost its subject"
    assert left < 10


def test_it_is_done_once_in_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, now = list[int](), [100.0]
    monkeypatch.setattr(freed_memory, "_find_trim", lambda: asked.append)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    assert freed_memory.release_freed_memory()
    assert freed_memory.release_at_times(), "what loading freed does not count"
    assert not freed_memory.release_at_times()
    now[0] += 0.99
    assert not freed_memory.release_at_times()
    now[0] += 0.02
    assert freed_memory.release_at_times()
    assert asked == [0, 0, 0]


def test_another_c_library_keeps_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    find_trim.cache_clear()
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert not freed_memory.release_freed_memory()
    assert not freed_memory.release_at_times()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts pages by Linux's smaps")
def test_the_blocks_of_a_pool_cost_nothing_before_they_are_used() -> None:
    """Fails with the allocator's zeros (at 75afd96), which a heap that has freed as much before has to clear."""
    held = np.ones(30 << 20, dtype=np.uint8)
    del held  # from now on the allocator serves 30 MiB from its heap
    used = [np.ones(1 << 20, dtype=np.uint8) for _ in range(30)]
    last = np.ones(1 << 18, dtype=np.uint8)  # keeps the heap open
    del used
    freed_memory.release_freed_memory()
    before = resident()
    pool = BlockMemory(BlockShape("kv", (1 << 18,), torch.float32), 24)
    empty = resident() - before
    pool.tensor[3] = 1.0
    assert empty < 2 << 20
    assert 1 << 20 <= resident() - before < 6 << 20
    assert int(pool.raw[3].max()) > 0  # type: ignore[index]
    assert not pool.raw[4].any()  # type: ignore[index]
    assert last.all()


def resident() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))
