"""Emulated work of given durations, on lanes that slow each other down."""

from __future__ import annotations

import threading
import time
from types import TracebackType


class EmulatedDevice:
    """Device that the lanes of one emulated instance share.

    While two lanes have work, each takes ``interference`` times as long, as two CUDA streams of one device do.
    """

    def __init__(self, interference: float = 1.0) -> None:
        self.interference = interference
        self.changed = threading.Condition()
        self._active: list[EmulatedWork] = []
        self._since = 0.0

    def work(self, seconds: float) -> EmulatedWork:
        """Emulate ``seconds`` of work, which begins on entering the context."""
        return EmulatedWork(self, seconds)

    @property
    def rate(self) -> float:
        """Seconds of work that each busy lane does in a second."""
        return 1 / self.interference if len(self._active) > 1 else 1.0

    def advance(self) -> None:
        """Account for the time since the last call. The caller holds ``changed``."""
        now = time.perf_counter()
        done = (now - self._since) * self.rate
        for each in self._active:
            each.left -= done
        self._since = now

    def begin(self, work: EmulatedWork) -> None:
        with self.changed:
            self.advance()
            self._active.append(work)
            self.changed.notify_all()

    def end(self, work: EmulatedWork) -> None:
        with self.changed:
            self.advance()
            self._active.remove(work)
            self.changed.notify_all()


class EmulatedWork:
    """Work of one step; ``left`` (s) remains, negative once its end has passed."""

    def __init__(self, device: EmulatedDevice, seconds: float) -> None:
        self.left, self._device = seconds, device

    def __enter__(self) -> EmulatedWork:
        self._device.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._device.end(self)

    def reach(self, left: float = 0.0) -> float:
        """Sleep until at most ``left`` seconds of work remain. Returns the seconds by which that came late."""
        device = self._device
        with device.changed:
            device.advance()
            while self.left > left:
                device.changed.wait((self.left - left) / device.rate)
                device.advance()
            return left - self.left
