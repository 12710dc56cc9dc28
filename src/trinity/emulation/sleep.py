"""Pace: waits for an exact time, on the threads of lanes that may slow each other down."""

from __future__ import annotations

import threading
import time
from types import TracebackType


class Pace:
    """The emulated work of one instance's lanes.

    While two lanes have work, each takes ``interference`` times as long (dual stream: both share one device).
    """

    def __init__(self, interference: float = 1.0) -> None:
        self.interference = interference
        self.changed = threading.Condition()
        self._active: list[Work] = []
        self._since = 0.0

    def work(self, seconds: float) -> Work:
        """So much work, which begins when its block is entered."""
        return Work(self, seconds)

    @property
    def rate(self) -> float:
        """Seconds of work done in a second, by each lane that has any."""
        return 1 / self.interference if len(self._active) > 1 else 1.0

    def advance(self) -> None:
        """Account for the time since the last look. The caller holds ``changed``."""
        now = time.perf_counter()
        done = (now - self._since) * self.rate
        for each in self._active:
            each.left -= done
        self._since = now

    def begin(self, work: Work) -> None:
        with self.changed:
            self.advance()
            self._active.append(work)
            self.changed.notify_all()

    def end(self, work: Work) -> None:
        with self.changed:
            self.advance()
            self._active.remove(work)
            self.changed.notify_all()


class Work:
    """One step's work: ``left`` seconds of it, negative where its end is past."""

    def __init__(self, pace: Pace, seconds: float) -> None:
        self.left, self._pace = seconds, pace

    def __enter__(self) -> Work:
        self._pace.begin(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pace.end(self)

    def reach(self, left: float = 0.0) -> float:
        """Sleep until no more than ``left`` seconds of work are left; by how many seconds that came late."""
        pace = self._pace
        with pace.changed:
            pace.advance()
            while self.left > left:
                pace.changed.wait((self.left - left) / pace.rate)
                pace.advance()
            return left - self.left
