"""Environment variables that UCX reads when it is loaded, for both transports that use it (nixl, ucx)."""

from __future__ import annotations

import os
from pathlib import Path

from trinity.errors import ConfigError

DEVICES_VARIABLE = "UCX_NET_DEVICES"
LOOPBACK = "lo"
INFINIBAND = Path("/sys/class/infiniband")  # present where the host has an RDMA device


def set_ucx_defaults() -> None:
    """Restrict UCX to the loopback interface and, without an RDMA device, turn off its InfiniBand module.

    By default UCX listens on every interface, without authentication, and the module crashes the process at exit on a
    host that has no such device. Variables that are set already (UCX_NET_DEVICES, UCX_MODULES) keep their values.
    """
    os.environ.setdefault(DEVICES_VARIABLE, LOOPBACK)
    if not INFINIBAND.exists():
        os.environ.setdefault("UCX_MODULES", "^ib")


def check_network(scheme: str, trusted_network: bool) -> None:
    """Raise ``ConfigError`` if UCX may use more than the loopback interface, and nobody has said that it may."""
    devices = os.environ.get(DEVICES_VARIABLE, LOOPBACK)
    if devices != LOOPBACK and not trusted_network:
        raise ConfigError(
            f"{DEVICES_VARIABLE} is {devices!r}: others than this host could reach the pools of {scheme!r}, and UCX "
            "neither authenticates nor encrypts. If only hosts that you trust are on that network, say so: "
            f"connector=Connector({scheme!r}, options={{'trusted_network': True}}); else unset {DEVICES_VARIABLE}"
        )
