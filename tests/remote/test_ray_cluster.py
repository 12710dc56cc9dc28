"""Instances on a Ray cluster of this machine's: the contract, exact tokens, restarts, an empty object store."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from remote.test_supervision import emulated, serves
from support import ray_cluster
from support.certificates import Authority
from support.checkpoint_files import checkpoint
from support.ray_cluster import WARM_UP_BYTES, RayCluster, run_on
from support.ray_hosts import find_processes
from support.running_instances import POOLS, SECRET, request
from trinity.connector import Connector
from trinity.errors import ConfigError, PeerLost, TrinityError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.ray.ray_supply import RaySupply
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.remote.supervision.process_identity import has_ended, read_start
from trinity.remote.supervision.supply import InstanceOrder
from trinity.testing.oracle import Oracle
from trinity.testing.supply_contract import check_supply

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(ray_cluster.missing()), reason=ray_cluster.missing()),
]
LIVENESS_S = 300.0
MOST_PROCESSES = 40  # of Ray's, in a test
KEY = SECRET.encode()
TRUSTED: dict[str, Any] = {"options": {"trusted_network": True}}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster.ray_cluster() as made:
        made.start_head(cpus=3)
        yield made


@pytest.fixture(scope="module")
def wanted() -> list[int]:
    return Oracle(checkpoint("llava")).generate(request())


def supply(cluster: RayCluster, placement: Any = "1E1P1D", **named: Any) -> RaySupply:
    return RaySupply(placement, address=cluster.address, **{"trusted_network": True, **named})


@asynccontextmanager
async def pipeline(cluster: RayCluster, tls: TLSConfig | None = None, **named: Any) -> AsyncIterator[Pipeline]:
    """In float32, at one thread, as ``generate()`` is here."""
    given = {"placement": "1E1P1D", **named}
    processes = ProcessConfig(supply=supply(cluster, given["placement"], trusted_network=tls is None), tls=tls)
    model, medium = checkpoint("llava"), Connector("auto", **TRUSTED)
    options: dict[str, Any] = {"hosting": "process", "processes": processes, "connector": medium, "dtype": "float32"}
    options["cache"] = CacheConfig(pools=POOLS)
    async with Pipeline(model, given.pop("placement"), **options, **given) as pipe:
        yield pipe


def instances_of(cluster: RayCluster) -> dict[int, int | None]:
    """Processes of instances and their launchers, by number, with their starts."""
    return {each: read_start(each) for node in cluster.nodes for each in node.processes("trinity.remote.fork_server")}


async def recovered(pipe: Pipeline) -> list[int]:
    """The first answer after a loss."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            try:
                return (await pipe.complete(request())).token_ids
            except TrinityError:
                await asyncio.sleep(0.1)


async def until_gone(births: dict[int, int | None]) -> None:
    async with asyncio.timeout(LIVENESS_S):
        while not all(has_ended(*birth) for birth in births.items()):
            await asyncio.sleep(0.05)


async def test_it_keeps_the_contract(cluster: RayCluster) -> None:
    @asynccontextmanager
    async def opened() -> AsyncIterator[RaySupply]:
        yield supply(cluster, "1P1D")

    await check_supply(opened, secret=KEY)


async def test_tokens_are_exact_and_none_go_through_rays_store(
    cluster: RayCluster, wanted: list[int], tmp_path: Path
) -> None:
    """With certificates on the control plane. A killed instance is back where its supply says."""
    async with pipeline(cluster, Authority(tmp_path, "authority").issue("all")) as pipe:
        outputs = await asyncio.gather(*(pipe.complete(request()) for _ in range(4)))
        births = instances_of(cluster)
        assert len(births) == 2 + 3, "a launcher for each of two actors, and three instances"
        assert [output.token_ids for output in outputs] == [wanted] * len(outputs)
        pulled = [each for output in outputs for each in output.transfers if each["outcome"] == "pulled"]
        assert {(each["kind"], each["scheme"]) for each in pulled} == {("image", "shm"), ("kv", "shm")}
        for process in births:
            os.kill(process, signal.SIGKILL)
        assert await recovered(pipe) == wanted
        assert min(health.epoch for health in pipe.health.values()) >= 1
        births = instances_of(cluster)
    await until_gone(births)
    moved = sum(each["bytes"] for each in pulled)
    assert cluster.stored_bytes() <= MOST_PROCESSES * WARM_UP_BYTES < moved / 50, "all of it Ray's own"


