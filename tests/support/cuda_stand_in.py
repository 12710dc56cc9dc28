"""A stand-in for a GPU on a CPU: tensors on "cuda:0" with real numbers, and captures that fail as CUDA's do.

Streams, events and devices are those of ``lazy_cuda``; operators run at once, whatever the stream.

Operators of mixed devices raise. What makes the host wait for the device (a number read, a size that depends on values,
a copy between the two) is counted, and refused while a capture is underway. ``torch.cuda.graph`` is torch's own.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from support.lazy_cuda import LazyCuda, LazyStream, replace_cuda

DEVICE = torch.device("cuda", 0)
REFUSED = "CUDA error: operation not permitted when stream is capturing"
BROKEN = "CUDA error: operation failed due to a previous error during capture"
READS = {
    *("_local_scalar_dense", "nonzero", "equal", "masked_select", "bincount", "repeat_interleave"),
    *("_unique", "_unique2", "unique_dim", "unique_consecutive"),
}


COPIES = {"_to_copy", "copy_", "index"}  # the last copies indices of the host
_AS_TEXT = {Tensor.tolist, Tensor.__repr__, Tensor.__format__}


class DeviceTensor(Tensor):
    """A tensor that says it is on the GPU; ``held`` has its numbers."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> DeviceTensor:
        strides, offset = held.stride(), held.storage_offset()
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.shape, strides=strides, storage_offset=offset, dtype=held.dtype, device=DEVICE
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} runs outside of the stand-in")


class _Bindings(TorchFunctionMode):
    """What torch's Python bindings do in place of operators, so that no dispatch mode sees it: lists and uploads."""

    def __init__(self, device: CudaStandIn) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _AS_TEXT and isinstance(args[0], DeviceTensor):
            return func(args[0].to("cpu"), *args[1:], **kwargs)
        place = kwargs.get("device")
        if func is Tensor.new_tensor and isinstance(args[0], DeviceTensor):
            func, args, place = torch.tensor, args[1:], place or DEVICE
        if func not in (torch.tensor, torch.as_tensor) or torch.device(place or "cpu").type == "cpu":
            return func(*args, **kwargs)
        self._device.wait("copy")
        with torch.utils._python_dispatch._disable_current_modes():
            return DeviceTensor(func(*args, **{**kwargs, "device": None}))


