"""Instances in processes of their own, as the pipeline sees them: started, introduced to each other, watched."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from trinity import errors
from trinity.errors import ConfigError, PeerLost, TransportError, TrinityError
from trinity.hosting import Deployment
from trinity.instance import Instance
from trinity.messages import FRONTEND, PeerUp, Value
from trinity.timeline import Timeline
from trinity.transport.channel import Address, Channel, connect
from trinity.transport.wire import Broken, Connected, Hello, Peers, Setup, Slices, Started, Stop, decode, encode

logger = logging.getLogger("trinity")
START_S = 120.0  # to import, load weights and profile budgets
STOP_S = 30.0
BACKOFF_S = 0.1  # before the first restart; doubled each time
MOST_RESTARTS = 6  # within FORGIVEN_S
FORGIVEN_S = 60.0


class Watcher(Protocol):
    """What the processes tell the pipeline, on the loop's thread."""

    def from_instances(self, messages: list[Value]) -> None: ...

    def lost(self, name: str, why: str) -> None: ...

    def back(self, member: InstanceProcess) -> None: ...


class Launcher:
    """The process that forks instances. A pipeline starts its own, or shares the one of ``kept_launcher``."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        environment.setdefault("OMP_NUM_THREADS", "1")
        environment.setdefault("OPENBLAS_NUM_THREADS", "1")
        command = [sys.executable, "-m", "trinity.launcher"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment)
        self._ready = concurrent.futures.Future[None]()
        self._started: dict[str, concurrent.futures.Future[int]] = {}
        self._exits: dict[int, concurrent.futures.Future[int]] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="trinity-launcher", daemon=True)
        self._reader.start()

    async def launch(self, address: Address, secret: bytes, model: str) -> tuple[int, asyncio.Future[int]]:
        """Fork an instance that listens on ``address``: its process number, and its exit code once it has ended."""
        await asyncio.wait_for(asyncio.wrap_future(self._ready), START_S)
        order = {"id": os.urandom(8).hex(), "address": str(address), "secret": secret.hex(), "model": model}
        started = self._started[order["id"]] = concurrent.futures.Future()
        assert self._process.stdin is not None
        with self._lock:
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
        try:
            process = await asyncio.wait_for(asyncio.shield(asyncio.wrap_future(started)), START_S)
        except BaseException:
            started.add_done_callback(_kill)  # nobody else will know its number
            raise
        return process, asyncio.wrap_future(self._exits[process])

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said: dict[str, Any] = json.loads(line)
            if "ready" in said:
                self._ready.set_result(None)
            elif "id" in said:
                self._exits[said["process"]] = concurrent.futures.Future()
                self._started.pop(said["id"]).set_result(said["process"])
            elif "exited" in said:
                self._exits.pop(said["exited"]).set_result(said["status"])
        lost = ConfigError("the launcher of instance processes has ended: see its output above")
        if not self._ready.done():
            self._ready.set_exception(lost)
        for started in self._started.values():
            started.set_exception(lost)
        for exited in self._exits.values():  # its children die with it
            exited.set_result(-signal.SIGKILL)

    def close(self) -> None:
        """End the launcher and, with it, every instance that is left. Blocks; twice is once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._process.stdout.close()


def _kill(started: concurrent.futures.Future[int]) -> None:
    if not started.cancelled() and started.exception() is None:
        with suppress(ProcessLookupError):
            os.kill(started.result(), signal.SIGKILL)


_kept: list[Launcher] = []


class KeptLauncher:
    """A launcher that all pipelines in its ``with`` or ``async with`` block share, so that each starts quickly."""

    def __enter__(self) -> Launcher:
        self._launcher = Launcher()
        _kept.append(self._launcher)
        return self._launcher

    def __exit__(self, *error: object) -> None:
        _kept.remove(self._launcher)
        self._launcher.close()

    async def __aenter__(self) -> Launcher:
        return self.__enter__()

    async def __aexit__(self, *error: object) -> None:
        await asyncio.to_thread(self.__exit__)


def kept_launcher() -> KeptLauncher:
    """Start instances of several pipelines from one launcher."""
    return KeptLauncher()


