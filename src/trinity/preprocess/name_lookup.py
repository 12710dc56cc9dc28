"""Addresses of a host's name, looked up beside the event loop and within a time that the caller sets."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

_MOST_LOOKUPS = 32
_PAUSE_S = 0.02  # between two tries for a thread
_lookups = threading.BoundedSemaphore(_MOST_LOOKUPS)


async def look_up(host: str, port: int) -> list[str]:
    """Look a host's name up: its addresses, in the resolver's order. Raises ``OSError``.

    Nothing interrupts the system's resolver, so it runs on a thread of its own, which a slow server of names may keep
    for longer than the caller waits. There are at most ``_MOST_LOOKUPS`` of these threads. What is an address already
    needs none: nobody is asked for it.
    """
    with suppress(OSError, UnicodeError):  # it is a name
        return _addresses(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    while not _lookups.acquire(blocking=False):
        await asyncio.sleep(_PAUSE_S)
    return await asyncio.wrap_future(_start(host, port))


def _start(host: str, port: int) -> Future[list[str]]:
    found: Future[list[str]] = Future()
    found.set_running_or_notify_cancel()  # a caller that leaves takes nothing from the thread

    def resolve() -> None:
        try:
            found.set_result(_addresses(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except Exception as error:
            found.set_exception(error)
        finally:
            _lookups.release()

    try:
        threading.Thread(target=resolve, name="trinity-lookup", daemon=True).start()
    except RuntimeError as error:  # the system has no thread to give
        _lookups.release()
        raise OSError(str(error)) from error
    return found


def _addresses(found: Sequence[tuple[Any, ...]]) -> list[str]:
    known = (socket.AF_INET, socket.AF_INET6)
    return list(dict.fromkeys(str(where[0]) for family, *_, where in found if family in known))
