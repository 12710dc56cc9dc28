"""LiveFeed: snapshots of a pipeline for everyone who looks, made a few times a second while somebody does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

import msgspec

from trinity.pipeline.live_snapshot import MOST_SHOWN, take_snapshot
from trinity.pipeline.stream import Stream

if TYPE_CHECKING:
    from trinity.pipeline.pipeline import Pipeline


class LiveFeed:
    """Makes snapshots, one for all viewers.

    - ``pipe``: the pipeline; all is called on its loop's thread.
    - ``every_s`` (s, 0.3): from one snapshot to the next.

    There is no task and no queue: the first viewer that wants a newer snapshot makes it, and the others get that. A
    viewer that is slow asks less often; nobody asks, nothing is made. Attributes: ``viewers``, ``made`` (snapshots).
    """

    def __init__(self, pipe: Pipeline, every_s: float = 0.3) -> None:
        self._pipe, self._every_s = pipe, every_s
        self.viewers = self.made = 0
        self._at, self._last = float("-inf"), b""
        self._watched: tuple[Stream, ...] = ()

    async def follow(self) -> AsyncGenerator[bytes]:
        """Yield snapshots as JSON, each newer than the one before, until one shows that the pipeline is closed."""
        self.viewers += 1
        seen = 0
        try:
            while True:
                await self._wait_newer(seen)
                seen, closed = self.made, self._pipe.state == "closed"
                yield self._last
                if closed:
                    return
        finally:
            self.viewers -= 1
            if not self.viewers:
                self._watched = ()  # streams hold their outputs

    async def _wait_newer(self, seen: int) -> None:
        while (wait := self._at + self._every_s - time.monotonic()) > 0 and self.made == seen:
            await asyncio.sleep(wait)
        if wait <= 0:
            self._take()

    def _take(self) -> None:
        self.made += 1
        self._last = msgspec.json.encode(take_snapshot(self._pipe, self.made, self._watched))
        self._watched, self._at = self._pipe.streams[:MOST_SHOWN], time.monotonic()
