"""Calls of transports, which are other people's code: whatever they raise fails one read, and nothing else."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, TypeVar

from trinity.errors import TransportError, describe_error
from trinity.memory.block_memory import BlockMemory
from trinity.transport.base import Transport

logger = logging.getLogger("trinity")
T = TypeVar("T")


async def contain(call: Awaitable[T], scheme: str) -> T:
    """Await a transport's call. Raises what it raises, but ``TransportError`` for what would end more than its read.

    That is SystemExit, which would end the program, and a CancelledError that nobody asked for: that of a task of the
    transport's own.
    """
    try:
        return await call
    except (Exception, KeyboardInterrupt):
        raise
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise TransportError("the transport cancelled its own call", scheme) from error
    except BaseException as error:
        raise TransportError(f"the transport raised {describe_error(error)}", scheme) from error


async def gather_or_cancel(reads: Iterable[Coroutine[Any, Any, int]]) -> list[int]:
    """Await reads that run side by side; if one fails, the others have ended before its error is raised."""
    first, *others = reads
    if not others:
        return [await first]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in (first, *others)]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


def withdraw(transport: Transport, memory: BlockMemory) -> None:
    """Have a transport let go of a pool before it ends itself, where it has ``withdraw``. Errors are logged."""
    try:
        getattr(transport, "withdraw", lambda _: None)(memory)
    except Exception:
        logger.exception("%r could not withdraw a pool", transport)
