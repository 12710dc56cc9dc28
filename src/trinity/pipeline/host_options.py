"""Options of a pipeline on the instances of a file of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity.connector import Connector
from trinity.remote.buddy import Buddy as Buddy
from trinity.remote.hosts import read_hosts
from trinity.remote.supervisor import ProcessConfig
from trinity.remote.tls import TLS_FILES as TLS_FILES
from trinity.remote.tls import join_files


def read_hosted_options(
    file: str | Path,
    tls_files: Sequence[str | None] = (),
    *,
    trusted_network: bool = False,
    attach: bool = False,
    buddy: Buddy | None = None,
) -> dict[str, Any]:
    """Read the keywords of a ``Pipeline`` that serves on the instances of a file of hosts.

    - ``tls_files`` (none): certificate, key and authority for the control channels.
    - ``trusted_network`` (False): say so of the network that control channels and blocks go over.
    - ``attach`` (False), ``buddy`` (None): as ``ProcessConfig`` has them.

    Raises ``ConfigError``, for one of the three files alone, too.
    """
    options = {"trusted_network": True} if trusted_network else {}
    return {
        "placement": read_hosts(file).placement,
        "hosting": "process",
        "processes": ProcessConfig(
            tls=join_files(tls_files), trusted_network=trusted_network, attach=attach, buddy=buddy
        ),
        "connector": Connector("auto", options=options),
    }
