"""Client of one instance process, on the pipeline's side: connects, sends events, takes messages, ends it."""

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
from trinity.errors import (
    ConfigError,
    HandshakeError,
    LayoutMismatch,
    OfferRefused,
    PeerLost,
    TransportError,
    TrinityError,
)
from trinity.remote.agreement import WeightsAgreement
from trinity.remote.channel import Address, Channel, connect
from trinity.remote.fork_client import INSTANCE_START_S, INSTANCE_STOP_S
from trinity.remote.request_faults import end_requests, requests_in, requests_of
from trinity.remote.wire import (
    ConnectReport,
    Hello,
    InstanceFailure,
    InstanceInfo,
    Peers,
    Setup,
    Slices,
    StopInstance,
    WeightsDigest,
    decode,
    encode,
)
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
Answer = TypeVar("Answer")


class Watcher(Protocol):
    """The pipeline, as instance clients call it on the event loop's thread."""

    def send_to_frontend(self, messages: list[Value]) -> None:
        """Take messages for the front end."""
        ...

    def on_lost(self, name: str, why: str) -> None:
        """Take note that an instance is lost."""
        ...

    def on_back(self, member: InstanceClient) -> None:
        """Take note that a lost instance runs again."""
        ...


class InstanceClient:
    """One instance in its own process. ``post`` sends it an event; its loss is reported to the watcher once."""

    def __init__(
        self, setup: Setup, watcher: Watcher, timeline: Timeline, *, weights: WeightsAgreement | None = None
    ) -> None:
        self.setup, self.name, self.process = setup, setup.name, 0
        self.started: InstanceInfo | None = None
        self.exit_code: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._watcher, self._timeline, self._weights = watcher, timeline, weights or WeightsAgreement()
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._loss = ""
        self._watched = self._stopping = False
        self._unheard: list[Value] = []  # what it says before the pipeline watches it
        self._connecting: dict[tuple[tuple[str, int], ...], asyncio.Future[None]] = {}
        self.last_heard = 0.0  # time of its last message, by the loop's clock

    async def attach(self, address: Address, secret: bytes) -> InstanceInfo:
        """Connect, have the instance load its model, and return its description.

        Raises the error that the instance met, ``PeerLost`` or ``HandshakeError`` if it cannot be reached.
        """
        reach = _connect_when_up(address, secret, self.exit_code) if self.process else _connect_by_hand(address, secret)
        self._channel = channel = await reach
        channel.send(encode(self.setup))
        answer = decode(
            await _within(INSTANCE_START_S, channel.receive(), f"instance {self.name} did not load its model")
        )
        if isinstance(answer, InstanceFailure):
            raise _to_error(answer)
        if not isinstance(answer, InstanceInfo):
            raise TransportError(f"instance {self.name} answered its Setup with {type(answer).__name__}", "control")
        self._weights.check(self.name, answer.hello.weights)
        self.started = answer = msgspec.structs.replace(answer, address=str(address))  # as the pipeline reaches it
        self.last_heard = asyncio.get_running_loop().time()
        self._reading = asyncio.get_running_loop().create_task(self._read(channel), name=f"trinity-{self.name}")
        return answer

    async def introduce(self, peers: Sequence[InstanceInfo]) -> None:
        """Have it connect to its peers; return once it has. Raises the error that it met, or ``PeerLost``."""
        others = tuple(peer for peer in peers if peer.up.name != self.name)
        key = tuple((peer.up.name, peer.up.epoch) for peer in others)
        if not self.alive:
            raise PeerLost(f"instance {self.name} was lost: {self._loss}", "control", self.name)
        connected = self._connecting[key] = asyncio.get_running_loop().create_future()
        try:
            self.post(Peers(others))
            await _within(INSTANCE_START_S, connected, f"instance {self.name} did not reach its peers")
        finally:
            del self._connecting[key]

    def watch(self) -> None:
        """Pass on what it says, and report its loss, from now on; what has come already at once.

        The front end knows it by then. What is lost before is never heard of: it is told no such loss either.
        """
        self._watched = True
        self._watcher.send_to_frontend(self._unheard)
        self._unheard = []
        if self._loss:
            self._watcher.on_lost(self.name, self._loss)

    def end(self, why: str) -> None:
        """Kill it and drop its channel: it counts as lost, for the reason ``why``."""
        self._loss = why
        self._kill()
        if self._channel is not None:
            self._channel.abort()

    def announcement(self) -> PeerUp:
        """Return the message by which the front end learns of the instance, which must have started."""
        assert self.started is not None
        return self.started.up

    def post(self, event: Value) -> None:
        """Send an event; one for a lost instance is dropped. One that cannot be sent ends its own request alone."""
        if self._channel is not None and not self._channel.closed:  # else its loss is about to be reported
            try:
                self._channel.send(encode(event))
            except TransportError as error:
                logger.warning("an event for instance %s was not sent: %s", self.name, error)
                self._watcher.send_to_frontend([*end_requests(requests_of(event), error, (self.name,))])

    @property
    def alive(self) -> bool:
        """True from its start until its loss."""
        return self.started is not None and not self._loss

    async def fence(self) -> None:
        """Make sure that the process has ended, so that it can reach no memory of this pipeline any more.

        An instance that was started by hand loses its channel, and then drops all its work for this pipeline.
        """
        self._stopping = True
        if self._channel is not None:
            self._channel.abort()
        self._kill()
        if self.process:
            await asyncio.wait_for(asyncio.shield(self.exit_code), INSTANCE_STOP_S)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            if self.process and not self.exit_code.done():
                os.kill(self.process, signal.SIGKILL)

    def stop(self, at_once: bool = False) -> None:
        """Ask it to end once it has no requests, or ``at_once``."""
        self._stopping = True
        self.post(StopInstance(at_once))

    async def join(self) -> None:
        """Wait until it has stopped serving; the launcher reaps its process."""
        if self._reading is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reading), INSTANCE_STOP_S)
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._channel is not None:
            await self._channel.aclose()

    async def _read(self, channel: Channel) -> None:
        why = "its control channel ended"
        loop = asyncio.get_running_loop()
        try:
            async for frame in channel:
                self.last_heard = loop.time()
                message = self._decode(frame)
                if isinstance(message, InstanceFailure):
                    why = f"{message.error}: {message.message}"
                else:
                    self._take(message)
        except TransportError as error:
            why = str(error)
            channel.abort()
        finally:
            self._loss = self._loss or why
            for connected in self._connecting.values():
                if not connected.done():
                    connected.set_exception(PeerLost(f"instance {self.name} was lost: {why}", "control", self.name))
            if self._watched and not self._stopping:
                self._watcher.on_lost(self.name, self._loss)

    def _decode(self, frame: bytes) -> Value | None:
        """Decode a message; one about a request that is none ends that request, any other raises ``HandshakeError``."""
        try:
            return decode(frame)
        except HandshakeError as error:
            requests = requests_in(frame)
            if not requests:
                raise
            self._watcher.send_to_frontend([*end_requests(requests, error, (self.name,))])
            return None

    def _take(self, message: Value | None) -> None:
        if isinstance(message, ConnectReport):
            connected = self._connecting.get(message.peers)
            if connected is not None and not connected.done():
                connected.set_result(None) if message.why is None else connected.set_exception(_to_error(message.why))
        elif isinstance(message, WeightsDigest):
            self._compare_weights(message.digest)
        elif isinstance(message, Slices):
            for row in message.rows:
                self._timeline.add(self.name, *row)
        elif message is not None and self._watched:
            self._watcher.send_to_frontend([message])
        elif message is not None:
            self._unheard.append(message)

    def _compare_weights(self, digest: str) -> None:
        """End the instance if it serves other weights than those before it: its tokens are those of another model."""
        try:
            self._weights.check(self.name, digest)
        except LayoutMismatch as error:
            self.end(str(error))


