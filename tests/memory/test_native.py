"""Copies and digests of blocks: the extension, numpy, torch and plain integers say the same."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trinity.errors import ConfigError
from trinity.memory import native
from trinity.memory.digest_function import DIGEST_MIX, DIGEST_STEP, SLICE_WORDS
from trinity.simulation import compiled_engine

KINDS = ("extension", "arrays")
INT64 = 1 << 63


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What does the work."""
    if request.param == "arrays":
        monkeypatch.setattr(native, "extension", None)
    elif not native.has_extension():
        pytest.skip(native.describe())
    return str(request.param)


class Without:
    """The fallback, for the length of a block; a fixture would not be undone between hypothesis' examples."""

    def __enter__(self) -> None:
        self.extension, native.extension = native.extension, None

    def __exit__(self, *_: object) -> None:
        native.extension = self.extension


def pool(blocks: int, block_bytes: int, seed: int = 0) -> native.Rows:
    return np.random.default_rng(seed).integers(0, 256, (blocks, block_bytes), dtype=np.uint8)


def digest_by_integers(piece: bytes) -> int:
    """The definition in csrc/blocks/digest.cpp, in Python's own integers."""

    def mixed(x: int) -> int:
        x ^= x >> 32
        x = x * DIGEST_MIX % (1 << 64)
        return x ^ (x >> 32)

    total = len(piece) * DIGEST_STEP
    for place, first in enumerate(range(0, len(piece), 8), 1):
        word = int.from_bytes(piece[first : first + 8].ljust(8, b"\0"), "little")
        total += mixed((word + place * DIGEST_STEP) % (1 << 64))
    value = mixed(total % (1 << 64))
    return value - (1 << 64) if value >= INT64 else value


# ---------------------------------------------------------------- it is there


@pytest.mark.skipif("CI" not in os.environ, reason="only CI insists on a C++ compiler: CI is not set")
def test_the_extension_is_built_where_ci_runs() -> None:
    assert native.has_extension(), native.describe()


def test_what_does_the_work_is_said(kind: str) -> None:
    words = {"extension": "csrc (", "arrays": "numpy and torch: "}
    assert native.describe().startswith(words[kind])
    assert native.has_extension() is (kind == "extension")


def test_the_extension_is_the_one_that_this_checkout_calls() -> None:
    if not native.has_extension():
        pytest.skip(native.describe())
    assert native.extension.API == native.API
    assert native.extension.instructions() in ("avx512", "avx2", "portable")


# ---------------------------------------------------------------- copies


@st.composite
def copies(draw: st.DrawFn) -> tuple[int, int, int, list[int], list[int], tuple[int, int] | None]:
    """(source blocks, target blocks, block bytes, to, from, within)."""
    theirs, ours = draw(st.integers(1, 24)), draw(st.integers(1, 24))
    block_bytes = draw(st.sampled_from([1, 7, 8, 64, 100, 4096, 5000]))
    to = draw(st.lists(st.integers(0, ours - 1), unique=True, max_size=ours))
    if draw(st.booleans()):
        to.sort()  # runs
    start = [draw(st.integers(0, theirs - 1)) for _ in to]
    if draw(st.booleans()):
        start = [min(theirs - 1, index) for index in range(len(to))]
    within = None
    if draw(st.booleans()):
        offset = draw(st.integers(0, block_bytes))
        within = (offset, draw(st.integers(0, block_bytes - offset)))
    return theirs, ours, block_bytes, to, start, within


@given(copies(), st.sampled_from([1, 2, 4]))
@example((1, 1, 8, [], [], None), 1)
def test_a_copy_moves_just_what_is_asked_for(asked: tuple, threads: int) -> None:  # type: ignore[type-arg]
    theirs, ours, block_bytes, to, start, within = asked
    source, before = pool(theirs, block_bytes, 1), pool(ours, block_bytes, 2)
    offset, length = within or (0, block_bytes)
    wanted = before.copy()
    for target, origin in zip(to, start, strict=True):
        wanted[target, offset : offset + length] = source[origin, offset : offset + length]
    by_array, by_extension, by_tensor = before.copy(), before.copy(), torch.from_numpy(before.copy())
    with Without():
        assert native.copy_blocks(by_array, source, to, start, within) == len(to) * length
    native.copy_blocks(by_extension, source, to, start, within, threads=threads)
    tensors = (by_tensor, torch.from_numpy(source))
    native._copy_tensors(*tensors, np.array(to, np.int64), np.array(start, np.int64), within)
    for found in (by_array, by_extension, by_tensor.numpy()):
        assert np.array_equal(found, wanted)


