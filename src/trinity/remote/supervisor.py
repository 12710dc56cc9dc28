"""Supervisor of a pipeline's instance processes: starts, connects, watches, restarts and ends them."""

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
from trinity.errors.arguments import check_arguments
from trinity.instance import Instance
from trinity.remote.agreement import WeightsAgreement
from trinity.remote.channel import SECRET_VARIABLE, SHORTEST_SECRET, Address
from trinity.remote.fork_client import Launcher, get_launcher
from trinity.remote.fork_client import kept_launcher as kept_launcher
from trinity.remote.instance_client import InstanceClient, Watcher
from trinity.remote.wire import DropPeer, InstanceInfo, RouteConfig, Setup
from trinity.runtime.loader import ServingConfig, config_digest
from trinity.timeline import Timeline
from trinity.transport.auto import pick_scheme

logger = logging.getLogger("trinity")
SILENCE_S = 20.0  # long, because processes starve on an overloaded machine
SHORTEST_SILENCE_S = 2.0  # two heartbeats of an instance
BACKOFF_S = 0.1  # before the first restart; doubled each time
LONGEST_BACKOFF_S = 5.0
MAX_RESTARTS = 6  # within RESTART_WINDOW_S; an instance started by hand is looked for without limit
RESTART_WINDOW_S = 60.0


@check_arguments
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
        if self.secret is not None:
            _check_secret(self.secret)
        if not self.silence_s >= SHORTEST_SILENCE_S:
            raise ConfigError(
                f"silence_s is {self.silence_s!r}: instances speak every second, give {SHORTEST_SILENCE_S} or more"
            )


