"""Devices as the papers' engines used them: steps without CUDA graphs, 20 ms a pass as TriInfer measures (figure 3).

Benchmarks that compare with a paper, or whose published figures were taken on these costs, name them here; the
planner's own defaults are other ones (``trinity.costs.engines``).
"""

from __future__ import annotations

import msgspec

from trinity.costs.cluster import Cluster
from trinity.costs.engines import Engine
from trinity.costs.step_cost import Device, get_device

ENGINE: Engine = "eager"
SAID = "eager, 20 ms a pass"  # of each claim


def paper_device(name: str) -> Device:
    """Return a device by its name with the overheads of an eager engine, 0.6 of its FLOP/s and 0.8 of its bandwidth."""
    shares = {"flops_share": 0.6, "vision_share": 0.6, "bandwidth_share": 0.8}
    return msgspec.structs.replace(get_device(name, ENGINE), **shares)


def paper_cluster(name: str, count: int, per_host: int | None = None) -> Cluster:
    """Return a cluster of so many of them, ``per_host`` in a host."""
    return Cluster.of(paper_device(name), count, per_host=per_host)
