"""Attention that tells which layers of a step's KV are written: the hook for transfers that overlap with prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trinity.errors import StageError
from trinity.stages.attention.interface import AttentionBackend, LayerAsk, PagedRows

OnLayers = Callable[[int, int], None]


class ToldAttention:
    """A backend around another, for one forward: ``told(first, end)`` after every ``group`` of ``layers`` layers.

    A layer's keys and values are in their blocks once its attention has run; on an accelerator, once the event behind
    it has been reached, which is asked for at every further layer and waited for in ``finish``. Layers that hold NaN or
    infinity are never told of: their reader would keep them, and a mask does not stop NaN. Raises ``StageError`` then.
    """

    def __init__(self, inner: AttentionBackend, group: int, layers: int, told: OnLayers) -> None:
        self.inner, self.group, self.layers, self.told = inner, group, layers, told
        self._first = self._next = 0
        self._sum: Tensor | None = None
        self._waiting: deque[tuple[int, int, Tensor, Any]] = deque()

    def attend(self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], ask: LayerAsk) -> Tensor:
        """See ``AttentionBackend``. Layers that come out of order are left for the end of the step."""
        seen = self.inner.attend(rows, cache, qkv, ask)
        self._written(*qkv[1:], ask.layer)
        return seen

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``Halves``, which the inner one then has."""
        inner: Any = self.inner
        inner.write(rows, cache, key, value, layer)
        self._written(key, value, layer)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, ask: LayerAsk) -> Tensor:
        """See ``Halves``."""
        inner: Any = self.inner
        seen: Tensor = inner.read(rows, cache, query, ask)
        return seen

    def _written(self, key: Tensor, value: Tensor, layer: int) -> None:
        if layer == self._next:
            self._next += 1
            total = key.sum(dtype=torch.float32) + value.sum(dtype=torch.float32)
            self._sum = total if self._sum is None else self._sum + total
            if self._next - self._first >= self.group or self._next == self.layers:
                self._mark(self._sum)
        self._tell(wait=False)

    def finish(self) -> None:
        """All kernels are launched: tell of every group as it ends."""
        self._tell(wait=True)

    def _mark(self, total: Tensor) -> None:
        """A group ends here. Its sum shows what is not finite, and is known on the host with the event."""
        if total.is_cuda:
            host = torch.empty((), dtype=torch.float32, pin_memory=True)
            host.copy_(total, non_blocking=True)
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            self._waiting.append((self._first, self._next, host, event))
        else:
            self._waiting.append((self._first, self._next, total, None))
        self._first, self._sum = self._next, None

    def _tell(self, wait: bool) -> None:
        while self._waiting:
            first, end, total, event = self._waiting[0]
            if event is not None and wait:
                event.synchronize()
            elif event is not None and not event.query():
                return
            self._waiting.popleft()
            if not bool(total.isfinite()):
                raise StageError(f"keys or values of layers {first} to {end - 1} are not finite", stage="P")
            self.told(first, end)
