"""Bundles: what the instances of a placement ask of Ray's hosts, host by host. Knows no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trinity.costs.cluster import Cluster
from trinity.errors import ConfigError
from trinity.instance import GivenPlacement, Instance, list_instances
from trinity.remote.hosts.host_groups import assign_hosts

KIND_SHARE = 0.001  # of Ray's resource "accelerator_type:H100", which each host of such devices has once
_NEAR, _APART = "PACK", "SPREAD"  # Ray's words: on few hosts where they have room, on many


@dataclass(frozen=True)
class HostBundle:
    """Bundle of resources that one host gives, for the instances that run there together.

    - ``names``: of the instances. ``resources``: by Ray's names, such as {"CPU": 2.0, "GPU": 2.0}.
    """

    names: tuple[str, ...]
    resources: dict[str, float]

    def __str__(self) -> str:
        return f"{', '.join(self.names)} ({_describe(self.resources)})"


@dataclass(frozen=True)
class HostGroup:
    """All bundles of a pipeline, and Ray's strategy for them: a placement group."""

    bundles: tuple[HostBundle, ...]
    strategy: str

    def find(self, name: str) -> int:
        """Return the number of an instance's bundle. Raises ``ConfigError`` for one that has none."""
        for number, bundle in enumerate(self.bundles):
            if name in bundle.names:
                return number
        known = ", ".join(name for bundle in self.bundles for name in bundle.names)
        raise ConfigError(f"this RaySupply has no instance {name}, it has {known}: give it the pipeline's placement")


def plan_bundles(placement: GivenPlacement, cluster: Cluster | None, cpus: float, gpus: float) -> HostGroup:
    """Group the instances by host, those with an address left out (TriInfer 5.5).

    Without a cluster, instances that exchange KV are one bundle, and each other is one of its own, near it if there is
    room. With one, each of its hosts is a bundle, arranged for the placement, and they are apart. ``cpus`` and ``gpus``
    are for each instance. Raises ``ConfigError`` for instances that would share a GPU without being told which.
    """
    instances = list_instances(placement)
    hosts, arranged = assign_hosts([each.roles for each in instances], cluster)
    kinds = _name_kinds(arranged, hosts) if arranged is not None else {}
    grouped: dict[str, list[Instance]] = {}
    for host, instance in zip(hosts, instances, strict=True):
        if instance.address is None:
            grouped.setdefault(host, []).append(instance)
    if not grouped:
        raise ConfigError("every instance has an address: a RaySupply would have none to start")
    for together in grouped.values():
        _check_devices(together, gpus)
    bundles = (
        HostBundle(tuple(each.name for each in together), _sum_resources(len(together), cpus, gpus, kinds.get(host)))
        for host, together in grouped.items()
    )
    return HostGroup(tuple(bundles), _NEAR if cluster is None else _APART)


def _name_kinds(cluster: Cluster, hosts: Sequence[str]) -> dict[str, list[str]]:
    """List the kinds of device of each host, where the cluster has several: else any host will do."""
    kinds: dict[str, list[str]] = {}
    if len({each.name for each in cluster.devices}) > 1:
        for host, device in zip(hosts, cluster.devices, strict=True):
            if device.name not in kinds.setdefault(host, []):
                kinds[host].append(device.name)
    return kinds


def _sum_resources(count: int, cpus: float, gpus: float, kinds: Iterable[str] | None) -> dict[str, float]:
    summed = {"CPU": cpus * count, "GPU": gpus * count}
    summed |= {f"accelerator_type:{each}": KIND_SHARE for each in kinds or ()}
    return {name: amount for name, amount in summed.items() if amount}


def _check_devices(together: Sequence[Instance], gpus: float) -> None:
    """Refuse instances of one host that would all take its first GPU, while it gives one to each."""
    if gpus < 1 or len(together) < 2:
        return
    devices = [each.device for each in together]
    if len(set(devices)) < len(devices):
        names, example = ", ".join(each.name for each in together), f'Instance("{together[1].roles}", device="cuda:1")'
        raise ConfigError(
            f"{names} run on one host with a GPU each, which are numbered from cuda:0 there: give each instance its "
            f"device, as in {example}"
        )


def explain_shortage(bundles: Sequence[HostBundle], nodes: Mapping[str, Mapping[str, float]]) -> str:
    """Say what Ray lacks for these bundles; ``nodes``: resources of each node by its address, used ones too."""
    if not nodes:
        return "Ray has no node that is alive"
    has = "; ".join(f"{address} has {_describe(resources)}" for address, resources in nodes.items())
    for bundle in bundles:
        if not any(_fits(bundle.resources, each) for each in nodes.values()):
            why = ", which exchange KV or were planned on one host" if len(bundle.names) > 1 else ""
            return f"no node of Ray's is large enough for {bundle}{why}: {has}"
    wanted = "; ".join(map(str, bundles))
    return f"Ray's nodes have no room for {wanted}: {has}, with what others use there"


def _fits(wanted: Mapping[str, float], given: Mapping[str, float]) -> bool:
    return all(given.get(name, 0.0) >= amount for name, amount in wanted.items())


def _describe(resources: Mapping[str, float]) -> str:
    listed = [f"{amount:g} {name}" for name, amount in resources.items() if name in ("CPU", "GPU")]
    listed += [name.partition(":")[2] for name in resources if name.startswith("accelerator_type:")]
    return " and ".join(listed) or "nothing"
