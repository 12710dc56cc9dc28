"""Waits for a future or a thread's work to its end even if the waiting caller is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

import anyio

from trinity.errors import TrinityError

T = TypeVar("T")


async def wait_shielded(future: asyncio.Future[T]) -> T:
    """Wait for a future or task to its end; a cancellation of the caller meanwhile is raised only afterwards."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # a cancelled scope of anyio would cancel every await anew
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        if not future.cancelled():
            future.exception()  # looked at: asyncio would log an error that nobody asked for
        raise cancelled
    return future.result()


async def run_to_end(function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Run a function on a thread, and wait for its end also if cancelled: nothing stops what a thread has begun."""
    return await wait_shielded(asyncio.ensure_future(asyncio.to_thread(function, *arguments, **named)))


async def carry_through(work: Coroutine[Any, Any, T], may_stop: Callable[[], bool]) -> T:
    """Run work as a task. A cancel of the caller reaches it while it may stop; else it is raised after the work's end.

    So what the work has done is also noted by it. Its own error is dropped where the caller is cancelled.
    """
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if may_stop():
            task.cancel()
        with suppress(asyncio.CancelledError, TrinityError):
            await wait_shielded(task)
        raise
