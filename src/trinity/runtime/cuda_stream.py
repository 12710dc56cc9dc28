"""Gives each lane on a GPU a CUDA stream of its own, and waits for it before others read its results."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from trinity.memory.devices import PATIENT, URGENT, gpu_number, use_device
from trinity.stage_kinds import roles_of

T = TypeVar("T")


class LaneStream:
    """Queue for the kernels of the thread that enters it. This base is for CPUs and does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: there is no stream to leave."""

    def begin(self) -> None:
        """Prepare for a step: it runs on this stream, after all that the default stream has so far."""

    def mark(self) -> Callable[[], None]:
        """Mark the end of what is queued so far; the call that it returns waits until the device has run it."""
        return _do_nothing

    def run(self, work: Callable[[], T]) -> T:
        """Call ``work`` as a step of its own, and wait until the device has run what it queued."""
        self.begin()
        try:
            return work()
        finally:
            self.settle()

    def settle(self) -> None:
        """Wait after a step until the device has run what this thread queued."""
        self.mark()()


class CudaLaneStream(LaneStream):
    """A CUDA stream of this thread's own, whose device is the thread's current one.

    - ``device``: "cuda" (the first GPU), "cuda:0", ...
    - ``urgent``: at the higher priority, for lanes that decode (TriInfer 4.2: TBT before encodes).

    Streams of torch do not wait for the default stream, on which weights are loaded and pools are made. So a step
    begins behind what is queued there, without the host waiting. It has ended when the host has seen the event at its
    end. Only then does the core hear of it, so that the other lane, a transfer, or the next owner of its blocks finds
    them written (decision 0048).
    """

    def __init__(self, device: str, urgent: bool) -> None:
        self.number, self.urgent = gpu_number(device) or 0, urgent
        self._idle: list[Any] = []  # events that nobody waits for

    def __enter__(self) -> Self:
        from torch import cuda

        with ExitStack() as scope:
            scope.enter_context(use_device(self.number))
            priority = URGENT if self.urgent else PATIENT
            self._stream: Any = cuda.Stream(self.number, priority=priority)  # type: ignore[no-untyped-call]
            scope.enter_context(cuda.stream(self._stream))
            self._scope = scope.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._scope.close()

    def begin(self) -> None:
        from torch import cuda

        cuda.set_stream(self._stream)  # the device too: whatever the last step has left as current
        self._stream.wait_stream(cuda.default_stream(self.number))

    def mark(self) -> Callable[[], None]:
        from torch import cuda

        ended = self._idle.pop() if self._idle else cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        ended.record(self._stream)

        def wait() -> None:
            ended.synchronize()  # blocking: a lane that waits does not spin on a core
            self._idle.append(ended)

        return wait


def make_lane_stream(device: str | None, lane: str, roles: str = "") -> LaneStream:
    """Make a CUDA stream for a lane on a GPU; one that decodes is urgent. A lane on a CPU needs none.

    ``roles``: the letters that its instance serves; of a joint lane they tell if it decodes.
    """
    if gpu_number(device) is None:
        return LaneStream()
    return CudaLaneStream(str(device), lane == "language" or (lane == "joint" and roles_of(roles).decodes))


def _do_nothing() -> None:
    """Do nothing: a CPU has done its work when a call returns."""
