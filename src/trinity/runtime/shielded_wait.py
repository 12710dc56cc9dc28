"""Waits for a task to its end even if the waiting caller is cancelled."""

from __future__ import annotations

import asyncio

import anyio


async def wait_shielded(task: asyncio.Task[None]) -> None:
    """Wait for a task to its end; a cancellation of the caller meanwhile is raised only afterwards."""
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
