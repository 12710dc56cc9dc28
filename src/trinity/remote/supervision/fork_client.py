"""Client of the fork server: starts that process and has it fork instances; pipelines may share one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from trinity.errors import ConfigError, PeerLost
from trinity.errors.parent_process import hold_lifeline
from trinity.remote.channel.channel import Address
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.supervision.process_identity import describe_inheritance, is_stopped, read_start
from trinity.remote.supervision.supply import InstanceProcess

logger = logging.getLogger("trinity")
INSTANCE_START_S = 120.0  # for an instance to import, load weights and profile budgets
INSTANCE_STOP_S = 30.0  # for an instance to end
REAP_S = 1.0  # for the launcher to carry out the orders of a pipeline that were given up
REAP_POLL_S = 0.002
SILENT_S = 2.0  # for the launcher to take an order, from its last word on, while it carries out no other
TAKEN_POLL_S = 0.05  # at least, between two looks at a launcher that is at work
LAUNCHER_ENDED = "the launcher of instance processes has ended (see its output above)"
Answer = TypeVar("Answer")


class LauncherSilent(PeerLost):
    """The launcher takes no orders: it is frozen. What it started is not, and needs it no more."""


class Launcher:
    """The fork server's process. A pipeline has one to itself, or shares the one of ``kept_launcher``.

    - ``torch`` (True): import torch and the stages once, which takes seconds; emulated instances need neither.
    - ``ready``: done once it takes orders. ``ended``: done once its process has ended. ``silent``: it takes no orders.
    - ``parent``: the process that started it; a copy of that, made by ``fork``, cannot hear its answers.
    - ``inherited``: what it has from the program, as that was when it was started.
    - ``on_end``: called on a thread of its own once it has ended.

    Instances that it has forked are those of whoever asked for them. They end with the program, not with it.
    """

    program: tuple[str, ...] = ("-m", "trinity.remote.fork_server")

    def __init__(self, torch: bool = True) -> None:
        self.torch = torch
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        self.parent, lifeline = os.getpid(), hold_lifeline()
        command = [sys.executable, *self.program, str(lifeline), *([] if torch else ["--paced"])]
        pipe = subprocess.PIPE
        self.inherited = describe_inheritance()
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, pass_fds=[lifeline])
        self.ended, self.silent = concurrent.futures.Future[None](), False
        self.ready = concurrent.futures.Future[None]()
        self.on_end: set[Callable[[], object]] = set()
        self._untaken: dict[str, concurrent.futures.Future[None]] = {}
        self._at_work: set[str] = set()
        self._last_word = time.monotonic()
        self._started: dict[str, concurrent.futures.Future[InstanceProcess]] = {}
        self._forked = weakref.WeakValueDictionary[str, InstanceProcess]()
        self._lock = threading.Lock()
        self._on_idle: Callable[[Launcher], None] = lambda launcher: None
        self._reader = threading.Thread(target=self._read, name="trinity-launcher", daemon=True)
        self._reader.start()

    @property
    def over(self) -> bool:
        """True once it takes no orders any more."""
        return self.silent or self.ended.done()

    async def launch(
        self,
        address: Address,
        secret: bytes,
        model: str,
        *,
        once: bool = True,
        shared: str = "",
        tls: TLSConfig | None = None,
    ) -> InstanceProcess:
        """Fork an instance that listens on ``address``; return its process, which its caller has to end.

        ``once``: it serves one pipeline and ends; else one after another, as if started by hand. ``shared``: the folder
        for what UCX keeps in shared memory, which stays if its process is killed at the wrong moment. ``tls``: for its
        channels over TCP. Raises ``ConfigError`` if the launcher has ended or cannot
        fork, ``LauncherSilent`` if it takes no orders.
        """
        await self._within(self.ready, "was not ready")
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
            return await self._within(started, "forked no instance")
        except BaseException:
            started.add_done_callback(_kill)  # nobody else would end it
            raise

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
        until, stopped = time.monotonic() + INSTANCE_START_S, False
        while (left := until - time.monotonic()) > 0.0 and not stopped:
            try:
                async with asyncio.timeout(min(left, SILENT_S)):
                    return await _shielded(answer)
            except TimeoutError:
                stopped = is_stopped(self._process.pid)
        self.silent = True
        why = "is stopped" if stopped else f"{late} within {INSTANCE_START_S} s"
        raise LauncherSilent(f"the launcher of instance processes {why}", "control")

    def _write(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            with self._lock:
                self._process.stdin.write(json.dumps(order).encode() + b"\n")
                self._process.stdin.flush()
        except (OSError, ValueError) as error:  # closed by the other side, or by this one
            raise ConfigError(f"{LAUNCHER_ENDED} ({error})") from error

    def _read(self) -> None:
        """Take in answers until neither the launcher nor an instance that does not listen yet can give any."""
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            for line in answers:
                self._last_word = time.monotonic()
                try:
                    self._hear(json.loads(line))
                except (ValueError, KeyError, TypeError):  # printed by what it imports before it speaks
                    logger.warning("the launcher of instance processes printed %r", line)
        waiting: list[concurrent.futures.Future[Any]] = [self.ready, *self._untaken.values(), *self._started.values()]
        for waits in waiting:
            _settle(waits, ConfigError(LAUNCHER_ENDED))
        self.ended.set_result(None)
        for each in list(self.on_end):
            with suppress(RuntimeError):  # of a loop that is closed by now
                each()
        self._on_idle(self)

    def _hear(self, answer: dict[str, Any]) -> None:
        if "ready" in answer:
            _settle(self.ready, None)
        elif "taken" in answer:
            self._at_work.add(answer["taken"])
            _settle(self._untaken.pop(answer["taken"]), None)
        elif "error" in answer:
            self._at_work.discard(answer["id"])
            text = f"the launcher of instance processes cannot fork another: {answer['error']}"
            _settle(self._started.pop(answer["id"]), ConfigError(text))
        elif "listening" in answer:
            if answer["id"] in self._forked:
                _settle(self._forked[answer["id"]].listening, Address.parse(answer["listening"]))
        elif "process" in answer:
            self._at_work.discard(answer["id"])
            if answer["id"] in self._started:  # else the other of the two that say so was first
                number, born = answer["process"], answer["born"]
                born = born if born is not None else read_start(number)  # the launcher may lack descriptors to read it
                process = self._forked[answer["id"]] = InstanceProcess(number, born)
                _settle(self._started.pop(answer["id"]), process)
        elif "awake" in answer:
            _settle(self._untaken.pop(answer["awake"]), None)
        elif "idle" in answer:
            self._on_idle(self)

    # ------------------------------------------------------------ between two pipelines

    def is_fit(self) -> bool:
        """Tell if it could serve another pipeline: it answers, and no order of the last one is on its way. Blocks."""
        until = time.monotonic() + REAP_S
        while self._is_at_work() and not self.over and time.monotonic() < until:
            time.sleep(REAP_POLL_S)
        return not (self.over or self._is_at_work())

    def _is_at_work(self) -> bool:
        return bool(self._untaken or self._started or self._at_work)

    def rest(self, seconds: float, on_idle: Callable[[Launcher], None]) -> None:
        """Have ``on_idle`` called, on a thread of its own, after ``seconds`` without an order, or when it has ended.

        Raises ``ConfigError`` if it has ended already.
        """
        self._on_idle = on_idle
        self._write({"rest": seconds})

    async def wakes(self) -> bool:
        """Ask it whether it takes orders after a rest; False if it has ended or is frozen.

        One that has not even begun, as its pipeline was given up at once, is not asked: its first order waits for that.
        It may have been stopped meanwhile, and would fail that order.
        """
        if not self.ready.done():
            return not (self.over or is_stopped(self._process.pid))
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
        """End the launcher, and no instance that it forked. Blocks; calling it twice does no harm."""
        assert self._process.stdin is not None
        self._process.kill()  # it holds nothing
        self._process.wait()
        with suppress(OSError):  # unsent orders
            self._process.stdin.close()
        self._reader.join(INSTANCE_STOP_S)  # an instance that was forked just now says so first


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


def _kill(started: concurrent.futures.Future[InstanceProcess]) -> None:
    if not started.cancelled() and started.exception() is None:
        started.result().kill()


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
    kept = [each for each in own if not each.over]
    return kept[-1] if kept else None
