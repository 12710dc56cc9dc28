"""Waiting for what must end first, whatever becomes of who waits."""

from __future__ import annotations

import asyncio

import anyio


async def outlast(task: asyncio.Task[None]) -> None:
    """Wait for the task's end even where the caller is cancelled meanwhile; the cancel is passed on after it."""
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # a cancelled scope of anyio would cancel every await anew
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
    if cancelled is not None:
        raise cancelled
    task.result()
