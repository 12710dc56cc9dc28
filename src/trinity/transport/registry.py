"""Transports by name: those of trinity and those that other packages add by the entry point ``trinity.transports``."""

from __future__ import annotations

from collections.abc import Callable

from trinity.plugins import find, known
from trinity.transport.auto import AutoHostTransport, AutoTransport
from trinity.transport.base import Transport
from trinity.transport.cuda_ipc.transport import CudaIpcTransport
from trinity.transport.inproc import InprocTransport
from trinity.transport.nixl.transport import NixlPushTransport, NixlTransport
from trinity.transport.shm import ShmTransport
from trinity.transport.ucx.transport import UcxTransport

GROUP = "trinity.transports"
BUILT_IN: dict[str, Callable[[], Transport]] = {
    "auto": AutoTransport,
    "auto-host": AutoHostTransport,
    "cuda_ipc": CudaIpcTransport,
    "inproc": InprocTransport,
    "nixl": NixlTransport,
    "nixl-push": NixlPushTransport,
    "shm": ShmTransport,
    "ucx": UcxTransport,
}


def known_transports() -> list[str]:
    return known(GROUP, BUILT_IN)


def make_transport(name: str | Transport) -> Transport:
    """The transport of this name, or the object itself. Raises ``UnknownName``."""
    if not isinstance(name, str):
        return name
    make = BUILT_IN.get(name) or find(GROUP, "transport", name, BUILT_IN)
    made: Transport = make()
    return made
