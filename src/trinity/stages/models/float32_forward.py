"""The forward of a half-precision model in float32, with weights converted module by module."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trinity.stages.kernels.gpu.fp8_linear import Fp8Linear
from trinity.stages.kernels.linear import PackedLinear

_SMALL = 1 << 19  # values: a norm, a convolution, an indexer's weights


@contextmanager
def in_float32(model: Any) -> Iterator[None]:
    """Compute in float32 what ``model`` computes, with the same weights, while the context lasts.

    A module has its weights in float32 only during its own call, so that no more than one of them is held twice: the
    output head of a model of 150,000 tokens and a width of 4,096 takes 2.5 GB, a copy of the model would take twice
    the model. Small modules have theirs for as long as the context lasts: other modules ask them for their dtype, or
    take their weights and do not call them. Embeddings convert the rows that they look up. Kernels must be off
    (``without_swaps``); packed linear layers are unpacked in the same way.
    """
    with ExitStack() as undone:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                undone.callback(module.register_forward_hook(_give_float32).remove)
            elif _has_half(module):
                _convert_calls(module, undone)
        yield


def _has_half(module: Any) -> bool:
    held = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    return any(each.is_floating_point() and each.dtype != torch.float32 for each in held)


def _give_float32(module: Any, given: Any, found: Tensor) -> Tensor:
    return found.float()


def _convert_calls(module: Any, undone: ExitStack) -> None:
    """Convert the weights of ``module`` before each of its calls, and put its own back after it, or when undone.

    Those of a small one are converted at once, and put back when undone.
    """
    kind = type(module)
    own_parameters = dict(module.named_parameters(recurse=False, remove_duplicate=False))
    own_buffers = dict(module.named_buffers(recurse=False, remove_duplicate=False))

    def convert(*call: Any) -> None:
        parameters, buffers = (
            {name: _to_float32(each) for name, each in held.items()} for held in (own_parameters, own_buffers)
        )
        if kind is PackedLinear:
            parameters["weight"] = module.packed.to_dense().float()
        elif isinstance(module, Fp8Linear):
            parameters["weight"] = module.to_dense()
        put({name: nn.Parameter(each, requires_grad=False) for name, each in parameters.items()} | buffers)

    def restore(*call: Any) -> None:
        put(own_parameters | own_buffers)

    def put(held: dict[str, Tensor]) -> None:
        for name, each in held.items():
            setattr(module, name, each)

    if kind is PackedLinear:
        module.__class__ = PackedLinear.swapped_from
        undone.callback(setattr, module, "__class__", kind)
    undone.callback(restore)
    if sum(each.numel() for each in (*module.parameters(recurse=False), *module.buffers(recurse=False))) <= _SMALL:
        convert()
        return
    undone.callback(module.register_forward_pre_hook(convert).remove)
    undone.callback(module.register_forward_hook(restore).remove)


def _to_float32(held: Tensor) -> Tensor:
    return held.float() if held.is_floating_point() and not held.is_meta else held
