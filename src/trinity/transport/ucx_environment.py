"""Environment variables that UCX reads when it is loaded, for both transports that use it (nixl, ucx)."""

from __future__ import annotations

import os
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")  # present where the host has an RDMA device


def set_ucx_defaults() -> None:
    """Restrict UCX to the loopback interface and, without an RDMA device, turn off its InfiniBand module.

    By default UCX listens on every interface, without authentication, and the module crashes the process at exit on a
    host that has no such device. Variables that are set already (UCX_NET_DEVICES, UCX_MODULES) keep their values.
    """
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if not INFINIBAND.exists():
        os.environ.setdefault("UCX_MODULES", "^ib")
