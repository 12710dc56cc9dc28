"""LargestArray: watches torch's operations on tensors without content, and finds the largest that one makes."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class LargestArray(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context that finds the most elements of any tensor that this thread's operations give, in ``numbers``.

    ``floats``: of those that are no integers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = self.floats = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(each, torch.Tensor):
                self.numbers = max(self.numbers, each.numel())
                self.floats = max(self.floats, each.numel() if each.is_floating_point() else 0)
        return made
