"""The command ``trinity instance --hosts FILE --on NAME`` as a process, and the processes that it has begun."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from support import paths
from support.running_instances import SECRET

LIVENESS_S = 120.0
ENVIRONMENT = {"TRINITY_SECRET": SECRET, "PYTHONPATH": paths.PYTHON_PATH}


class HostCommand:
    """One such command. ``entry``: what its words begin with, to enter a namespace."""

    def __init__(self, file: Path, name: str, *words: str, entry: Sequence[str] = (), errors: Any = None) -> None:
        command = [*entry, sys.executable, "-m", "trinity", "instance", "--hosts", str(file), "--on", name, *words]
        self._mark = f"TRINITY_TEST_COMMAND={uuid.uuid4().hex}"
        known = {key: value for key, value in os.environ.items() if key != "UCX_NET_DEVICES"} | ENVIRONMENT
        name, _, value = self._mark.partition("=")
        known[name] = value
        self.run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=known)
        self._pending = b""

    def hear(self, timeout_s: float = LIVENESS_S) -> dict[str, str]:
        """The next line that it prints."""
        told, until = cast(IO[bytes], self.run.stdout), time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([told], [], [], max(0.0, until - time.monotonic()))
            assert ready, f"nothing was printed in {timeout_s} s"
            piece = os.read(told.fileno(), 65_536)
            assert piece, "it has ended"
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        said: dict[str, str] = json.loads(line)
        return said

    def until_listening(self, count: int) -> dict[str, str]:
        """Where each instance listens, by name, once so many have said so."""
        return {said["instance"]: said["listening"] for said in (self.hear() for _ in range(count))}

    def processes(self) -> list[int]:
        """A launcher, then all instances. Those of a dead launcher are no descendants: all have the command's mark."""
        return [self.launcher(), *self.instances()]

    def launcher(self) -> int:
        own = self.own()
        found = [each for each in self._marked() if parent_of(each) == own]
        assert found, "the command has no launcher now"
        return found[0]

    def instances(self) -> list[int]:
        """Children of the launcher, and of launchers that have died: their parent is none of the command's."""
        marked, launcher = self._marked(), self.launcher()
        return [each for each in marked if each != launcher and parent_of(each) not in {*marked} - {launcher}]

    def _marked(self) -> list[int]:
        every = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
        of_launchers = (each for each in every if "trinity.remote.fork_server" in words_of(each))
        return sorted(each for each in of_launchers if self._mark in settings_of(each))

    def own(self) -> int:
        """The command itself, which a namespace's entry has begun."""
        return next(each for each in [self.run.pid, *descendants(self.run.pid)] if "--on" in words_of(each)[:9]
                    and "nsenter" not in words_of(each)[0])  # fmt: skip

    def send(self, number: signal.Signals) -> None:
        os.kill(self.own(), number)

    def close(self) -> None:
        """Kill it with all that it has begun. May be called twice."""
        for process in [*descendants(self.run.pid), self.run.pid]:
            if self.run.poll() is None or process != self.run.pid:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
        self.run.wait(LIVENESS_S)
        cast(IO[bytes], self.run.stdout).close()


def words_of(process: int) -> list[str]:
    with suppress(OSError):
        return Path(f"/proc/{process}/cmdline").read_bytes().decode(errors="replace").split("\0")
    return [""]


def settings_of(process: int) -> list[str]:
    """Its environment when it began, each ``NAME=value``."""
    with suppress(OSError):
        return Path(f"/proc/{process}/environ").read_bytes().decode(errors="replace").split("\0")
    return []


def parent_of(process: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()[1])
    return 0


def descendants(process: int) -> list[int]:
    """Processes that it has begun, and they, the oldest generation first."""
    parents = {int(path.name): parent_of(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    found, now = list[int](), [process]
    while now := [each for each, parent in sorted(parents.items()) if parent in now]:
        found += now
    return found


@contextmanager
def host_command(file: Path, name: str, *words: str, **named: Any) -> Iterator[HostCommand]:
    made = HostCommand(file, name, *words, **named)
    try:
        yield made
    finally:
        made.close()
