"""GuardedSupply: a supply of somebody else's, of which nothing but errors and answers reaches the pipeline.

Its code is cancelled as a pipeline closes. What swallows that would keep the pipeline for ever. A ``CancelledError`` of
its own, as of a future that it awaits, would pass for a cancel by the pipeline: nobody would hear of the loss.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from trinity.errors import ConfigError, describe_error
from trinity.remote.supervision.supply import InstanceOrder, InstancePlace, Supply

logger = logging.getLogger("trinity")
GIVE_UP_S = 10.0  # for a call of a supply to end after it was cancelled: it may tidy up
Answer = TypeVar("Answer")


class GuardedSupply:
    """A ``supply`` that raises exceptions alone, never a ``BaseException``, and ends soon after a cancel.

    A call that goes on for ``GIVE_UP_S`` after it was cancelled is logged and left to itself.
    """

    def __init__(self, supply: Supply) -> None:
        self._supply = supply

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        """Begin a life. Raises ``ConfigError`` for an answer that is no place, and what the supply raises."""
        place: object = await _guard("begin", self._supply.begin(order))
        if not isinstance(place, InstancePlace):
            raise ConfigError(f"begin of the supply of instances returned {place!r:.80}, which is no InstancePlace")
        return place

    async def end(self, name: str, epoch: int) -> None:
        await _guard("end", self._supply.end(name, epoch))

    async def aclose(self) -> None:
        await _guard("aclose", self._supply.aclose())


async def _guard(what: str, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await a call of a supply in a task of its own. Raises ``ConfigError`` where it raises no ``Exception``."""
    call = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([call])
    except asyncio.CancelledError:
        await _give_up(what, call)
        raise
    if call.cancelled():
        raise ConfigError(f"{what} of the supply of instances was cancelled by itself, and not by the pipeline")
    error = call.exception()
    if error is not None and not isinstance(error, Exception):
        raise ConfigError(f"{what} of the supply of instances raised {describe_error(error)}") from error
    return call.result()


async def _give_up(what: str, call: asyncio.Task[Any]) -> None:
    """Cancel a call, and wait for its end, but not for ever."""
    call.cancel()
    call.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks any more
    await asyncio.wait([call], timeout=GIVE_UP_S)
    if not call.done():
        text = "%s of the supply of instances goes on %s s after it was cancelled, and is left to itself"
        logger.error(text, what, GIVE_UP_S)
