"""InstanceSupervisor: starts, connects, watches, restarts and ends instance processes, as its core decides."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from trinity.core.messages import PeerLeaving, PeerRemoved, PeerSuspect, Tick, Value
from trinity.errors import ConfigError, PeerLost, TrinityError, describe_error
from trinity.instance import Instance
from trinity.memory.weight_shelf import WeightShelf, open_shelf
from trinity.remote.channel.agreement import WeightsAgreement
from trinity.remote.channel.channel import Address
from trinity.remote.channel.wire import DropPeer, Peers, Setup
from trinity.remote.supervision.fork_client import INSTANCE_STOP_S
from trinity.remote.supervision.fork_supply import ForkSupply
from trinity.remote.supervision.instance_client import InstanceClient, Watcher
from trinity.remote.supervision.leftovers import OwnedFolder
from trinity.remote.supervision.process_config import ProcessConfig, parse_addresses
from trinity.remote.supervision.process_identity import is_stopped
from trinity.remote.supervision.supervisor_core import SupervisorCore
from trinity.remote.supervision.supervisor_messages import (
    Begin,
    CloseAll,
    Down,
    Ended,
    Event,
    Fence,
    InstanceHealth,
    Introduce,
    Launch,
    Leaving,
    Loaded,
    Lost,
    NextLost,
    Proceed,
    Quiet,
    Removed,
    Retire,
    Separate,
    Suspect,
    Up,
)
from trinity.remote.supervision.supply import END_POLL_S, AttachedSupply, GuardedSupply, InstanceOrder, Supply
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
WATCH_S = 0.5  # between two looks at who is silent
FENCE_AGAIN_S = 1.0  # after an error of the system
CLOSE_S = 60.0  # for the steps of cancelled requests to end


class InstanceSupervisor:
    """All instance processes of a pipeline, by name (``members``): carries out what ``SupervisorCore`` decides.

    - ``watcher``: learns of losses and restarts, and takes messages for the front end.
    - ``timeline``: gets the steps of every instance.
    - ``addresses`` (by name): instances that were started by hand.
    - ``secret`` (bytes, None: random): authenticates every control channel.
    - ``config`` (None): ``ProcessConfig``, the longest silence and who is told of changes.
    """

    def __init__(
        self,
        watcher: Watcher,
        timeline: Timeline,
        addresses: Mapping[str, Address],
        secret: bytes | None = None,
        config: ProcessConfig | None = None,
    ) -> None:
        self._config = config or ProcessConfig()
        self._watcher, self._timeline = watcher, timeline
        self._secret = secret or secrets.token_bytes(32)
        self._folder, self._weights = OwnedFolder(), WeightsAgreement()
        self._shelf: WeightShelf | None = None
        tls = self._config.tls
        # What has passed on a secret that opens others' instances must not fork those of another pipeline.
        waits_s = self._config.launcher_waits_s if secret is None else 0.0
        self.forks = ForkSupply(self._folder.path, tls, waits_s)
        self._attached = AttachedSupply(addresses, tls)
        self._lent = GuardedSupply(self._config.supply) if self._config.supply is not None else None
        self.members: dict[str, InstanceClient] = {}
        self.core = SupervisorCore([])
        self.setups: dict[str, Setup] = {}
        self._lives: dict[tuple[str, int], InstanceClient] = {}
        self._launches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._events: deque[Event | Tick] = deque()
        self._handling = self._watched = False
        self.changed = asyncio.Event()  # set by whatever the core has handled
        self._unheard: list[tuple[Up | Down, InstanceClient]] = []  # losses and returns before anybody watches
        self.problems: dict[str, TrinityError | None] = {}  # of the last life of each that has ended
        self._changes = HealthChanges(self._config.on_change)
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def start(self, setups: Sequence[Setup]) -> dict[str, InstanceClient]:
        """Fork and load every instance, and have them connect to each other. Raises the first error of any."""
        self.setups = {setup.name: setup for setup in setups}
        elsewhere = [name for name in self.setups if self._supply_of(name) is not self.forks]
        self.core = SupervisorCore(list(self.setups), elsewhere, self._config.silence_s)
        if any(setup.paced is None for setup in setups):
            self._shelf = open_shelf(self._folder.path)
        self._run(self._watch_silence())
        self.handle(Begin())
        await self._all_up
        return self.members

    def watch(self) -> None:
        """Report losses and returns to the watcher from now on; those that have happened already at once."""
        self._watched = True
        for member in self.members.values():
            if not member.setup.epoch:
                member.watch()
        while self._unheard:
            self._tell(*self._unheard.pop(0))

    def health(self) -> dict[str, InstanceHealth]:
        """Describe the state of every instance."""
        now = time.monotonic()
        return {name: self.core.health(name, now) for name in self.core.members}

    # ------------------------------------------------------------ events and commands

    def handle(self, event: Event | Tick) -> None:
        """Have the core decide on an event and carry out its commands, which may lead to further events."""
        self._events.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                for command in self.core.handle(self._events.popleft(), time.monotonic()):
                    try:
                        self._carry_out(command)
                    except Exception:
                        self._give_up(command)
        finally:
            self._handling = False
        self._arm()
        self.changed.set()
        self._changes.tell(self.health)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.core.next_timer()
        wait = None if due is None else max(0.0, due - time.monotonic())
        loop = asyncio.get_running_loop()
        self._timer = None if wait is None else loop.call_later(wait, self.handle, Tick())

    def _give_up(self, command: Event) -> None:
        """Lose the life whose command raised: those behind it are carried out all the same."""
        logger.exception("%s was not carried out", command)
        if isinstance(command, (Launch, Proceed, Introduce, Separate, Up)):
            self._events.append(Lost(command.name, command.epoch, f"{type(command).__name__} failed: see the log"))

    def _carry_out(self, command: Event) -> None:
        if isinstance(command, Launch):
            self._begin(command)
        elif isinstance(command, Proceed):
            self._lives[command.name, command.epoch].proceed()
        elif isinstance(command, NextLost):
            client = self._lives.get((command.name, command.epoch))  # none where its Launch has failed
            self.problems[command.name] = client.problem if client is not None and client.says_so else None
        elif isinstance(command, Fence):
            self._run(self._fence((command.name, command.epoch)))
            if (command.name, command.epoch) in self._lives:  # its Launch may have failed
                self._lives[command.name, command.epoch].cut()
        elif isinstance(command, Introduce):
            peer = self._lives[command.peer, command.peer_epoch].started
            self._post(command.name, command.epoch, Peers((peer,) if peer is not None else ()))
        elif isinstance(command, Separate):
            self._post(command.name, command.epoch, DropPeer(command.peer, command.peer_epoch))
        elif isinstance(command, Suspect):
            self._suspect(command)
        elif isinstance(command, Leaving):
            self._announce(PeerLeaving(command.name, command.epoch, command.leaving))
        elif isinstance(command, Removed):
            self._drop(command)
        elif isinstance(command, (Up, Down)):
            self._hear(command)

    def _begin(self, command: Launch) -> None:
        life, forked = (command.name, command.epoch), self._supply_of(command.name) is self.forks
        shelf = self._shelf.path if self._shelf is not None and forked else ""
        serves = self._weights.served if self._all_up.done() else None
        named = {"epoch": command.epoch, "shelf": shelf, "waits": command.waits, "serves": serves}
        setup = msgspec.structs.replace(self.setups[command.name], **named)
        self._lives[life] = InstanceClient(setup, self._watcher, self._timeline, self.handle, weights=self._weights)
        self._launches[life] = self._run(self._launch(command))

    def _post(self, name: str, epoch: int, message: Value) -> None:
        client = self._lives.get((name, epoch))
        if client is not None:
            client.post(message)

    def _suspect(self, command: Suspect) -> None:
        logger.warning("instance %s %s", command.name, "is silent" if command.suspected else "speaks again")
        self._announce(PeerSuspect(command.name, command.epoch, command.suspected))

    def _drop(self, command: Removed) -> None:
        """Forget an instance that does not come back, and have everybody forget it."""
        for known in (self.members, self.setups, self.problems, self._attached.addresses):
            known.pop(command.name, None)
        self._changes.forget(command.name)
        self._lives.pop((command.name, command.epoch), None)
        self._announce(PeerRemoved(command.name, command.epoch))

    def attach(self, spec: Instance) -> bool:
        """Note where an instance that is to be added runs; return True where it is not started on this host."""
        self._attached.addresses.update(parse_addresses([spec]))
        return self._supply_of(spec.name) is not self.forks

    def _announce(self, message: PeerLeaving | PeerRemoved | PeerSuspect) -> None:
        """Tell the front end and every other instance of one."""
        for member in self.members.values():
            if member.name != message.name:
                member.post(message)
        self._watcher.send_to_frontend([message])

    def _hear(self, command: Up | Down) -> None:
        if isinstance(command, Up):
            old = self.members.get(command.name)
            if old is not None:
                self._lives.pop((old.name, old.setup.epoch), None)
            self.members[command.name] = self._lives[command.name, command.epoch]
            self.members[command.name].post(Peers(()))
            if not self._all_up.done() and len(self.members) == len(self.setups):
                self.members = {name: self.members[name] for name in self.setups}  # as they are placed
                self._all_up.set_result(None)
        elif not self._all_up.done():
            client = self._lives[command.name, command.epoch]
            text = f"instance {command.name} was lost: {command.why}"
            problems = [each.problem for each in (client, *self._lives.values()) if each.problem is not None]
            self._all_up.set_exception([*problems, PeerLost(text, "control", command.name)][0])
        if isinstance(command, Down):
            self.problems[command.name] = self._lives[command.name, command.epoch].problem
        first = isinstance(command, Up) and not command.epoch
        if not first or self._watched:
            told = (command, self._lives[command.name, command.epoch])
            self._tell(*told) if self._watched else self._unheard.append(told)

    def _tell(self, command: Up | Down, client: InstanceClient) -> None:
        if isinstance(command, Down):
            self._watcher.on_lost(command.name, command.why, planned=command.planned)
        else:
            self._watcher.on_back(client)
            client.watch()

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------ where instances come from

    def _supply_of(self, name: str) -> Supply:
        if name in self._attached.addresses:
            return self._attached
        return self._lent if self._lent is not None else self.forks

    # ------------------------------------------------------------ a life

    async def _launch(self, command: Launch) -> None:
        """Start, connect and load one life of an instance."""
        name, epoch = command.name, command.epoch
        client = self._lives[name, epoch]
        try:
            await self._attach(client)
        except (TrinityError, OSError) as error:
            client.problem = error if isinstance(error, TrinityError) else ConfigError(f"instance {name}: {error}")
            self.handle(Lost(name, epoch, str(error)))
        except Exception as error:
            logger.exception("instance %s could not be started", name)
            client.problem = ConfigError(f"instance {name} could not be started: {describe_error(error)}")
            self.handle(Lost(name, epoch, str(client.problem)))
        else:
            self.handle(Loaded(name, epoch))

    async def _attach(self, client: InstanceClient) -> None:
        setup = client.setup
        order = InstanceOrder(setup.name, setup.epoch, setup.roles, self._secret, setup.model, self._config.tls)
        place = await self._supply_of(setup.name).begin(order)
        self._config.check_place(setup.name, place)
        await client.attach(place, self._secret)

    async def _fence(self, life: tuple[str, int]) -> None:
        """Make sure that a life has ended, however long that takes: it is killed before its launch is waited for."""
        launch, client = self._launches.pop(life, None), self._lives.get(life)
        if launch is not None:
            launch.cancel()
        ended = client is None
        while client is not None and not ended:
            try:
                client.kill()
                if launch is not None:
                    await asyncio.gather(launch, return_exceptions=True)
                await self._supply_of(life[0]).end(*life)
                ended = True
            except Exception:
                logger.exception("the end of %s is not certain", life[0])
                await asyncio.sleep(FENCE_AGAIN_S)
        if client is not None and self.members.get(client.name) is not client:
            self._lives.pop(life, None)
        self.handle(Ended(*life))

    async def _watch_silence(self) -> None:
        """Tell the core who says nothing: frozen or cut off, they would hold requests for ever."""
        pause = min(WATCH_S, self._config.silence_s / 8)
        while True:
            began = time.monotonic()
            await asyncio.sleep(pause)
            late = time.monotonic() - began - pause  # the loop itself was blocked: their messages wait to be read
            for life, client in list(self._lives.items()):
                if client.last_heard is not None and (client.alive or client.started is None):
                    late = late if late > pause else 0.0
                    client.last_heard += late
                    now, step = time.monotonic(), client.step
                    client.step = step = (step[0] + late, step[1]) if step is not None else None
                    stopped = step is not None and is_stopped(client.process)  # it is at no step then
                    at = (now - step[0], step[1]) if step is not None and not stopped else ()
                    try:
                        self.handle(Quiet(*life, now - client.last_heard, *at))
                    except Exception:
                        logger.exception("the silence of %s was not told", life[0])

    # ------------------------------------------------------------ the end

    async def drain(self, idle: Coroutine[Any, Any, None]) -> None:
        """Start nothing any more, and wait until the instances are idle, but not for ever: they are killed later."""
        self.handle(Retire())
        try:
            await asyncio.wait_for(idle, CLOSE_S)
        except TimeoutError:
            logger.error("requests that were cancelled have not ended within %s s", CLOSE_S)

    async def aclose(self) -> None:
        """End every process and launcher, and remove the folder of their sockets, whoever does not end in time."""
        self.handle(CloseAll())
        if self._timer is not None:
            self._timer.cancel()
        self._all_up.cancel()
        try:
            async with asyncio.timeout(INSTANCE_STOP_S):
                while self.core.unended:
                    await asyncio.sleep(END_POLL_S)
        except TimeoutError:
            left = ", ".join(self.core.unended)
            logger.error("processes of %s were killed and have not ended in %s s", left, INSTANCE_STOP_S)
        finally:
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._close_supplies()
            if self._shelf is not None:
                await asyncio.to_thread(self._shelf.close)
            self._folder.remove()

    async def _close_supplies(self) -> None:
        """Close all three; one of somebody else's may fail, or not return."""
        await self.forks.aclose()
        await self._attached.aclose()
        if self._lent is not None:
            try:
                async with asyncio.timeout(INSTANCE_STOP_S):
                    await self._lent.aclose()
            except Exception:
                logger.exception("the supply of instances was not closed")


class HealthChanges:
    """States that a program knows, and its function that hears of others; None: nobody listens."""

    def __init__(self, on_change: Callable[[InstanceHealth], None] | None) -> None:
        self._on_change = on_change
        self._told: dict[str, tuple[str, int]] = {}  # state and epoch of each

    def tell(self, health: Callable[[], Mapping[str, InstanceHealth]]) -> None:
        """Tell of each whose state or epoch is another than was told last. Errors of the function are logged."""
        if self._on_change is None:
            return
        for name, each in health().items():
            if self._told.get(name) != (each.state, each.epoch):
                self._told[name] = (each.state, each.epoch)
                try:
                    self._on_change(each)
                except Exception:
                    logger.exception("on_change failed")

    def forget(self, name: str) -> None:
        """Forget an instance that does not come back."""
        self._told.pop(name, None)
