"""Streams: each of two lanes on one GPU queues its kernels by itself; who reads what it wrote waits for it before."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

URGENT, PATIENT = -1, 0  # CUDA's priorities of streams: the lower goes first where both have kernels ready


class LaneStream:
    """Where the kernels of the thread that enters it are queued: nothing to be done on a CPU."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing was begun."""

    def begin(self) -> None:
        """Before a step: what others gave the device so far comes first."""

    def settle(self) -> None:
        """After a step: return once the device has done what this thread gave it."""


class CudaLaneStream(LaneStream):
    """A CUDA stream of this thread's own; ``urgent`` for the language lane (TriInfer 4.2: TBT before encodes).

    Streams of torch do not wait for the default stream, on which weights are loaded and blocks copied within a process.
    So a step begins behind what is queued there, on the device and without the host. It has ended when the host has
    seen the event at its end: only then does the core hear of it, so that the other lane, a transfer, or whoever gets
    the blocks next finds them written. ``cuda``: a stand-in for ``torch.cuda``.
    """

    def __init__(self, device: str, urgent: bool, cuda: Any = None) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._cuda, self._device, self._priority = cuda, device, URGENT if urgent else PATIENT

    def __enter__(self) -> Self:
        self._stream = self._cuda.Stream(self._device, priority=self._priority)
        self._ended = self._cuda.Event(blocking=True)  # a lane that waits spins on no core
        self._scope = self._cuda.stream(self._stream)
        self._scope.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.__exit__(kind, error, trace)

    def begin(self) -> None:
        self._stream.wait_stream(self._cuda.default_stream(self._device))

    def settle(self) -> None:
        self._ended.record(self._stream)
        self._ended.synchronize()


def stream_for(device: str | None, lane: str) -> LaneStream:
    """A stream of its own for either of two lanes on a GPU. A lone lane needs none: it has the default stream."""
    if lane == "joint" or not (device or "cpu").startswith("cuda"):
        return LaneStream()
    return CudaLaneStream(device or "cuda", urgent=lane == "language")
