"""Waits for a future to its end even if the waiting caller is cancelled."""

from __future__ import annotations

import asyncio
from typing import TypeVar

import anyio

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
        raise cancelled
    return future.result()
