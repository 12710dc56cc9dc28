"""Environment variables that UCX reads when it is loaded, for both transports that use it (nixl, ucx)."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from pathlib import Path

from trinity.errors import ConfigError

DEVICES_VARIABLE = "UCX_NET_DEVICES"
LOOPBACK = "lo"
INFINIBAND = Path("/sys/class/infiniband")  # present where the host has an RDMA device
_GET_ADDRESS, _NAME_BYTES, _REQUEST_BYTES = 0x8915, 15, 256  # SIOCGIFADDR of netdevice(7)


def set_ucx_defaults() -> None:
    """Restrict UCX to the loopback interface and, without an RDMA device, turn off its InfiniBand module.

    By default UCX listens on every interface, without authentication, and the module crashes the process at exit on a
    host that has no such device. Variables that are set already (UCX_NET_DEVICES, UCX_MODULES) keep their values.
    """
    os.environ.setdefault(DEVICES_VARIABLE, LOOPBACK)
    if not INFINIBAND.exists():
        os.environ.setdefault("UCX_MODULES", "^ib")


def take_interface_of(address: str) -> None:
    """Restrict UCX to the interface of this host that has this address, for instances that others reach at it.

    A variable that is set already keeps its value, and no address but a numeric IPv4 one of this host changes it.
    """
    device = find_interface(address)
    if device is not None:
        os.environ.setdefault(DEVICES_VARIABLE, device)


def find_interface(address: str) -> str | None:
    """Name the network interface that holds a numeric IPv4 address of this host; None for any other."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        wanted = socket.inet_aton(address)
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                question = struct.pack(f"{_REQUEST_BYTES}s", name.encode()[:_NAME_BYTES])
                if fcntl.ioctl(asking.fileno(), _GET_ADDRESS, question)[20:24] == wanted:
                    return name
    return None


def check_network(scheme: str, trusted_network: bool) -> None:
    """Raise ``ConfigError`` if UCX may use more than the loopback interface, and nobody has said that it may."""
    devices = os.environ.get(DEVICES_VARIABLE, LOOPBACK)
    if devices != LOOPBACK and not trusted_network:
        raise ConfigError(
            f"{DEVICES_VARIABLE} is {devices!r}: others than this host could reach the pools of {scheme!r}, and UCX "
            "neither authenticates nor encrypts. If only hosts that you trust are on that network, say so: "
            f"connector=Connector({scheme!r}, options={{'trusted_network': True}}); else unset {DEVICES_VARIABLE}"
        )
