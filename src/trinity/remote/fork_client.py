"""Client of the fork server: starts that process and has it fork instances; pipelines may share one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from trinity.errors import ConfigError, PeerLost
from trinity.remote.channel import Address
from trinity.remote.process_identity import describe_inheritance
from trinity.remote.tls import TLSConfig

logger = logging.getLogger("trinity")
INSTANCE_START_S = 120.0  # for an instance to import, load weights and profile budgets
INSTANCE_STOP_S = 30.0  # for an instance to end
LAUNCHER_STOP_S = 5.0  # for the launcher to end by itself; a frozen one is killed
REAP_S = 1.0  # for the launcher to say that the instances of a pipeline have ended, after they have
REAP_POLL_S = 0.002
SILENT_S = 2.0  # for the launcher to take an order, from its last word on, while it carries out no other
TAKEN_POLL_S = 0.05  # at least, between two looks at a launcher that is at work
LAUNCHER_ENDED = "the launcher of instance processes has ended (see its output above)"
NEVER_LISTENED = "the instance has ended before it listened (see its output above)"
Answer = TypeVar("Answer")
ForkedProcess = tuple[int, concurrent.futures.Future[int]]  # its process number, and its exit code once it has ended


class LauncherSilent(PeerLost):
    """The launcher takes no orders: it is frozen. What it started is not."""


class Launcher:
    """The fork server's process. A pipeline has one to itself, or shares the one of ``kept_launcher``.

    - ``torch`` (True): import torch and the stages once, which takes seconds; emulated instances need neither.
    - ``ended``: done once its process has ended. ``silent``: it takes no orders, and is given no more.
    - ``parent``: the process that started it; a copy of that, made by ``fork``, cannot hear its answers.
    - ``inherited``: what it has from the program, as that was when it was started.
    """

    program: tuple[str, ...] = ("-m", "trinity.remote.fork_server")

    def __init__(self, torch: bool = True) -> None:
        self.torch = torch
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        self.parent = os.getpid()
        command = [sys.executable, *self.program, str(self.parent), *([] if torch else ["--paced"])]
        pipe = subprocess.PIPE
        self.inherited = describe_inheritance()
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        self.ended, self.silent = concurrent.futures.Future[None](), False
        self._ready = concurrent.futures.Future[None]()
        self._untaken: dict[str, concurrent.futures.Future[None]] = {}
        self._at_work: set[str] = set()
        self._last_word = time.monotonic()
        self._started: dict[str, concurrent.futures.Future[ForkedProcess]] = {}
        self._exits: dict[int, concurrent.futures.Future[int]] = {}
        self._addresses: dict[int, concurrent.futures.Future[Address]] = {}
        self._lock = threading.Lock()
        self._on_idle: Callable[[Launcher], None] = lambda launcher: None
        self._reader = threading.Thread(target=self._read, name="trinity-launcher", daemon=True)
        self._reader.start()

    async def launch(
        self,
        address: Address,
        secret: bytes,
        model: str,
        *,
        once: bool = True,
        shared: str = "",
        tls: TLSConfig | None = None,
    ) -> tuple[int, asyncio.Future[int]]:
        """Fork an instance that listens on ``address``; return its process number and a future of its exit code.

        ``once``: it serves one pipeline and ends; else one after another, as if started by hand. ``shared``: the folder
        for what UCX keeps in shared memory, which stays if its process is killed at the wrong moment. ``tls``: for its
        channels over TCP. Raises ``ConfigError`` if the launcher has ended or cannot
        fork, ``LauncherSilent`` if it takes no orders.
        """
        await self._within(self._ready, "was not ready")
        mark = os.urandom(8).hex()
        order: dict[str, Any] = {
            "id": mark,
            "address": str(address),
            "secret": secret.hex(),
            "model": model,
            "once": once,
        }
        order |= {"shared": shared, "tls": tls.paths() if tls is not None else None}
        started = self._started[mark] = concurrent.futures.Future()
        taken = self._untaken[mark] = concurrent.futures.Future()
        try:
            self._write(order)
            await self._until_taken(taken)
            process, exit_code = await self._within(started, "forked no instance")
        except BaseException:
            started.add_done_callback(_kill)  # nobody else would end it
            raise
        return process, asyncio.wrap_future(exit_code)

    async def find_address(self, process: int) -> Address:
        """Wait until an instance that it has forked listens; return where: its order may have asked for any free port.

        Raises ``ConfigError`` if it ends before that, ``LauncherSilent`` if that takes too long.
        """
        listening = self._addresses.get(process)
        if listening is None:
            raise ConfigError(NEVER_LISTENED)
        return await self._within(listening, "has an instance that did not listen")

    async def _until_taken(self, taken: concurrent.futures.Future[None]) -> None:
        """Wait until an order is taken. Raises ``LauncherSilent`` if it is not, and no other is carried out.

        One that was given up may be at work still: it has as long as an instance may need to start.
        """
        began = time.monotonic()
        latest = began + INSTANCE_START_S
        while True:
            due = max(began, self._last_word) + SILENT_S
            try:
                async with asyncio.timeout(min(max(due - time.monotonic(), TAKEN_POLL_S), SILENT_S)):
                    return await _shielded(taken)
            except TimeoutError as error:
                now = time.monotonic()
                spoke = now < max(began, self._last_word) + SILENT_S
                if self.silent or now > latest or not (self._at_work or spoke):
                    self.silent = True
                    text = f"the launcher of instance processes has taken no order for {now - began:.1f} s"
                    raise LauncherSilent(text, "control") from error

    async def _within(self, answer: concurrent.futures.Future[Answer], late: str) -> Answer:
        """Await an answer without cancelling it: others may wait for it too. Raises ``LauncherSilent``.

        By a timeout of asyncio's own: Python 3.11's ``wait_for`` swallows a cancel that comes with the answer.
        """
        try:
            async with asyncio.timeout(INSTANCE_START_S):
                return await _shielded(answer)
        except TimeoutError as error:
            self.silent = True
            text = f"the launcher of instance processes {late} within {INSTANCE_START_S} s"
            raise LauncherSilent(text, "control") from error

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
            self._last_word = time.monotonic()
            try:
                self._hear(json.loads(line))
            except (ValueError, KeyError, TypeError):  # printed by what it imports before it speaks
                logger.warning("the launcher of instance processes printed %r", line)
        lost = ConfigError(LAUNCHER_ENDED)
        waiting: list[concurrent.futures.Future[Any]] = [self._ready, *self._untaken.values(), *self._started.values()]
        for waits in (*waiting, *self._addresses.values()):
            _settle(waits, lost)
        for exited in list(self._exits.values()):  # its children die with it
            _settle(exited, -signal.SIGKILL)
        self.ended.set_result(None)
        self._on_idle(self)

    def _hear(self, answer: dict[str, Any]) -> None:
        if "ready" in answer:
            _settle(self._ready, None)
        elif "taken" in answer:
            self._at_work.add(answer["taken"])
            _settle(self._untaken.pop(answer["taken"]), None)
        elif "error" in answer:
            self._at_work.discard(answer["id"])
            text = f"the launcher of instance processes cannot fork another: {answer['error']}"
            _settle(self._started.pop(answer["id"]), ConfigError(text))
        elif "id" in answer:
            self._at_work.discard(answer["id"])
            exit_code = self._exits[answer["process"]] = concurrent.futures.Future()
            self._addresses.setdefault(answer["process"], concurrent.futures.Future())
            _settle(self._started.pop(answer["id"]), (answer["process"], exit_code))
        elif "listening" in answer:  # which it may say before its launcher has said that it was forked
            listening = self._addresses.setdefault(answer["process"], concurrent.futures.Future())
            _settle(listening, Address.parse(answer["listening"]))
        elif "exited" in answer:
            _settle(self._exits.pop(answer["exited"]), answer["status"])
            _settle(self._addresses.pop(answer["exited"]), ConfigError(NEVER_LISTENED))
        elif "awake" in answer:
            _settle(self._untaken.pop(answer["awake"]), None)
        elif "idle" in answer:
            self._on_idle(self)

    # ------------------------------------------------------------ between two pipelines

    def is_fit(self) -> bool:
        """Tell if it could serve another pipeline: it answers, and nothing of the last one is left. Blocks."""
        until = time.monotonic() + REAP_S
        while self._is_at_work() and not self._is_over() and time.monotonic() < until:
            time.sleep(REAP_POLL_S)
        return not (self._is_over() or self._is_at_work())

    def _is_over(self) -> bool:
        return self.silent or self.ended.done()

    def _is_at_work(self) -> bool:
        return bool(self._untaken or self._started or self._at_work or self._exits)

    def rest(self, seconds: float, on_idle: Callable[[Launcher], None]) -> None:
        """Have ``on_idle`` called, on a thread of its own, after ``seconds`` without an order, or when it has ended.

        Raises ``ConfigError`` if it has ended already.
        """
        self._on_idle = on_idle
        self._write({"rest": seconds})

    async def wakes(self) -> bool:
        """Ask it whether it takes orders after a rest; False if it has ended or is frozen.

        One that has not even begun, as its pipeline was given up at once, is not asked: its first order waits for that.
        """
        if not self._ready.done():
            return not self._is_over()
        mark = os.urandom(8).hex()
        awake = self._untaken[mark] = concurrent.futures.Future()
        try:
            self._write({"wake": mark})
            async with asyncio.timeout(SILENT_S):
                await _shielded(awake)
        except (TimeoutError, ConfigError):
            self.silent = True
            return False
        return True

    def dismiss(self) -> None:
        """End it as ``close`` does, and do not wait for that."""
        threading.Thread(target=self.close, name="trinity-launcher-end", daemon=True).start()

    def close(self) -> None:
        """End the launcher and every instance that it forked. Blocks; calling it twice does no harm.

        It is told to: a copy that the program has forked holds its stdin open. One that imports still is killed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        begun = self._ready.done() and self._ready.exception() is None
        with suppress(ConfigError, OSError, ValueError):  # unsent orders, if it has ended; closed by the first call
            if begun and not self.silent:
                self._write({"end": True})
        with suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(LAUNCHER_STOP_S if begun and not self.silent else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


def _shielded(answer: concurrent.futures.Future[Answer]) -> asyncio.Future[Answer]:
    """Make a future that can be given up without harm to others that wait for it, and without a word of its error."""
    wrapped = asyncio.wrap_future(answer)
    wrapped.add_done_callback(lambda done: done.cancelled() or done.exception())
    return asyncio.shield(wrapped)


def _settle(waits: concurrent.futures.Future[Any], answer: object) -> None:
    """Give an answer, or an error, to who waits for it; who has given up, on whichever thread, gets none."""
    with suppress(concurrent.futures.InvalidStateError):
        if isinstance(answer, Exception):
            waits.set_exception(answer)
        else:
            waits.set_result(answer)


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


def find_kept(torch: bool = True) -> Launcher | None:
    """Return the launcher of an open ``kept_launcher`` if it takes orders."""
    own = [each for each in _kept if each.torch is torch and each.parent == os.getpid()]
    kept = [each for each in own if not each.silent and not each.ended.done()]
    return kept[-1] if kept else None
