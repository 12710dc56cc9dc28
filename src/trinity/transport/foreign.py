"""Calls of transports, which are other people's code: whatever they raise fails one read, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from trinity.errors import TransportError, describe_error

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
