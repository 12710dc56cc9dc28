"""Settings of an instance, as its core reads them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.core.values import STATE
from trinity.errors import ConfigError, UnknownName

Reservation = Literal["full", "optimistic"]
RESERVATIONS: tuple[Reservation, ...] = ("full", "optimistic")


@dataclass(frozen=True)
class Settings:
    """An instance as its core sees it.

    - ``pools``: blocks by kind. With blocks of states there is no ``prefix_cache``: a state holds all of a text.
    - ``host`` (""): where it runs; instances of one name are on one host.
    - ``lanes`` (("joint",)): or ("vision", "language").
    - ``depth`` (1): steps in flight on a lane; with 2 the next one is decided while one runs (async scheduling).
    - ``layers`` (1): of a KV block.
    - ``reservation`` ("full"): all blocks that a request may need at once, or "optimistic", blocks as it decodes, and
      the youngest preempted where there are none.
    - ``lease_s`` (s, 30): blocks stay leased to a silent peer.
    - ``report_s`` (s, 0.1): between two reports of a load that changes.
    - ``heartbeat_s`` (s, 1): between two of one that does not.
    - ``digest_keys`` (512): most cached blocks of each kind that a report names, 8 bytes each.
    """

    name: str
    roles: str
    pools: dict[str, int]
    rules: BatchRules = field(default_factory=BatchRules)
    lanes: tuple[str, ...] = ("joint",)
    depth: int = 1
    image_block_size: int = 576
    kv_block_size: int = 16
    image_cache: bool = True
    prefix_cache: bool = True
    epoch: int = 0
    layers: int = 1
    reservation: Reservation = "full"
    transfers: TransferPolicy = field(default_factory=TransferPolicy)
    lease_s: float = 30.0
    report_s: float = 0.1
    heartbeat_s: float = 1.0
    digest_keys: int = 512
    host: str = ""

    def __post_init__(self) -> None:
        if STATE in self.pools:
            object.__setattr__(self, "prefix_cache", False)

    def is_other_life(self, epoch: int | None) -> bool:
        """True for the epoch of another life of this instance; None is any."""
        return epoch is not None and epoch != self.epoch


def check_reservation(name: str) -> None:
    """Raise ``UnknownName``."""
    if name not in RESERVATIONS:
        raise UnknownName("reservation", name, RESERVATIONS)


def check_depth(depth: int) -> None:
    """Raise ``ConfigError``."""
    if depth not in (1, 2):
        raise ConfigError(f"depth is 1 or 2 steps in flight on a lane, got {depth!r}")


def check_limits(token_budget: int | None, image_budget: int | None, ruled: bool) -> None:
    """Raise ``ConfigError`` for batch limits that cannot be, or that are given beside ``rules`` with their own."""
    for name, limit in (("token_budget", token_budget), ("image_budget", image_budget)):
        if limit is None:
            continue
        if ruled:
            raise ConfigError(f"{name}={limit!r} and rules= both limit a batch: give the limits in the rules alone")
        if not isinstance(limit, int) or limit < 1:
            raise ConfigError(f"{name} is a whole number of at least 1, got {limit!r}")
