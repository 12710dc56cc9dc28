"""The door to a GPU and its copy stream, over a stand-in for torch.cuda that runs work as late as it may."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from support.lazy_cuda import LazyCuda, replace_cuda
from support.paths import PYTHON_PATH
from trinity.memory import device_blocks, native
from trinity.memory.block_memory import BlockMemory, BlockShape
from trinity.memory.devices import gpu_number, make_device_buffer, use_copy_stream, use_device, wait_for_default_stream


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> LazyCuda:
    return replace_cuda(monkeypatch)


class OnGpu(torch.Tensor):
    """A pool of the host that says it is on the second GPU."""

    device = torch.device("cuda", 1)

    def __new__(cls, values: torch.Tensor) -> OnGpu:
        return values.as_subclass(cls)


def test_the_stand_in_takes_what_torch_takes() -> None:
    """None of torch's own runs here: at least the names and parameters of the calls that trinity makes are its own."""
    stand_in, real = LazyCuda(), torch.cuda
    for name, wanted in {
        "Stream": ["device", "priority"],
        "Event": ["blocking"],
        "stream": ["stream"],
        "set_stream": ["stream"],
        "device": ["device"],
        "default_stream": ["device"],
        "current_stream": ["device"],
    }.items():
        made = getattr(real, name)
        of_torch = inspect.signature(made.__new__ if name in ("Stream", "Event") else made).parameters
        assert set(wanted) <= set(of_torch), f"torch.cuda.{name} takes {list(of_torch)}"
        assert set(wanted) <= set(inspect.signature(getattr(stand_in, name)).parameters), name
    for made, names in ((real.Stream, "wait_stream synchronize"), (real.Event, "record query synchronize")):
        assert all(hasattr(made, name) for name in names.split())


def test_names_of_devices() -> None:
    given: list[Any] = ["cuda:3", "cuda", torch.device("cuda", 1), torch.device("cuda"), 2, 0, "cpu", None, "meta"]
    assert [gpu_number(each) for each in given] == [3, 0, 1, 0, 2, 0, None, None, None]


def test_a_thread_is_on_the_device_within_the_door_alone(cuda: LazyCuda) -> None:
    with use_device("cuda:1"):
        assert cuda.current_device() == 1
        with use_device("cpu"):
            assert cuda.current_device() == 1
    assert cuda.current_device() == 0
    with pytest.raises(ValueError, match="inside"), use_device(1):
        raise ValueError("inside")
    assert cuda.current_device() == 0


def test_a_door_that_nobody_left_changes_no_other_thread() -> None:
    """A generator would be closed by whichever thread collects it, and set the device of that one."""
    door = use_device("cuda:1")
    assert type(door) is torch.cuda.device
    assert not hasattr(door, "__del__")


def test_a_cpu_needs_no_torch() -> None:
    use = "from trinity.memory.devices import use_device; use_device('cpu').__enter__()"
    code = f"import sys; {use}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": PYTHON_PATH}, capture_output=True, text=True)
    assert done.stdout.strip() == "False", done.stderr


def test_a_copy_is_done_on_return_and_waits_for_no_lane(cuda: LazyCuda) -> None:
    did: list[str] = []
    with cuda.device(1):
        cuda.launch(lambda: did.append("pool is made"))
        with cuda.stream(cuda.Stream(1)):
            cuda.launch(lambda: did.append("another lane's prefill"))
    with use_copy_stream("cuda:1"):
        cuda.launch(lambda: did.append("copy"), 1)
        assert did == []
    assert did == ["pool is made", "copy"]
    assert (cuda.current_device(), cuda.current_stream(1)) == (0, cuda.defaults[1])


def test_a_copy_between_two_gpus_is_done_on_both(cuda: LazyCuda) -> None:
    did: list[str] = []
    with use_copy_stream("cuda:0", "cuda:1"):
        with cuda.device(0):
            cuda.launch(lambda: did.append("gather"), 0)
        cuda.launch(lambda: did.append("scatter"), 1)
    assert sorted(did) == ["gather", "scatter"]


