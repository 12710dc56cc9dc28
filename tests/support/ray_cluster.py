"""Nodes of a Ray cluster that tests start, with little of everything, and end, whatever happens."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from support.paths import PYTHON_PATH
from support.running_instances import free_port

LIVENESS_S = 120.0
STORE_BYTES = 80_000_000  # the least that Ray takes
WARM_UP_BYTES = 8  # that each process of Ray's puts into the store as it joins, to have tried it
CREATED = re.compile(r"num bytes created total: (\d+)")
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_worker_prestart": "false",  # each would import Ray
    "RAY_prestart_worker_first_driver": "false",
    "RAY_event_stats_print_interval_ms": "1000",  # of its statistics
    "RAY_raylet_start_wait_time_s": "60",
    "OMP_NUM_THREADS": "1",
}


def missing() -> str:
    """What this machine lacks for it; "" where nothing."""
    return "" if importlib.util.find_spec("ray") else "ray is not installed: pip install 'trinity-epd[ray]'"


class RayNode:
    """A raylet, and the head's processes where it is one, with all that they start."""

    def __init__(self, folder: Path, words: Sequence[str], entry: Sequence[str], environment: dict[str, str]) -> None:
        self.mark = f"trinity-node-{os.urandom(6).hex()}"
        command = [*entry, sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"]
        command += [f"--object-store-memory={STORE_BYTES}", *words]
        known = {**os.environ, **ENVIRONMENT, **environment, "PYTHONPATH": PYTHON_PATH, "TRINITY_TEST_NODE": self.mark}
        self.log = folder / f"{self.mark}.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, env=known, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def processes(self, of: str = "") -> list[int]:
        """Numbers of its processes, of those alone whose command line says ``of``.

        They have its mark, or descend from one that does: Ray writes a worker's title over what it inherited.
        """
        marked = f"TRINITY_TEST_NODE={self.mark}".encode()
        parents, ours = dict[int, int](), set[int]()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                parents[int(path.name)] = int((path / "stat").read_text(errors="replace").rpartition(")")[2].split()[1])
                if marked in (path / "environ").read_bytes().split(b"\0"):
                    ours.add(int(path.name))
        while more := {each for each, parent in parents.items() if parent in ours} - ours:
            ours |= more
        return [each for each in sorted(ours) if of in _command(each)]

    def wait_up(self) -> None:
        until = time.monotonic() + LIVENESS_S
        while "Ray runtime started" not in self.log.read_text(errors="replace"):
            assert not self._process.poll(), self.log.read_text(errors="replace")
            assert time.monotonic() < until, self.log.read_text(errors="replace")
            time.sleep(0.1)

    def kill(self, of: str = "") -> int:
        """Kill its processes, or those alone whose command line says ``of``; return how many there were."""
        killed = 0
        for process in self.processes(of):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
                killed += 1
        return killed

    def kill_one(self, process: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)

    def close(self) -> None:
        until = time.monotonic() + LIVENESS_S
        while self.kill():
            self._process.poll()
            assert time.monotonic() < until
            time.sleep(0.05)
        self._process.wait()


def _command(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


class RayCluster:
    """A head and what joins it, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.nodes = folder, list[RayNode]()
        self.address = ""

    def start_head(self, cpus: int, host: str = "127.0.0.1", entry: Sequence[str] = (), **environment: str) -> RayNode:
        port = int(self.address.rpartition(":")[2]) if self.address else free_port()
        words = ["--head", f"--port={port}", f"--node-ip-address={host}", f"--temp-dir={self.folder}"]
        words += [f"--num-cpus={cpus}", "--include-dashboard=false", "--include-log-monitor=false"]
        node = self._start(words, entry, environment)
        self.address = f"{host}:{port}"
        node.wait_up()
        return node

    def join(self, cpus: int, host: str, entry: Sequence[str] = (), **environment: str) -> RayNode:
        words = [f"--address={self.address}", f"--node-ip-address={host}", f"--num-cpus={cpus}"]
        node = self._start([*words, "--include-log-monitor=false"], entry, environment)
        node.wait_up()
        return node

    def _start(self, words: Sequence[str], entry: Sequence[str], environment: dict[str, str]) -> RayNode:
        node = RayNode(self.folder, words, entry, environment)
        self.nodes.append(node)
        return node

    def stored_bytes(self) -> int:
        """Bytes that were ever put into the raylets' object stores, as they count them themselves, once a second."""
        logs = (path.read_text(errors="replace") for path in self.folder.glob("session_2*/logs/raylet*.out"))
        return sum(int(counted[-1]) for counted in map(CREATED.findall, logs) if counted)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster without nodes yet. Its folder's name is short: sockets are in it."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    cluster = RayCluster(folder)
    try:
        yield cluster
    finally:
        cluster.close()
        shutil.rmtree(folder, ignore_errors=True)


def run_on(cluster: RayCluster, program: str, entry: Sequence[str] = ()) -> subprocess.CompletedProcess[Any]:
    """Run a program of Python's that has ``ray`` and has joined the cluster."""
    start = f"import ray\nray.init({cluster.address!r}, log_to_driver=False, logging_level='ERROR')\n"
    known = {**os.environ, **ENVIRONMENT, "PYTHONPATH": PYTHON_PATH}
    return subprocess.run(
        [*entry, sys.executable, "-c", start + program], env=known, capture_output=True, text=True, timeout=LIVENESS_S,
        check=True,
    )  # fmt: skip
