"""Gives each of two lanes on one GPU a CUDA stream of its own, and waits for it before others read its results."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

URGENT, PATIENT = -1, 0  # CUDA's stream priorities: the lower number runs first when both have kernels ready


class LaneStream:
    """Queue for the kernels of the thread that enters it. This base is for CPUs and does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: there is no stream to leave."""

    def begin(self) -> None:
        """Prepare for a step: it runs after all that others have queued on the device so far."""

    def settle(self) -> None:
        """Wait after a step until the device has run what this thread queued."""


class CudaLaneStream(LaneStream):
    """A CUDA stream of this thread's own.

    - ``device``: "cuda", "cuda:0", ...
    - ``urgent``: at the higher priority, for the language lane (TriInfer 4.2: TBT before encodes).
    - ``cuda`` (``torch.cuda``): replaced in tests.

    Streams of torch do not wait for the default stream, on which weights are loaded and blocks copied within a process.
    So a step begins behind what is queued there, without the host waiting. It has ended when the host has seen the
    event at its end. Only then does the core hear of it, so that the other lane, a transfer, or the next owner of its
    blocks finds them written.
    """

    def __init__(self, device: str, urgent: bool, cuda: Any = None) -> None:
        if cuda is None:
            import torch

            cuda = torch.cuda
        self._cuda, self._device, self._priority = cuda, device, URGENT if urgent else PATIENT

    def __enter__(self) -> Self:
        self._stream = self._cuda.Stream(self._device, priority=self._priority)
        self._ended = self._cuda.Event(blocking=True)  # a lane that waits does not spin on a core
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


def make_lane_stream(device: str | None, lane: str) -> LaneStream:
    """Make a CUDA stream for each of two lanes on a GPU. A single lane uses the default stream."""
    if lane == "joint" or not (device or "cpu").startswith("cuda"):
        return LaneStream()
    return CudaLaneStream(device or "cuda", urgent=lane == "language")
