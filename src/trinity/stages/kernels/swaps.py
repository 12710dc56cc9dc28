"""Swapped classes: put before a class of transformers or torch, recognised, taken off for a while.

A swapped module has a class of trinity's with its own class as the base, which the member ``swapped_from`` names. A
class that is ``irreversible`` has lost the weights that its own forward needs.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from types import FunctionType
from typing import Any

from torch.nn.modules import module as torch_module

_SWAPPED_FROM = "swapped_from"
_RECORDING = "transformers.utils.output_capturing"  # its hooks read what a layer gives, if somebody asks for it
Hooks = tuple[dict[int, Any], ...]


def make_swapped_class(base: Any, kind: Any, **members: Any) -> Any:
    """Make the class that modules of ``kind`` get: ``base`` before ``kind``, and ``members``."""
    return type(kind.__name__, (base, kind), {_SWAPPED_FROM: kind, "__module__": kind.__module__, **members})


@cache
def put_before(base: Any, kind: Any, forward: str = "original_forward") -> Any:
    """Make the class of ``base`` before ``kind`` once, with the forward of ``kind`` by the name ``forward``."""
    return make_swapped_class(base, kind, **{forward: kind.forward})


def find_own_class(module: Any) -> Any:
    """Return the class that ``module`` had before all swaps."""
    kind = type(module)
    while _SWAPPED_FROM in vars(kind):
        kind = vars(kind)[_SWAPPED_FROM]
    return kind


@contextmanager
def without_swaps(model: Any) -> Iterator[int]:
    """Give the modules of ``model`` their own classes for a while; yields the number of modules that were swapped.

    Packed linear layers and dropped encoder layers stay.
    """
    swapped = [(module, type(module)) for module in model.modules() if _can_return(module)]
    for module, _ in swapped:
        module.__class__ = find_own_class(module)
    try:
        yield len(swapped)
    finally:
        for module, kind in swapped:
            module.__class__ = kind


def drop_swaps(model: Any) -> None:
    """Give the modules of ``model`` their own classes for good."""
    for module in model.modules():
        if _can_return(module):
            module.__class__ = find_own_class(module)


def _can_return(module: Any) -> bool:
    kind = type(module)
    return _SWAPPED_FROM in vars(kind) and not getattr(kind, "irreversible", False)


def is_altered(module: Any) -> bool:
    """Tell if ``module`` itself holds a method, such as a forward of its own in place of its class's."""
    kind = type(module)
    return any(isinstance(getattr(kind, name, None), FunctionType) for name in vars(module))


def own_hooks(module: Any) -> Hooks:
    """Return the forward hooks of ``module``, as live dicts; torch has no public way to ask for them."""
    return module._forward_pre_hooks, module._forward_hooks


def copy_with(module: Any, children: Mapping[str, Any]) -> Any:
    """Copy ``module`` with these children in place of, or beside, its own; the two share all else."""
    twin = copy.copy(module)
    twin._modules = {**module._modules, **children}  # to set a child of such a copy sets the original's
    return twin


def collect_hooks(modules: Iterable[Any]) -> Hooks:
    """Collect the forward hooks of ``modules``, as live dicts, and those that torch runs for every module."""
    own = [hooks for each in modules for hooks in own_hooks(each)]
    return (torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks, *own)


def has_hooks(hooks: Hooks) -> bool:
    """Tell if ``hooks`` hold one that may change or watch a result; transformers' recording of outputs does not count.

    Recorders of a layer's own output stay in force, and those of attention weights record None without kernels too.
    """
    return any(hooks) and any(each.__module__ != _RECORDING for held in hooks for each in held.values())
