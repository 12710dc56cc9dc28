"""Progress: which parts of a pipeline have work and end none of it, however full their queues are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple


class WorkToken(NamedTuple):
    """A piece of work that has begun; ``allowed_s`` (s): what it may take beyond what any may."""

    part: str
    number: int
    allowed_s: float


class StalledPart(NamedTuple):
    """A part that makes no progress: for so many seconds it has had work and ended none."""

    part: str
    seconds: float


class PartProgress:
    """Work of each part, by its begin and its end. Calls come from one thread.

    - ``clock``: returns seconds that never go back.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock, self._numbers = clock, count()
        self._begun: dict[str, dict[WorkToken, float]] = {}  # by part, oldest first
        self._ended: dict[str, float] = {}
        self._seen: dict[str, tuple[Hashable, WorkToken]] = {}

    def begin(self, part: str, allowed_s: float = 0.0) -> WorkToken:
        """Note that a piece of work waits for a part, or is begun by it."""
        token = WorkToken(part, next(self._numbers), allowed_s)
        self._begun.setdefault(part, {})[token] = self._clock()
        return token

    def end(self, token: WorkToken) -> None:
        """Note that a piece of work has ended, well or not; once more is nothing."""
        if self._begun.get(token.part, {}).pop(token, None) is not None:
            self._ended[token.part] = self._clock()

    @contextmanager
    def working(self, part: str, allowed_s: float = 0.0) -> Iterator[None]:
        """Make a block that is a piece of work. One that is cancelled has left, and the part ended nothing."""
        token = self.begin(part, allowed_s)
        try:
            yield
        except Exception:
            self.end(token)
            raise
        except BaseException:
            self._begun.get(part, {}).pop(token, None)
            raise
        self.end(token)

    def observe(self, part: str, oldest: Hashable | None, allowed_s: float = 0.0) -> None:
        """Note the oldest work that a part reports, by any name; None for no work.

        Another name than before means that the former one has ended. That it may take longer may become known later.
        """
        before = self._seen.get(part)
        if before is not None and before[0] == oldest:
            self._allow(before[1], allowed_s)
            return
        if before is not None:
            self.end(before[1])
            del self._seen[part]
        if oldest is not None:
            self._seen[part] = oldest, self.begin(part, allowed_s)

    def _allow(self, token: WorkToken, allowed_s: float) -> None:
        """Give a piece of work that is observed, the one of its part, more time; less may be another's prediction."""
        if token.allowed_s < allowed_s and (works := self._begun.get(token.part)) and token in works:
            known = token._replace(allowed_s=allowed_s)
            works[known] = works.pop(token)
            self._seen[token.part] = self._seen[token.part][0], known

    def forget(self, part: str) -> None:
        """Forget a part that is gone, with its work."""
        for known in (self._begun, self._ended, self._seen):
            known.pop(part, None)

    def find_stalled(self, after_s: float) -> list[StalledPart]:
        """List the parts whose oldest work is older than ``after_s`` and that have ended none for as long."""
        found = []
        now = self._clock()
        for part, works in self._begun.items():
            token, since = next(iter(works.items()), (None, 0.0))
            if token is None:
                continue
            waited = now - max(since, self._ended.get(part, since))
            if waited > after_s + token.allowed_s:
                found.append(StalledPart(part, waited))
        return sorted(found)
