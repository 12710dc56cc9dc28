"""Seconds of a transfer between two instances."""

from __future__ import annotations

import math
from collections.abc import Mapping

import msgspec

from trinity.errors import ConfigError


class Interconnect(msgspec.Struct, frozen=True, kw_only=True):
    """An interconnect between two instances.

    ``bandwidth`` (bytes/s): reached, not peak. ``fixed_s`` (s): latency of any transfer. Raises ``ConfigError``.
    """

    name: str
    bandwidth: float
    fixed_s: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.bandwidth < math.inf and 0 <= self.fixed_s < math.inf):
            raise ConfigError(f"{self!r}: bandwidth must be positive and fixed_s at least 0")

    def seconds(self, size: float) -> float:
        """Seconds of a transfer of ``size`` bytes; 0 for an empty one."""
        return self.fixed_s + size / self.bandwidth if size > 0 else 0.0


INTERCONNECTS: Mapping[str, Interconnect] = {
    link.name: link
    for link in (  # four fifths of their nominal bandwidth
        Interconnect(name="nvlink", bandwidth=360e9, fixed_s=2e-4),
        Interconnect(name="infiniband-2x200", bandwidth=40e9, fixed_s=5e-4),
        Interconnect(name="pcie4", bandwidth=25e9, fixed_s=3e-4),
        Interconnect(name="memory", bandwidth=5e9, fixed_s=2e-4),
    )
}