class InstanceSupervisor:
    """All instance processes of a pipeline, by name (``members``). A lost one is fenced; the others go on serving.

    - ``watcher``: learns of losses and restarts, and takes messages for the front end.
    - ``timeline``: gets the steps of every instance.
    - ``addresses`` (by name): instances that were started by hand.
    - ``secret`` (bytes, None: random): authenticates every control channel.
    - ``silence_s`` (s, 20): an instance that sends nothing for longer is killed; each sends something every second.
    """

    def __init__(
        self,
        watcher: Watcher,
        timeline: Timeline,
        addresses: Mapping[str, Address],
        secret: bytes | None = None,
        silence_s: float = SILENCE_S,
    ) -> None:
        self._silence_s = silence_s
        self._starting = asyncio.Lock()
        self._watcher, self._timeline = watcher, timeline
        self._addresses = addresses
        self._secret = secret or secrets.token_bytes(32)
        self._own_launcher: Launcher | None = None
        self._launcher: Launcher | None = None
        self._folder = Path(tempfile.mkdtemp(prefix="trinity-"))
        self.members: dict[str, InstanceClient] = {}
        self._epochs: dict[str, int] = {}
        self._restarts: dict[str, list[float]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._weights = WeightsAgreement()

    def _client(self, setup: Setup) -> InstanceClient:
        return InstanceClient(setup, self._watcher, self._timeline, weights=self._weights)

    async def start(self, setups: Sequence[Setup]) -> dict[str, InstanceClient]:
        """Fork and load every instance, and have them connect to each other. Raises the first error of any."""
        self.members = {setup.name: self._client(setup) for setup in setups}
        if self.members.keys() - self._addresses.keys():
            self._launcher, own = get_launcher(torch=any(setup.paced is None for setup in setups))
            self._own_launcher = self._launcher if own else None
        started = await asyncio.gather(*(self._launch(member) for member in self.members.values()))
        await asyncio.gather(*(member.introduce(started) for member in self.members.values()))
        return self.members

    def watch(self) -> None:
        """Report losses to the watcher from now on; those that have happened already at once."""
        for member in self.members.values():
            member.watch()
        self._run(self._watch_silence())

    async def _launch(self, member: InstanceClient) -> InstanceInfo:
        if member.name in self._addresses:
            return await member.attach(self._addresses[member.name], self._secret)
        assert self._launcher is not None
        address = Address("unix", path=str(self._folder / f"{member.name}.sock"))
        member.process, member.exit_code = await self._launcher.launch(address, self._secret, member.setup.model)
        return await member.attach(address, self._secret)

    def restart(self, name: str) -> None:
        """Restart a lost instance after a delay that doubles each time, at most ``MAX_RESTARTS`` times in a row.

        An instance that was started by hand is not started, only attached again once it is back.
        """
        now = time.monotonic()
        recent = [at for at in self._restarts.get(name, []) if now - at < RESTART_WINDOW_S]
        if self._closing:
            return
        if len(recent) >= MAX_RESTARTS and name not in self._addresses:
            logger.error("instance %s is not started again: %d times in %.0f s", name, len(recent), RESTART_WINDOW_S)
            return
        self._restarts[name] = [*recent, now]
        self._run(self._restart_later(name, min(BACKOFF_S * 2 ** len(recent), LONGEST_BACKOFF_S)))

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _restart_later(self, name: str, delay_s: float) -> None:
        old = self.members[name]
        for each in self.members.values():
            each.post(DropPeer(name, old.setup.epoch))
        await old.fence()
        await asyncio.sleep(delay_s)
        epoch = self._epochs[name] = self._epochs.get(name, 0) + 1
        member = self._client(msgspec.structs.replace(old.setup, epoch=epoch))
        try:
            async with self._starting:  # if two are lost at once, the second must connect to the restarted first
                await self._join(member)
        except TrinityError as error:
            logger.error("instance %s could not be started again: %s", name, error)
            await member.fence()
            self.restart(name)
        except BaseException:
            await member.fence()
            raise

    async def _join(self, member: InstanceClient) -> None:
        """Start an instance, and have it and the others connect to each other."""
        started = await self._launch(member)
        others = [each for each in self.members.values() if each.name != member.name and each.alive]
        known = [each.started for each in others if each.started is not None]
        meeting = [member.introduce(known), *(each.introduce([started]) for each in others)]
        for problem in await asyncio.gather(*meeting, return_exceptions=True):
            if isinstance(problem, BaseException):
                raise problem
        self.members[member.name] = member
        self._watcher.on_back(member)
        member.watch()

    async def _watch_silence(self) -> None:
        """Kill instances that send nothing for too long: frozen or cut off, they would hold requests for ever."""
        loop, pause = asyncio.get_running_loop(), self._silence_s / 8
        while True:
            began = loop.time()
            await asyncio.sleep(pause)
            late = loop.time() - began - pause  # the loop itself was blocked: their messages wait to be read
            for member in self.members.values():
                member.last_heard += late if late > pause else 0.0
                quiet = loop.time() - member.last_heard
                if member.alive and quiet > self._silence_s:
                    member.end(f"it said nothing for {quiet:.1f} s")

    async def aclose(self) -> None:
        """End every process and remove the folder of their sockets."""
        self._closing = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for member in self.members.values():
            await member.fence()
        if self._own_launcher is not None:
            await asyncio.to_thread(self._own_launcher.close)
        shutil.rmtree(self._folder, ignore_errors=True)


def make_setups(
    instances: Sequence[Instance], deployment: ServingConfig, connector: Connector, routing: str
) -> list[Setup]:
    """Build the setup message of every instance of a pipeline. Raises ``ConfigError`` as ``make_setup`` does."""
    pipeline = secrets.token_hex(8)
    config = config_digest(deployment.model)
    routes = make_route_configs(connector, [each.address for each in instances])
    setups = [make_setup(each, deployment, connector, routing) for each in instances]
    return [msgspec.structs.replace(each, pipeline=pipeline, config=config, routes=routes) for each in setups]


def make_route_configs(connector: Connector, addresses: Sequence[str | None]) -> dict[str, RouteConfig]:
    """Describe the connector's transports for instances at these addresses, by kind of block."""
    return {
        kind: RouteConfig(pick_scheme(route.name, addresses), route.timeout_s, route.verify, dict(route.options))
        for kind, route in connector.routes.items()
    }


def make_setup(spec: Instance, deployment: ServingConfig, connector: Connector, routing: str) -> Setup:
    """Build the setup message of one instance process. Raises ``ConfigError`` for objects that cannot be sent."""
    if deployment.observe is not None:
        raise ConfigError("observe= is an object of this process and cannot be sent to another: use hosting='thread'")
    if not all(isinstance(each, str) for each in spec.stages):
        raise ConfigError(
            "a stage's factory is an object of this process and cannot be sent to another: give stages= the name of "
            "its entry point trinity.stages, or use hosting='thread'"
        )
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
        routes=make_route_configs(connector, [spec.address]),
        stages=tuple(each for each in spec.stages if isinstance(each, str)),
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
        transfers=deployment.transfers,
    )


def parse_addresses(instances: Sequence[Instance]) -> dict[str, Address]:
    """Parse the addresses of instances that were started by hand, by name. Raises ``ConfigError``."""
    return {each.name: Address.parse(each.address) for each in instances if each.address is not None}


def resolve_secret(instances: Sequence[Instance], secret: str | None) -> bytes | None:
    """Return the secret as bytes, from TRINITY_SECRET if instances run already; None: to be drawn.

    Raises ``ConfigError`` if it is missing or too short.
    """
    attached = [each.name for each in instances if each.address is not None]
    if secret is None and attached:
        secret = os.environ.get(SECRET_VARIABLE)
    if secret is None and attached:
        raise ConfigError(
            f"{', '.join(attached)} run already: give secret=, or set {SECRET_VARIABLE} as it is where they run"
        )
    return _check_secret(secret).encode() if secret is not None else None


def _check_secret(secret: str) -> str:
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(f"the pipeline's secret has {len(secret)} characters; at least {SHORTEST_SECRET} are needed")
    return secret


def check_hosting(hosting: str, instances: Sequence[Instance] = ()) -> Literal["thread", "process"]:
    """Return ``hosting`` if it is valid and its instances can run so; else raise ``ConfigError``."""
    if hosting not in ("thread", "process"):
        raise ConfigError(f"hosting must be 'thread' or 'process', got {hosting!r}")
    if parse_addresses(instances) and hosting == "thread":
        raise ConfigError("instances with an address are processes: use hosting='process' with them")
    return "process" if hosting == "process" else "thread"
