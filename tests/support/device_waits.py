"""A stand-in for a GPU for which the host never waits: torch's "meta" device, and an error where CUDA would wait.

Its operators know shapes and compute nothing. CUDA waits for the device where a value is read, where a shape hangs on
values (``nonzero``, masks), and in every copy between host and device that is not asynchronous and from or to pinned
memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = {
    "_local_scalar_dense",
    "is_nonzero",
    "equal",
    "nonzero",
    "masked_select",
    "_unique2",
    "unique_dim",
    "unique_consecutive",
    "bincount",
}
DEVICE = torch.device("meta")


class DeviceWait(RuntimeError):
    """The host would have waited for the device."""


class _Watch(TorchDispatchMode):
    def __init__(self, pinned: dict[int, Tensor]) -> None:
        super().__init__()
        self._pinned = pinned
        self.copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(each.is_meta for each in given):
            if name in READS:
                raise DeviceWait(f"{name} reads a value")
            if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
                masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
                if masks:
                    raise DeviceWait(f"{name} by a mask")
        if name in ("_to_copy", "copy_") and self._crosses(name, args, kwargs) and given[-1].is_meta:
            return given[0]  # to the host: there is nothing to be copied
        return func(*args, **kwargs)

    def _crosses(self, name: str, args: Any, kwargs: Any) -> bool:
        """Tell if a copy is between host and device. Raises ``DeviceWait`` if it is synchronous."""
        source = args[1] if name == "copy_" else args[0]
        goal = args[0].device if name == "copy_" else torch.device(kwargs.get("device") or source.device)
        if source.device == goal or (name == "copy_" and source.ndim == 0):
            return False
        asynchronous = kwargs.get("non_blocking", args[2] if name == "copy_" and len(args) > 2 else False)
        pinned = _place(source) in self._pinned or (name == "copy_" and _place(args[0]) in self._pinned)
        if not (asynchronous and pinned):
            raise DeviceWait(f"{name} of {tuple(source.shape)} from {source.device} to {goal}")
        self.copies += 1
        return True


class _Indices(TorchFunctionMode):
    """Indices of the host, which torch's Python bindings copy to the device by themselves, and wait."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__getitem__, Tensor.__setitem__) and args[0].is_meta:
            for each in args[1] if isinstance(args[1], tuple) else args[1:2]:
                if isinstance(each, list | np.ndarray) or (isinstance(each, Tensor) and each.ndim and not each.is_meta):
                    raise DeviceWait(f"indices of the host, {type(each).__name__}")
        return func(*args, **(kwargs or {}))


def _place(tensor: Tensor) -> int:
    """Where a tensor and its views lie; 0 on the device."""
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


class _Event:
    """Of a device that is never done."""

    def __init__(self, **_: Any) -> None: ...

    def record(self) -> None: ...

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise DeviceWait("an event is waited for")


@contextmanager
def no_device_waits() -> Iterator[_Watch]:
    """Raise ``DeviceWait`` where the host would wait for ``DEVICE``."""
    pinned, empty, tensor = dict[int, Tensor](), torch.empty, torch.tensor

    def pin(tensor: Tensor) -> Tensor:
        found = tensor.clone()
        pinned[_place(found)] = found
        return found

    def make_empty(*shape: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        found = empty(*shape, **kwargs)
        if pin_memory:
            pinned[_place(found)] = found
        return found

    def make_tensor(values: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        return tensor(values, **kwargs).to(device)  # a copy as on CUDA, which torch spares the stand-in

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "pin_memory", pin)
        patch.setattr(torch, "empty", make_empty)
        patch.setattr(torch.cuda, "Event", _Event)
        patch.setattr(torch, "tensor", make_tensor)
        with _Watch(pinned) as watch, _Indices():
            yield watch
