"""Buddies: a pipeline leaves a journal of its requests with another one, which adopts them when its program dies."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from trinity.core.frontend.journal import Journal, JournalKept, JournalStart, JournalWriter
from trinity.core.values import is_frontend
from trinity.errors import ConfigError, HandshakeError, TransportError, TrinityError
from trinity.errors.arguments import Count, Positive, check_arguments
from trinity.remote.channel.channel import TIMEOUT_S, Address, Channel, connect
from trinity.remote.channel.listener import listen
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.channel.wire import Hello, InstanceFailure, UnsendableMessage, decode, encode

logger = logging.getLogger("trinity")
TELL_S = 0.05  # between two journals while requests are open
BEAT_S = 1.0  # between two while none is: the other one must see that this one lives
REACH_AGAIN_S = 0.5  # between two tries to reach the buddy
KNOWN_WITHIN_S = 0.5  # that a request waits, once, for a buddy that does not answer
JOURNAL_BACKLOG = 64 << 20  # bytes that the buddy has not read, beyond which it is told no more for now


@check_arguments
@dataclass(frozen=True)
class Buddy:
    """Terms between a pipeline and the one that goes on with its requests when its program dies.

    - ``address`` (None): where that one listens; None where nobody adopts the requests of this one.
    - ``listen`` (None): where others bring their journals to this one, "tcp:host:port" or "unix:/path"; None: nowhere.
    - ``resume_s`` (seconds, 60): how long a request that was adopted, or has ended, waits for its reader to come back.
    - ``journal_bytes`` (bytes, 1 GiB): of what is kept for others, and of pixels that go to the buddy because they
      cannot be read again; beyond it requests are served without.

    Both serve the same model on the same instances, and hold one secret. Raises ``ConfigError``.
    """

    address: str | None = None
    listen: str | None = None
    resume_s: Positive = 60.0
    journal_bytes: Count = 1 << 30

    def __post_init__(self) -> None:
        if self.address is None and self.listen is None:
            raise ConfigError("a Buddy needs an address=, where one listens, or listen=, or both")
        for each in self.addresses:
            Address.parse(each)
        if self.address is not None and Address.parse(self.address).is_any:
            raise ConfigError(f"{self.address} is no place to go to: give the port at which the buddy listens")
        if self.address == self.listen:
            raise ConfigError(f"{self.address} is to be this pipeline's own buddy; name another one's listen= address")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Both addresses, as far as there are any."""
        return tuple(each for each in (self.address, self.listen) if each is not None)


class JournalSender:
    """Keeps a channel to the buddy, and tells it what is new.

    - ``name``, ``start``: of this front end. ``secret``, ``tls``: of the channel.
    - ``writer``: knows what is new.
    """

    def __init__(
        self,
        buddy: Address,
        name: str,
        start: JournalStart,
        secret: bytes,
        tls: TLSConfig | None,
        writer: JournalWriter,
    ) -> None:
        self.buddy, self.writer = buddy, writer
        self._hello, self._start, self._secret, self._tls = encode(Hello(name)), start, secret, tls
        self._channel: Channel | None = None
        self._kept, self._said_at, self._why = 0, 0.0, ""
        self._late = False  # it has not answered in time, and has not since
        self._news, self._answers = asyncio.Event(), asyncio.Event()

    @property
    def reached(self) -> bool:
        """True while there is a channel to the buddy."""
        return self._channel is not None and not self._channel.closed

    async def run(self) -> None:
        """Reach the buddy, and reach it again, until cancelled."""
        while True:
            try:
                await self._serve()
            except (TrinityError, TimeoutError, OSError) as error:
                self._say(str(error) or "it does not answer")
            finally:
                self._drop()
            await asyncio.sleep(REACH_AGAIN_S)

    def _say(self, why: str) -> None:
        if why != self._why:
            logger.warning("the buddy at %s is not reached, requests are served without: %s", self.buddy, why)
        self._why = why

    def _drop(self) -> None:
        self._channel = None
        self.writer.begin_again()
        self._answers.set()

    async def _serve(self) -> None:
        channel = await connect(self.buddy, self._secret, self._hello, tls=self._tls)
        try:
            await self._converse(channel)
        finally:
            channel.abort()

    async def _converse(self, channel: Channel) -> None:
        channel.send(encode(self._start))
        await self._hear(channel)  # that it takes them
        self._channel = channel
        logger.info("the buddy at %s keeps a journal of requests", self.buddy)
        self._why, self._late, self._kept = "", False, 0
        both = [asyncio.create_task(self._tell(channel)), asyncio.create_task(self._hear_all(channel))]
        try:
            done, _ = await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)

    async def _hear_all(self, channel: Channel) -> None:
        while True:
            await self._hear(channel)

    async def _hear(self, channel: Channel) -> None:
        """Take one answer. Raises ``TransportError`` or ``TimeoutError`` where none comes, ``ConfigError`` for a no."""
        async with asyncio.timeout(TIMEOUT_S):
            answer = decode(await channel.receive())
        if isinstance(answer, InstanceFailure):
            raise ConfigError(answer.message)
        if not isinstance(answer, JournalKept):
            raise HandshakeError(f"{self.buddy} answered a journal with {type(answer).__name__}", "control")
        self._kept, self._late = answer.number, False
        self._answers.set()

    async def _tell(self, channel: Channel) -> None:
        while not channel.closed:
            self._news.clear()
            self._flush()
            if not self.writer.behind:
                with suppress(TimeoutError):
                    async with asyncio.timeout(BEAT_S):
                        await self._news.wait()
            else:
                await asyncio.sleep(TELL_S)

    def _flush(self, *, tokens: bool = True) -> None:
        """Send what is new, ``tokens`` or the rest alone; and an empty journal where nothing was sent for a while."""
        channel, now = self._channel, time.monotonic()
        if channel is None or channel.closed or channel.backlog > JOURNAL_BACKLOG:
            return
        journal = self.writer.take(now, tokens=tokens)
        if journal is None and now - self._said_at >= BEAT_S:
            self.writer.number += 1
            journal = Journal(number=self.writer.number)
        if journal is not None:
            self._said_at = now
            self._send(channel, journal)

    def _send(self, channel: Channel, journal: Journal) -> None:
        try:
            channel.send(encode(journal))
        except UnsendableMessage as error:
            names = [each.key for each in journal.openings]
            logger.warning("the buddy is told nothing of %s: %s", ", ".join(names), error)
            for name in names:
                self.writer.drop(name)
            channel.abort()  # what else was in this journal is said again
        except TransportError as error:
            self._say(str(error))
            channel.abort()

    async def wait_kept(self) -> None:
        """Tell the buddy what is new, and wait for its answer: without it no token may be out.

        One that is out of reach is not waited for, nor one that has let a request wait for ``KNOWN_WITHIN_S`` already.
        """
        self._news.set()
        self._flush(tokens=False)
        due = self.writer.number
        try:
            async with asyncio.timeout(KNOWN_WITHIN_S):
                while self.reached and not self._late and self._kept < due:
                    self._answers.clear()
                    await self._answers.wait()
        except TimeoutError:
            self._late = True
            logger.warning("the buddy at %s answers late: requests do not wait for it", self.buddy)

    async def aclose(self) -> None:
        """Tell the buddy that nothing is to go on, and close the channel."""
        channel, self._channel = self._channel, None
        if channel is not None and not channel.closed:
            with suppress(TransportError):
                channel.send(encode(Journal(number=self.writer.number + 1, closed=True)))
            await channel.aclose()


