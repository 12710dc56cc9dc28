"""Wraps a backend and reports each group of layers once its KV is in the cache, so that transfers overlap prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trinity.errors import StageError
from trinity.stage_kinds import PREFILL
from trinity.stages.attention.interface import AttentionBackend, AttentionParams, PagedRows

LayersCallback = Callable[[int, int], None]


class LayerProgressAttention:
    """Backend that wraps ``inner`` for one forward.

    - ``group``: number of layers per report.
    - ``layers``: number of layers of the model.
    - ``report``: called with (first, end) after each group.

    A layer's keys and values are in their blocks once its attention has run. On a GPU that is when the event recorded
    behind it has completed: each further layer queries it, and ``finish`` waits for it. Layers that hold NaN or
    infinity are never reported, since their reader would keep them and a mask does not stop NaN; ``StageError`` is
    raised.
    """

    def __init__(self, inner: AttentionBackend, group: int, layers: int, report: LayersCallback) -> None:
        self.inner, self.group, self.layers, self.report = inner, group, layers, report
        self._first = self._next = 0
        self._sum: Tensor | None = None
        self._waiting: deque[tuple[int, int, Tensor, Any]] = deque()

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        """See ``AttentionBackend.attend``. Layers that come out of order are left to the end of the step."""
        seen = self.inner.attend(rows, cache, qkv, params)
        self._note_layer(*qkv[1:], params.layer)
        return seen

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """See ``SplitAttention.write``; ``inner`` must have it."""
        inner: Any = self.inner
        inner.write(rows, cache, key, value, layer)
        self._note_layer(key, value, layer)

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        """See ``SplitAttention.read``; ``inner`` must have it."""
        inner: Any = self.inner
        seen: Tensor = inner.read(rows, cache, query, params)
        return seen

    def _note_layer(self, key: Tensor, value: Tensor, layer: int) -> None:
        if layer == self._next:
            self._next += 1
            total = key.sum(dtype=torch.float32) + value.sum(dtype=torch.float32)
            self._sum = total if self._sum is None else self._sum + total
            if self._next - self._first >= self.group or self._next == self.layers:
                self._end_group(self._sum)
        self._report_groups(wait=False)

    def finish(self) -> None:
        """Wait for every group that is not reported yet, and report it. All kernels must have been launched."""
        self._report_groups(wait=True)

    def _end_group(self, total: Tensor) -> None:
        """End a group here. Its sum, which shows values that are not finite, reaches the host with the event."""
        if total.is_cuda:
            host = torch.empty((), dtype=torch.float32, pin_memory=True)
            host.copy_(total, non_blocking=True)
            event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record()
            self._waiting.append((self._first, self._next, host, event))
        else:
            self._waiting.append((self._first, self._next, total, None))
        self._first, self._sum = self._next, None

    def _report_groups(self, wait: bool) -> None:
        while self._waiting:
            first, end, total, event = self._waiting[0]
            if event is not None and wait:
                event.synchronize()
            elif event is not None and not event.query():
                return
            self._waiting.popleft()
            if not bool(total.isfinite()):
                problem = f"keys or values of layers {first} to {end - 1} are not finite; check the model's weights"
                raise StageError(problem, stage=PREFILL.letter)
            self.report(first, end)
