"""Transfer ways: by which transport blocks go between two hosts, said once in the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from trinity.core.messages import PeerUp

logger = logging.getLogger("trinity")
MOVED = ("pulled", "store")  # outcomes of transfers that have moved blocks


class TransferWays:
    """Ways that blocks have gone: kind of block, hosts, and transport. Each new one is a line at INFO."""

    def __init__(self) -> None:
        self._known: set[tuple[str, str, str, str]] = set()

    def note(self, transfers: Iterable[Mapping[str, Any]], peers: Mapping[str, PeerUp]) -> None:
        """Note what moved for a request that has ended. ``peers``: instances by name; those on no host say nothing."""
        for each in transfers:
            source, target = (peers.get(str(each.get(end))) for end in ("source", "target"))
            if each.get("outcome") not in MOVED or source is None or target is None:
                continue
            way = (str(each.get("kind")), source.host, target.host, str(each.get("scheme")))
            if way not in self._known and source.host and target.host:
                self._known.add(way)
                _log_way(*way)


def _log_way(kind: str, source: str, target: str, scheme: str) -> None:
    where = f"stay on host {source}, moved" if source == target else f"go from host {source} to host {target}"
    logger.info("blocks of kind %s %s by %s", kind, where, scheme)
