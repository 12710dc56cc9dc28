"""Parts of a model whose tensors lie in one region that processes of a host share: one writes it, all read it.

The region has each tensor once, those of linear layers side by side as products merge them. Whoever takes a part makes
its modules without weights, as transformers itself does before it loads, and has them look into the region.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from trinity.memory.shared_regions import ALIGNMENT, SharedRegion, make_region


class TensorPlace(msgspec.Struct, frozen=True):
    """A tensor of a region: the names under which modules have it, and where it begins, in bytes."""

    names: tuple[str, ...]
    offset: int
    shape: tuple[int, ...]
    dtype: str


class PartTable(msgspec.Struct, frozen=True):
    """Places of all tensors of a part, and a digest of its modules, which must be alike where it is taken."""

    modules: str
    places: tuple[TensorPlace, ...]


class PartMismatch(Exception):
    """The region has other tensors than the modules."""


def move_part(model: Any, device: torch.device) -> tuple[SharedRegion, bytes]:
    """Move the tensors of ``model`` into a new region of a device; return it with its table.

    Raises ``OSError``, ``TransportError`` or torch's own error if there is no such memory; some tensors may have been
    moved then.
    """
    places, size = _lay_out(model)
    region, found = make_region(device, max(1, size)), _list_tensors(model)
    for place in places:
        region.write(place.offset, found.pop(place.names[0]))
        for name in place.names[1:]:
            del found[name]
        _put(model, place, region)  # the tensor's own memory is free before the next is copied
    region.seal()
    return region, msgspec.msgpack.encode(PartTable(_describe_modules(model), places))


def fill_part(model: Any, region: SharedRegion, table: bytes) -> None:
    """Have the modules of ``model``, made on the meta device, use the tensors of a region.

    Raises ``PartMismatch``, ``msgspec.DecodeError`` if these are not its tensors.
    """
    given, found = msgspec.msgpack.decode(table, type=PartTable), _list_tensors(model)
    shapes = {name: (place.shape, place.dtype) for place in given.places for name in place.names}
    if given.modules != _describe_modules(model) or shapes.keys() != found.keys():
        raise PartMismatch("its modules are others")
    if any(tuple(each.shape) != shapes[name][0] for name, each in found.items()):
        raise PartMismatch("its tensors have other shapes")
    for place in given.places:
        if place.offset % ALIGNMENT or place.offset > region.size:
            raise PartMismatch("its tensors are not where they should be")
        _put(model, place, region)
    left = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor)]
    if any(each.is_meta for each in left):
        raise PartMismatch("a module has a tensor that is neither parameter nor buffer")


def _lay_out(model: Any) -> tuple[tuple[TensorPlace, ...], int]:
    """Lay the tensors of ``model`` one behind the other; return their places, and the bytes that all need."""
    names: dict[int, list[str]] = {}
    tensors = _list_tensors(model)
    for name in _order(tensors):
        names.setdefault(id(tensors[name]), []).append(name)
    places, offset = [], 0
    for each in names.values():
        tensor = tensors[each[0]]
        dtype = str(tensor.dtype).removeprefix("torch.")
        places.append(TensorPlace(tuple(each), offset, tuple(tensor.shape), dtype))
        offset += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    return tuple(places), offset


def _order(names: Iterable[str]) -> list[str]:
    """Order tensors so that weights of the linear layers of one module are side by side, and so are their biases."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parts = name.split(".")
        groups.setdefault((".".join(parts[:-2]), parts[-1]), []).append(name)
    return [name for group in groups.values() for name in group]


def _list_tensors(model: Any) -> dict[str, Tensor]:
    """List parameters and buffers by name, parameters first; a tied one has several names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def _put(model: Any, place: TensorPlace, region: SharedRegion) -> None:
    """Have modules use a tensor of the region; those that are tied use one parameter."""
    value = region.view(place.offset, place.shape, getattr(torch, place.dtype))
    parameter = nn.Parameter(value, requires_grad=False)
    for name in place.names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))
        setattr(module, leaf, value if leaf in buffers else parameter)


def _describe_modules(model: Any) -> str:
    """Digest the names and classes of all modules, and which attention they use."""
    found = hashlib.sha256()
    for name, module in model.named_modules():
        attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
        found.update(f"{name} {type(module).__qualname__} {attention};".encode())
    return found.hexdigest()
