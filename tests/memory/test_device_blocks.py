"""Copies and digests of blocks by Triton (in its interpreter) and by torch are numpy's; wrong ones are found."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from trinity.memory import device_blocks, native
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.memory.device_blocks import (
    DeviceBlocks,
    TorchBlocks,
    choose_blocks,
    find_block_fault,
    gather_on_device,
    upload_numbers,
)
from trinity.memory.digest_function import digest_array, sum_tensor_words
from trinity.memory.triton_blocks import TritonBlocks, split_into_grains

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
WAYS: dict[str, Callable[[], DeviceBlocks]] = {"triton": TritonBlocks, "torch": TorchBlocks}


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> Iterator[None]:
    choose_blocks.cache_clear()
    yield
    choose_blocks.cache_clear()


def on_device(array: Any) -> torch.Tensor:
    return torch.from_numpy(array).to(DEVICE, copy=True)


@st.composite
def pieces(draw: st.DrawFn) -> tuple[int, int, int, list[int], list[int]]:
    """(unit bytes, offset, length, target units, source units) of pools of 9 units."""
    grain = draw(st.sampled_from([1, 8, 16]))
    unit = draw(st.integers(1, 40)) * grain
    offset = draw(st.integers(0, unit // grain)) * grain
    length = draw(st.integers(0, (unit - offset) // grain)) * grain
    to = draw(st.lists(st.integers(0, 8), unique=True, max_size=4))
    return unit, offset, length, to, [draw(st.integers(0, 8)) for _ in to]


@pytest.mark.parametrize("way", WAYS)
@given(pieces(), st.integers(0, 2), st.integers(0, 99))
@settings(max_examples=15)
@example((40000, 16, 36016, [3, 0], [1, 1]), 0, 1)  # several slices of 16 KiB
@example((5, 0, 5, [], []), 0, 1)
def test_copies_and_digests_are_numpys(
    way: str, asked: tuple[int, int, int, list[int], list[int]], shift: int, seed: int
) -> None:
    """``shift``: bytes by which the pools' addresses miss a multiple of 16."""
    unit, offset, length, to, start = asked
    target, source = np.random.default_rng(seed).integers(0, 256, (2, 9 * unit + 2), dtype=np.uint8)
    ours, theirs = (on_device(each)[shift : shift + 9 * unit].view(9, unit) for each in (target, source))
    units = upload_numbers(np.array([to, start], dtype=np.int64), DEVICE)
    blocks: DeviceBlocks = WAYS[way]()
    blocks.copy(ours, theirs, units, offset, length)
    wanted, held = (each[shift : shift + 9 * unit].reshape(9, unit).copy() for each in (target, source))
    wanted[to, offset : offset + length] = held[start, offset : offset + length]
    assert np.array_equal(ours.cpu().numpy(), wanted)
    assert blocks.digest(theirs, units[1], offset, length) == [
        digest_array(held[number, offset : offset + length]) for number in start
    ]


def test_blocks_in_fp8_are_bytes_like_others() -> None:
    """Every byte there is, NaN among them, is copied and summed as it stands."""
    pools = [BlockMemory(BlockShape("kv", (2, 2, 1, 16, 8), torch.float8_e4m3fn), 3) for _ in range(2)]
    for number, pool in enumerate(pools):
        pool.tensor.view(torch.uint8).flatten().copy_(torch.arange(3 * 512).roll(number).to(torch.uint8))
    target, source = (pool.piece(0, 512).contiguous().view(torch.uint8).to(DEVICE) for pool in pools)
    blocks = TritonBlocks()
    blocks.copy(target, source, upload_numbers(np.array([[2, 0], [1, 2]], dtype=np.int64), DEVICE), 0, 512)
    assert torch.equal(target[[2, 0]], source[[1, 2]])
    held = [digest_array(source[number].cpu().numpy()) for number in (2, 1)]
    assert blocks.digest(source, upload_numbers(np.array([2, 1], dtype=np.int64), DEVICE), 0, 512) == held


def test_a_digest_of_several_programs() -> None:
    """A block of two slices of 128 KiB and a bit, and a number of blocks in torch that does not fit at once."""
    rows = np.random.default_rng(0).integers(0, 256, (3, (2 << 17) + 24), dtype=np.uint8)
    units = upload_numbers(np.array([2, 0], dtype=np.int64), DEVICE)
    wanted = [digest_array(rows[2]), digest_array(rows[0])]
    assert TritonBlocks().digest(on_device(rows), units, 0, rows.shape[1]) == wanted
    assert TorchBlocks().digest(on_device(rows), units, 0, rows.shape[1]) == wanted


def test_digests_in_torch_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (8, 100), dtype=np.uint8)
    gathered: list[int] = []

    def watched(pieces: torch.Tensor) -> torch.Tensor:
        gathered.append(len(pieces))
        return sum_tensor_words(pieces)

    monkeypatch.setattr(device_blocks, "sum_tensor_words", watched)
    monkeypatch.setattr(device_blocks, "BYTES_SUMMED_AT_ONCE", 300)
    found = TorchBlocks().digest(torch.from_numpy(rows), torch.arange(8), 0, 100)
    assert (found, gathered) == ([digest_array(row) for row in rows], [3, 3, 2])


