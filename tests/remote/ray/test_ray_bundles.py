"""Which instances share a host of Ray's, and what each host has to give: tables, without a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from trinity.costs.cluster import Cluster
from trinity.errors import ConfigError, PlacementError
from trinity.instance import Instance
from trinity.placement import Placement
from trinity.remote.ray.ray_bundles import HostBundle, explain_shortage, plan_bundles


def hosts(placement: Any, cluster: Cluster | None = None) -> list[set[str]]:
    return [set(bundle.names) for bundle in plan_bundles(placement, cluster, 1.0, 0.0).bundles]


@pytest.mark.parametrize(
    ("placement", "together"),
    [
        ("1E1P1D", [{"E0"}, {"P0", "D0"}]),
        ("2E1P2D", [{"E0"}, {"E1"}, {"P0", "D0", "D1"}]),
        ("ED+P", [{"ED0", "P0"}]),  # KV goes from P to ED
        ("EP+D", [{"EP0", "D0"}]),
        ("1E2PD", [{"E0"}, {"PD0"}, {"PD1"}]),  # no KV moves
        ("2EPD", [{"EPD0"}, {"EPD1"}]),
        (Placement.parse("1E1P1D"), [{"E0"}, {"P0", "D0"}]),
        ([Instance("E", "eye"), Instance("P"), Instance("D")], [{"eye"}, {"P0", "D0"}]),
        ([Instance("E"), Instance("PD", address="tcp:10.0.0.1:7000")], [{"E0"}]),
    ],
)
def test_what_exchanges_kv_is_on_one_host_where_nothing_was_planned(placement: Any, together: list[set[str]]) -> None:
    assert hosts(placement) == together
    assert plan_bundles(placement, None, 1.0, 0.0).strategy == "PACK", "near each other, where there is room"


@pytest.mark.parametrize(
    ("placement", "per_host", "together"),
    [
        ("1E1P1D", 3, [{"E0", "P0", "D0"}]),
        ("2E1P1D", 2, [{"E0", "E1"}, {"P0", "D0"}]),  # E alone crosses hosts
        ("2P2D", 2, [{"P0", "D0"}, {"P1", "D1"}]),  # each host has the placement's mix
        ("1E1P2D", 2, [{"P0", "D0"}, {"E0", "D1"}]),
        ("4PD", 2, [{"PD0", "PD1"}, {"PD2", "PD3"}]),
    ],
)
def test_a_clusters_hosts_are_obeyed(placement: str, per_host: int, together: list[set[str]]) -> None:
    cluster = Cluster.of("H100", Placement.parse(placement).size, per_host=per_host)
    found = hosts(placement, cluster)
    assert sorted(map(sorted, found)) == sorted(map(sorted, together))
    arranged = cluster.arrange_for(placement)
    planned: dict[str, set[str]] = {}
    for (name, _), host in zip(Placement.parse(placement).instances(), arranged.hosts, strict=True):
        planned.setdefault(host, set()).add(name)
    assert sorted(map(sorted, planned.values())) == sorted(map(sorted, found)), "as the planner's simulation has them"
    assert plan_bundles(placement, cluster, 1.0, 0.0).strategy == "SPREAD"


def test_a_cluster_of_one_host_is_one_bundle() -> None:
    assert hosts("2E1P1D", Cluster.of("H100", 4)) == [{"E0", "E1", "P0", "D0"}]


def test_a_bundle_has_what_its_instances_need() -> None:
    [eye, language] = plan_bundles("1E1P1D", None, 2.0, 0.25).bundles
    assert eye.resources == {"CPU": 2.0, "GPU": 0.25}
    assert language.resources == {"CPU": 4.0, "GPU": 0.5}
    assert plan_bundles("1PD", None, 1.0, 0.0).bundles[0].resources == {"CPU": 1.0}, "no GPU is asked for"


def test_kinds_of_device_are_asked_for_where_there_are_several() -> None:
    mixed = Cluster.of(("L40S", 1), ("H100", 2))
    hosted = Cluster(devices=mixed.devices, hosts=("a", "b", "b"))
    eye, language = plan_bundles("1E1P1D", hosted, 1.0, 0.5).bundles
    assert eye.resources == {"CPU": 1.0, "GPU": 0.5, "accelerator_type:L40S": 0.001}
    assert language.resources == {"CPU": 2.0, "GPU": 1.0, "accelerator_type:H100": 0.001}
    assert str(language) == "P0, D0 (2 CPU and 1 GPU and H100)"
    same = plan_bundles("1E1P1D", Cluster.of("H100", 3), 1.0, 0.5)
    assert list(same.bundles[0].resources) == ["CPU", "GPU"], "any host will do"


def test_an_instance_finds_its_bundle() -> None:
    group = plan_bundles("1E1P1D", None, 1.0, 0.0)
    assert [group.find(name) for name in ("E0", "P0", "D0")] == [0, 1, 1]
    with pytest.raises(ConfigError, match="no instance D1, it has E0, P0, D0: give it the pipeline's placement"):
        group.find("D1")


@pytest.mark.parametrize(
    ("placement", "cluster", "kind", "said"),
    [
        ("1E1P1D", Cluster.of("H100", 4), PlacementError, "has 3 instances, the cluster 4 devices"),
        ("1E1Q", None, PlacementError, "unknown stage"),
        ([Instance("PD", address="tcp:10.0.0.1:7000")], None, ConfigError, "every instance has an address"),
    ],
)
def test_bad_use_is_refused(placement: Any, cluster: Cluster | None, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        plan_bundles(placement, cluster, 1.0, 0.0)


def test_instances_that_have_a_gpu_each_say_which() -> None:
    with pytest.raises(ConfigError, match=r'P0, D0 run on one host with a GPU each.*Instance\("D", device="cuda:1"\)'):
        plan_bundles("1E1P1D", None, 1.0, 1.0)
    numbered = [Instance("E"), Instance("P", device="cuda:0"), Instance("D", device="cuda:1")]
    assert [each.resources["GPU"] for each in plan_bundles(numbered, None, 1.0, 1.0).bundles] == [1.0, 2.0]
    plan_bundles("1E1P1D", None, 1.0, 0.5)  # who shares a GPU needs no number


NODES = {"10.0.0.1": {"CPU": 4.0}, "10.0.0.2": {"CPU": 8.0, "GPU": 1.0}}


@pytest.mark.parametrize(
    ("bundles", "nodes", "said"),
    [
        ([HostBundle(("E0",), {"CPU": 1.0})], {}, "Ray has no node that is alive"),
        (
            [HostBundle(("E0",), {"CPU": 1.0}), HostBundle(("P0", "D0"), {"CPU": 2.0, "GPU": 2.0})],
            NODES,
            "no node of Ray's is large enough for P0, D0 (2 CPU and 2 GPU), which exchange KV or were planned on one "
            "host: 10.0.0.1 has 4 CPU; 10.0.0.2 has 8 CPU and 1 GPU",
        ),
        (
            [HostBundle(("E0",), {"CPU": 8.0}), HostBundle(("E1",), {"CPU": 8.0})],
            NODES,
            "Ray's nodes have no room for E0 (8 CPU); E1 (8 CPU): 10.0.0.1 has 4 CPU; 10.0.0.2 has 8 CPU and 1 GPU, "
            "with what others use there",
        ),
        (
            [HostBundle(("E0",), {"accelerator_type:H100": 0.001})],
            {"10.0.0.1": {}},
            "no node of Ray's is large enough for E0 (H100): 10.0.0.1 has nothing",
        ),
    ],
    ids=["no node", "no node so large", "no room", "no such kind"],
)
def test_a_shortage_says_what_is_missing(bundles: list[HostBundle], nodes: Any, said: str) -> None:
    assert explain_shortage(bundles, nodes) == said
