"""Devices that a placement runs on, and the interconnects between them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from trinity.costs.engines import DEFAULT_ENGINE
from trinity.costs.interconnects import INTERCONNECTS, Interconnect
from trinity.costs.step_cost import Device, get_device
from trinity.errors import ConfigError, PlacementError, UnknownName
from trinity.errors.arguments import KeywordsByName, check_call, check_struct, check_value, show
from trinity.placement import Placement
from trinity.stage_kinds import roles_of

MOST_DEVICES = 1 << 16  # of one kind


class Cluster(msgspec.Struct, metaclass=KeywordsByName, frozen=True, kw_only=True):
    """Devices of a placement, one for each instance, in the order of ``placement.instances()``.

    devices: the devices, at least one.
    hosts (names, ()): the host of each device; () puts all in one host.
    link (interconnect, nvlink): carries blocks inside a host.
    network (interconnect, infiniband-2x200): carries blocks between hosts.
    message_s (s, 1e-4): time that a control message takes.

    Raises ``ConfigError`` for values out of range.
    """

    devices: tuple[Device, ...]
    hosts: tuple[str, ...] = ()
    link: Interconnect = INTERCONNECTS["nvlink"]
    network: Interconnect = INTERCONNECTS["infiniband-2x200"]
    message_s: float = 1e-4

    def __post_init__(self) -> None:
        check_struct(self)
        if not self.devices:
            raise ConfigError('a cluster needs at least one device, as in Cluster.of("H100", 8)')
        if self.hosts and len(self.hosts) != len(self.devices):
            raise ConfigError(f"{len(self.hosts)} hosts for {len(self.devices)} devices: name the host of each device")
        if not 0 <= self.message_s < math.inf:
            raise ConfigError(f"message_s must be at least 0 seconds, got {self.message_s!r}")

    @classmethod
    @check_call
    def of(
        cls,
        *what: str | Device | int | tuple[str | Device, int],
        per_host: int | None = None,
        link: str | Interconnect = "nvlink",
        network: str | Interconnect = "infiniband-2x200",
        message_s: float = 1e-4,
        engine: str = DEFAULT_ENGINE,
    ) -> Cluster:
        """Build a cluster: ``Cluster.of("H100", 8)`` or ``Cluster.of(("H100", 4), ("L40S", 4))``.

        ``per_host`` devices share a host; None puts all in one. ``engine``: of the devices that are given by name, in
        ``trinity.costs.engines.ENGINES``. Raises ``ConfigError`` for a count below 1, ``UnknownName`` for an unknown
        device, interconnect or engine.
        """
        devices = tuple(one for kind, count in _parse_groups(what, engine) for one in [kind] * count)
        if per_host is not None and per_host < 1:
            raise ConfigError(f"a host has at least one device, got per_host={per_host}")
        hosts = tuple(f"host{at // per_host}" for at in range(len(devices))) if per_host else ()
        return cls(
            devices=devices,
            hosts=hosts,
            link=_get_interconnect(link),
            network=_get_interconnect(network),
            message_s=message_s,
        )

    @property
    def size(self) -> int:
        return len(self.devices)

    def link_between(self, one: int, other: int) -> Interconnect:
        """Get the interconnect of two devices, given by their indices in ``devices``.

        Simulations ask for every transfer: what is right already is not looked at by the door of arguments.
        """
        if not (type(one) is type(other) is int and 0 <= one < self.size and 0 <= other < self.size):
            one, other = self._check_index("one", one), self._check_index("other", other)
        return self.network if self.hosts and self.hosts[one] != self.hosts[other] else self.link

    def _check_index(self, name: str, value: object) -> int:
        index: int = check_value(name, value, int)
        if not 0 <= index < self.size:
            raise ConfigError(f"devices are numbered from 0 to {self.size - 1}, got {index}")
        return index

    @check_call
    def arrange_for(self, placement: Placement | str) -> Cluster:
        """Assign the devices' hosts so that few blocks cross between hosts (TriInfer 5.5).

        Instances that exchange KV fill host after host, each host with the placement's mix of roles; instances that
        only encode come last, so that features cross rather than KV. Only equal devices swap hosts. Raises
        ``PlacementError`` where the placement has another number of instances than the cluster has devices.
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
    """Rank instances in the order in which hosts are filled; instances of equal roles are spread evenly."""
    roles = [each for _, each in placement.instances()]
    moves_kv = any(roles_of(each).hands_kv_on for each in roles)
    seen: dict[str, int] = {}
    ranks = []
    for each in roles:
        seen[each] = seen.get(each, 0) + 1
        ranks.append((moves_kv and roles_of(each).only_encodes, (seen[each] - 0.5) / roles.count(each)))
    return ranks


def _parse_groups(
    what: Sequence[str | Device | int | tuple[str | Device, int]], engine: str
) -> list[tuple[Device, int]]:
    if len(what) in (1, 2) and isinstance(what[0], (str, Device)):
        what = ((what[0], what[1] if len(what) == 2 else 1),)  # type: ignore[assignment]
    groups = []
    for each in what:
        pair = each if isinstance(each, tuple) and len(each) == 2 else (None, None)
        kind, count = pair
        if not isinstance(kind, (str, Device)) or type(count) is not int or not 1 <= count <= MOST_DEVICES:
            raise ConfigError(f'give a cluster as "H100", 8 or as pairs of a device and a count, got {show(each)}')
        groups.append((get_device(kind, engine) if isinstance(kind, str) else kind, count))
    return groups


def _get_interconnect(given: str | Interconnect) -> Interconnect:
    if isinstance(given, Interconnect):
        return given
    if given not in INTERCONNECTS:
        text = "For another one give a trinity.costs.interconnects.Interconnect."
        raise UnknownName("interconnect", given, INTERCONNECTS, text)
    return INTERCONNECTS[given]
