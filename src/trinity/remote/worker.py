"""InstanceWorker: loads an instance in a process of its own and serves one pipeline with it over control channels.

The pipeline connects first, says what to load, and introduces the peers, which then connect to each other.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from trinity.connector import Connector
from trinity.core.messages import PeerDown as PeerGone
from trinity.core.messages import PeerLoad, Value
from trinity.core.routing.router import routing_policy
from trinity.core.values import is_frontend
from trinity.errors import HandshakeError, PeerLost, TransportError, TrinityError
from trinity.memory.block_memory import BlockMemory
from trinity.memory.weight_digests import LoadedFiles
from trinity.remote.channel.agreement import check_layouts, hash_weights
from trinity.remote.channel.channel import TIMEOUT_S, Address, Channel, connect
from trinity.remote.channel.handshake import BrokenHandshake
from trinity.remote.channel.request_faults import decode_or_end, encode_all, end_requests, requests_of
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.channel.wire import (
    CheckFiles,
    ConnectReport,
    DropPeer,
    FilesChecked,
    Hello,
    InstanceFailure,
    InstanceInfo,
    LinkEnded,
    ModelIdentity,
    Peers,
    Setup,
    Slices,
    StillBusy,
    StopInstance,
    UnsendableMessage,
    WeightsDigest,
    decode,
    encode,
)
from trinity.remote.fellow_front_ends import REPORT_BACKLOG as REPORT_BACKLOG
from trinity.remote.fellow_front_ends import Fellows
from trinity.remote.instance_loading import BUSY_BEAT_S, load_life, send_while_open
from trinity.remote.instance_setup import describe_layouts, identify_model, make_instance_connector, read_instance
from trinity.remote.lane_steps import LaneSteps
from trinity.runtime.cpu_affinity import check_cores, pin_process
from trinity.runtime.host import InstanceHost
from trinity.timeline import Timeline

logger = logging.getLogger("trinity")
RETRY_S = 0.1  # between two attempts to reach a peer
ANNOUNCE_S = 0.2  # for the loop to send a word ahead of a long step
MAX_SLICES = 50_000  # of the timeline, which is sent to the front end in one frame at the end


class InstanceWorker:
    """An instance serving one pipeline: its host, a channel to the front end, and one to each peer.

    - ``secret`` (bytes): authenticates every channel.
    - ``address``: the server's, at which peers connect.
    - ``crash``: set when a thread of the instance has failed; the process should then end.
    - ``model`` (directory, None): a checkpoint on this machine, in place of the one that the pipeline names.
    - ``tls`` (None): for peers that are reached over TCP.
    """

    def __init__(
        self,
        secret: bytes,
        address: str,
        crash: asyncio.Event,
        model: str | None = None,
        tls: TLSConfig | None = None,
    ) -> None:
        self.secret, self.crash, self.model, self.tls = secret, crash, model, tls
        self.leaving = False
        self.pools: list[weakref.ref[BlockMemory]] = []
        self.loop = asyncio.get_running_loop()
        self.connector = Connector("shm")
        self.timeline = Timeline(limit=MAX_SLICES)
        self.host: InstanceHost | None = None
        self.hello = Hello("?")
        self._address = address
        self._unread: tuple[Path, LoadedFiles] | None = None  # the checkpoint, until every byte is being hashed
        self._frontend: Channel | None = None
        self._peers: dict[str, Channel] = {}
        self._epochs: dict[str, int] = {}
        self._links: dict[str, asyncio.Event] = {}
        self._meeting: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._steps = LaneSteps()
        self.fellows = Fellows(address)

    # ------------------------------------------------------------ the front end's channel

    async def serve(self, channel: Channel, setup: Setup) -> None:
        """Load the instance and serve until the front end stops it or is gone; then release everything.

        Errors of loading and serving are sent to the front end.
        """
        self._frontend = channel
        try:
            cores = read_instance(setup).cores
            check_cores(cores, setup.name)
            with pin_process(cores):
                await self._run(channel, setup)
        except TrinityError as error:
            await _give_up(channel, InstanceFailure(type(error).__name__, str(error)))
        except Exception as error:
            logger.exception("instance %s failed", self.hello.name)
            await _give_up(channel, InstanceFailure("TrinityError", repr(error)))
        finally:
            self.leaving = True
            await self._end()

    async def _run(self, channel: Channel, setup: Setup) -> None:
        if self.model is not None:
            setup = msgspec.structs.replace(setup, model=self.model)
        self.connector, directory = make_instance_connector(setup, self.secret), Path(setup.model)
        loaded, files, weights = await load_life(channel, setup, self.connector)
        self.pools = [weakref.ref(memory) for memory in loaded.memory.values()]
        self.hello = Hello(
            setup.name, loaded.model.fingerprint, describe_layouts(loaded), setup.pipeline, setup.epoch, weights
        )
        self.host = InstanceHost(loaded, self, self.timeline, routing_policy(setup.routing))
        pools = self.connector.bind(setup.name, loaded.memory)
        up = self.host.announcement()
        self.host.post(up)
        self.host.on_long_step = self._announce_step
        self.host.start()
        info = InstanceInfo(up, self.hello, pools, self._address)
        channel.send(encode(info))
        self._start(self._beat_at_work(channel, self.host))
        self._unread = (directory, files) if not weights and setup.paced is None else None
        try:
            await self._follow(channel, setup, lambda host: self.fellows.open(host, info, setup.config))
        except TransportError:
            if not self.fellows.channels:
                raise
        await self.fellows.outlive_first(channel)

    async def _report_weights(self, channel: Channel, directory: Path, loaded: LoadedFiles) -> None:
        try:
            found = WeightsDigest(await hash_weights(directory, loaded))
        except OSError as error:
            return logger.error("%s cannot read its weights again, to compare them: %s", self.hello.name, error)
        send_while_open(channel, encode(found))
        self.fellows.note_weights(found)

    async def _check_files(self, channel: Channel, setup: Setup, serves: ModelIdentity) -> None:
        """Tell if a next life with this setup would be refused."""
        why = None
        try:
            await asyncio.to_thread(identify_model, msgspec.structs.replace(setup, serves=serves))
        except TrinityError as error:
            why = InstanceFailure(type(error).__name__, str(error))
        except OSError as error:
            why = InstanceFailure("ConfigError", f"{self.hello.name} cannot read its model: {error}")
        send_while_open(channel, encode(FilesChecked(why)))

    async def _follow(self, channel: Channel, setup: Setup, begin: Callable[[InstanceHost], None]) -> None:
        """Carry out messages of the front end until it stops the instance or is gone."""
        assert self.host is not None
        async for frame in channel:
            message = decode_or_end(frame, self.hello.name, self.send_to_frontend)
            if message is None:
                continue
            if isinstance(message, StopInstance) and self.fellows.channels:
                channel.send(encode(Slices(self.timeline.rows())))
                return await channel.aclose()
            if isinstance(message, StopInstance):
                self.leaving = True
                self.host.stop(message.at_once)
                await self.host.join()
                channel.send(encode(Slices(self.timeline.rows())))
                await channel.aclose()
                return
            if isinstance(message, Peers):
                for peer in message.peers:
                    self._meet(channel, peer)
                if not message.peers:
                    begin(self.host)
                if not message.peers and self._unread is not None:
                    unread, self._unread = self._unread, None
                    self._start(self._report_weights(channel, *unread))
            elif isinstance(message, DropPeer):
                self._stop_meeting(message.name, message.epoch)
                self._drop_older(message.name, message.epoch + 1)
            elif isinstance(message, CheckFiles):
                self._start(self._check_files(channel, setup, message.serves))
            else:
                self.host.post(message)

    async def _end(self) -> None:
        self.fellows.close()
        if self.host is not None:
            self.host.stop(at_once=True)
            await self.host.join()
        for task in self._tasks:
            task.cancel()
        for peer in list(self._peers.values()):
            await peer.aclose()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.connector.aclose()
        self.host, self.connector = (
            None,
            Connector("shm"),
        )  # a broken channel keeps a reference to its last caller, and so to this

    # ------------------------------------------------------------ peers

    def _meet(self, frontend: Channel, peer: InstanceInfo) -> None:
        """Begin to meet a peer, until it is met or said to be lost."""
        name, epoch = peer.up.name, peer.up.epoch
        self._stop_meeting(name, epoch)
        self._meeting[name] = (epoch, self._start(self._join(frontend, peer)))

    def _stop_meeting(self, name: str, epoch: int) -> None:
        if name in self._meeting and self._meeting[name][0] <= epoch:
            self._meeting.pop(name)[1].cancel()

    async def _join(self, frontend: Channel, peer: InstanceInfo) -> None:
        """Connect to a peer and tell the core of it; ``connects_first`` says which of two instances connects."""
        assert self.host is not None
        name, epoch = peer.up.name, peer.up.epoch
        try:
            check_layouts(self.hello, peer.hello)
            self._drop_older(name, epoch)
            self.connector.introduce(name, peer.pools)
            if connects_first(self.hello.name, self._address, name, peer.address):
                await self._reach(peer)
            while self._epochs.get(name) != epoch or name not in self._peers:
                self._link(name).clear()
                await self._link(name).wait()
        except TrinityError as error:
            why = InstanceFailure(type(error).__name__, f"{self.hello.name} cannot reach {name}: {error}")
            return send_while_open(frontend, encode(ConnectReport(name, epoch, why)))
        self.host.post(peer.up)
        send_while_open(frontend, encode(ConnectReport(name, epoch)))

    async def _reach(self, peer: InstanceInfo) -> None:
        """Connect to a peer, again and again: the front end says when to give up, and which of the two is at fault.

        Raises ``HandshakeError`` for what no other try mends: another version, a wrong proof, TLS on one side alone.
        """
        while True:
            try:
                where, hello = Address.parse(peer.address), encode(Hello("instance"))
                channel = await connect(where, self.secret, hello, tls=self.tls)
                break
            except (PeerLost, HandshakeError) as error:
                if not _may_pass(error):
                    raise HandshakeError(str(error), "control", peer.address) from error
                await asyncio.sleep(RETRY_S)
        channel.send(encode(self.hello))
        self._start(self._serve_peer(channel, peer.up.name, peer.up.epoch))

    def _link(self, name: str) -> asyncio.Event:
        """Return the event that is set while there is a channel to this peer."""
        return self._links.setdefault(name, asyncio.Event())

    async def greet(self, channel: Channel) -> None:
        """Serve a peer that has connected, after its hello.

        Raises ``HandshakeError`` or ``LayoutMismatch`` if it does not belong here.
        """
        async with asyncio.timeout(TIMEOUT_S):
            hello = decode(await channel.receive())
        if not isinstance(hello, Hello) or self.host is None:
            raise HandshakeError("a peer must send its Hello first, and this instance must have started", "control")
        if hello.pipeline != self.hello.pipeline:
            raise HandshakeError(f"{hello.name} belongs to another pipeline than {self.hello.name}", "control")
        check_layouts(self.hello, hello)
        if hello.epoch <= self._epochs.get(hello.name, -1):
            raise HandshakeError(f"{hello.name} of epoch {hello.epoch} is connected or lost already", "control")
        await self._serve_peer(channel, hello.name, hello.epoch)

    async def _serve_peer(self, channel: Channel, name: str, epoch: int) -> None:
        host = self.host
        assert host is not None
        self._drop_older(name, epoch)
        self._peers[name], self._epochs[name] = channel, epoch
        self._link(name).set()
        try:
            async for frame in channel:
                if self._peers.get(name) is not channel:
                    break  # it was dropped: its core has heard that this peer is lost, and nothing may follow that
                message = decode_or_end(frame, self.hello.name, self._tell_all)
                if message is not None:
                    host.post(message)
        except TransportError as error:
            logger.warning("%s drops the control channel of %s: %s", self.hello.name, name, error)
        finally:
            channel.abort()
            if self._peers.get(name) is channel:
                self._drop_older(name, epoch + 1)
                if not self.leaving:
                    self.send_to_frontend([LinkEnded(name, epoch)])

    def _drop_older(self, name: str, epoch: int) -> None:
        """Disconnect this peer if its epoch is below ``epoch``: it was lost, or has been restarted."""
        if name in self._peers and self._epochs[name] < epoch:
            self._peers.pop(name).abort()
            self._link(name).clear()
            self.connector.forget(name)
            if self.host is not None:
                self.host.post(PeerGone(name))

    def _start(self, serving: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(serving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ------------------------------------------------------------ the network of the host (``trinity.runtime.host``)

    def send_to_peer(self, name: str, message: Value) -> None:
        """Send to a peer or a fellow, on the thread of the core. What cannot be sent ends its own request alone."""
        if is_frontend(name):
            self.loop.call_soon_threadsafe(self.fellows.send, name, [message], self.hello.name)
            return
        try:
            self.loop.call_soon_threadsafe(self._send, name, encode(message))
        except UnsendableMessage as error:
            assert self.host is not None
            ended: list[Value] = [
                *end_requests(requests_of(message, self.host.core.state), error, (self.hello.name, name))
            ]
            self.loop.call_soon_threadsafe(self._tell_all, ended)

    def _tell_all(self, messages: list[Value]) -> None:
        """Tell every front end: whose request it is nobody knows here."""
        self.send_to_frontend(messages)
        self.fellows.send_to_all(messages, self.hello.name)

    def send_to_frontend(self, messages: list[Value]) -> None:
        """Send messages to the front end. While it does not read it is spared load reports, which would pile up."""
        if self._frontend is not None and self._frontend.backlog > REPORT_BACKLOG:
            messages = [message for message in messages if not isinstance(message, PeerLoad)]
        self._send_all(encode_all(messages, self.hello.name))

    def _announce_step(self, lane: str, predicted_s: float) -> None:
        """Say of a step that it begins, before its lane may hold the interpreter for longer than silence is borne."""
        said = threading.Event()

        def say() -> None:
            if self._frontend is not None:
                steps = self.host.predict_steps() if self.host is not None else {}
                send_while_open(self._frontend, encode(self._steps.begin(lane, predicted_s, steps)))
            said.set()

        self.loop.call_soon_threadsafe(say)
        said.wait(ANNOUNCE_S)

    async def _beat_at_work(self, channel: Channel, host: InstanceHost) -> None:
        """Say every second what step is long, and speak for a core that computes digests, for as long as it goes on.

        One that hangs in a digest is spoken for no more.
        """
        digests = 0
        while True:
            await asyncio.sleep(BUSY_BEAT_S)
            if host.blocks_digested != digests:
                digests = host.blocks_digested
                send_while_open(channel, encode(StillBusy()))
            if (told := self._steps.beat(host.predict_steps())) is not None:
                send_while_open(channel, encode(told))

    def report_crash(self, name: str, error: BaseException) -> None:
        self._send_all([encode(InstanceFailure(type(error).__name__, str(error)))])
        self.crash.set()

    def _send(self, name: str, frame: bytes) -> None:
        channel = self._peers.get(name)
        if channel is not None:
            send_while_open(channel, frame)

    def _send_all(self, frames: list[bytes]) -> None:
        if self._frontend is not None:
            for frame in frames:
                send_while_open(self._frontend, frame)


def _may_pass(error: TransportError) -> bool:
    """Tell if another try to connect may succeed: the peer died or was busy, and did not show that the two differ."""
    if isinstance(error.__cause__, ssl.SSLError):
        return isinstance(error.__cause__, ssl.SSLEOFError)
    return isinstance(error, (PeerLost, BrokenHandshake))


async def _give_up(channel: Channel, why: InstanceFailure) -> None:
    send_while_open(channel, encode(why))
    with suppress(TransportError):
        await channel.aclose()


def connects_first(name: str, address: str, other: str, its_address: str) -> bool:
    """Tell whether the first of two peers connects to the other.

    The one that listens on a Unix socket connects to the one on TCP, since only TCP reaches other hosts; else the names
    decide, in alphabetical order.
    """
    return (address.startswith("tcp:"), name) < (its_address.startswith("tcp:"), other)
