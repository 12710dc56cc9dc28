"""An instance in a process of its own: serves one pipeline over control channels.

    python -m trinity.instance --listen tcp:127.0.0.1:7000

The pipeline connects first, says what to load, and introduces the peers, which then connect to each other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from trinity.connector import Connector
from trinity.errors import HandshakeError, LayoutMismatch, TransportError, TrinityError
from trinity.hosting import Deployment, load
from trinity.instance import Instance, InstanceHost, Loaded
from trinity.messages import FRONTEND, Value
from trinity.messages import PeerLost as PeerGone
from trinity.processor import RequestProcessor
from trinity.routing import routing_policy
from trinity.scheduler import Rules
from trinity.timeline import Timeline
from trinity.transport.channel import Address, Channel, connect, listen
from trinity.transport.wire import (
    Broken,
    Connected,
    Hello,
    Layout,
    Peers,
    Setup,
    Slices,
    Started,
    Stop,
    decode,
    encode,
)

logger = logging.getLogger("trinity")
SECRET = "TRINITY_SECRET"
LINK_S = 60.0


class Standalone:
    """The instance that this process is: a host, its channel to the front end, one channel to each peer."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.loop = asyncio.get_running_loop()
        self.connector = Connector("shm")
        self.timeline = Timeline()
        self.host: InstanceHost | None = None
        self.hello = Hello("?")
        self.ended = asyncio.Event()
        self._address = ""
        self._frontend: Channel | None = None
        self._peers: dict[str, Channel] = {}
        self._links: dict[str, asyncio.Event] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self, address: Address, announce: Callable[[Address], None]) -> None:
        """Listen until the front end says stop or is gone."""
        async with listen(address, self.secret, encode(Hello("instance")), self._accepted) as bound:
            self._address = str(bound)
            announce(bound)
            await self.ended.wait()

    async def _accepted(self, channel: Channel) -> None:
        try:
            hello = decode(channel.hello)
            if isinstance(hello, Hello) and hello.name == FRONTEND and self._frontend is None:
                await self._serve_frontend(channel)
            elif isinstance(hello, Hello) and self.host is not None:
                await self._greet(channel, decode(await channel.receive()))
        except TransportError as error:
            logger.warning("a control channel of %s was dropped: %s", self.hello.name, error)
        finally:
            channel.abort()

    # ------------------------------------------------------------ the front end's channel

    async def _serve_frontend(self, channel: Channel) -> None:
        self._frontend = channel
        try:
            await self._run(channel)
        except TrinityError as error:
            channel.send(encode(Broken(type(error).__name__, str(error))))
            await channel.aclose()
        except Exception as error:
            logger.exception("instance %s failed", self.hello.name)
            channel.send(encode(Broken("TrinityError", repr(error))))
            await channel.aclose()
        finally:
            self.ended.set()

    async def _run(self, channel: Channel) -> None:
        setup = decode(await channel.receive())
        if not isinstance(setup, Setup):
            raise HandshakeError("the front end must send its Setup first", "control")
        loaded = await asyncio.to_thread(_load, setup)
        self.hello = Hello(setup.name, loaded.model.fingerprint, layouts(loaded))
        self.connector = Connector(setup.transport, timeout_s=setup.read_timeout_s)
        self.host = InstanceHost(loaded, self, self.timeline, routing_policy(setup.routing))
        pools = self.connector.bind(setup.name, loaded.memory)
        up = self.host.announcement()
        self.host.post(up)
        self.host.start()
        channel.send(encode(Started(up, self.hello, pools, self._address)))
        try:
            await self._follow(channel)
        finally:
            await self._end()

    async def _follow(self, channel: Channel) -> None:
        """Carry out what the front end says, until it says stop or is gone."""
        assert self.host is not None
        async for frame in channel:
            message = decode(frame)
            if isinstance(message, Stop):
                self.host.stop(message.at_once)
                await self.host.join()
                channel.send(encode(Slices(self.timeline.rows())))
                await channel.aclose()
                return
            if isinstance(message, Peers):
                self._start(self._meet_all(channel, message.peers))
            else:
                self.host.post(message)

    async def _end(self) -> None:
        assert self.host is not None
        self.host.stop(at_once=True)
        await self.host.join()
        for peer in list(self._peers.values()):
            await peer.aclose()
        await self.connector.aclose()

    # ------------------------------------------------------------ peers

    async def _meet_all(self, frontend: Channel, peers: tuple[Started, ...]) -> None:
        """Learn of peers. Of two, the one whose name comes first connects; the core hears of those that are reached."""
        assert self.host is not None
        try:
            for peer in peers:
                check_layouts(self.hello, peer.hello)
                self.connector.introduce(peer.up.name, peer.pools)
                if self.hello.name < peer.up.name:
                    await self._reach(peer)
            for peer in peers:
                await asyncio.wait_for(self._link(peer.up.name).wait(), LINK_S)
                self.host.post(peer.up)
        except (TrinityError, TimeoutError) as error:
            frontend.send(encode(Broken(type(error).__name__, f"{self.hello.name} cannot reach its peers: {error}")))
            return
        frontend.send(encode(Connected()))

    async def _reach(self, peer: Started) -> None:
        channel = await connect(Address.parse(peer.address), self.secret, encode(Hello("instance")))
        channel.send(encode(self.hello))
        self._start(self._serve_peer(channel, peer.up.name))

    def _link(self, name: str) -> asyncio.Event:
        """Set while there is a channel to this peer."""
        return self._links.setdefault(name, asyncio.Event())

    async def _greet(self, channel: Channel, hello: Value) -> None:
        if not isinstance(hello, Hello):
            raise HandshakeError("a peer must say who it is first", "control")
        check_layouts(self.hello, hello)
        await self._serve_peer(channel, hello.name)

    async def _serve_peer(self, channel: Channel, name: str) -> None:
        assert self.host is not None
        self._peers[name] = channel
        self._link(name).set()
        async for frame in channel:
            self.host.post(decode(frame))
        if self._peers.get(name) is channel:
            del self._peers[name]
            self._link(name).clear()
            self.connector.forget(name)
            self.host.post(PeerGone(name))

    def _start(self, serving: Coroutine[Any, Any, None]) -> None:
        task = self.loop.create_task(serving)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ what the host asks of its network

    def to_peer(self, name: str, message: Value) -> None:
        self.loop.call_soon_threadsafe(self._send, name, encode(message))

    def to_frontend(self, messages: list[Value]) -> None:
        self.loop.call_soon_threadsafe(self._send_all, [encode(message) for message in messages])

    def crashed(self, name: str, error: BaseException) -> None:
        if self._frontend is not None and not self._frontend.closed:
            self._frontend.send(encode(Broken(type(error).__name__, str(error))))
        self.ended.set()

    def _send(self, name: str, frame: bytes) -> None:
        channel = self._peers.get(name)
        if channel is not None and not channel.closed:  # else its PeerLost is on the way
            channel.send(frame)

    def _send_all(self, frames: list[bytes]) -> None:
        if self._frontend is not None and not self._frontend.closed:
            for frame in frames:
                self._frontend.send(frame)


