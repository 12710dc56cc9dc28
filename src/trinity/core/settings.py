"""An instance as its core is told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trinity.errors import UnknownName
from trinity.overlap import Transfers
from trinity.scheduler import Rules

Reservation = Literal["full", "optimistic"]
RESERVATIONS: tuple[Reservation, ...] = ("full", "optimistic")


@dataclass(frozen=True)
class Settings:
    """An instance as its core sees it. ``pools``: blocks by kind. ``lanes``: ("joint",) or ("vision", "language").

    ``depth``: steps in flight on a lane, 2 where the next one is decided while one runs. ``layers`` of a KV block.
    ``reservation``: "full", all that a request may need at once, or "optimistic", blocks as it decodes, and the
    youngest preempted where there are none. Seconds: ``lease_s`` that blocks stay leased to a silent peer, ``report_s``
    between two reports of a load that changes, ``heartbeat_s`` between two of one that does not. A report names at most
    ``digest_keys`` cached blocks of each kind, 8 bytes each.
    """

    name: str
    roles: str
    pools: dict[str, int]
    rules: Rules = field(default_factory=Rules)
    lanes: tuple[str, ...] = ("joint",)
    depth: int = 1
    media_block: int = 576
    kv_block: int = 16
    image_cache: bool = True
    prefix_cache: bool = True
    epoch: int = 0
    layers: int = 1
    reservation: Reservation = "full"
    transfers: Transfers = field(default_factory=Transfers)
    lease_s: float = 30.0
    report_s: float = 0.1
    heartbeat_s: float = 1.0
    digest_keys: int = 512


def check_reservation(name: str) -> None:
    """Raise ``UnknownName``."""
    if name not in RESERVATIONS:
        raise UnknownName("reservation", name, RESERVATIONS)