async def _within(seconds: float, answer: Awaitable[Answer], late: str) -> Answer:
    """Await ``answer``. Raises ``PeerLost`` with the text ``late`` after ``seconds``."""
    try:
        return await asyncio.wait_for(answer, seconds)
    except TimeoutError as error:
        raise PeerLost(f"{late} within {seconds} s", "control") from error


async def _connect_by_hand(address: Address, secret: bytes) -> Channel:
    """Connect to an instance that was started by hand; errors say what to do on its side."""
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
    """Connect to a forked instance, retrying until it listens.

    Raises ``ConfigError`` if it ends before, or does not listen within ``INSTANCE_START_S``.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + INSTANCE_START_S
    while True:
        try:
            return await connect(address, secret, encode(Hello(FRONTEND)))
        except PeerLost as error:
            if gone.done() or loop.time() > deadline:
                raise ConfigError(f"the instance at {address} did not come up; see its output above") from error
        await asyncio.sleep(0.005)


def _to_error(broken: InstanceFailure) -> TrinityError:
    if broken.error == "OfferRefused":
        return OfferRefused(broken.message, broken.reason, "control")
    if broken.error == "UnknownName":  # the message lists the names that the other side knows
        return ConfigError(broken.message)
    kind = getattr(errors, broken.error, TrinityError)
    made: TrinityError = (
        kind(broken.message) if issubclass(kind, (ConfigError, TransportError)) else TrinityError(broken.message)
    )
    return made
