"""Two hosts of a Ray cluster, out of namespaces of this machine, and a pipeline's program on the first."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support import namespaces, paths, ray_cluster
from support.asked_program import AskedProgram
from support.asked_program import check_told as check_told
from support.asked_program import make_wanted as make_wanted
from support.certificates import make_certificates as make_certificates
from support.namespaces import HostSpace, two_hosts
from support.ray_cluster import ENVIRONMENT, LIVENESS_S, RayCluster, RayNode
from support.ray_cluster import ray_cluster as ray_cluster_folder
from support.running_instances import PHOTOS

PROGRAM = paths.TESTS / "support" / "ray_program.py"


def missing() -> str:
    """What this machine lacks for it; "" where nothing."""
    return ray_cluster.missing() or namespaces.missing()


class RayHosts(AskedProgram):
    """The cluster, its hosts, the raylet of each, and the program, which runs on the first."""

    def __init__(self, cluster: RayCluster, hosts: Sequence[HostSpace], cpus: Sequence[int]) -> None:
        self.cluster, self.hosts, self.cpus = cluster, hosts, cpus
        self.nodes: list[RayNode] = []

    def start(self) -> None:
        [one, two], [few, many] = self.hosts, self.cpus
        self.nodes = [self.cluster.start_head(few, one.address, one.entry)]
        self.nodes.append(self.cluster.join(many, two.address, two.entry))

    def join_again(self) -> None:
        """Start the second host's raylet anew."""
        self.nodes[1].close()
        self.nodes[1] = self.cluster.join(self.cpus[1], self.hosts[1].address, self.hosts[1].entry)

    def restart_head(self) -> None:
        """Start everything anew: a head without a store forgets its cluster."""
        for node in self.nodes:
            node.close()
        self.start()

    def run(self, model: Path | str, tls: Sequence[str]) -> None:
        known = {**ENVIRONMENT, "PYTHONPATH": paths.PYTHON_PATH, "UCX_NET_DEVICES": self.hosts[0].device}
        words = [str(PROGRAM), self.cluster.address, str(model), str(PHOTOS[0]), *tls]
        self.begin([*self.hosts[0].entry, sys.executable, *words], known)

    def driver(self) -> list[int]:
        """Processes of the program's driver of Ray."""
        return find_processes("trinity.remote.ray.ray_driver")


def find_processes(of: str) -> list[int]:
    """Numbers of processes whose command line has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if of.encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


@contextmanager
def ray_hosts(cpus: Sequence[int]) -> Iterator[RayHosts]:
    """Two such hosts with so many CPUs in Ray's account, the head on the first."""
    with ray_cluster_folder() as cluster, two_hosts() as hosts:
        made = RayHosts(cluster, hosts, cpus)
        try:
            made.start()
            yield made
        finally:
            made.kill()
            cluster.close()


def wait_until(true: Any, what: str) -> None:
    until = time.monotonic() + LIVENESS_S
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.1)