def _load(setup: Setup) -> Loaded:
    """Weights, pools and budgets of this instance. Blocks: run it on a thread."""
    spec = Instance(
        setup.roles,
        setup.name,
        pools=setup.pools,
        memory_bytes=setup.memory_bytes,
        lanes=setup.lanes,
        threads=setup.threads,
        device=setup.device,
        prefix_cache=setup.prefix_cache,
        image_cache=setup.image_cache,
    )
    deployment = Deployment(
        model=Path(setup.model),
        dtype=setup.dtype,
        slo=setup.slo,
        budgets=setup.budgets,
        rules=Rules(setup.tokens, setup.media, setup.policy, setup.order, setup.chunked, setup.media_budget),
        media_block=setup.media_block,
        kv_block=setup.kv_block,
        observe=None,
        device=setup.device,
        shared=True,
    )
    processor = RequestProcessor(setup.model) if setup.slo is not None and setup.budgets is None else None
    try:
        loaded = load(deployment, [spec], processor)[0]
        loaded.settings = replace(loaded.settings, epoch=setup.epoch)
        return loaded
    finally:
        if processor is not None:
            processor.close()


def layouts(loaded: Loaded) -> dict[str, Layout]:
    """What a peer must have too: the shape of each kind of block."""
    return {
        kind: Layout(memory.shape.shape, str(memory.shape.dtype), memory.block_bytes)
        for kind, memory in loaded.memory.items()
    }


def check_layouts(mine: Hello, theirs: Hello) -> None:
    """Raise ``LayoutMismatch`` naming both sides where they cannot exchange blocks."""
    if mine.fingerprint != theirs.fingerprint:
        text = f"{mine.name} runs model {mine.fingerprint}, {theirs.name} runs {theirs.fingerprint}"
        raise LayoutMismatch(f"{text}: every instance of a pipeline must load the same checkpoint in the same dtype")
    for kind in mine.layouts.keys() & theirs.layouts.keys():
        if mine.layouts[kind] != theirs.layouts[kind]:
            raise LayoutMismatch(
                f"{kind} blocks differ: {mine.name} has {mine.layouts[kind]}, {theirs.name} has {theirs.layouts[kind]}"
            )


def serve_once(address: str, secret: bytes, announce: Callable[[Address], None] = lambda bound: None) -> int:
    """Serve one pipeline, then end; the process's exit code."""

    async def serve() -> None:
        await Standalone(secret).serve(Address.parse(address), announce)

    try:
        asyncio.run(serve())
    except TrinityError as error:
        print(f"trinity: {error}", file=sys.stderr)
        return 1
    return 0


def main() -> int:
    """``python -m trinity.instance --listen ADDRESS``: one instance, served to whoever holds the secret."""
    parser = argparse.ArgumentParser(prog="python -m trinity.instance", description=main.__doc__)
    parser.add_argument("--listen", required=True, help="unix:/path or tcp:host:port (port 0: any free one)")
    asked = parser.parse_args()
    secret = os.environ.get(SECRET, "")
    if len(secret) < 32:
        parser.error(f"set {SECRET} to the pipeline's secret, at least 32 characters that only its hosts know")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def announce(bound: Address) -> None:
        print(json.dumps({"listening": str(bound)}), flush=True)

    return serve_once(asked.listen, secret.encode(), announce)


if __name__ == "__main__":
    raise SystemExit(main())