@pytest.mark.parametrize("block_bytes", [1 << 14, (1 << 16) + 24, 1 << 20])
@pytest.mark.parametrize("threads", [1, 3])
def test_large_copies_pass_by_the_cache_and_are_whole(kind: str, block_bytes: int, threads: int) -> None:
    count = (4 << 20) // block_bytes
    source, target = pool(count, block_bytes), pool(count + 1, block_bytes, 5)
    order = np.random.default_rng(3).permutation(count)
    last = target[count].copy()
    for start in (order, np.arange(count)):
        native.copy_blocks(target, source, start[::-1], start[::-1], threads=threads)
        assert np.array_equal(target[:count], source)
        target[:count] = 0
    native.copy_blocks(target, source, order, order, (8, block_bytes - 9), threads=threads)
    assert np.array_equal(target[:count, 8:-1], source[:, 8:-1])
    assert not target[:count, :8].any()
    assert not target[:count, -1].any()
    assert np.array_equal(target[count], last)


@pytest.mark.parametrize(
    ("to", "start", "within", "said"),
    [
        ([0, 1], [0], None, "one of each"),
        ([4], [0], None, "pool of 4"),
        ([-1], [0], None, "pool of 4"),
        ([0], [5], None, "pool of 5"),
        ([0], [-1], None, "pool of 5"),
        ([1, 2, 1], [0, 1, 2], None, "twice"),
        ([0], [0], (8, 9), "not within"),
        ([0], [0], (-1, 2), "not within"),
        ([0], [0], (0, -1), "not within"),
        ([0], ["a"], None, "whole numbers"),
        ([[0]], [0], None, "one row"),
        ([1 << 70], [0], None, "whole numbers"),
    ],
)
def test_a_wrong_copy_is_refused_before_a_byte_moves(
    kind: str, to: list[int], start: list[int], within: tuple[int, int] | None, said: str
) -> None:
    source, target = pool(5, 16), np.zeros((4, 16), np.uint8)
    for ours in (target, torch.from_numpy(target)):
        with pytest.raises(ConfigError, match=said):
            native.copy_blocks(ours, source, to, start, within)
    assert not target.any()


def test_pools_that_do_not_fit_are_refused(kind: str) -> None:
    fixed = pool(4, 16)
    fixed.flags.writeable = False
    wide = pool(4, 32)
    for target, source, said in (
        (pool(4, 16), wide, "do not fit"),
        (fixed, pool(4, 16), "read-only"),
        (pool(4, 16), wide[:, ::2], "contiguous"),
        (torch.zeros(4, 32)[:, ::2], pool(4, 16), "contiguous"),
        (np.empty((0, 0), np.uint8), np.empty((0, 0), np.uint8), "blocks of 0 bytes"),
    ):
        with pytest.raises(ConfigError, match=said):
            native.copy_blocks(target, source, [0], [0])


def test_within_one_pool_no_block_is_read_and_written(kind: str) -> None:
    one = pool(8, 16)
    before = one.copy()
    for to, start in (([1], [1]), ([1, 2], [0, 1])):
        with pytest.raises(ConfigError, match="overlap"):
            native.copy_blocks(one, one, to, start)
    with pytest.raises(ConfigError, match="overlap"):
        native.copy_blocks(one[1:], one[:-1], [0], [0])
    assert np.array_equal(one, before)
    native.copy_blocks(one, one, [4, 5], [0, 1])
    assert np.array_equal(one[4:6], before[:2])