class CudaStandIn(TorchDispatchMode):
    """The device, as this thread sees it.

    - ``cuda``: streams, events and devices.
    - ``waits``: operators for which the host waited.
    - ``underway``: pools that the device's allocator records into; ``host_underway``: and that of pinned memory, which
      only a capture that ends well gives up.
    - ``captures``: captures that began; ``replays``: replays of all graphs.
    - ``capturing``: graphs of all threads that are being captured.
    - ``refused_wait``: set once a wait for the whole device was refused.
    """

    def __init__(self, cuda: LazyCuda) -> None:
        super().__init__()
        # The place that torch has for fake tensors: with it no factory starts CUDA itself.
        self._mode_key = torch._C._TorchDispatchModeKey.FAKE
        self.cuda = cuda
        self.waits: list[str] = []
        self.underway: set[Any] = set()
        self.host_underway: set[Any] = set()
        self.captures = self.replays = self.handles = 0
        self.capturing: list[Graph] = []
        self.refused_wait = threading.Event()
        self._threads = threading.local()

    @property
    def capture(self) -> Graph | None:
        """The graph that this thread captures."""
        found: Graph | None = getattr(self._threads, "capture", None)
        return found

    @capture.setter
    def capture(self, graph: Graph | None) -> None:
        self._threads.capture = graph

    def synchronize(self, *_: object) -> None:
        """Wait for the whole device: not while any of its streams captures, and those captures are broken then."""
        for each in self.capturing:
            each.is_broken = True
        if self.capturing:
            self.refused_wait.set()
            raise RuntimeError(REFUSED)

    def empty_cache(self) -> None:
        """Give memory back, which torch's allocator takes for a fault of its own while anything is captured."""
        if self.capturing:
            raise RuntimeError("captures_underway.empty() INTERNAL ASSERT FAILED")

    @contextmanager
    def enter_thread(self) -> Iterator[None]:
        """Have this thread, too, compute with the stand-in: modes of torch are a thread's own."""
        with _Bindings(self), self:
            yield

    @property
    def current(self) -> LazyStream:
        """The thread's stream."""
        return self.cuda.current_stream()

    @classmethod
    def is_infra_mode(cls) -> bool:
        return True

    def break_capture(self) -> None:
        """Refuse an operation that no look before the capture has seen."""
        if self.capture is not None:
            self.capture.is_broken = True
            raise RuntimeError(REFUSED)

    def wait(self, name: str) -> None:
        """Make the host wait for the device, which a capture refuses."""
        self.break_capture()
        self.waits.append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if "scaled_dot_product" not in func.overloadpacket.__name__:
            with self:
                made = func.decompose(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if self.capture is not None and self.capture.is_broken:
            raise RuntimeError(BROKEN)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        is_there = any(isinstance(each, DeviceTensor) for each in tensors)
        if not is_there and torch.device(kwargs.get("device") or "cpu").type == "cpu":
            return self._run_here(func, args, kwargs)
        return self._run_there(func, args, kwargs, tensors)

    def _run_here(self, func: Any, args: Any, kwargs: Any) -> Any:
        name = func.overloadpacket.__name__
        if name == "is_pinned":
            return False
        return args[0].clone() if name == "_pin_memory" else func(*args, **kwargs)

    def _run_there(self, func: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> Any:
        name = func.overloadpacket.__name__
        place = kwargs.get("device")
        to_host = place is not None and torch.device(place).type == "cpu"
        mixed = any(not isinstance(each, DeviceTensor) and each.ndim for each in tensors)
        if name in COPIES and (mixed or to_host):
            self.wait("copy")
        elif mixed and any(isinstance(each, DeviceTensor) for each in tensors):
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found cuda:0 and cpu")
        if _needs_values(func, args, kwargs):
            self.wait(name)
        return self._carry_out(
            func, args, kwargs, to_host or (name == "copy_" and not isinstance(args[0], DeviceTensor))
        )

    def _carry_out(self, func: Any, args: Any, kwargs: Any, to_host: bool) -> Any:
        own = {id(each.held): each for each in tree_leaves((args, kwargs)) if isinstance(each, DeviceTensor)}
        if "device" in kwargs:
            kwargs["device"] = torch.device("cpu")
        bare, named = tree_map(_unwrap, (args, kwargs))
        made = func(*bare, **named)
        if self.capture is not None:
            self.capture.tape.append((func, bare, named, made))
        if to_host:
            return made

        def wrap(leaf: Any) -> Any:
            found = own.get(id(leaf))
            return (
                DeviceTensor(leaf) if found is None and isinstance(leaf, Tensor) else leaf if found is None else found
            )

        return tree_map(wrap, made)


def _unwrap(leaf: Any) -> Any:
    return leaf.held if isinstance(leaf, DeviceTensor) else leaf


def _needs_values(func: Any, args: Any, kwargs: Any) -> bool:
    name = func.overloadpacket.__name__
    if "index" in name and isinstance(args[1], list | tuple):
        return any(each is not None and each.dtype == torch.bool for each in args[1])
    return name in READS and kwargs.get("output_size") is None


class Graph:
    """``torch.cuda.CUDAGraph`` over a tape of operators; allocators are told as torch 2.11 to 2.13 do."""

    def __init__(self, device: CudaStandIn) -> None:
        self._device = device
        self.tape: list[tuple[Any, Any, Any, Any]] = []
        self.is_broken = False

    def capture_begin(self, pool: Any, **further: Any) -> None:
        if pool in self._device.underway | self._device.host_underway:
            raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
        self._device.underway.add(pool)
        self._device.host_underway.add(pool)
        self._pool, self._device.capture = pool, self
        self._device.capturing.append(self)
        self._device.captures += 1

    def capture_end(self) -> None:
        self._device.capture = None
        self._device.capturing.remove(self)
        if self.is_broken:
            raise RuntimeError(BROKEN)
        self._device.underway.remove(self._pool)
        self._device.host_underway.remove(self._pool)

    def replay(self) -> None:
        self._device.replays += 1
        with torch.utils._python_dispatch._disable_current_modes(), torch.inference_mode():
            for func, args, kwargs, before in self.tape:
                for old, new in zip(tree_leaves(before), tree_leaves(func(*args, **kwargs)), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


@pytest.fixture
def cuda_stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaStandIn]:
    """Run the test's thread with the stand-in in place of CUDA."""
    device = CudaStandIn(replace_cuda(monkeypatch))

    def new_handle(*given: Any) -> Any:
        device.handles += 1
        return (0, device.handles)

    def end_allocate(index: int, pool: Any) -> None:
        if pool not in device.underway:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        device.underway.remove(pool)

    parts = {
        "graph_pool_handle": new_handle,
        "CUDAGraph": lambda: Graph(device),
        "mem_get_info": lambda *given: (8 << 30, 8 << 30),
        "synchronize": device.synchronize,
        "empty_cache": device.empty_cache,
    }
    zero = ("memory_reserved", "memory_allocated")
    for name, part in parts.items() | {(name, lambda *given: 0) for name in zero}:
        monkeypatch.setattr(torch.cuda, name, part)
    below = {"_host_emptyCache": lambda: None, "_cuda_endAllocateToPool": end_allocate}
    for name, part in {**below, "_cuda_releasePool": lambda index, pool: None}.items():
        monkeypatch.setattr(torch._C, name, part, raising=False)
    with _cuda_guard(), device.enter_thread():
        yield device


@contextmanager
def _cuda_guard() -> Iterator[None]:
    """Give torch's bindings the CPU's guard for CUDA devices, which does nothing, in place of none or of CUDA's own.

    ``x[0]`` and ``copy_`` of a tensor on the GPU begin by making its device the current one: a torch for CUDA would
    look for a driver.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * 2).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[1]
    guards[1] = guards[0]
    try:
        yield
    finally:
        guards[1] = before


def move_to_device(module: Any) -> None:
    """Put a module's weights and buffers on the stand-in."""
    with torch.inference_mode():
        for each in module.modules():
            for held in (each._parameters, each._buffers):
                held.update({name: DeviceTensor(value.detach()) for name, value in held.items() if value is not None})
