"""AttachedInstances: instances that another pipeline has set up and supervises, as one that attaches to them sees them.

It connects to each at its address, and to the next life of one that was lost as soon as that serves. It starts, stops
and restarts none: that is the first pipeline's (decision 0083).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, cast

import msgspec

from trinity.core.values import FRONTEND
from trinity.errors import ConfigError, TransportError, TrinityError
from trinity.remote.channel.agreement import WeightsAgreement
from trinity.remote.channel.channel import TIMEOUT_S, Address
from trinity.remote.channel.wire import Attach, InstanceFailure, InstanceInfo, Setup, decode, encode
from trinity.remote.supervision.instance_client import InstanceClient, Watcher, connect_by_hand, to_error
from trinity.remote.supervision.instance_processes import CLOSE_S, InstanceSupervisor
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.remote.supervision.supervisor_messages import Event, InstanceHealth, Lost
from trinity.remote.supervision.supply import InstancePlace
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
AGAIN_S = 0.5  # between two tries to reach one that was lost


def name_frontend(config: ProcessConfig) -> str:
    """Name a pipeline's front end: of one that attaches by a draw, as no other one may have its name."""
    return f"{FRONTEND}:{secrets.token_hex(8)}" if config.attach else FRONTEND


class FellowClient(InstanceClient):
    """One life of an instance that another pipeline supervises. Its end here leaves it as it is."""

    async def join_in(self, place: InstancePlace, secret: bytes, owner: str) -> None:
        """Attach as the front end ``owner``.

        Raises ``ConfigError`` for an instance of another name or other roles, what the instance answers
        (``OfferRefused``), ``PeerLost`` or ``HandshakeError`` if it cannot be reached.
        """
        self._channel = channel = await connect_by_hand(place, secret, owner)
        channel.send(encode(Attach(owner, self.setup.config)))
        async with asyncio.timeout(TIMEOUT_S):
            answer = decode(await channel.receive())
        if isinstance(answer, InstanceFailure):
            raise to_error(answer)
        if not isinstance(answer, InstanceInfo):
            raise TransportError(f"instance {self.name} answered with {type(answer).__name__}", "control")
        up = answer.up
        if (up.name, up.roles) != (self.name, self.setup.roles):
            text = f"the instance at {place.address} is {up.name} ({up.roles}), not {self.name} ({self.setup.roles})"
            raise ConfigError(f"{text}: give the instances as the pipeline that set them up has them")
        self.setup = msgspec.structs.replace(self.setup, epoch=up.epoch)
        self._weights.admit(self.setup, answer.hello)
        self.started = msgspec.structs.replace(answer, address=str(place.address))
        self._reading = asyncio.get_running_loop().create_task(self._read(channel), name=f"trinity-{self.name}")

    def stop(self, at_once: bool = False) -> None:
        """Hear nothing more of it once what was sent has left; it serves on."""
        self._stopping = True

    async def join(self) -> None:
        """Close the channel."""
        self._stopping = True
        if self._channel is not None:
            await self._channel.aclose()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)


class AttachedInstances:
    """All instances of a pipeline that attaches, by name (``members``).

    - ``owner``: its front end's name. ``watcher``: learns of losses and returns, and takes messages for it.
    - ``addresses`` (by name), ``secret``, ``config``: as ``InstanceSupervisor`` has them.
    """

    def __init__(
        self,
        owner: str,
        watcher: Watcher,
        timeline: Timeline,
        addresses: Mapping[str, Address],
        secret: bytes | None,
        config: ProcessConfig,
    ) -> None:
        self.owner, self.members = owner, dict[str, InstanceClient]()
        self._watcher, self._timeline, self._config = watcher, timeline, config
        self._addresses, self._secret = dict(addresses), secret or b""
        self._setups: dict[str, Setup] = {}
        self._weights = WeightsAgreement()
        self._lost: dict[str, str] = {}
        self._losses: dict[str, int] = {}
        self._watched = False
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, setups: Sequence[Setup]) -> dict[str, InstanceClient]:
        """Attach to every instance. Raises the first error of any."""
        self._setups = {each.name: each for each in setups}
        found = await asyncio.gather(*map(self._reach, self._setups), return_exceptions=True)
        self.members = {each.name: each for each in found if isinstance(each, FellowClient)}
        problem = next((each for each in found if isinstance(each, BaseException)), None)
        if problem is not None:
            await self.aclose()
            raise problem
        return self.members

    def watch(self) -> None:
        """Report losses and returns to the watcher from now on; those that have happened already at once."""
        self._watched = True
        for name, member in list(self.members.items()):
            member.watch()
            if name in self._lost:
                self._begin_again(name)

    def health(self) -> dict[str, InstanceHealth]:
        """Describe every instance as it is seen from here."""
        return {
            name: InstanceHealth(
                name,
                "lost" if name in self._lost else "up",
                member.setup.epoch,
                self._losses.get(name, 0),
                self._lost.get(name, ""),
            )
            for name, member in self.members.items()
        }

    async def drain(self, idle: Coroutine[Any, Any, None]) -> None:
        """Wait until no instance has a request of this pipeline, but not for ever."""
        try:
            await asyncio.wait_for(idle, CLOSE_S)
        except TimeoutError:
            logger.error("requests that were cancelled have not ended within %s s", CLOSE_S)

    async def aclose(self) -> None:
        """Leave the instances to the pipeline that set them up."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(member.join() for member in self.members.values()))

    async def _reach(self, name: str) -> FellowClient:
        place = InstancePlace(self._addresses[name], tls=self._config.tls, listen_s=0.0)
        self._config.check_place(name, place)
        serves = self._weights.served if self.members else None
        setup = msgspec.structs.replace(self._setups[name], serves=serves)
        client = FellowClient(setup, self._watcher, self._timeline, self._hear, weights=self._weights)
        try:
            await client.join_in(place, self._secret, self.owner)
        except BaseException:
            client.cut()
            raise
        return client

    def _hear(self, event: Event) -> None:
        if isinstance(event, Lost):
            if event.name in self.members:
                self.members[event.name].cut()
            self._lost[event.name] = event.why
            self._losses[event.name] = self._losses.get(event.name, 0) + 1
            if self._watched:
                self._begin_again(event.name)

    def _begin_again(self, name: str) -> None:
        self._watcher.on_lost(name, self._lost[name], planned=False)
        task = asyncio.get_running_loop().create_task(self._come_back(name), name=f"trinity-again-{name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _come_back(self, name: str) -> None:
        """Reach the next life of an instance, for as long as that takes."""
        while True:
            await asyncio.sleep(AGAIN_S)
            try:
                client = await self._reach(name)
                break
            except (TrinityError, TimeoutError) as error:
                said = str(error) or "it does not answer"
                if said != self._lost[name]:
                    logger.info("instance %s is not back yet: %s", name, said)
                self._lost[name] = said
        del self._lost[name]
        self.members[name] = client
        self._watcher.on_back(client)
        client.watch()


def supervise(
    owner: str,
    watcher: Watcher,
    timeline: Timeline,
    addresses: Mapping[str, Address],
    *,
    secret: bytes | None,
    config: ProcessConfig,
) -> InstanceSupervisor:
    """Make what a pipeline has its instances by.

    An ``AttachedInstances`` has all that a pipeline calls but for changes of its instances, which are refused before.
    """
    if config.attach:
        return cast(InstanceSupervisor, AttachedInstances(owner, watcher, timeline, addresses, secret, config))
    return InstanceSupervisor(watcher, timeline, addresses, secret, config)
