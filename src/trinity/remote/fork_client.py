"""Client of the fork server: starts that process and has it fork instances; pipelines may share one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any, TypeVar

from trinity.errors import ConfigError, PeerLost
from trinity.remote.channel import Address

INSTANCE_START_S = 120.0  # for an instance to import, load weights and profile budgets
INSTANCE_STOP_S = 30.0  # for an instance or the launcher to end
LAUNCHER_ENDED = (
    "the launcher of instance processes has ended (see its output above): close the pipeline and make a new one"
)
Answer = TypeVar("Answer")
ForkedProcess = tuple[int, concurrent.futures.Future[int]]  # its process number, and its exit code once it has ended


class Launcher:
    """The fork server's process. A pipeline starts its own, or shares the one of ``kept_launcher``.

    - ``torch`` (True): import torch and the stages once, which takes seconds; emulated instances need neither.
    """

    program: tuple[str, ...] = ("-m", "trinity.remote.fork_server")

    def __init__(self, torch: bool = True) -> None:
        self.torch = torch
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        command = [sys.executable, *self.program, *([] if torch else ["--paced"])]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        self._ready = concurrent.futures.Future[None]()
        self._started: dict[str, concurrent.futures.Future[ForkedProcess]] = {}
        self._exits: dict[int, concurrent.futures.Future[int]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="trinity-launcher", daemon=True)
        self._reader.start()

    async def launch(
        self, address: Address, secret: bytes, model: str, *, once: bool = True
    ) -> tuple[int, asyncio.Future[int]]:
        """Fork an instance that listens on ``address``; return its process number and a future of its exit code.

        ``once``: it serves one pipeline and ends; else one after another, as if started by hand. Raises
        ``ConfigError`` if the launcher has ended, ``PeerLost`` if it does not answer in time.
        """
        await _within(self._ready, "was not ready")
        mark = os.urandom(8).hex()
        order = {"id": mark, "address": str(address), "secret": secret.hex(), "model": model, "once": once}
        started = self._started[mark] = concurrent.futures.Future()
        try:
            self._write(order)
            process, exit_code = await _within(started, "forked no instance")
        except BaseException:
            started.add_done_callback(_kill)  # nobody else would end it
            raise
        return process, asyncio.wrap_future(exit_code)

    def _write(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        except OSError as error:
            raise ConfigError(f"{LAUNCHER_ENDED} ({error})") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer: dict[str, Any] = json.loads(line)
            if "ready" in answer:
                self._ready.set_result(None)
            elif "id" in answer:
                exit_code = self._exits[answer["process"]] = concurrent.futures.Future()
                self._started.pop(answer["id"]).set_result((answer["process"], exit_code))
            elif "exited" in answer:
                self._exits.pop(answer["exited"]).set_result(answer["status"])
        lost = ConfigError(LAUNCHER_ENDED)
        if not self._ready.done():
            self._ready.set_exception(lost)
        for started in list(self._started.values()):
            started.set_exception(lost)
        for exited in self._exits.values():  # its children die with it
            exited.set_result(-signal.SIGKILL)

    def close(self) -> None:
        """End the launcher and every instance that it forked. Blocks; calling it twice does no harm."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # unsent orders, if it has ended
            self._process.stdin.close()
        try:
            self._process.wait(INSTANCE_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


async def _within(answer: concurrent.futures.Future[Answer], late: str) -> Answer:
    """Await an answer of the launcher without cancelling it: others may wait for it too. Raises ``PeerLost``."""
    try:
        return await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(answer)), INSTANCE_START_S)
    except TimeoutError as error:
        raise PeerLost(f"the launcher of instance processes {late} within {INSTANCE_START_S} s", "control") from error


def _kill(started: concurrent.futures.Future[ForkedProcess]) -> None:
    if not started.cancelled() and started.exception() is None:
        with suppress(ProcessLookupError):
            os.kill(started.result()[0], signal.SIGKILL)


_kept: list[Launcher] = []


class KeptLauncher:
    """Context manager of a launcher that all pipelines made within it share, so that each starts quickly."""

    def __init__(self, torch: bool = True) -> None:
        self._torch = torch

    def __enter__(self) -> Launcher:
        self._launcher = Launcher(self._torch)
        _kept.append(self._launcher)
        return self._launcher

    def __exit__(self, *error: object) -> None:
        _kept.remove(self._launcher)
        self._launcher.close()

    async def __aenter__(self) -> Launcher:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.__exit__)


def kept_launcher(torch: bool = True) -> KeptLauncher:
    """Make a context in which pipelines share one launcher; ``torch=False`` if all their instances are emulated."""
    return KeptLauncher(torch)


def get_launcher(torch: bool = True) -> tuple[Launcher, bool]:
    """Return the launcher of an open ``kept_launcher`` and False, or a new one and True: the caller closes it."""
    kept = [each for each in _kept if each.torch is torch]
    return (kept[-1], False) if kept else (Launcher(torch), True)
