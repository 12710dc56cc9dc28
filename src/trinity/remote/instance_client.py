"""One instance in a process of its own, as the pipeline sees it: reached, told, listened to, fenced."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec

from trinity import errors
from trinity.core.messages import FRONTEND, PeerUp, Value
from trinity.errors import ConfigError, HandshakeError, OfferRefused, PeerLost, TransportError, TrinityError
from trinity.remote.channel import Address, Channel, connect
from trinity.remote.fork_client import START_S, STOP_S
from trinity.remote.wire import Broken, Connected, Hello, Peers, Setup, Slices, Started, Stop, decode, encode
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
Answer = TypeVar("Answer")


class Watcher(Protocol):
    """What the processes tell the pipeline, on the loop's thread."""

    def to_frontend(self, messages: list[Value]) -> None: ...

    def lost(self, name: str, why: str) -> None: ...

    def back(self, member: InstanceProcess) -> None: ...


class InstanceProcess:
    """One instance in its own process. ``post`` sends an event; a lost process is told to the watcher, once."""

    def __init__(self, setup: Setup, watcher: Watcher, timeline: Timeline) -> None:
        self.setup, self.name, self.process = setup, setup.name, 0
        self.started: Started | None = None
        self.gone: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watcher, self._timeline = watcher, timeline
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._why = ""
        self._watched = self._stopping = False
        self._connecting: dict[tuple[tuple[str, int], ...], asyncio.Future[None]] = {}
        self.heard = 0.0  # when it last said something, by the loop's clock

    async def attach(self, address: Address, secret: bytes) -> Started:
        """Connect, have it load, and learn what it offers. Raises what it could not do as the error that it met."""
        reach = _connect_when_up(address, secret, self.gone) if self.process else _connect_by_hand(address, secret)
        self._channel = channel = await reach
        channel.send(encode(self.setup))
        answer = decode(await _within(START_S, channel.receive(), f"instance {self.name} did not load its model"))
        if isinstance(answer, Broken):
            raise _typed(answer)
        if not isinstance(answer, Started):
            raise TransportError(f"instance {self.name} answered its Setup with {type(answer).__name__}", "control")
        self.started = answer = msgspec.structs.replace(answer, address=str(address))  # as it is reached from here
        self.heard = asyncio.get_running_loop().time()
        self._reading = asyncio.get_running_loop().create_task(self._read(channel), name=f"trinity-{self.name}")
        return answer

    async def introduce(self, peers: Sequence[Started]) -> None:
        """Tell it of its peers; returns once it has reached them. Raises why it cannot."""
        others = tuple(peer for peer in peers if peer.up.name != self.name)
        key = tuple((peer.up.name, peer.up.epoch) for peer in others)
        if not self.alive:
            raise PeerLost(f"instance {self.name} was lost: {self._why}", "control", self.name)
        connected = self._connecting[key] = asyncio.get_running_loop().create_future()
        try:
            self.post(Peers(others))
            await _within(START_S, connected, f"instance {self.name} did not reach its peers")
        finally:
            del self._connecting[key]

    def watch(self) -> None:
        """From now on its loss is told to the watcher, if that has happened already at once."""
        self._watched = True
        if self._why:
            self._watcher.lost(self.name, self._why)

    def end(self, why: str) -> None:
        """Make it end now: it is lost."""
        self._why = why
        self._kill()
        if self._channel is not None:
            self._channel.abort()

    def announcement(self) -> PeerUp:
        assert self.started is not None
        return self.started.up

    def post(self, event: Value) -> None:
        if self._channel is not None and not self._channel.closed:  # else its loss is on the way
            try:
                self._channel.send(encode(event))
            except TransportError as error:
                logger.error("instance %s cannot be told anything any more: %s", self.name, error)
                self._channel.abort()

    @property
    def alive(self) -> bool:
        """Whether it has started and is not lost."""
        return self.started is not None and not self._why

    async def fence(self) -> None:
        """Make sure that the process is gone: nothing it does can reach memory of ours any more.

        One that was started by hand loses its channel, and drops by itself whatever it did for this pipeline.
        """
        self._stopping = True
        if self._channel is not None:
            self._channel.abort()
        self._kill()
        if self.process:
            await asyncio.wait_for(asyncio.shield(self.gone), STOP_S)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            if self.process and not self.gone.done():
                os.kill(self.process, signal.SIGKILL)

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
        loop = asyncio.get_running_loop()
        try:
            async for frame in channel:
                self.heard = loop.time()
                message = decode(frame)
                if isinstance(message, Broken):
                    why = f"{message.error}: {message.message}"
                else:
                    self._take(message)
        except TransportError as error:
            why = str(error)
            channel.abort()
        finally:
            self._why = self._why or why
            for connected in self._connecting.values():
                if not connected.done():
                    connected.set_exception(PeerLost(f"instance {self.name} was lost: {why}", "control", self.name))
            if self._watched and not self._stopping:
                self._watcher.lost(self.name, self._why)

    def _take(self, message: Value) -> None:
        if isinstance(message, Connected):
            connected = self._connecting.get(message.peers)
            if connected is not None and not connected.done():
                connected.set_result(None) if message.why is None else connected.set_exception(_typed(message.why))
        elif isinstance(message, Slices):
            for row in message.rows:
                self._timeline.add(self.name, *row)
        else:
            self._watcher.to_frontend([message])


async def _within(seconds: float, answer: Awaitable[Answer], late: str) -> Answer:
    """What is awaited. Raises ``PeerLost`` where it does not come in time."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError as error:
        raise PeerLost(f"{late} within {seconds} s", "control") from error


async def _connect_by_hand(address: Address, secret: bytes) -> Channel:
    """Reach an instance that somebody has started; the errors say what to do at its end."""
    try:
        return await connect(address, secret, encode(Hello(FRONTEND)))
    except PeerLost as error:
        text = f"{error}; start an instance there: python -m trinity.instance --listen {address}"
        raise PeerLost(text, "control", str(address)) from error
    except HandshakeError as error:
        text = (
            f"the instance at {address} was not reached: {error}; ProcessConfig(secret=...) must be its TRINITY_SECRET"
        )
        raise HandshakeError(text, "control", str(address)) from error


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
    if broken.error == "OfferRefused":
        return OfferRefused(broken.message, broken.reason, "control")
    if broken.error == "UnknownName":  # its list of those known is that of the other side, and in the message
        return ConfigError(broken.message)
    kind = getattr(errors, broken.error, TrinityError)
    made: TrinityError = (
        kind(broken.message) if issubclass(kind, (ConfigError, TransportError)) else TrinityError(broken.message)
    )
    return made
