"""A Ray cluster of two hosts, each with network and processes of its own: exact; what is lost comes back elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import ray_hosts
from support.checkpoint_files import checkpoint
from support.ray_cluster import WARM_UP_BYTES
from support.ray_hosts import RayHosts, check_told, make_certificates, make_wanted, wait_until
from sweeps import ray_kills

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(ray_hosts.missing()), reason=ray_hosts.missing()),
]
MOST_PROCESSES = 60  # of Ray's, in a test


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return make_wanted()


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[RayHosts]:
    """E on the first host, where there is room for one; P and D on the second."""
    with ray_hosts.ray_hosts((1, 2)) as hosts:
        hosts.run(checkpoint("llava"), make_certificates(tmp_path))
        yield hosts


def test_two_hosts_serve_exactly_and_survive_their_head(serving: RayHosts, wanted: list[int]) -> None:
    first = serving.ask("up")
    assert check_told(first, wanted)
    assert first["errors"] == {}
    assert {(kind, scheme) for kind, _, _, scheme in first["ways"]} == {("image", "nixl"), ("kv", "shm")}
    one, two = serving.hosts
    places = {said.split()[1]: said.split()[4].split(":")[1] for said in first["said"] if " is at tcp:" in said}
    assert places == {"E0": one.address, "P0": two.address, "D0": two.address}
    assert serving.nodes[0].kill("gcs_server") == 1
    for _ in range(3):
        told = serving.ask("up")
        assert check_told(told, wanted) > 0
        assert told["errors"] == {}, "nothing is lost with the head"
    [*_, instance] = serving.nodes[1].processes("trinity.remote.fork_server")
    epochs = {name: epoch for name, (_, epoch, _) in told["health"].items()}
    serving.nodes[1].kill_one(instance)
    wait_until(lambda: serving.ask("on")["errors"], "nothing was lost")
    told = serving.ask("up")
    check_told(told, wanted)
    assert sum(epoch for _, epoch, _ in told["health"].values()) == sum(epochs.values()) + 1, "its actor began another"
    assert serving.cluster.stored_bytes() <= MOST_PROCESSES * WARM_UP_BYTES
    assert serving.nodes[1].kill("ray::HostActor") == 1
    for _ in range(3):
        told = serving.ask("on")
        check_told(told, wanted)
    serving.restart_head()
    assert check_told(serving.ask("up"), wanted)
    assert serving.end() == 0


def test_what_a_lost_host_had_lands_on_the_other(tmp_path: Path, wanted: list[int]) -> None:
    with ray_hosts.ray_hosts((3, 3)) as hosts:
        hosts.run(checkpoint("llava"), make_certificates(tmp_path))
        first = hosts.ask("up")
        assert check_told(first, wanted)
        there = {said.split()[1] for said in first["said"] if f"tcp:{hosts.hosts[1].address}:" in said}
        hosts.nodes[1].close()
        told = hosts.ask("up")
        check_told(told, wanted)
        assert {scheme for _, _, _, scheme in hosts.ask("up")["ways"]} == {"shm"}
        landed = {said.split()[1] for said in told["said"] if f"tcp:{hosts.hosts[0].address}:" in said}
        assert landed >= there
        assert hosts.end() == 0


def test_kills_of_each_kind(tmp_path: Path) -> None:
    """``python tests/sweeps/ray_kills.py`` has 50."""
    counted = ray_kills.run(5, 3, tmp_path, ("actor", "raylet", "launcher", "instance", "driver"))
    assert counted["kills"] == 5
    assert counted["answers"]
