"""What the cores are promised of a death: nothing of a former life after it, and nothing of a life before its start."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from trinity.core.messages import Cancel, PeerDown, Value
from trinity.remote.channel.channel import Channel
from trinity.remote.channel.wire import AtStep, Setup, encode
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.remote.supervision.supervisor_messages import Event, Lost
from trinity.remote.worker import InstanceWorker
from trinity.timeline import Timeline

D0 = cast(Setup, SimpleNamespace(name="D0", epoch=0))


class Line:
    """A channel whose other end says what the test has it say."""

    def __init__(self) -> None:
        self.reader, self.closed = asyncio.StreamReader(), False
        self.transport = SimpleNamespace(abort=self.reader.feed_eof)
        self.write = self.reader.feed_data
        self.channel = Channel(self.reader, cast(Any, self))

    def is_closing(self) -> bool:
        return self.closed

    def say(self, *messages: Value) -> None:
        for message in messages:
            self.channel.send(encode(message))


class Heard(list[Value]):
    """A host, or a watcher, that keeps what it is given."""

    post = list.append

    def send_to_frontend(self, messages: list[Value]) -> None:
        self.extend(messages)

    def report(self, event: Event) -> None:
        assert isinstance(event, Lost)
        self.append(PeerDown(event.name))


def test_what_a_dropped_peer_had_said_is_not_heard_after_its_loss() -> None:
    async def run() -> list[Value]:
        line, heard = Line(), Heard()
        session = InstanceWorker(b"s" * 32, "unix:/nowhere", asyncio.Event())
        session.host = cast(Any, heard)
        session.connector = cast(Any, SimpleNamespace(forget=lambda name: None))
        line.say(Cancel("a"))
        serving = asyncio.ensure_future(session._serve_peer(line.channel, "P0", 0))
        while not heard:
            await asyncio.sleep(0)
        line.say(Cancel("b"))  # received, and not read yet
        session._drop_older("P0", 1)
        await serving
        return heard

    assert asyncio.run(run()) == [Cancel("a"), PeerDown("P0")]


def test_an_instance_is_not_heard_before_it_is_watched() -> None:
    async def run() -> tuple[list[Value], list[Value]]:
        line, heard = Line(), Heard()
        client = InstanceClient(D0, cast(Any, heard), Timeline(), heard.report)
        line.say(Cancel("a"))
        reading = asyncio.ensure_future(client._read(line.channel))
        await asyncio.sleep(0)
        before = list(heard)
        client.watch()
        line.say(Cancel("b"))
        line.reader.feed_eof()
        await reading
        return before, heard

    assert asyncio.run(run()) == ([], [Cancel("a"), Cancel("b"), PeerDown("D0")])


def test_of_an_instance_that_was_given_up_nothing_more_is_heard() -> None:
    """It may only have been silent, and its words be here already."""

    async def run() -> list[Value]:
        line, heard = Line(), Heard()
        client = InstanceClient(D0, cast(Any, heard), Timeline(), heard.report)
        client.watch()
        line.say(Cancel("a"))
        reading = asyncio.ensure_future(client._read(line.channel))
        while not heard:
            await asyncio.sleep(0)
        line.say(Cancel("b"))
        client.cut()
        line.reader.feed_eof()
        await reading
        return heard

    assert asyncio.run(run()) == [Cancel("a")]


def test_an_instance_that_was_lost_is_at_no_step() -> None:
    """``/ready`` named it as stalled until another life of its name was up, while others served."""

    async def run() -> tuple[dict[str, Any], dict[str, Any]]:
        line, heard = Line(), Heard()
        client = InstanceClient(D0, cast(Any, heard), Timeline(), heard.report)
        client.started = cast(Any, SimpleNamespace())
        line.say(AtStep(0.0, 40.0, "language"))
        reading = asyncio.ensure_future(client._read(line.channel))
        while client.step is None:
            await asyncio.sleep(0)
        before = client.lane_steps()
        line.reader.feed_eof()
        await reading
        return before, client.lane_steps()

    before, after = asyncio.run(run())
    assert [(lane, predicted_s) for lane, (_, predicted_s) in before.items()] == [("language", 40.0)]
    assert after == {}