def test_grains_are_as_large_as_all_sizes_allow() -> None:
    assert split_into_grains(1 << 40, 32, 48) == ([1 << 36, 2, 3], 8, 2)
    assert split_into_grains(1 << 40, 32, 40) == ([1 << 37, 4, 5], 8, 1)
    assert split_into_grains(1 << 40, 32, 41) == ([1 << 40, 32, 41], 1, 1)


@given(pieces(), st.integers(0, 2))
@settings(max_examples=15)
@example((64, 8, 48, [8, 0, 3], [1, 1, 8]), 0)
def test_pieces_are_gathered_as_numpys(asked: tuple[int, int, int, list[int], list[int]], shift: int) -> None:
    unit, offset, length, _, start = asked
    source = np.random.default_rng(unit).integers(0, 256, 9 * unit + 2, dtype=np.uint8)
    rows = on_device(source)[shift : shift + 9 * unit].view(9, unit)
    found = gather_on_device(rows, np.array(start, dtype=np.int64), offset, length)
    assert np.array_equal(found, source[shift : shift + 9 * unit].reshape(9, unit)[start, offset : offset + length])


# ---------------------------------------------------------------- tried before it is used


class Wrong(TorchBlocks):
    """Right but for one thing."""

    def __init__(self, how: str) -> None:
        self.how = how

    def copy(self, target: torch.Tensor, source: torch.Tensor, units: torch.Tensor, offset: int, length: int) -> None:
        if self.how == "raises":
            raise RuntimeError("no kernel image is available for execution on the device")
        super().copy(target, source, units, offset, length - (self.how == "a byte less"))
        if self.how == "beside":
            target[units[0, 0], offset + length] ^= 1

    def digest(self, rows: torch.Tensor, units: torch.Tensor, offset: int, length: int) -> list[int]:
        found = super().digest(rows, units, offset, length)
        return found[::-1] if self.how == "digests" else found


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("raises", "fail on this machine: RuntimeError: no kernel image"),
        ("a byte less", "wrong copies of 40000 bytes and copies of 4088"),
        ("beside", "wrong copies of 40000"),
        ("digests", "wrong digests of 40000 bytes and digests of"),
    ],
)
def test_a_wrong_kernel_is_found_out(how: str, why: str) -> None:
    assert why in str(find_block_fault(DEVICE, Wrong(how)))


def test_triton_and_torch_are_right_here() -> None:
    assert find_block_fault(DEVICE) is None
    assert find_block_fault(DEVICE, TorchBlocks()) is None


@pytest.mark.parametrize("how", ["", "digests"])
def test_a_device_is_tried_once_and_what_is_wrong_is_said(
    how: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from trinity.memory import triton_blocks

    tried: list[str] = []

    def make() -> TorchBlocks:
        tried.append(how)
        return Wrong(how)

    monkeypatch.setattr(triton_blocks, "TritonBlocks", make)
    with caplog.at_level(logging.WARNING, "trinity"):
        found = {type(choose_blocks(DEVICE)) for _ in range(3)}
    assert found == ({TorchBlocks} if how else {Wrong})
    assert len(tried) == (1 if how else 2), "one to try, and where it is right one to use"
    assert [how] * len(caplog.messages) == (["digests"] if how else [])
    assert all("copies and digests on" in line for line in caplog.messages)


def test_without_triton_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_blocks, "find_spec", lambda name: None)
    assert isinstance(choose_blocks(DEVICE), TorchBlocks)


def test_pools_of_one_gpu_go_by_what_is_chosen_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between devices, and on a CPU, torch copies."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(device_blocks, "choose_blocks", chosen.append)
    here, there = (torch.empty(0, device="meta") for _ in range(2))
    one, other = (type("Pool", (), {"device": torch.device("cuda", n)})() for n in range(2))
    device_blocks._choose_for(other, other)
    assert chosen == [torch.device("cuda", 1)]
    for target, source in ((one, other), (here, there), (one, here)):
        assert isinstance(device_blocks._choose_for(target, source), TorchBlocks)


def test_addresses_will_do() -> None:
    """For pools of which there is no tensor, such as a peer's."""
    if DEVICE.type == "cuda":
        pytest.skip("numpy's memory is not the GPU's")
    source = np.random.default_rng(1).integers(0, 256, (4, 64), dtype=np.uint8)
    target, units = np.zeros_like(source), torch.tensor([[0, 3], [2, 1]])
    assert device_blocks.copy_by_address(DEVICE, target.ctypes.data, source.ctypes.data, units.numpy(), 64, (16, 32))
    assert np.array_equal(target[[0, 3], 16:48], source[[2, 1], 16:48])
    assert not target[1:3].any()
    assert not target[:, 48:].any()


def test_addresses_need_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_blocks, "find_spec", lambda name: None)
    assert not device_blocks.copy_by_address(DEVICE, 1, 1, np.zeros((2, 1), dtype=np.int64), 64, (0, 64))


def test_a_pool_says_its_kernels_are_not_the_extensions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool on a GPU is checked like any other before one of these is asked."""
    asked: list[tuple[list[list[int]], int, int]] = []
    monkeypatch.setattr(
        native, "copy_on_device", lambda target, source, units, *piece: asked.append((units.tolist(), *piece))
    )
    ours, theirs = (torch.zeros((4, 64), dtype=torch.uint8) for _ in range(2))
    numbers = (np.array([1, 2]), np.array([3, 0]))
    assert native._copy_tensors(ours, theirs, *numbers, (16, 32)) == 64
    assert asked == [([[1, 2], [3, 0]], 16, 32)]