class InstanceProcess:
    """One instance in its own process. ``post`` sends an event; a lost process is told to the watcher, once."""

    def __init__(self, setup: Setup, watcher: Watcher, timeline: Timeline) -> None:
        self.setup, self.name, self.process = setup, setup.name, 0
        self.started: Started | None = None
        self.gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watcher, self._timeline = watcher, timeline
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._lost = False
        self._connected: asyncio.Future[None] | None = None
        self._stopping = False

    async def attach(self, address: Address, secret: bytes) -> Started:
        """Connect, have it load, and learn what it offers. Raises what it could not do as the error that it met."""
        self._channel = channel = await _connect_when_up(address, secret, self.gone)
        channel.send(encode(self.setup))
        answer = decode(await asyncio.wait_for(channel.receive(), START_S))
        if isinstance(answer, Broken):
            raise _typed(answer)
        if not isinstance(answer, Started):
            raise TransportError(f"instance {self.name} answered its Setup with {type(answer).__name__}", "control")
        self.started = answer
        self._reading = asyncio.get_running_loop().create_task(self._read(channel), name=f"trinity-{self.name}")
        return answer

    async def introduce(self, peers: Sequence[Started]) -> None:
        """Tell it of its peers; returns once it has reached them."""
        assert self._channel is not None
        self._connected = asyncio.get_running_loop().create_future()
        self._channel.send(encode(Peers(tuple(peer for peer in peers if peer.up.name != self.name))))
        await asyncio.wait_for(self._connected, START_S)

    def announcement(self) -> PeerUp:
        assert self.started is not None
        return self.started.up

    def post(self, event: Value) -> None:
        if self._channel is not None and not self._channel.closed:  # else its loss is on the way
            self._channel.send(encode(event))

    @property
    def alive(self) -> bool:
        """Whether it has started and is not lost."""
        return self.started is not None and not self._lost

    async def fence(self) -> None:
        """Make sure that the process is gone: nothing it does can reach memory of ours any more."""
        self._stopping = True
        if self._channel is not None:
            self._channel.abort()
        with suppress(ProcessLookupError):
            if self.process and not self.gone.done():
                os.kill(self.process, signal.SIGKILL)
        if self.process:
            await asyncio.wait_for(asyncio.shield(self.gone), STOP_S)

    def stop(self, at_once: bool = False) -> None:
        self._stopping = True
        self.post(Stop(at_once))

    async def join(self) -> None:
        """Wait for the end of its serving; its process is the launcher's to reap."""
        if self._reading is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reading), STOP_S)
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._channel is not None:
            await self._channel.aclose()

    async def _read(self, channel: Channel) -> None:
        why = "its control channel ended"
        try:
            async for frame in channel:
                message = decode(frame)
                if isinstance(message, Broken):
                    why = f"{message.error}: {message.message}"
                else:
                    self._take(message)
        except TransportError as error:
            why = str(error)
            channel.abort()
        finally:
            if self._connected is not None and not self._connected.done():
                self._connected.set_exception(TransportError(f"instance {self.name} ended: {why}", "control"))
            if not self._stopping:
                self._lost = True
                self._watcher.lost(self.name, why)

    def _take(self, message: Value) -> None:
        if isinstance(message, Connected) and self._connected is not None:
            self._connected.set_result(None)
        elif isinstance(message, Slices):
            for row in message.rows:
                self._timeline.add(self.name, *row)
        else:
            self._watcher.from_instances([message])


