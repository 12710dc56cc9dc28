"""Random draws of a load, which are not its user's: constructors of some models draw what weights take the place of.

torch has one random state for all threads. To put it back behind a load would give another thread, which drew
meanwhile, the same numbers once more. So draws of this thread alone are made from a generator of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_FACTORIES: set[Callable[..., Any]] = {torch.rand, torch.randn, torch.randint, torch.randperm}
_OF_TENSORS: set[Callable[..., Any]] = {
    *(torch.normal, torch.bernoulli, torch.multinomial),
    *(torch.Tensor.bernoulli, torch.Tensor.multinomial, torch.Tensor.bernoulli_),
    *(torch.Tensor.uniform_, torch.Tensor.normal_, torch.Tensor.random_, torch.Tensor.exponential_),
    *(torch.Tensor.cauchy_, torch.Tensor.geometric_, torch.Tensor.log_normal_),
}


@contextmanager
def own_draws() -> Iterator[None]:
    """Draw on the CPU from a generator of this context, in this thread, while the context lasts."""
    with _OwnDraws():
        yield


class _OwnDraws(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if given.get("generator") is None and _is_drawn_here(func, args, given):
            given["generator"] = self._generator
        return func(*args, **given)


def _is_drawn_here(func: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> bool:
    """Tell if a call draws from the CPU's generator: on another device, or on none, it would refuse that one.

    The functions of ``torch.nn.init`` come here with their ``generator``, None by default.
    """
    if func in _FACTORIES:
        return torch.device(given.get("device") or torch.get_default_device()).type == "cpu"
    held = next((each for each in (*args, *given.values()) if isinstance(each, torch.Tensor)), None)
    return (func in _OF_TENSORS or "generator" in given) and (held is None or held.device.type == "cpu")