def test_a_copy_that_fails_is_waited_for_too(cuda: LazyCuda) -> None:
    did: list[str] = []

    def copy() -> None:
        with use_copy_stream(1):
            cuda.launch(lambda: did.append("half"), 1)
            raise ValueError("half-way")

    with pytest.raises(ValueError, match="half-way"):
        copy()
    assert did == ["half"]


def test_all_threads_share_a_copy_stream_for_each_gpu(cuda: LazyCuda) -> None:
    """torch has 32 streams, handed out in turns: one for each copy would now and then be that of a lane."""
    used: list[Any] = []

    def copy() -> None:
        with use_copy_stream("cuda:1"):
            used.append(cuda.current_stream())

    threads = [threading.Thread(target=copy) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    copy()
    assert len(set(used)) == 1
    assert used[0].priority < 0, "ahead of the kernels of lanes: it is short, and a request waits for it"


def test_copies_and_digests_pass_the_door(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """On whatever thread they are called: that of a core, of a transport, or one of asyncio's."""
    seen: list[tuple[int, bool]] = []

    def note(*_: Any) -> Any:
        seen.append((cuda.current_device(), cuda.current_stream() is cuda.defaults[1]))
        cuda.launch(lambda: seen.append((-1, True)), 1)
        return []

    monkeypatch.setattr(native, "_copy_tensors", note)
    monkeypatch.setattr(native, "_tensor_digests", note)
    pool = OnGpu(torch.zeros(4, 8, dtype=torch.uint8))
    native.copy_blocks(pool, np.zeros((4, 8), np.uint8), [0], [1])
    assert seen == [(1, False), (-1, True)], "on the device, not on the default stream, and done on return"
    seen.clear()
    native.compute_digests(pool, [0])
    assert seen == [(1, False), (-1, True)]
    seen.clear()
    monkeypatch.setattr(native, "gather_on_device", note)
    assert list(native.read_blocks(pool, [0])) == []
    assert seen == [(1, False), (-1, True)]
    seen.clear()
    monkeypatch.setattr(device_blocks, "choose_blocks", note)
    device_blocks.warm_up_blocks("cpu")
    device_blocks.warm_up_blocks("cuda:1")
    assert seen == [(1, False), (-1, True)], "kernels are tried as they will run, and a CPU has none"


def test_the_zeros_of_a_pool_are_there_when_it_is_made(cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """NIXL, UCX and CUDA IPC write into it without a look at any stream."""
    made: list[str] = []

    def zeros(*_: Any, device: str, **named: Any) -> torch.Tensor:
        with cuda.device(device):
            cuda.launch(lambda: made.append("zeros"))
        return OnGpu(torch.empty(1))

    monkeypatch.setattr(torch, "zeros", zeros)
    BlockMemory(BlockShape("kv", (1, 2, 1, 4, 8), torch.float32), 2, "cuda:1")
    assert made == ["zeros"]


def test_nothing_that_is_queued_still_uses_a_buffer_that_is_handed_out(
    cuda: LazyCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch gives freed memory to the next tensor of its stream at once; UCX and NIXL write without that stream."""
    did: list[str] = []

    def empty(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        assert (device, cuda.current_stream().priority) == ("cuda:1", -1)
        cuda.launch(lambda: did.append("the last use of this memory"))
        return OnGpu(torch.zeros(size, dtype=dtype))

    monkeypatch.setattr(torch, "empty", empty)
    assert len(make_device_buffer(8, 1)) == 8
    assert did == ["the last use of this memory"]


def test_pools_of_the_host_are_on_no_gpu() -> None:
    assert BlockMemory(BlockShape("kv", (8,), torch.float32), 2).gpu is None


def test_the_default_stream_of_one_device_is_waited_for(cuda: LazyCuda) -> None:
    did: list[int] = []
    for number in (0, 1):
        with cuda.device(number):
            cuda.launch(lambda number=number: did.append(number))  # type: ignore[misc]
    wait_for_default_stream("cuda:1")
    assert did == [1]
