"""Channels between a front end and its buddy: reached late, lost, slow, silent, refused, and closed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.core_tables import work
from support.emulated_pipelines import MODEL
from trinity.core.frontend.journal import Closing, Journal, JournalStart, JournalWriter, Opening
from trinity.core.messages import Sampled
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote import buddy as module
from trinity.remote.buddy import Buddy, JournalListener, JournalSender
from trinity.remote.channel.channel import Address, connect
from trinity.remote.channel.wire import Hello, decode, encode
from trinity.remote.supervision.process_config import ProcessConfig

SECRET = b"the secret of journals and of their tests"
START = JournalStart("life", "a model", ("PD0",))


class Taker:
    """Notes what comes in. ``refusal``: told to whoever comes; ``broken``: nothing that is said follows."""

    def __init__(self) -> None:
        self.journals: list[Journal] = []
        self.lost: list[tuple[str, str]] = []
        self.refusal, self.broken = "", False

    def refuse(self, start: JournalStart) -> str:
        return self.refusal

    def take(self, life: str, journal: Journal) -> None:
        if self.broken:
            raise ValueError("it does not follow")
        self.journals.append(journal)

    def lose(self, life: str, why: str) -> None:
        self.lost.append((life, why))

    @property
    def keys(self) -> list[str]:
        return [opening.key for journal in self.journals for opening in journal.openings]


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("TELL_S", 0.01), ("BEAT_S", 0.05), ("REACH_AGAIN_S", 0.02)):
        monkeypatch.setattr(module, name, seconds)


@asynccontextmanager
async def listening(address: Address, taker: Taker, silence_s: float = 10.0) -> AsyncIterator[JournalListener]:
    made = JournalListener(address, "frontend", SECRET, None, silence_s)
    await made.start(taker)
    try:
        yield made
    finally:
        await made.aclose()


@asynccontextmanager
async def sending(address: Address, secret: bytes = SECRET) -> AsyncIterator[JournalSender]:
    made = JournalSender(address, "frontend:a", START, secret, None, JournalWriter())
    running = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        await made.aclose()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not true():
            await asyncio.sleep(0.005)


def begin(sender: JournalSender, key: str, given: list[Sampled] | None = None) -> None:
    sender.writer.begin(Opening(key=key, reader=key, work=work(key, 3)), given or [], 0.0)


@pytest.fixture
def address(tmp_path: Path) -> Address:
    return Address.parse(f"unix:{tmp_path}/buddy")


async def test_a_request_is_known_before_it_goes_on(address: Address) -> None:
    taker = Taker()
    async with listening(address, taker), sending(address) as sender:
        await until(lambda: sender.reached)
        given: list[Sampled] = []
        sender.writer.begin(Opening(key="r", reader="r", work=work("r", 3)), given, 0.0)
        await sender.wait_kept()
        assert taker.keys == ["r"]
        given.append(Sampled(5))
        await until(lambda: any(journal.pages for journal in taker.journals))
        sender.writer.end(Closing("r", "length"))
        await until(lambda: any(journal.closings for journal in taker.journals))
        await until(lambda: taker.journals[-1] == Journal(number=taker.journals[-1].number))  # it says that it lives
        assert [journal.number for journal in taker.journals] == list(range(1, len(taker.journals) + 1))
    assert taker.journals[-1].closed
    assert not taker.lost


async def test_one_that_comes_late_or_again_is_told_all(address: Address) -> None:
    async with sending(address) as sender:
        begin(sender, "r")
        async with asyncio.timeout(60):
            await sender.wait_kept()  # nobody is there, and nobody is waited for
        for _ in range(2):
            await _hear_all(address)
            await until(lambda: not sender.reached)


async def _hear_all(address: Address) -> None:
    taker = Taker()
    async with listening(address, taker):
        await until(lambda: bool(taker.journals))
        assert (taker.journals[0].whole, taker.keys) == (True, ["r"])
    assert not taker.lost, "who closes loses nobody"


async def test_its_end_is_a_loss_unless_it_says_so(address: Address) -> None:
    taker = Taker()
    async with listening(address, taker):
        channel = await connect(address, SECRET, encode(Hello("frontend:a")))
        channel.send(encode(START))
        await channel.receive()
        channel.abort()
        await until(lambda: bool(taker.lost))
        assert taker.lost[0][0] == "life"
        async with sending(address) as sender:
            await until(lambda: sender.reached)
        await asyncio.sleep(0.05)
        assert len(taker.lost) == 1


async def test_one_that_says_nothing_is_lost(address: Address) -> None:
    taker = Taker()
    async with listening(address, taker, silence_s=0.05):
        channel = await connect(address, SECRET, encode(Hello("frontend:a")))
        channel.send(encode(START))
        await until(lambda: bool(taker.lost))
        assert taker.lost == [("life", "it was silent for 0.05 s")]
        channel.abort()


async def test_one_that_answers_late_is_waited_for_once(address: Address, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KNOWN_WITHIN_S", 0.05)
    taker, slow = Taker(), asyncio.Event()
    follow = JournalListener._follow

    async def late(self: JournalListener, *given: Any) -> None:
        await slow.wait()
        await follow(self, *given)

    monkeypatch.setattr(JournalListener, "_follow", late)
    async with listening(address, taker), sending(address) as sender:
        await until(lambda: sender.reached)
        begin(sender, "r")
        await sender.wait_kept()
        assert sender._late
        monkeypatch.setattr(module, "KNOWN_WITHIN_S", 1000.0)
        begin(sender, "s")
        async with asyncio.timeout(120):
            await sender.wait_kept()
        slow.set()
        await until(lambda: taker.keys == ["r", "s"] and not sender._late)
        begin(sender, "t")
        await sender.wait_kept()
        assert "t" in taker.keys


@pytest.mark.parametrize(("secret", "refusal"), [(b"w" * 40, ""), (SECRET, "this pipeline serves another model")])
async def test_who_is_not_taken_is_told_why(
    address: Address, secret: bytes, refusal: str, caplog: pytest.LogCaptureFixture
) -> None:
    taker = Taker()
    taker.refusal = refusal
    async with listening(address, taker), sending(address, secret) as sender:
        await until(lambda: "is not reached, requests are served without" in caplog.text)
        assert refusal in caplog.text
        await asyncio.sleep(0.1)
        assert sum("is not reached" in record.message for record in caplog.records) == 1, "said once"
        assert not sender.reached
    assert not taker.lost


@pytest.mark.parametrize("said", [encode(Hello("again")), b"no message", encode(Journal(number=1))])
async def test_who_says_something_else_is_dropped(address: Address, said: bytes) -> None:
    taker = Taker()
    async with listening(address, taker):
        channel = await connect(address, SECRET, encode(Hello("frontend:a")))
        channel.send(said)
        frames = [frame async for frame in channel]
        assert not frames
        assert not taker.lost


async def test_what_does_not_follow_ends_the_channel(address: Address) -> None:
    taker = Taker()
    taker.broken = True
    async with listening(address, taker):
        channel = await connect(address, SECRET, encode(Hello("frontend:a")))
        channel.send(encode(START))
        channel.send(encode(Journal(number=1)))
        frames = [decode(frame) async for frame in channel]
        assert len(frames) == 1, "the first answer alone"
        assert taker.lost == [("life", "it does not follow")]


async def test_a_request_that_cannot_be_sent_is_served_without(
    address: Address, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "trinity")
    taker = Taker()
    async with listening(address, taker), sending(address) as sender:
        await until(lambda: sender.reached)
        bad = Opening(key="bad", reader="bad", work=work("bad", 3), inputs=(1 << 70,), input_bytes=1)
        sender.writer.begin(bad, [], 0.0)
        begin(sender, "good")
        async with asyncio.timeout(120):
            await sender.wait_kept()
        await until(lambda: "told nothing of bad" in caplog.text)
        begin(sender, "next")
        await until(lambda: "next" in taker.keys)
        assert "bad" not in taker.keys


async def test_an_address_that_is_taken_is_an_error(address: Address) -> None:
    listener = JournalListener(Address.parse("tcp:127.0.0.1:0"), "frontend", SECRET, None, 5.0)
    await listener.start(Taker())
    again = JournalListener(listener.address, "frontend", SECRET, None, 5.0)
    with pytest.raises(ConfigError, match="cannot listen"):
        await again.start(Taker())
    await listener.aclose()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "needs an address="),
        ({"address": "nowhere"}, "is no address"),
        ({"listen": "tcp:no-port"}, "is no address"),
        ({"address": "unix:/a", "listen": "unix:/a"}, "its own buddy|own buddy"),
        ({"address": "tcp:10.0.0.1:0"}, "give the port"),
        ({"listen": "unix:/a\0b"}, "is no address"),
        ({"listen": "unix:/a", "resume_s": 0.0}, "resume_s"),
        ({"listen": "unix:/a", "journal_bytes": -1}, "journal_bytes"),
    ],
)
def test_terms_that_would_not_do_are_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        Buddy(**given)


def test_a_buddy_needs_instances_that_outlive_a_program() -> None:
    secret = SECRET.decode()
    with pytest.raises(ConfigError, match="so that they outlive a program"):
        Pipeline(MODEL, "EPD", hosting="process", processes=ProcessConfig(secret=secret, buddy=Buddy("unix:/a")))
    given = ProcessConfig(secret=secret, buddy=Buddy("tcp:10.1.2.3:99"))
    with pytest.raises(ConfigError, match=r"journal is reached over a network.*TLSConfig"):
        Pipeline(MODEL, [Instance("EPD", address="unix:/b")], hosting="process", processes=given)
