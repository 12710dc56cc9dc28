"""Registry of transports by name: built-in ones, and those of other packages (entry point ``trinity.transports``)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from trinity.errors import ConfigError, show
from trinity.plugins import list_names, load_plugin
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
    """List the names of all transports, built in or installed."""
    return list_names(GROUP, BUILT_IN)


def make_transport(name: str, **options: Any) -> Transport:
    """Make the transport of this name with its own keywords.

    Raises ``UnknownName``, ``TransportUnavailable`` if it cannot run here, ``ConfigError`` if its package is broken or
    it does not take these keywords.
    """
    factory: Callable[..., Transport] = BUILT_IN.get(name) or load_plugin(GROUP, "transport", name, BUILT_IN)
    signature = inspect.signature(factory)
    try:
        signature.bind(**options)
    except (TypeError, ValueError) as error:
        takes = ", ".join(signature.parameters) or "none"
        raise ConfigError(f"transport {name!r} does not take the options {show(options)}: it takes {takes}") from error
    return factory(**options)
