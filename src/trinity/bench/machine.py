"""Facts of the machine, CPU seconds of processes, and the share that other processes take."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from trinity.errors import DISTRIBUTION

ROOT = Path(__file__).resolve().parents[3]
MAX_FOREIGN_SHARE = 0.10  # share of the machine that others may take before a wall time no longer counts
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
_TICKS = os.sysconf("SC_CLK_TCK")


def session_seconds(leaders: Iterable[int]) -> float:
    """CPU seconds of all processes of these sessions, and of their children that have ended; 0 without /proc."""
    wanted, ticks = set(leaders), 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if int(fields[3]) in wanted:
            ticks += sum(map(int, fields[11:15]))
    return ticks / _TICKS


def own_seconds() -> float:
    """CPU seconds of this process."""
    return time.process_time()


def busy_seconds() -> float:
    """CPU seconds that all processes of the machine have taken; 0 without /proc."""
    try:
        fields = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return 0.0
    user, nice, system, _idle, _wait, irq, softirq, *_ = map(int, fields)
    return (user + nice + system + irq + softirq) / _TICKS


class LoadMeter:
    """Measures a ``with`` block: ``cpu_s`` of the given sessions, ``wall_s``, and ``foreign``, the share of others.

    This process is not counted among the others: it is the client.
    """

    cpu_s = foreign = wall_s = 0.0

    def __init__(self, sessions: Iterable[int]) -> None:
        self._sessions = list(sessions)

    def __enter__(self) -> LoadMeter:
        self._busy, self._own = busy_seconds(), own_seconds()
        self._theirs, self._wall = session_seconds(self._sessions), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        self.wall_s = time.monotonic() - self._wall
        self.cpu_s = session_seconds(self._sessions) - self._theirs
        others = busy_seconds() - self._busy - self.cpu_s - (own_seconds() - self._own)
        room = self.wall_s * (os.cpu_count() or 1)
        self.foreign = min(1.0, max(0.0, others / room)) if room else 0.0


def machine_facts() -> dict[str, Any]:
    """Collect what a figure depends on: machine, versions, threads, commit, date. Imports nothing large."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "cpu": read_cpu_field("model name") or platform.processor() or platform.machine(),
        "flags": sorted(set(read_cpu_field("flags").split()).intersection(CPU_FLAGS)),
        "cores": os.cpu_count(),
        "system": platform.platform(terse=True),
        "omp": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY")},
        "python": platform.python_version(),
        "trinity": _version(DISTRIBUTION),
        **{name: _version(name) for name in ("torch", "transformers")},
        "git": measured_commit(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "unknown"


def read_cpu_field(key: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def measured_commit(root: Path = ROOT) -> str:
    """Name the commit that was measured, with "+" where files differ from it; "unknown" outside a checkout."""
    try:
        head = _git(root, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(root, "status", "--porcelain", "--", "src", "benchmarks") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
