"""Cluster: devices, hosts, links, and how a placement is laid over hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from trinity.costs.cluster import Cluster
from trinity.costs.interconnects import INTERCONNECTS, Interconnect
from trinity.costs.step_cost import DEVICES
from trinity.errors import ConfigError, PlacementError, UnknownName, arguments
from trinity.placement import Placement


def test_devices_by_name_and_count() -> None:
    own = DEVICES["A100"]
    assert [each.name for each in Cluster.of("H100", 2).devices] == ["H100", "H100"]
    assert Cluster.of("H100").size == 1
    mixed = Cluster.of(("H100", 1), (own, 2))
    assert [each.name for each in mixed.devices] == ["H100", "A100", "A100"]
    assert Cluster.of(own, 3) == Cluster(devices=(own,) * 3)


def test_links_within_and_between_hosts() -> None:
    cluster = Cluster.of("H100", 4, per_host=2, link="pcie4", network=Interconnect(name="string", bandwidth=1.0))
    assert cluster.hosts == ("host0", "host0", "host1", "host1")
    assert cluster.link_between(0, 1) == INTERCONNECTS["pcie4"]
    assert cluster.link_between(1, 2).name == "string"
    assert Cluster.of("H100", 2).link_between(0, 1) == INTERCONNECTS["nvlink"]
    assert Cluster.of("H100", 3, per_host=2).hosts == ("host0", "host0", "host1")


def test_links_of_what_is_no_device() -> None:
    cluster = Cluster.of("H100", 2)
    assert cluster.link_between(np.int64(0), np.uint8(1)) == INTERCONNECTS["nvlink"]  # type: ignore[arg-type]
    for wrong in (-1, 2, True, "0", None, 0.0, 10**400, np.int64(2)):
        for pair in ((0, wrong), (wrong, 0)):
            with pytest.raises(ConfigError):
                cluster.link_between(*pair)  # type: ignore[arg-type]


def test_a_link_that_simulations_ask_for_is_not_checked_by_its_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for with every transfer; the door of arguments takes nine microseconds."""
    cluster = Cluster.of("H100", 2)
    monkeypatch.setattr(arguments, "check_value", None)
    monkeypatch.setattr("trinity.costs.cluster.check_value", None)
    assert cluster.link_between(0, 1) == INTERCONNECTS["nvlink"]


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ((), {}),
        (("H100", 0), {}),
        (("H100", 2, 3), {}),
        ((("H100", "A100"),), {}),
        (("H100", 2), {"per_host": 0}),
        (("H100", 2), {"message_s": -1.0}),
        (("H100", 2), {"message_s": float("nan")}),
    ],
)
def test_what_is_no_cluster(what: tuple[Any, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Cluster.of(*what, **options)


def test_names_that_are_none() -> None:
    with pytest.raises(UnknownName, match="H1000"):
        Cluster.of("H1000", 2)
    with pytest.raises(UnknownName, match="wire"):
        Cluster.of("H100", 2, link="wire")
    with pytest.raises(ConfigError, match="3 hosts"):
        Cluster(devices=(DEVICES["H100"],) * 2, hosts=("a", "b", "c"))


def crossing(roles: Sequence[str], hosts: Sequence[str]) -> tuple[float, float]:
    """Shares of the ways that KV, and features, can go between instances which lead to another host."""

    def share(sources: list[int], targets: list[int]) -> float:
        ways = [(one, other) for one in sources for other in targets]
        return sum(hosts[one] != hosts[other] for one, other in ways) / max(1, len(ways))

    def having(letter: str, without: str = "-") -> list[int]:
        return [at for at, each in enumerate(roles) if letter in each and without not in each]

    return share(having("P", "D"), having("D")), share(having("E", "P"), having("P"))


def assignments(roles: Sequence[str], room: dict[str, int], done: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every way to give each instance a host, but for changes among instances of equal roles."""
    at = len(done)
    if at == len(roles):
        yield done
    for host in room if at < len(roles) else ():
        again = at > 0 and roles[at] == roles[at - 1] and host < done[-1]
        if room[host] and not again:
            yield from assignments(roles, {**room, host: room[host] - 1}, (*done, host))


@pytest.mark.parametrize("text", ["1E3P4D", "4E2P2D", "1E2P1D", "3EP1D", "2EP6D", "3ED1P", "2PD2E", "6PD2E", "1E6P1D"])
@pytest.mark.parametrize("per_host", [2, 4])
def test_a_placement_laid_out_crosses_hosts_as_little_as_can_be_kv_first(text: str, per_host: int) -> None:
    placement = Placement.parse(text)
    roles = [each for _, each in placement.instances()]
    plain = Cluster.of("H100", placement.size, per_host=per_host)
    found = plain.arrange_for(placement)
    assert sorted(found.hosts) == sorted(plain.hosts)
    room = {host: plain.hosts.count(host) for host in sorted(set(plain.hosts))}
    best = min(crossing(roles, each) for each in assignments(roles, room))
    assert crossing(roles, found.hosts) == pytest.approx(best)


def test_only_equal_devices_change_places() -> None:
    mixed = Cluster.of(("L40S", 2), ("H100", 4), per_host=3)
    found = mixed.arrange_for("2E2P2D")
    assert found.hosts[:2] == ("host0", "host0")
    assert sorted(found.hosts[2:]) == ["host0", "host1", "host1", "host1"]
    assert Cluster.of("H100", 3).arrange_for("E+P+D") == Cluster.of("H100", 3), "one host"
    with pytest.raises(PlacementError, match="2 instances"):
        mixed.arrange_for("P+D")
