"""Options of a pipeline on the instances of a file of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity.connector import Connector
from trinity.errors import ConfigError
from trinity.remote.hosts import read_hosts
from trinity.remote.supervisor import ProcessConfig
from trinity.remote.tls import TLSConfig


def read_hosted_options(
    file: str | Path, tls_files: Sequence[str | None] = (), *, trusted_network: bool = False
) -> dict[str, Any]:
    """Read the keywords of a ``Pipeline`` that serves on the instances of a file of hosts.

    - ``tls_files`` (none): certificate, key and authority for the control channels.
    - ``trusted_network`` (False): say so of the network that control channels and blocks go over.

    Raises ``ConfigError``, for one of the three files alone, too.
    """
    given = [each for each in tls_files if each]
    if given and len(given) != len(TLSConfig.__dataclass_fields__):
        raise ConfigError("TLS between hosts needs all of certificate, key and authority")
    options = {"trusted_network": True} if trusted_network else {}
    return {
        "placement": read_hosts(file).placement,
        "hosting": "process",
        "processes": ProcessConfig(tls=TLSConfig(*given) if given else None, trusted_network=trusted_network),
        "connector": Connector("auto", options=options),
    }
