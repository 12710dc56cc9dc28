"""Copies of modules that a model shares with others of the program, so that what alters a model alters no other.

transformers keeps some modules as globals, such as ``transformers.activations.gelu_pytorch_tanh``, and models hold
these themselves: a hook, another class or another mode of one would be that of every model that holds it.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn


def own_modules(model: nn.Module) -> None:
    """Replace the modules of ``model`` that its code holds elsewhere by copies; one that is held twice stays one."""
    shared = {id(each) for found in _list_shared(model) for each in found.modules()}
    copies: dict[int, Any] = {}
    for module in list(model.modules()):
        for name, child in module._modules.items():
            if id(child) in shared:
                module._modules[name] = copy.deepcopy(child, copies)


def _list_shared(model: nn.Module) -> Iterator[nn.Module]:
    """List modules that are globals of the packages ``model`` comes from, or defaults of its classes' arguments."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__}
    packages = {kind.__module__.partition(".")[0] for kind in kinds}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages:
            yield from _pick_modules(vars(module).values())
    for kind in kinds:
        make = vars(kind).get("__init__")
        yield from _pick_modules(getattr(make, "__defaults__", None) or ())
        yield from _pick_modules((getattr(make, "__kwdefaults__", None) or {}).values())


def _pick_modules(values: Iterable[Any]) -> Iterator[nn.Module]:
    """Pick the modules among ``values`` and in the plain collections among them."""
    for value in list(values):
        kind = type(value)  # ``isinstance`` would ask a lazy object, which imports or warns
        if issubclass(kind, nn.Module):
            yield value
        elif kind in (dict, list, tuple):
            held = value.values() if kind is dict else value
            yield from (each for each in list(held) if issubclass(type(each), nn.Module))
