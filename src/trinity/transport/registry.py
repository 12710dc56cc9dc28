"""Transports by name: those of trinity and those that other packages add by the entry point ``trinity.transports``."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points

from trinity.errors import UnknownName
from trinity.transport.base import Transport
from trinity.transport.inproc import InprocTransport

GROUP = "trinity.transports"
BUILT_IN: dict[str, Callable[[], Transport]] = {"inproc": InprocTransport}


def known_transports() -> list[str]:
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


def make_transport(name: str | Transport) -> Transport:
    """The transport of this name, or the object itself. Raises ``UnknownName``."""
    if not isinstance(name, str):
        return name
    if name in BUILT_IN:
        return BUILT_IN[name]()
    for entry in entry_points(group=GROUP, name=name):
        made: Transport = entry.load()()
        return made
    raise UnknownName("transport", name, known_transports(), "Other packages add theirs by the entry point " + GROUP)