def test_a_copy_lets_go_of_the_interpreter(kind: str) -> None:
    """Several at once, and each is whole: the threads of the extension's own pool are taken by one of them."""
    sources = [pool(64, 1 << 16, seed) for seed in range(4)]
    targets = [np.zeros_like(source) for source in sources]
    order = list(range(63, -1, -1))
    threads = [
        threading.Thread(target=native.copy_blocks, args=(target, source, order, order), kwargs={"threads": 3})
        for target, source in zip(targets, sources, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(np.array_equal(target, source) for target, source in zip(targets, sources, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_threads_of_its_own() -> None:
    source, target = pool(8, 1 << 19), np.zeros((8, 1 << 19), np.uint8)
    native.copy_blocks(target, source, range(8), range(8), threads=2)
    process = os.fork()
    if process == 0:
        target[:] = 0
        native.copy_blocks(target, source, range(8), range(8), threads=2)
        os._exit(0 if np.array_equal(target, source) else 1)
    assert os.waitpid(process, 0)[1] == 0


# ---------------------------------------------------------------- digests


@given(st.binary(max_size=200), st.integers(0, 7), st.integers(0, 7))
def test_every_way_computes_the_same_digest(piece: bytes, before: int, after: int) -> None:
    raw = np.frombuffer(bytes(before) + piece + bytes(after) + b"\1", np.uint8).copy()[None]
    within = (before, len(piece))
    wanted = [digest_by_integers(piece)]
    assert native.compute_digests(raw, [0], within) == wanted
    assert native._tensor_digests(torch.from_numpy(raw), np.zeros(1, np.int64), within) == wanted
    with Without():
        assert native.compute_digests(raw, [0], within) == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_digests_of_many_blocks_in_any_order(kind: str, dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(pool(6, 2048 * 12)).view(dtype).view(6, 3, -1)
    order = [5, 0, 3, 3]
    rows = tensor.view(6, -1).view(torch.uint8).numpy()
    assert native.compute_digests(tensor, order) == [digest_by_integers(rows[each].tobytes()) for each in order]
    assert native.compute_digests(tensor, np.array(order)) == native.compute_digests(rows, order)
    assert native.compute_digests(tensor, []) == []


def test_a_long_block_goes_slice_by_slice(kind: str) -> None:
    rows = pool(2, 8 * SLICE_WORDS + 8 * 77 + 5)
    assert native.compute_digests(rows, [1]) == [digest_by_integers(rows[1].tobytes())]


@given(st.integers(1, 64), st.data())
def test_what_changes_a_block_changes_its_digest(words: int, data: st.DataObject) -> None:
    row = pool(1, 8 * words, words)
    (before,) = native.compute_digests(row, [0])
    bit = data.draw(st.integers(0, 64 * words - 1))
    flipped = row.copy()
    flipped[0, bit // 8] ^= 1 << bit % 8
    assert native.compute_digests(flipped, [0]) != [before]
    left, right = (data.draw(st.integers(0, words - 1)) for _ in range(2))
    swapped = row.copy().view(np.uint64)
    swapped[0, [left, right]] = swapped[0, [right, left]]
    assert (native.compute_digests(swapped, [0]) != [before]) is (left != right)


def test_zeros_of_different_lengths_differ(kind: str) -> None:
    zeros = np.zeros((1, 4096), np.uint8)
    found = [native.compute_digests(zeros, [0], (0, length))[0] for length in range(4097)]
    assert len(set(found)) == len(found)
    top_bits = np.zeros((1, 16), np.uint64)  # an even number of them cancels in a plain weighted sum
    top_bits[0, :2] = 1 << 63
    assert native.compute_digests(top_bits, [0]) != native.compute_digests(np.zeros_like(top_bits), [0])


@pytest.mark.parametrize(("blocks", "within"), [([3], None), ([-1], None), ([0], (0, 17)), ([0], (17, 0))])
def test_a_wrong_digest_is_refused(kind: str, blocks: list[int], within: tuple[int, int] | None) -> None:
    for source in (pool(3, 16), torch.from_numpy(pool(3, 16))):
        with pytest.raises(ConfigError):
            native.compute_digests(source, blocks, within)
    with pytest.raises(ConfigError):
        native._tensor_digests(torch.from_numpy(pool(3, 16)), np.array(blocks), within)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: copies and digests on it")
@pytest.mark.parametrize("within", [None, (16, 4096), (8, 24), (3, 5)])
def test_a_gpu_does_the_same(within: tuple[int, int] | None) -> None:
    source, target = pool(64, 1 << 16), pool(64, 1 << 16, 1)
    to, start = np.random.default_rng(4).permutation(64), np.random.default_rng(5).permutation(64)
    theirs, ours = torch.from_numpy(source).cuda(), torch.from_numpy(target).cuda()
    native.copy_blocks(ours, theirs, to, start, within)
    native.copy_blocks(target, source, to, start, within)
    assert np.array_equal(ours.cpu().numpy(), target)
    assert native.compute_digests(ours, to, within) == native.compute_digests(target, to, within)


@pytest.mark.skipif(not native.has_extension(), reason="the extension is not built")
def test_it_has_the_twin_that_this_checkout_calls() -> None:
    assert not compiled_engine.why_unavailable()


HELD_AT_EXIT = """
import subprocess
import sys
import threading
from trinity import _native

held = _native.sim_linear(1.0, 1.0, 1.0, 1.0, 1.0)
threading.Thread(target=lambda cost: threading.Event().wait(), args=(held,), daemon=True).start()
"""


@pytest.mark.skipif(not native.has_extension(), reason=native.describe())
@pytest.mark.skipif("libasan" in os.environ.get("LD_PRELOAD", ""), reason="make asan keeps the lists of what is held")
def test_a_process_that_ends_while_a_thread_holds_something_is_quiet() -> None:
    done = subprocess.run([sys.executable, "-c", HELD_AT_EXIT], capture_output=True, text=True, check=True)
    assert done.stderr == "", "the user's thread is no fault of the bindings"
