"""Client of one instance process, on the pipeline's side: connects, sends events, takes messages, ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import Protocol

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
from trinity.remote.channel.agreement import WeightsAgreement
from trinity.remote.channel.channel import Channel, connect
from trinity.remote.channel.host_addresses import name_host
from trinity.remote.channel.request_faults import decode_or_end, end_requests, requests_of
from trinity.remote.channel.wire import (
    AtStep,
    CheckFiles,
    ConnectReport,
    FilesChecked,
    Hello,
    InstanceFailure,
    InstanceInfo,
    InstancePrepared,
    LinkEnded,
    ProceedInstance,
    Setup,
    Slices,
    StillBusy,
    StopInstance,
    WeightsDigest,
    decode,
    encode,
)
from trinity.remote.supervision.fork_client import INSTANCE_STOP_S
from trinity.remote.supervision.supervisor_messages import Event, Linked, Lost, NextLoaded, Refused, Unlinked
from trinity.remote.supervision.supply import InstancePlace, InstanceProcess
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
LISTEN_POLL_S = 0.005  # between two tries to reach one that will listen soon


class Watcher(Protocol):
    """The pipeline, as instance clients call it on the event loop's thread."""

    def send_to_frontend(self, messages: list[Value]) -> None:
        """Take messages for the front end."""
        ...

    def on_lost(self, name: str, why: str, *, planned: bool) -> None:
        """Take note that an instance is lost, or was ended to have other roles."""
        ...

    def on_back(self, member: InstanceClient) -> None:
        """Take note that a lost instance runs again."""
        ...


