"""A stand-in for torch.cuda that runs queued work as late as CUDA allows, and refuses what CUDA refuses.

Each thread has a current device, 0 at first, and a current stream on each device. What is queued on a stream runs only
when somebody waits for it: whoever reads before that finds the old bytes. An event belongs to the device on which it
was first recorded; recording it on another one raises, as does launching onto a device that is not the current one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trinity.memory import devices

DEVICES = 2
REPLACED = ["Event", "Stream", "current_device", "current_stream", "default_stream", "device", "device_count"]
REPLACED += ["set_device", "set_stream", "stream"]
Work = Callable[[], object]


class LazyStream:
    """A queue of a device; ``queued`` holds work, and events of other streams that the next work waits for."""

    def __init__(self, cuda: LazyCuda, device: int, priority: int = 0, name: str = "") -> None:
        self.cuda, self.device_number, self.priority = cuda, device, priority
        self.device = torch.device("cuda", device)
        self.name = name or f"stream {len(cuda.streams)}"
        self.queued: deque[Work] = deque()
        self.ran = self.added = 0
        cuda.streams.append(self)

    def add(self, work: Work) -> int:
        self.queued.append(work)
        self.added += 1
        return self.added

    def run(self, until: int) -> None:
        with self.cuda.running:
            while self.ran < until:
                work = self.queued.popleft()
                self.ran += 1
                work()

    def wait_stream(self, other: LazyStream) -> None:
        until = other.added
        self.add(lambda: other.run(until))
        self.cuda.note("behind", other.name)

    def synchronize(self) -> None:
        self.run(self.added)


class LazyEvent:
    def __init__(self, cuda: LazyCuda, blocking: bool = False) -> None:
        self.cuda, self.blocking = cuda, blocking
        self.place: tuple[LazyStream, int] | None = None

    def record(self, stream: LazyStream | None = None) -> None:
        on = stream or self.cuda.current_stream()
        if self.place is not None and self.place[0].device_number != on.device_number:
            raise RuntimeError("CUDA error: invalid resource handle (an event of another device)")
        self.place = (on, on.added)

    def query(self) -> bool:
        """Run what may have run by now: the work of some time has passed."""
        self.synchronize()
        return True

    def synchronize(self) -> None:
        if self.place is not None:
            self.place[0].run(self.place[1])


class Scope:
    """Device and streams of a thread as ``enter`` sets them; then as before. No generator: that might end elsewhere."""

    def __init__(self, cuda: LazyCuda, enter: Callable[[], None]) -> None:
        self.cuda, self.enter = cuda, enter

    def __enter__(self) -> None:
        self.before = self.cuda.current_device(), list(self.cuda.current_streams())
        self.enter()

    def __exit__(self, *_: object) -> None:
        self.cuda.threads.device, self.cuda.threads.streams = self.before


class LazyCuda:
    """The stand-in. ``touched`` has (thread, current device) of every launch, ``notes`` what streams wait for."""

    def __init__(self) -> None:
        self.streams: list[LazyStream] = []
        self.defaults = [LazyStream(self, number, name=f"default of {number}") for number in range(DEVICES)]
        self.threads = threading.local()
        self.running = threading.RLock()
        self.touched: list[tuple[str, int]] = []
        self.notes: list[tuple[str, ...]] = []

    def note(self, *said: str) -> None:
        self.notes.append((threading.current_thread().name, *said))

    def current_streams(self) -> list[LazyStream]:
        if not hasattr(self.threads, "streams"):
            self.threads.streams = list(self.defaults)
        found: list[LazyStream] = self.threads.streams
        return found

    def number(self, device: Any) -> int:
        if device is None:
            return self.current_device()
        found = device if isinstance(device, int) else torch.device(device).index
        number = self.current_device() if found is None else int(found)
        assert 0 <= number < DEVICES, f"CUDA error: invalid device ordinal {number}"
        return number

    def current_device(self) -> int:
        found: int = getattr(self.threads, "device", 0)
        return found

    def set_device(self, device: Any) -> None:
        self.threads.device = self.number(device)

    def device_count(self) -> int:
        return DEVICES

    def device(self, device: Any) -> Scope:
        return Scope(self, lambda: self.set_device(device))

    def current_stream(self, device: Any = None) -> LazyStream:
        return self.current_streams()[self.number(device)]

    def default_stream(self, device: Any = None) -> LazyStream:
        return self.defaults[self.number(device)]

    def set_stream(self, stream: LazyStream) -> None:
        self.set_device(stream.device_number)
        self.current_streams()[stream.device_number] = stream

    def stream(self, stream: LazyStream) -> Scope:
        return Scope(self, lambda: self.set_stream(stream))

    def Stream(self, device: Any = None, priority: int = 0) -> LazyStream:
        return LazyStream(self, self.number(device), priority)

    def Event(self, blocking: bool = False) -> LazyEvent:
        return LazyEvent(self, blocking)

    def launch(self, work: Work, device: int | None = None) -> None:
        """Queue a kernel on the thread's current stream; its tensors are on ``device``, the current one if None."""
        current = self.current_device()
        if device is not None and device != current:
            raise RuntimeError(f"CUDA error: an illegal memory access: device {device}, launched on {current}")
        self.touched.append((threading.current_thread().name, current))
        self.current_stream().add(work)


def replace_cuda(monkeypatch: pytest.MonkeyPatch) -> LazyCuda:
    """Put the stand-in in the place of torch.cuda's streams, events and devices."""
    made = LazyCuda()
    for name in REPLACED:
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(devices, "_copy_streams", {})
    return made
