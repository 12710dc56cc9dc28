"""Two hosts of a Ray cluster, out of namespaces of this machine, and a pipeline's program on the first."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from support import namespaces, paths, ray_cluster
from support.certificates import Authority
from support.checkpoint_files import checkpoint
from support.namespaces import HostSpace, two_hosts
from support.ray_cluster import ENVIRONMENT, LIVENESS_S, RayCluster, RayNode
from support.ray_cluster import ray_cluster as ray_cluster_folder
from support.running_instances import GREEDY, PHOTOS
from trinity.request import Request
from trinity.testing.oracle import Oracle

REQUEST_ERRORS = {"MigrationError", "StageError", "Overloaded", "RequestError", "PeerLost"}
PROGRAM = paths.TESTS / "support" / "ray_program.py"


def missing() -> str:
    """What this machine lacks for it; "" where nothing."""
    return ray_cluster.missing() or namespaces.missing()


class RayHosts:
    """The cluster, its hosts, the raylet of each, and the program, which runs on the first."""

    def __init__(self, cluster: RayCluster, hosts: Sequence[HostSpace], cpus: Sequence[int]) -> None:
        self.cluster, self.hosts, self.cpus = cluster, hosts, cpus
        self.nodes: list[RayNode] = []
        self.program: subprocess.Popen[bytes] | None = None

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
        known = {**os.environ, **ENVIRONMENT, "PYTHONPATH": paths.PYTHON_PATH}
        known |= {"UCX_NET_DEVICES": self.hosts[0].device}
        words = [str(PROGRAM), self.cluster.address, str(model), str(PHOTOS[0]), *tls]
        pipe = subprocess.PIPE
        self.program = subprocess.Popen(
            [*self.hosts[0].entry, sys.executable, *words], stdin=pipe, stdout=pipe, env=known, start_new_session=True
        )

    def ask(self, word: str, timeout_s: float = 3 * LIVENESS_S) -> dict[str, Any]:
        """Give the program a word; return what it says."""
        assert self.program is not None
        told = cast(IO[bytes], self.program.stdin)
        told.write(f"{word}\n".encode())
        told.flush()
        heard = cast(IO[bytes], self.program.stdout)
        ready, _, _ = select.select([heard], [], [], timeout_s)
        assert ready, f"the program said nothing for {timeout_s} s"
        answer: dict[str, Any] = json.loads(heard.readline())
        return answer

    def end(self) -> int:
        """Have the program close its pipeline; return its exit code."""
        assert self.program is not None
        cast(IO[bytes], self.program.stdin).close()
        try:
            return self.program.wait(LIVENESS_S)
        finally:
            cast(IO[bytes], self.program.stdout).close()

    def driver(self) -> list[int]:
        """Processes of the program's driver of Ray."""
        return find_processes("trinity.remote.ray_driver")

    def close(self) -> None:
        if self.program is not None and self.program.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.program.pid, signal.SIGKILL)
            self.program.wait()
            for each in (self.program.stdin, self.program.stdout):
                cast(IO[bytes], each).close()


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
            made.close()
            cluster.close()


def make_certificates(folder: Path) -> list[str]:
    """Files of one certificate that all sides show."""
    return [str(each) for each in Authority(folder, "authority").issue("all").paths()]


def wait_until(true: Any, what: str) -> None:
    until = time.monotonic() + LIVENESS_S
    while not true():
        assert time.monotonic() < until, what
        time.sleep(0.1)


def make_wanted() -> list[int]:
    """What ``generate()`` answers to the program's request."""
    asked = Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=24, sampling=GREEDY)
    return Oracle(checkpoint("llava")).generate(asked)


def check_told(told: dict[str, Any], wanted: list[int]) -> int:
    """Every answer is exact, every error one of a request's; return the number of answers."""
    assert not told["problem"], told
    assert [tokens for tokens, _ in told["answers"]] in ([], [wanted])
    assert set(told["errors"]) <= REQUEST_ERRORS
    return sum(count for _, count in told["answers"])
