"""Preprocessing processes that are forked from one that has what they import: five seconds of CPU are most of each.

They run the worker's own program with its own arguments, environment and descriptors. Only Python's start is left out;
tests of how they end with their parent start theirs as a user's program does. ``worker_forks`` is what forks.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support import worker_forks
from support.worker_forks import PROGRAM


class WarmProcess:
    """As much of ``subprocess.Popen`` as the owner of a preprocessing process uses."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid, self._status = pid, status
        self.returncode: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], 0)[0]:
                self.returncode = int(os.read(self._status, 64) or b"-9")  # else: who forked it was killed, and it too
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        select.select([self._status], [], [], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(PROGRAM, timeout or 0.0)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._status)


class WarmWorkers:
    """The process that forks them, on the side of the tests."""

    def __init__(self, model: Path) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, worker_forks.__file__, str(theirs.fileno()), str(model)]
        with theirs:
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._lock = threading.Lock()

    def start(
        self, command: Sequence[str], *, env: Mapping[str, str], pass_fds: Sequence[int] = (), **named: Any
    ) -> WarmProcess:
        """Stand in for ``subprocess.Popen``."""
        assert (command[:3], named.pop("start_new_session")) == ([sys.executable, "-m", PROGRAM], True)
        assert named == {"stdin": subprocess.DEVNULL, "stdout": 2}
        told, tell = os.pipe()
        order = {"arguments": command[3:], "environment": dict(env), "folder": os.getcwd(), "numbers": [2, *pass_fds]}
        try:
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(order).encode()], [tell, 2, *pass_fds])
                pid = int(self._socket.recv(64))
        finally:
            os.close(tell)
        return WarmProcess(pid, told)

    @contextmanager
    def instead(self) -> Iterator[None]:
        """Have ``WorkerProcess`` start its processes here."""
        with pytest.MonkeyPatch.context() as patch:
            module = SimpleNamespace(Popen=self.start, DEVNULL=subprocess.DEVNULL)
            patch.setattr("trinity.preprocess.worker_processes.subprocess", module)
            yield

    def close(self) -> None:
        self._socket.close()
        self._process.wait()
