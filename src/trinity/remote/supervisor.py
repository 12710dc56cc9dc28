"""Instances in processes of their own, as the pipeline sees them: started, introduced to each other, watched."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from trinity.connector import Connector
from trinity.emulation.model import EmulatedModel
from trinity.errors import ConfigError, TrinityError
from trinity.instance import Instance
from trinity.remote.channel import Address
from trinity.remote.fork_client import Launcher, launcher_in_use
from trinity.remote.fork_client import kept_launcher as kept_launcher
from trinity.remote.instance_client import InstanceProcess, Watcher
from trinity.remote.wire import Dropped, Setup, Started
from trinity.runtime.loading import Deployment, config_digest
from trinity.timeline import Timeline
from trinity.transport.auto import pick_scheme

logger = logging.getLogger("trinity")
SECRET = "TRINITY_SECRET"
SHORTEST_SECRET = 32
SILENCE_S = 20.0  # long: on a machine that is too busy processes starve
SHORTEST_SILENCE_S = 2.0  # two heartbeats
BACKOFF_S = 0.1  # before the first restart; doubled each time
LONGEST_BACKOFF_S = 5.0
MOST_RESTARTS = 6  # within FORGIVEN_S; one that was started by hand is looked for again without end
FORGIVEN_S = 60.0


@dataclass(frozen=True)
class ProcessConfig:
    """Terms between a pipeline and its instance processes.

    - ``secret`` (at least 32 characters, None): shown to instances that run already, where TRINITY_SECRET has the same;
      None takes it from there. Instances that the pipeline starts get one drawn at random.
    - ``silence_s`` (seconds, 20): a process that says nothing for longer is restarted.

    Raises ``ConfigError`` for a silence shorter than an instance's own pauses.
    """

    secret: str | None = field(default=None, repr=False)
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        if not self.silence_s >= SHORTEST_SILENCE_S:
            raise ConfigError(
                f"silence_s is {self.silence_s!r}: instances speak every second, give {SHORTEST_SILENCE_S} or more"
            )


class Processes:
    """All instance processes of a pipeline, by name. A lost one is fenced; the pipeline goes on without it."""

    def __init__(
        self,
        watcher: Watcher,
        timeline: Timeline,
        addresses: Mapping[str, Address],
        secret: bytes | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        """``addresses``: by name, where instances run that were started by hand. ``silence_s``: for so long may an
        instance say nothing before it is killed and counts as lost; it is heard of every second."""
        self._silence_s = silence_s
        self._starting = asyncio.Lock()
        self._watcher, self._timeline = watcher, timeline
        self._addresses = addresses
        self._secret = secret or secrets.token_bytes(32)
        self._own: Launcher | None = None
        self._launcher: Launcher | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="trinity-"))
        self.members: dict[str, InstanceProcess] = {}
        self._epochs: dict[str, int] = {}
        self._restarts: dict[str, list[float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False

    async def start(self, setups: Sequence[Setup]) -> dict[str, InstanceProcess]:
        """Fork, load and introduce every instance."""
        self.members = {setup.name: InstanceProcess(setup, self._watcher, self._timeline) for setup in setups}
        if self.members.keys() - self._addresses.keys():
            self._launcher, own = launcher_in_use(torch=any(setup.paced is None for setup in setups))
            self._own = self._launcher if own else None
        started = await asyncio.gather(*(self._launch(member) for member in self.members.values()))
        await asyncio.gather(*(member.introduce(started) for member in self.members.values()))
        return self.members

    def watch(self) -> None:
        """From now on losses are told to the watcher, those that have happened already at once."""
        for member in self.members.values():
            member.watch()
        self._run(self._listen())

    async def _launch(self, member: InstanceProcess) -> Started:
        if member.name in self._addresses:
            return await member.attach(self._addresses[member.name], self._secret)
        assert self._launcher is not None
        address = Address("unix", path=str(self._folder / f"{member.name}.sock"))
        member.process, member.gone = await self._launcher.launch(address, self._secret, member.setup.model)
        return await member.attach(address, self._secret)

    def restart(self, name: str) -> None:
        """Start a lost instance again, later each time; after too many times in a row it stays away.

        One that was started by hand is somebody else's to start; it is attached again once it is there.
        """
        now = time.monotonic()
        recent = [at for at in self._restarts.get(name, []) if now - at < FORGIVEN_S]
        if self._closing:
            return
        if len(recent) >= MOST_RESTARTS and name not in self._addresses:
            logger.error("instance %s is not started again: %d times in %.0f s", name, len(recent), FORGIVEN_S)
            return
        self._restarts[name] = [*recent, now]
        self._run(self._again(name, min(BACKOFF_S * 2 ** len(recent), LONGEST_BACKOFF_S)))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _again(self, name: str, delay_s: float) -> None:
        old = self.members[name]
        for each in self.members.values():
            each.post(Dropped(name, old.setup.epoch))
        await old.fence()
        await asyncio.sleep(delay_s)
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        member = InstanceProcess(msgspec.structs.replace(old.setup, epoch=epoch), self._watcher, self._timeline)
        try:
            async with self._starting:  # of two that are lost at once, the second is to meet the first anew
                await self._join(member)
        except TrinityError as error:
            logger.error("instance %s could not be started again: %s", name, error)
            await member.fence()
            self.restart(name)
        except BaseException:
            await member.fence()
            raise

    async def _join(self, member: InstanceProcess) -> None:
        """Start it, and have it and the others meet."""
        started = await self._launch(member)
        others = [each for each in self.members.values() if each.name != member.name and each.alive]
        known = [each.started for each in others if each.started is not None]
        meeting = [member.introduce(known), *(each.introduce([started]) for each in others)]
        for problem in await asyncio.gather(*meeting, return_exceptions=True):
            if isinstance(problem, BaseException):
                raise problem
        self.members[member.name] = member
        self._watcher.back(member)
        member.watch()

    async def _listen(self) -> None:
        """End whoever says nothing for too long: frozen, or cut off, it would hold requests and blocks for ever."""
        loop, pause = asyncio.get_running_loop(), self._silence_s / 8
        while True:
            began = loop.time()
            await asyncio.sleep(pause)
            late = loop.time() - began - pause  # this loop was held up: what they said waits to be read
            for member in self.members.values():
                member.heard += late if late > pause else 0.0
                quiet = loop.time() - member.heard
                if member.alive and quiet > self._silence_s:
                    member.end(f"it said nothing for {quiet:.1f} s")

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


def setups_for(
    instances: Sequence[Instance], deployment: Deployment, connector: Connector, routing: str
) -> list[Setup]:
    """What the instances of one pipeline are told."""
    pipeline = secrets.token_hex(8)
    config = config_digest(deployment.model)
    transport = pick_scheme(connector.scheme, [each.address for each in instances])
    setups = [setup_for(each, deployment, connector, routing) for each in instances]
    return [msgspec.structs.replace(each, pipeline=pipeline, config=config, transport=transport) for each in setups]


def setup_for(spec: Instance, deployment: Deployment, connector: Connector, routing: str) -> Setup:
    """What an instance process is told. Raises ``ConfigError`` for what cannot travel to a process."""
    if spec.stages or deployment.observe is not None:
        raise ConfigError("own stages and observe= are objects of this process: use hosting='thread' for them")
    rules = spec.rules or deployment.rules
    pools: Mapping[str, int] | None = spec.pools if spec.pools is not None else deployment.cache.pools
    return Setup(
        name=spec.name,
        epoch=0,
        roles=spec.roles,
        model="" if isinstance(deployment.model, EmulatedModel) else str(deployment.model.resolve()),
        paced=deployment.model if isinstance(deployment.model, EmulatedModel) else None,
        dtype=deployment.dtype,
        device=spec.device or deployment.device,
        transport=connector.scheme,
        routing=routing,
        lanes=spec.lanes,
        depth=spec.depth,
        most_tokens=spec.token_budget,
        most_images=spec.image_budget,
        threads=spec.threads,
        cores=spec.cores,
        image_block_size=deployment.cache.image_block_size,
        kv_block_size=deployment.cache.kv_block_size,
        pools=dict(pools) if pools is not None else None,
        memory_bytes=spec.memory_bytes or deployment.cache.memory_bytes,
        prefix_cache=spec.prefix_cache,
        image_cache=spec.image_cache,
        reservation=spec.reservation,
        attention=spec.attention,
        pack=spec.pack,
        slo=deployment.slo,
        budgets=deployment.budgets,
        tokens=rules.token_budget,
        media=rules.image_budget,
        policy=rules.policy,
        order=rules.order,
        chunked=rules.chunked,
        media_budget=rules.limit_encodes,
        read_timeout_s=connector.timeout_s,
        verify=connector.verify,
        transfers=deployment.transfers,
    )


def addresses_of(instances: Sequence[Instance]) -> dict[str, Address]:
    """Where those run that were started by hand, by name. Raises ``ConfigError`` for what is no address."""
    return {each.name: Address.parse(each.address) for each in instances if each.address is not None}


def check_secret(instances: Sequence[Instance], secret: str | None) -> bytes | None:
    """The secret as bytes, or that of TRINITY_SECRET where instances run already. Raises ``ConfigError``."""
    attached = [each.name for each in instances if each.address is not None]
    if secret is None and attached:
        secret = os.environ.get(SECRET)
    if secret is None and attached:
        raise ConfigError(f"{', '.join(attached)} run already: give secret=, or set {SECRET} as it is where they run")
    if secret is not None and len(secret) < SHORTEST_SECRET:
        raise ConfigError(f"the pipeline's secret has {len(secret)} characters; at least {SHORTEST_SECRET} are needed")
    return secret.encode() if secret is not None else None


def check_hosting(hosting: str, connector: object, instances: Sequence[Instance] = ()) -> Literal["thread", "process"]:
    """Raise ``ConfigError`` for a hosting that is none, or a transport that cannot reach another process."""
    if hosting not in ("thread", "process"):
        raise ConfigError(f"hosting must be 'thread' or 'process', got {hosting!r}")
    if hosting == "process" and not (connector is None or isinstance(connector, str)):
        raise ConfigError("instances in processes make their own transports: give connector= by name")
    if hosting == "process" and connector == "inproc":
        raise ConfigError("inproc reaches instances of one process only; use connector='shm' with hosting='process'")
    if addresses_of(instances) and hosting == "thread":
        raise ConfigError("instances with an address are processes: use hosting='process' with them")
    return "process" if hosting == "process" else "thread"