class InstanceClient:
    """One life of an instance in its own process. ``post`` sends it an event; ``report`` hears of its links and end.

    - ``last_heard`` (s, monotonic clock; None): when its last sign of life came.
    - ``step`` (None): when the long step began that a lane is at (monotonic clock), and its predicted seconds.
    - ``problem`` (None): the error for which it could not start or go on. ``says_so``: it has told of that itself.
    """

    def __init__(
        self,
        setup: Setup,
        watcher: Watcher,
        timeline: Timeline,
        report: Callable[[Event], None],
        *,
        weights: WeightsAgreement | None = None,
    ) -> None:
        self.setup, self.name = setup, setup.name
        self.started: InstanceInfo | None = None
        self.problem: TrinityError | None = None
        self.says_so = False
        self.last_heard: float | None = None
        self.step: tuple[float, float] | None = None
        self._step_lane = ""
        self._watcher, self._timeline, self._report = watcher, timeline, report
        self._weights = weights or WeightsAgreement()
        self._process: InstanceProcess | None = None
        self._channel: Channel | None = None
        self._reading: asyncio.Task[None] | None = None
        self._checked: asyncio.Future[InstanceFailure | None] | None = None
        self._loss = ""
        self._watched = self._stopping = self._proceeds = False
        self._unheard: list[Value] = []  # what it says before the front end knows it

    @property
    def process(self) -> int:
        """Its process number; 0 where this host does not have it, or not yet."""
        return self._process.number if self._process is not None else 0

    async def attach(self, place: InstancePlace, secret: bytes) -> InstanceInfo:
        """Connect, have the instance load its model, and return its description.

        With ``setup.waits`` it loads the rest, and is described, after ``proceed``.
        Raises the error that the instance met, ``PeerLost`` or ``HandshakeError`` if it cannot be reached.
        """
        self._process = place.process
        self.setup = msgspec.structs.replace(self.setup, host=name_host(place.address))
        self._channel = channel = await (_connect_when_up if place.listen_s else connect_by_hand)(place, secret)
        channel.send(encode(self.setup))
        if self._proceeds:
            self.post(ProceedInstance())
        answer: Value = StillBusy()
        while isinstance(answer, (StillBusy, InstancePrepared)):
            self.last_heard = time.monotonic()
            if isinstance(answer, InstancePrepared):
                self._report(NextLoaded(self.name, self.setup.epoch))
            answer = decode(await channel.receive())
        if isinstance(answer, InstanceFailure):
            self.says_so = True
            raise to_error(answer)
        if not isinstance(answer, InstanceInfo):
            raise TransportError(f"instance {self.name} answered its Setup with {type(answer).__name__}", "control")
        self._weights.admit(self.setup, answer.hello)
        reached = str(place.address)  # by the pipeline, which need not be as the instance calls itself
        self.started = answer = msgspec.structs.replace(answer, address=reached)
        self.last_heard = time.monotonic()
        self._reading = asyncio.get_running_loop().create_task(self._read(channel), name=f"trinity-{self.name}")
        return answer

    def proceed(self) -> None:
        """Have an instance that waits go on, or one that is being prepared not wait."""
        self._proceeds = True
        if self._channel is not None:
            self.post(ProceedInstance())

    async def check_files(self) -> None:
        """Have it look if a next life would load what the pipeline serves; return, too, once it is lost.

        Raises the error for which that life would be refused.
        """
        served = self._weights.served
        assert served is not None  # it has started
        self._checked = asyncio.get_running_loop().create_future()
        self.post(CheckFiles(served))
        if self.alive and (why := await self._checked) is not None:
            raise to_error(why)

    def watch(self) -> None:
        """Pass on what it says from now on, and what it has said already: the front end knows it by now."""
        self._watched = True
        self._watcher.send_to_frontend(self._unheard)
        self._unheard = []

    def announcement(self) -> PeerUp:
        """Return the message by which the front end learns of the instance, which must have started."""
        assert self.started is not None
        return self.started.up

    def lane_steps(self) -> dict[str, tuple[Hashable, float]]:
        """Return the lane of a step that may keep back its reports, a name for it, and its predicted seconds."""
        return {self._step_lane: self.step} if self.alive and self.step is not None and self._step_lane else {}

    def post(self, event: Value) -> None:
        """Send an event; one for a lost instance is dropped. One that cannot be sent ends its own request alone."""
        if self._channel is not None and not self._channel.closed:  # else its loss is about to be reported
            try:
                self._channel.send(encode(event))
            except TransportError as error:
                logger.warning("an event for instance %s was not sent: %s", self.name, error)
                self._watcher.send_to_frontend([*end_requests(requests_of(event), error, (self.name,))])

    @property
    def fingerprint(self) -> str:
        """Digest of the model that it has loaded, weights and precision included; it must have started."""
        assert self.started is not None
        return self.started.hello.fingerprint

    @property
    def alive(self) -> bool:
        """True from its start until its loss."""
        return self.started is not None and not self._loss

    def cut(self) -> None:
        """Hear nothing more of it: nobody may hear a word of it after its loss."""
        self._stopping = True
        self._loss = self._loss or "it was ended"
        self._weights.forget(self.name, self.setup.epoch)
        if self._channel is not None:
            self._channel.abort()

    def kill(self) -> None:
        """Hear nothing more of it, and end its process if there is one here by now."""
        self.cut()
        if self._process is not None:
            self._process.kill()

    def stop(self, at_once: bool = False) -> None:
        """Ask it to end once it has no requests, or ``at_once``."""
        self._stopping = True
        self.post(StopInstance(at_once))

    async def join(self) -> None:
        """Wait until it has stopped serving, or is lost."""
        if self._reading is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(self._reading), INSTANCE_STOP_S)
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._channel is not None:
            await self._channel.aclose()

    async def _read(self, channel: Channel) -> None:
        why = "its control channel ended"
        try:
            async for frame in channel:
                if self._loss:
                    break
                message = decode_or_end(frame, self.name, self._watcher.send_to_frontend)
                if isinstance(message, AtStep):
                    began = time.monotonic() - (message.seconds or 0.0)
                    self.step = (began, message.predicted_s) if message.seconds is not None else None
                    self._step_lane = message.lane or self._step_lane
                    continue
                self.last_heard = time.monotonic()
                if isinstance(message, InstanceFailure):
                    why, self.problem = f"{message.error}: {message.message}", to_error(message)
                else:
                    self._take(message)
        except TransportError as error:
            why = str(error)
            channel.abort()
        finally:
            self._loss = self._loss or why
            self._take(FilesChecked())  # whoever waits for it
            if not self._stopping:
                self._report(Lost(self.name, self.setup.epoch, self._loss))

    def _take(self, message: Value | None) -> None:
        life = (self.name, self.setup.epoch)
        if isinstance(message, ConnectReport):
            if message.why is None:
                self._report(Linked(*life, message.peer, message.epoch))
            else:
                self.problem = to_error(message.why)
                peer, for_good = (message.peer, message.epoch), message.why.error == LayoutMismatch.__name__
                self._report(Refused(*life, message.why.message, *peer, for_good))
        elif isinstance(message, LinkEnded):
            self._report(Unlinked(*life, message.peer, message.epoch))
        elif isinstance(message, WeightsDigest):
            self._compare_weights(message.digest)
        elif isinstance(message, FilesChecked):
            if self._checked is not None and not self._checked.done():
                self._checked.set_result(message.why)
        elif isinstance(message, Slices):
            for row in message.rows:
                self._timeline.add(self.name, *row)
        elif isinstance(message, StillBusy):
            pass  # it was heard
        elif message is not None and self._watched:
            self._watcher.send_to_frontend([message])
        elif message is not None:
            self._unheard.append(message)

    def _compare_weights(self, digest: str) -> None:
        """End this instance or a younger one where their weights differ: its tokens are those of another model."""
        dispute = self._weights.compare(self.name, self.setup.epoch, digest)
        if dispute is not None:
            self.problem = LayoutMismatch(dispute.why)
            life = (self.name, self.setup.epoch, dispute.why)
            self._report(Refused(*life, dispute.name, dispute.epoch) if dispute.name else Lost(*life))


