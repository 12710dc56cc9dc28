"""Groups of instances that share a host: those that exchange KV, and whatever a cluster was planned with."""

from __future__ import annotations

from collections.abc import Sequence

from trinity.costs.cluster import Cluster
from trinity.stage_kinds import roles_of

KV_HOST = "kv"  # the group of all that exchange KV, where nothing was planned


def assign_hosts(roles: Sequence[str], cluster: Cluster | None) -> tuple[list[str], Cluster | None]:
    """Name the host of each instance, in order, and return the cluster as it was arranged for them (TriInfer 5.5).

    Without a cluster, instances that exchange KV are on one host, and each other on one of its own. With one, each is
    on a host of its. Raises ``PlacementError`` where its devices are not as many as the instances.
    """
    if cluster is None:
        return _keep_kv_together(roles), None
    arranged = cluster.arrange_for("+".join(roles))
    return list(arranged.hosts) or [""] * arranged.size, arranged


def _keep_kv_together(roles: Sequence[str]) -> list[str]:
    does = [roles_of(each) for each in roles]
    moves_kv = any(each.hands_kv_on for each in does)
    return [KV_HOST if moves_kv and not each.only_encodes else str(number) for number, each in enumerate(does)]
