"""Memory of a device, divided among the instances that share it: weights first, then pools by role.

Every process computes the same division from the same tenants, however far the others have loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trinity.core.instance.settings import PoolSizes
from trinity.stage_kinds import roles_of

POOL_SHARE = 0.8  # of a GPU's memory beside weights and encoding; the rest is for prefill, graphs and fragments
CONTEXT_BYTES = 608 << 20  # of each process on a GPU: its context, workspaces of its libraries, and sampled texts
DECODES, PREFILLS, ENCODES = 1.0, 0.5, 0.1  # of the memory for pools: blocks of P and E are free once they have moved


@dataclass(frozen=True)
class DeviceTenant(PoolSizes):
    """An instance on a device, as those that share it know it; of sizes that its user has not set it takes a share.

    - ``roles``: letters of its stages.
    - ``shares`` (False): it has its weights in common with the others, where the device allows it.
    """

    roles: str
    shares: bool = False

    def fixed_bytes(self, weight_bytes: int, block_bytes: Mapping[str, int]) -> int | None:
        """Bytes of pools that the user has set, for weights and blocks of these roles' sizes; None: by default."""
        if self.pools is not None:
            return sum(self.pools.get(kind, 0) * size for kind, size in block_bytes.items())
        return None if self.memory_bytes is None else max(0, self.memory_bytes - weight_bytes)


def pool_weight(roles: str) -> float:
    """Weigh an instance's pools: decoding is where requests stay."""
    does = roles_of(roles)
    return DECODES if does.decodes else PREFILLS if does.prefills else ENCODES


def share_of_pools(free_bytes: int, roles: str, others: Iterable[str], fixed_bytes: int = 0) -> int:
    """Compute the bytes of a GPU that the pools of an instance get by default.

    free_bytes (bytes): free once the weights of all are loaded.
    roles: the instance's.
    others: roles of the other instances there whose pools are sized by default too.
    fixed_bytes (bytes, 0): pools on the device that are set otherwise.
    """
    weight = pool_weight(roles)
    return max(0, int((free_bytes * POOL_SHARE - fixed_bytes) * weight / (weight + sum(map(pool_weight, others)))))


def free_when_loaded(total_bytes: int, copies: Iterable[int], processes: int) -> int:
    """Compute the bytes of a GPU that are free once every process there has its context and its weights.

    copies (bytes): of each copy of weights; those that processes share are there once.
    """
    return total_bytes - sum(copies) - processes * CONTEXT_BYTES


def group_by_device(places: Iterable[tuple[str, str]]) -> list[list[int]]:
    """List for each instance those that share its device, itself left out, by number.

    places: machine and device of each; "cuda" is the first GPU.
    """
    keys = [(machine, "cuda:0" if device == "cuda" else device) for machine, device in places]
    return [[other for other, key in enumerate(keys) if key == own and other != n] for n, own in enumerate(keys)]
