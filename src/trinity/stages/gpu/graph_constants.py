"""Constants of a recorded call: tensors that the host knows, uploaded before the capture begins.

Encoders make positions and sequence lengths out of grids. They read a grid on the host, and mix tensors made of it with
pixels; a CUDA graph can contain neither that read nor the copy to the device. While a call is recorded, tensors of the
host therefore stay there, where a read costs nothing, and each that meets a tensor of the device is replaced by a copy
of it, made when the call first ran. torch.compile lifts constants out of graphs in the same way.

A read of what only the device knows is refused in that first run, so that no capture fails for it. Modes of torch hold
for one thread: what other threads do meanwhile is not looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from trinity.stages.block_tables import upload

_READING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_INDEXING = {  # operators by name
    *("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"),
    *("aten::_unsafe_index.Tensor", "aten::_unsafe_index_put"),
}
_FROM_DATA = {torch.tensor, torch.as_tensor, torch.asarray}


class Unrecordable(RuntimeError):
    """A call does what no CUDA graph can contain, whatever its inputs' values."""


class GraphConstants:
    """Constants of one call that runs on ``device``; they must outlive its recording."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copies: dict[tuple[torch.dtype, torch.Size, bytes], Tensor] = {}
        self._sealed = False

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Run this thread's operators over lifted constants.

        Raises ``Unrecordable`` from an operator that reads the device or, once sealed, needs another constant.
        """
        with _HostTensors(), _Lifting(self, self._device):
            yield

    def seal(self) -> None:
        """Refuse further constants: a capture can copy none."""
        self._sealed = True

    def lift(self, tensor: Tensor) -> Tensor:
        """Return the device's copy of a tensor of the host, found by its numbers."""
        numbers: bytes = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        key = (tensor.dtype, tensor.shape, numbers)
        if key not in self._copies:
            if self._sealed:
                raise Unrecordable("it makes other numbers of the same inputs in each run")
            self._copies[key] = upload(tensor, self._device)
        return self._copies[key]


class _HostTensors(TorchFunctionMode):
    """Leaves on the host what is made of numbers there: ``torch.tensor(numbers, device="cuda")`` is a copy too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FROM_DATA:
            kwargs.pop("device", None)
        elif func is Tensor.new_tensor:
            own, *args = args
            func, kwargs = torch.tensor, {"dtype": own.dtype, **kwargs, "device": None}
        return func(*args, **kwargs)


class _Lifting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators of the host there, and those of ``device`` over lifted constants."""

    def __init__(self, constants: GraphConstants, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constants, self._device = constants, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self:  # inference mode gives composite operators whole; what reads may be a part of one
            made = func.decompose(*args, **kwargs)
        if made is not NotImplemented:
            return made
        leaves, form = tree_flatten((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        if not any(self._is_there(each) for each in tensors):
            return _run_on_host(func, args, kwargs) if tensors else func(*args, **kwargs)
        if _reads(func, args, kwargs) or self._writes_host(func, args, kwargs):
            raise Unrecordable(f"{func} reads on the host what only the device knows")
        leaves = [self._lift(each) for each in leaves]
        args, kwargs = tree_unflatten(leaves, form)
        return func(*args, **kwargs)

    def _is_there(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._device.type

    def _lift(self, leaf: Any) -> Any:
        return self._constants.lift(leaf) if isinstance(leaf, Tensor) and not self._is_there(leaf) else leaf

    def _writes_host(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        """Tell if the operator writes numbers of the device into a tensor of the host, or makes such a one."""
        place = kwargs.get("device")
        if place is not None and torch.device(place).type != self._device.type:
            return True
        arguments = func._schema.arguments  # which of them it writes, torch says nowhere else
        given = dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
        written = [given.get(each.name) for each in arguments if each.alias_info and each.alias_info.is_write]
        return any(isinstance(each, Tensor) and not self._is_there(each) for each in tree_leaves(written))


def _run_on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator over tensors of the host; one that would copy them to the device leaves them there."""
    if func.name() == "aten::_pin_memory":
        return args[0]
    if func.name() == "aten::_to_copy":
        kwargs = {name: value for name, value in kwargs.items() if name not in ("device", "non_blocking", "pin_memory")}
    return func(*args, **kwargs)


def _reads(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Tell if the host must know values on the device to run the operator, to return a number or to know a size."""
    if func.name() in _INDEXING:
        return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
    if func.name() == "aten::repeat_interleave.Tensor":
        return kwargs.get("output_size") is None
    return not _READING.isdisjoint(func.tags)
