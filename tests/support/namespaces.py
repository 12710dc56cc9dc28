"""Two hosts out of one: network and process namespaces, joined by a pair of devices that leads nowhere else."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LIVENESS_S = 60.0
TOOLS = ("unshare", "nsenter", "ip")


@dataclass
class HostSpace:
    """One such host: its address, the name of its device, and the process that holds its namespaces."""

    address: str
    device: str
    process: int

    @property
    def entry(self) -> list[str]:
        """What a command begins with that is to run there."""
        return ["nsenter", f"--target={self.process}", "--net", "--pid", "--mount"]


def missing() -> str:
    """What this machine lacks for it; "" where nothing."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"no {', '.join(lacking)} here"
    tried = subprocess.run(
        ["unshare", "-n", "-p", "-f", "--mount-proc", "mount", "-t", "sysfs", "sysfs", "/sys"],
        capture_output=True,
        check=False,
    )
    return "" if tried.returncode == 0 else f"no namespaces of one's own here: {tried.stderr.decode().strip()}"


@contextmanager
def two_hosts() -> Iterator[list[HostSpace]]:
    """Two of them, which reach each other and nothing else; all that runs there ends with them."""
    holders, hosts = [_hold() for _ in range(2)], []
    try:
        for number, holder in enumerate(holders, 1):
            hosts.append(HostSpace(f"10.99.{os.getpid() % 250}.{number}", f"tr{number}", _child(holder)))
        one, two = hosts
        _ip("link", "add", one.device, "netns", str(one.process), "type", "veth",
            "peer", "name", two.device, "netns", str(two.process))  # fmt: skip
        for host in hosts:
            inside = ["nsenter", f"--target={host.process}", "--net", "ip"]
            for words in (
                ["addr", "add", f"{host.address}/24", "dev", host.device],
                ["link", "set", host.device, "up"],
                ["link", "set", "lo", "up"],
            ):
                subprocess.run([*inside, *words], check=True, capture_output=True)
        yield hosts
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def _hold() -> subprocess.Popen[Any]:
    devices = "mount -t sysfs sysfs /sys && exec sleep 1000000"  # else those of the namespace around it are listed
    command = ["unshare", "-n", "-p", "-f", "--mount-proc", "--kill-child", "sh", "-c", devices]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL)


def _child(holder: subprocess.Popen[Any]) -> int:
    until = time.monotonic() + LIVENESS_S
    while time.monotonic() < until:
        children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        if children and Path(f"/proc/{children[0]}/comm").read_text().strip() == "sleep":
            return int(children[0])
        time.sleep(0.01)
    raise AssertionError("namespaces were not made")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