async def connect_by_hand(place: InstancePlace, secret: bytes, name: str = FRONTEND) -> Channel:
    """Connect the front end ``name`` to an instance that was started by hand; errors say what to do on its side."""
    address = place.address
    try:
        return await connect(address, secret, encode(Hello(name)), tls=place.tls)
    except PeerLost as error:
        text = f"{error}; start an instance there: python -m trinity.instance --listen {address}"
        raise PeerLost(text, "control", str(address)) from error
    except HandshakeError as error:
        text = (
            f"the instance at {address} was not reached: {error}; ProcessConfig(secret=...) must be its TRINITY_SECRET"
        )
        raise HandshakeError(text, "control", str(address)) from error


async def _connect_when_up(place: InstancePlace, secret: bytes) -> Channel:
    """Connect to an instance that was begun for this pipeline, retrying until it listens.

    Raises ``ConfigError`` if it ends before, or does not listen in time.
    """
    loop, process = asyncio.get_running_loop(), place.process
    deadline = loop.time() + place.listen_s
    while True:
        try:
            return await connect(place.address, secret, encode(Hello(FRONTEND)), tls=place.tls)
        except PeerLost as error:
            if (process is not None and process.has_ended()) or loop.time() > deadline:
                raise ConfigError(f"the instance at {place.address} did not come up; see its output") from error
        await asyncio.sleep(LISTEN_POLL_S)


def to_error(broken: InstanceFailure) -> TrinityError:
    """Make the error that an instance tells of."""
    if broken.error == "OfferRefused":
        return OfferRefused(broken.message, broken.reason, "control")
    if broken.error == "UnknownName":  # the message lists the names that the other side knows
        return ConfigError(broken.message)
    kind = getattr(errors, broken.error, TrinityError)
    made: TrinityError = (
        kind(broken.message) if issubclass(kind, (ConfigError, TransportError)) else TrinityError(broken.message)
    )
    return made