class Processes:
    """All instance processes of a pipeline, by name. A lost one is fenced; the pipeline goes on without it."""

    def __init__(self, watcher: Watcher, timeline: Timeline) -> None:
        self._watcher, self._timeline = watcher, timeline
        self._secret = secrets.token_bytes(32)
        self._own = None if _kept else Launcher()
        self._launcher = self._own or _kept[-1]
        self._folder = Path(tempfile.mkdtemp(prefix="trinity-"))
        self.members: dict[str, InstanceProcess] = {}
        self._restarts: dict[str, list[float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self, setups: Sequence[Setup]) -> dict[str, InstanceProcess]:
        """Fork, load and introduce every instance."""
        self.members = {setup.name: InstanceProcess(setup, self._watcher, self._timeline) for setup in setups}
        started = await asyncio.gather(*(self._launch(member) for member in self.members.values()))
        await asyncio.gather(*(member.introduce(started) for member in self.members.values()))
        return self.members

    async def _launch(self, member: InstanceProcess) -> Started:
        address = Address("unix", path=str(self._folder / f"{member.name}.sock"))
        member.process, member.gone = await self._launcher.launch(address, self._secret, member.setup.model)
        return await member.attach(address, self._secret)

    def restart(self, name: str) -> None:
        """Start a lost instance again, later each time; after too many times in a row it stays away."""
        now = time.monotonic()
        recent = [at for at in self._restarts.get(name, []) if now - at < FORGIVEN_S]
        if self._closing or len(recent) >= MOST_RESTARTS:
            logger.error("instance %s is not started again: %d times in %.0f s", name, len(recent), FORGIVEN_S)
            return
        self._restarts[name] = [*recent, now]
        task = asyncio.get_running_loop().create_task(self._again(name, BACKOFF_S * 2 ** len(recent)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, name: str, delay_s: float) -> None:
        old = self.members[name]
        await old.fence()
        await asyncio.sleep(delay_s)
        setup = msgspec.structs.replace(old.setup, epoch=old.setup.epoch + 1)
        member = InstanceProcess(setup, self._watcher, self._timeline)
        try:
            started = await self._launch(member)
            others = [each for each in self.members.values() if each.name != name and each.alive]
            known = [each.started for each in others if each.started is not None]
            await asyncio.gather(member.introduce(known), *(each.introduce([started]) for each in others))
        except (TrinityError, TimeoutError) as error:
            logger.error("instance %s could not be started again: %s", name, error)
            await member.fence()
            self.restart(name)
            return
        except BaseException:
            await member.fence()
            raise
        self.members[name] = member
        self._watcher.back(member)

    async def aclose(self) -> None:
        """End every process that is left, and what is kept of them on disk."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members.values():
            await member.fence()
        if self._own is not None:
            await asyncio.to_thread(self._own.close)
        shutil.rmtree(self._folder, ignore_errors=True)


async def _connect_when_up(address: Address, secret: bytes, gone: asyncio.Future[int]) -> Channel:
    """The instance listens a moment after its fork."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_S
    while True:
        try:
            return await connect(address, secret, encode(Hello(FRONTEND)))
        except PeerLost as error:
            if gone.done() or loop.time() > deadline:
                raise ConfigError(f"the instance at {address} did not come up; see its output above") from error
        await asyncio.sleep(0.005)


def _typed(broken: Broken) -> TrinityError:
    kind = getattr(errors, broken.error, TrinityError)
    made: TrinityError = (
        kind(broken.message) if issubclass(kind, (ConfigError, TransportError)) else TrinityError(broken.message)
    )
    return made


def setup_for(spec: Instance, deployment: Deployment, transport: str, routing: str, timeout_s: float) -> Setup:
    """What an instance process is told. Raises ``ConfigError`` for what cannot travel to a process."""
    if spec.stages or deployment.observe is not None:
        raise ConfigError("own stages and observe= are objects of this process: use hosting='thread' for them")
    rules = spec.rules or deployment.rules
    pools: Mapping[str, int] | None = spec.pools if spec.pools is not None else deployment.pools
    return Setup(
        name=spec.name,
        epoch=0,
        roles=spec.roles,
        model=str(deployment.model.resolve()),
        dtype=deployment.dtype,
        device=spec.device or deployment.device,
        transport=transport,
        routing=routing,
        lanes=spec.lanes,
        threads=spec.threads,
        media_block=deployment.media_block,
        kv_block=deployment.kv_block,
        pools=dict(pools) if pools is not None else None,
        memory_bytes=spec.memory_bytes or deployment.memory_bytes,
        prefix_cache=spec.prefix_cache,
        image_cache=spec.image_cache,
        slo=deployment.slo,
        budgets=deployment.budgets,
        tokens=rules.tokens,
        media=rules.media,
        policy=rules.policy,
        order=rules.order,
        chunked=rules.chunked,
        media_budget=rules.media_budget,
        read_timeout_s=timeout_s,
    )


def check_hosting(hosting: str, connector: object) -> Literal["thread", "process"]:
    """Raise ``ConfigError`` for a hosting that is none, or a transport that cannot reach another process."""
    if hosting not in ("thread", "process"):
        raise ConfigError(f"hosting must be 'thread' or 'process', got {hosting!r}")
    if hosting == "process" and not (connector is None or isinstance(connector, str)):
        raise ConfigError("instances in processes make their own transports: give connector= by name")
    if hosting == "process" and connector == "inproc":
        raise ConfigError("inproc reaches instances of one process only; use connector='shm' with hosting='process'")
    return "process" if hosting == "process" else "thread"
