"""Regions outlast whoever made them, nobody can write to them, and nothing of them is left open."""

from __future__ import annotations

import faulthandler
import gc
import logging
import mmap
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support import fake_cuda
from support.fake_cuda import Fake
from support.fake_regions import use_fake_gpu
from support.paths import PYTHON_PATH
from trinity.errors import TransportError
from trinity.memory import shared_regions
from trinity.memory.cuda_driver import CudaDriver
from trinity.memory.shared_regions import HostRegion, SharedRegion, can_share, make_region, open_region
from trinity.memory.weight_shelf import WeightShelf, take_turn

SIZE = 1 << 20


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_cuda.build(tmp_path_factory.mktemp("cuda"))


@pytest.fixture(params=["cpu", "cuda:0"])
def device(request: pytest.FixtureRequest, library: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A CPU, and a GPU that is a stand-in: its driver's memory is files of the host's."""
    use_fake_gpu(library, monkeypatch.setattr)
    yield str(request.param)
    calls = Fake(library).calls()
    for made, ended in (("cuMemMap", "cuMemUnmap"), ("cuMemAddressReserve", "cuMemAddressFree")):
        assert calls.count(made) == calls.count(ended), "a mapping of the GPU was left"
    imported = calls.count("cuMemCreate") + calls.count("cuMemImportFromShareableHandle")
    assert calls.count("cuMemRelease") == imported, "a handle of the GPU was left"


def noise(count: int = 999) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(1))


def written(device: str, values: torch.Tensor) -> SharedRegion:
    made = make_region(device, SIZE)
    made.write(128, values)
    made.write(SIZE - 64, torch.arange(8))
    made.seal()
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_what_is_written_is_read_by_whoever_has_the_descriptor(device: str, dtype: torch.dtype) -> None:
    values = (noise() * 100).to(dtype).view(27, 37)
    made = written(device, values.t())  # of any strides
    other = open_region(device, made.file, made.size)
    for region in (made, other):
        assert torch.equal(region.view(128, (37, 27), dtype), values.t())
        assert torch.equal(region.view(SIZE - 64, (8,), torch.int64), torch.arange(8))
    assert made.view(128, (37, 27), dtype).data_ptr() != other.view(128, (37, 27), dtype).data_ptr()
    assert made.view(256, (), torch.float32).shape == ()


def test_a_tensor_keeps_the_mapping_and_nothing_else_does(device: str) -> None:
    values = noise()
    kept = written(device, values).view(128, (999,), torch.float32)
    assert torch.equal(kept, values), "the region itself is gone by now"


def test_it_outlasts_the_process_that_made_it(device: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        maker = os.fork()
        if not maker:
            made = written(device, noise())
            socket.send_fds(theirs, [made.size.to_bytes(8, "big")], [made.file])
            signal.pause()
        size, (file,), _, _ = socket.recv_fds(ours, 8, 1)
    opened = open_region(device, file, int.from_bytes(size, "big"))
    os.close(file)
    found = opened.view(128, (999,), torch.float32)
    os.kill(maker, signal.SIGKILL)
    os.waitpid(maker, 0)
    again = open_region(device, opened.file, opened.size)  # as an instance that starts later does
    for each in (found, again.view(128, (999,), torch.float32)):
        assert torch.equal(each, noise())


def test_nobody_writes_to_a_sealed_file() -> None:
    made = written("cpu", noise())
    writable = os.open(f"/proc/self/fd/{made.file}", os.O_RDWR)
    try:
        with pytest.raises(PermissionError):
            os.pwrite(writable, b"x", 0)
        with pytest.raises(PermissionError):
            os.ftruncate(writable, 0)
        with pytest.raises(PermissionError):
            mmap.mmap(writable, SIZE)
    finally:
        os.close(writable)


def test_a_write_by_mistake_ends_the_process_and_harms_no_other() -> None:
    made = written("cpu", noise())
    writer = os.fork()
    if not writer:
        faulthandler.disable()
        made.view(128, (999,), torch.float32).add_(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(writer, 0)[1]) == -signal.SIGSEGV
    assert torch.equal(made.view(128, (999,), torch.float32), noise())


@pytest.mark.parametrize("fault", ["unsealed", "too small", "no memory file"])
def test_a_descriptor_that_could_change_is_refused(fault: str, tmp_path: Path) -> None:
    """Whoever can truncate a file ends those that have mapped it."""
    if fault == "no memory file":
        (tmp_path / "file").write_bytes(bytes(SIZE))
        file = os.open(tmp_path / "file", os.O_RDONLY)
    else:
        made = HostRegion.make(SIZE)
        if fault == "too small":
            made.seal()
        file = os.dup(made.file)
    with pytest.raises((OSError, ValueError)):
        open_region("cpu", file, SIZE * 2 if fault == "too small" else SIZE)
    gc.collect()
    os.close(file)  # it is the caller's still


# ---------------------------------------------------------------- a GPU that cannot


def test_a_host_without_a_gpu_shares_none_of_its_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> CudaDriver:
        return CudaDriver("libcuda-that-nobody-has.so")

    monkeypatch.setattr(shared_regions, "_load_driver", missing)
    shared_regions._find_fault.cache_clear()
    with caplog.at_level(logging.WARNING, "trinity"):
        assert (can_share("cuda"), can_share("cpu")) == (False, True)
    assert "processes share no weights on cuda:0: TransportUnavailable: cuda_ipc needs the driver" in caplog.text


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemExportToShareableHandle", "cuMemMap", "cuMemSetAccess"])
def test_a_driver_that_refuses_is_a_typed_error(library: str, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    use_fake_gpu(library, monkeypatch.setattr)
    monkeypatch.setenv("FAKE_CUDA_FAIL", f"{call}:2")
    with pytest.raises(TransportError, match=f"{call} failed: CUDA_ERROR_OUT_OF_MEMORY"):
        make_region("cuda:0", SIZE)


@pytest.mark.parametrize(("lacking", "able"), [("", True), ("102", False), ("103", False)])
def test_a_gpu_says_if_it_shares(library: str, monkeypatch: pytest.MonkeyPatch, lacking: str, able: bool) -> None:
    use_fake_gpu(library, monkeypatch.setattr)
    monkeypatch.setenv("FAKE_CUDA_LACKS", lacking)
    assert can_share("cuda:0") is able


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_gpu_is_tried_before_it_is_trusted(library: str, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """What torch makes of a mapping may differ from release to release."""
    use_fake_gpu(library, monkeypatch.setattr)

    def make(memory: object, gpu: int) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("pointer resides on host memory and is not registered with any CUDA device")
        return torch.zeros(4 << 20, dtype=torch.uint8)

    monkeypatch.setattr(shared_regions, "_make_device_tensor", make)
    assert not can_share("cuda:0")


MAKER = """
import signal, sys, torch
from trinity.memory.shared_regions import make_region
from trinity.memory.weight_shelf import take_turn
with take_turn(sys.argv[1], "part") as turn:
    region = make_region("cuda", 1 << 20)
    region.write(128, torch.arange(999))
    region.seal()
    turn.leave(region.size, b"", region.file)
print("left", flush=True)
signal.pause()
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU: memory of a process that is killed")
def test_memory_of_a_gpu_outlasts_the_process_that_made_it(tmp_path: Path) -> None:
    shelf = WeightShelf(tmp_path / "weights.sock")
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    command = [sys.executable, "-c", MAKER, shelf.path]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        assert maker.stdout.readline() == b"left\n"
        with take_turn(shelf.path, "part") as turn:
            assert turn.part is not None
            found = open_region("cuda", turn.file, turn.part.size).view(128, (999,), torch.int64)
        for _ in range(2):
            assert torch.equal(found.cpu(), torch.arange(999))
            maker.kill()
            maker.wait()
    shelf.close()