class JournalTaker(Protocol):
    """The side of a pipeline that takes journals in."""

    def refuse(self, start: JournalStart) -> str:
        """Say why nothing is kept for this front end; "" where it is."""
        ...

    def take(self, life: str, journal: Journal) -> None:
        """Take in what a front end says. Raises ``ValueError`` for what does not follow what it said before."""
        ...

    def lose(self, life: str, why: str) -> None:
        """Go on with the requests of a front end whose channel has ended."""
        ...


class JournalListener:
    """Takes channels of front ends whose buddy this one is. ``silence_s``: one that says nothing so long is lost."""

    def __init__(self, address: Address, name: str, secret: bytes, tls: TLSConfig | None, silence_s: float) -> None:
        self.address, self._name, self._secret, self._tls = address, name, secret, tls
        self._silence_s = silence_s
        self._ended = asyncio.Event()
        self._serving: asyncio.Task[None] | None = None

    async def start(self, taker: JournalTaker) -> None:
        """Listen. Raises ``ConfigError`` where that cannot be."""
        bound: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        self._serving = asyncio.create_task(self._run(taker, bound.set_result), name="trinity-journals")
        both: list[asyncio.Future[Any]] = [bound, self._serving]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if not bound.done():
            self._serving.result()
        self.address = bound.result()

    async def _run(self, taker: JournalTaker, announce: Callable[[Address], None]) -> None:
        async def serve(channel: Channel) -> None:
            await self._serve(channel, taker)

        async with listen(self.address, self._secret, encode(Hello(self._name)), serve, self._tls) as address:
            announce(address)
            await self._ended.wait()

    async def _serve(self, channel: Channel, taker: JournalTaker) -> None:
        try:
            hello = decode(channel.hello)
            async with asyncio.timeout(TIMEOUT_S):
                start = decode(await channel.receive())
            if not isinstance(start, JournalStart) or not isinstance(hello, Hello) or not is_frontend(hello.name):
                raise HandshakeError("a front end must say first what it keeps a journal of", "control")
        except (TransportError, TimeoutError) as error:
            logger.warning("a journal was dropped: %s", error or "no message came in time")
            return
        refusal = taker.refuse(start)
        if refusal:
            channel.send(encode(InstanceFailure("OfferRefused", refusal, "model")))
            await channel.aclose()
            return
        channel.send(encode(JournalKept(0)))
        await self._follow(channel, start.life, taker)

    async def _follow(self, channel: Channel, life: str, taker: JournalTaker) -> None:
        """Take journals until the front end closes; without that it is lost."""
        try:
            while True:
                async with asyncio.timeout(self._silence_s):
                    journal = decode(await channel.receive())
                if not isinstance(journal, Journal):
                    raise HandshakeError(f"a {type(journal).__name__} is no journal", "control")
                taker.take(life, journal)
                if journal.closed:
                    return
                channel.send(encode(JournalKept(journal.number)))
        except (TransportError, ValueError) as error:
            why = str(error)
        except TimeoutError:
            why = f"it was silent for {self._silence_s:g} s"
        if not self._ended.is_set():
            taker.lose(life, why)

    async def aclose(self) -> None:
        """Take no more, and drop all channels; what they belong to is no loss."""
        self._ended.set()
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)
