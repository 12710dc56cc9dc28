"""Cluster: the hardware that a placement runs on, and what moving blocks between two of its devices takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from trinity.costs.step_cost import LINKS, Device, Link, device
from trinity.errors import ConfigError, PlacementError, UnknownName
from trinity.placement import Placement


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """One device for each instance, in the order of ``placement.instances()``.

    ``hosts``: the host of each device; () means that all are in one. Blocks go over ``link`` inside a host and over
    ``network`` between hosts. A control message takes ``message_s`` seconds. Raises ``ConfigError``.
    """

    devices: tuple[Device, ...]
    hosts: tuple[str, ...] = ()
    link: Link = LINKS["nvlink"]
    network: Link = LINKS["infiniband-2x200"]
    message_s: float = 1e-4

    def __post_init__(self) -> None:
        if not self.devices:
            raise ConfigError('a cluster has at least one device: Cluster.of("H100", 8)')
        if self.hosts and len(self.hosts) != len(self.devices):
            raise ConfigError(f"{len(self.hosts)} hosts are named for {len(self.devices)} devices: name one for each")
        if not 0 <= self.message_s < math.inf:
            raise ConfigError(f"message_s is a number of seconds of at least 0, got {self.message_s!r}")

    @classmethod
    def of(
        cls,
        *what: str | Device | int | tuple[str | Device, int],
        per_host: int | None = None,
        link: str | Link = "nvlink",
        network: str | Link = "infiniband-2x200",
        message_s: float = 1e-4,
    ) -> Cluster:
        """``Cluster.of("H100", 8)``, or ``Cluster.of(("H100", 4), ("L40S", 4))``; ``per_host`` devices share a host.

        Raises ``ConfigError`` for a count below 1, ``UnknownName`` for a device or link that has no such name.
        """
        devices = tuple(one for kind, count in _groups(what) for one in [kind] * count)
        if per_host is not None and per_host < 1:
            raise ConfigError(f"a host has at least one device, got per_host={per_host}")
        hosts = tuple(f"host{at // per_host}" for at in range(len(devices))) if per_host else ()
        return cls(devices=devices, hosts=hosts, link=_link(link), network=_link(network), message_s=message_s)

    @property
    def size(self) -> int:
        return len(self.devices)

    def between(self, one: int, other: int) -> Link:
        """What joins two devices, by their places in ``devices``."""
        return self.network if self.hosts and self.hosts[one] != self.hosts[other] else self.link

    def laid_out(self, placement: Placement | str) -> Cluster:
        """The same devices, with their hosts shared out so that few blocks cross between hosts (TriInfer 5.5).

        Instances between which KV moves fill host after host, each with the placement's mix of roles; those that only
        encode come last, so that features cross rather than KV. Only equal devices change places.
        """
        parsed = Placement.parse(placement) if isinstance(placement, str) else placement
        if parsed.size != self.size:
            raise PlacementError(f"placement {parsed} has {parsed.size} instances, the cluster {self.size} devices")
        if not self.hosts:
            return self
        hosts = list(self.hosts)
        for kind in dict.fromkeys(self.devices):
            places = [at for at, each in enumerate(self.devices) if each == kind]
            ranked = sorted(places, key=_ranks(parsed).__getitem__)
            for place, host in zip(
                ranked, sorted((self.hosts[at] for at in places), key=self.hosts.index), strict=True
            ):
                hosts[place] = host
        return msgspec.structs.replace(self, hosts=tuple(hosts))


def _ranks(placement: Placement) -> list[tuple[bool, float]]:
    """Where each instance comes when hosts are filled: instances of equal roles are spread evenly over the others'."""
    roles = [each for _, each in placement.instances()]
    moves_kv = any("P" in each and "D" not in each for each in roles)
    seen: dict[str, int] = {}
    ranks = []
    for each in roles:
        seen[each] = seen.get(each, 0) + 1
        ranks.append((moves_kv and each == "E", (seen[each] - 0.5) / roles.count(each)))
    return ranks


def _groups(what: Sequence[str | Device | int | tuple[str | Device, int]]) -> list[tuple[Device, int]]:
    if len(what) in (1, 2) and isinstance(what[0], (str, Device)):
        what = ((what[0], what[1] if len(what) == 2 else 1),)  # type: ignore[assignment]
    found = []
    for each in what:
        pair = each if isinstance(each, tuple) and len(each) == 2 else (None, None)
        kind, count = pair
        if not isinstance(kind, (str, Device)) or not isinstance(count, int) or count < 1:
            raise ConfigError(f'a cluster is given as "H100", 8 or as pairs of a device and a count, got {each!r}')
        found.append((device(kind) if isinstance(kind, str) else kind, count))
    return found


def _link(link: str | Link) -> Link:
    return _named(link) if isinstance(link, str) else link


def _named(name: str) -> Link:
    if name not in LINKS:
        raise UnknownName("link", name, LINKS, "For another one give a trinity.costs.step_cost.Link.")
    return LINKS[name]