def test_what_does_go_through_rays_store_is_counted() -> None:
    """The figure that the test above reads is that of the store: it has a control of its own."""
    with ray_cluster.ray_cluster() as made:
        made.start_head(cpus=1)
        run_on(made, "ray.put(b'0' * 5_000_000)\nimport time\ntime.sleep(2.5)")
        until = time.monotonic() + LIVENESS_S
        while made.stored_bytes() < 5_000_000:
            assert time.monotonic() < until
            time.sleep(0.1)


async def test_actors_that_are_killed_come_back_and_serve(cluster: RayCluster) -> None:
    given: dict[str, Any] = {"supply": supply(cluster), "connector": Connector("auto", **TRUSTED)}
    async with emulated(**given) as pipe, asyncio.timeout(LIVENESS_S):
        await serves(pipe)
        [node] = cluster.nodes
        for epoch in range(1, 3):
            before = instances_of(cluster)
            assert node.kill("ray::HostActor") == 2
            await until_gone(before)
            await serves(pipe)
            assert [health.epoch for health in pipe.health.values()] >= [epoch] * 3


async def test_a_driver_that_is_killed_is_replaced(cluster: RayCluster) -> None:
    """Ray ends what a driver has begun with it: all instances are lost, and all come back with the next."""
    given: dict[str, Any] = {"supply": supply(cluster), "connector": Connector("auto", **TRUSTED)}
    async with emulated(**given) as pipe, asyncio.timeout(LIVENESS_S):
        await serves(pipe)
        before = instances_of(cluster)
        [driver] = find_processes("trinity.remote.ray.ray_driver")
        os.kill(driver, signal.SIGKILL)
        await until_gone(before)
        await serves(pipe)
        assert find_processes("trinity.remote.ray.ray_driver") != [driver]


async def begun(made: RaySupply, name: str = "E0") -> None:
    try:
        await made.begin(InstanceOrder(name, 0, name[0], KEY))
    finally:
        await made.aclose()


async def test_too_few_resources_are_an_error_that_says_which(cluster: RayCluster) -> None:
    with pytest.raises(
        ConfigError, match=r"no node .* large enough for P0, D0 \(4 CPU\), which exchange KV.* has 3 CPU"
    ):
        await begun(supply(cluster, cpus=2, timeout_s=2.0))


async def test_resources_in_use_are_an_error_that_says_so(cluster: RayCluster) -> None:
    one = supply(cluster, "1PD", cpus=3)
    try:
        await one.begin(InstanceOrder("PD0", 0, "PD", KEY))
        with pytest.raises(ConfigError, match=r"no room for PD0 \(2 CPU\).* with what others use"):
            await begun(supply(cluster, "1PD", cpus=2, timeout_s=2.0), "PD0")
    finally:
        await one.aclose()


async def test_no_cluster_is_an_error_that_says_how_to_start_one() -> None:
    with pytest.raises(PeerLost, match=r"no Ray cluster answers at 127.0.0.1:9 .*ray start --head"):
        await begun(RaySupply("1PD", address="127.0.0.1:9", trusted_network=True, timeout_s=2.0), "PD0")


async def test_without_an_address_it_is_the_cluster_that_ray_knows(
    cluster: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    await begun(RaySupply("1PD", trusted_network=True), "PD0")


async def test_a_model_that_a_host_lacks_is_an_error_that_says_so(cluster: RayCluster) -> None:
    made = supply(cluster, "1PD")
    try:
        with pytest.raises(ConfigError, match="no model at /nowhere: every host needs it"):
            await made.begin(InstanceOrder("PD0", 0, "PD", KEY, "/nowhere"))
    finally:
        await made.aclose()
