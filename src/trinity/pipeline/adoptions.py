"""Adoptions: a pipeline goes on with the requests of another one whose program has died, for readers who come back."""

from __future__ import annotations

import asyncio
import logging
import time
from types import TracebackType
from typing import Any

import msgspec

from trinity.core.frontend import Deliver, End
from trinity.core.frontend.journal import Journal, JournalKeeper, JournalStart, Kept, may_be_adopted
from trinity.core.messages import Failure, Value
from trinity.errors import ResumeError, TrinityError
from trinity.pipeline.frontend_host import FrontendHost
from trinity.pipeline.journal import RequestNote, decode_request
from trinity.pipeline.stream import Stream
from trinity.preprocess.processor import ProcessedRequest
from trinity.preprocess.text.detokenizer import TextStream
from trinity.remote.buddy import Buddy, JournalListener
from trinity.remote.channel.channel import Address
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.request import Output, Token

logger = logging.getLogger("trinity")
WITHIN_S = 10.0  # in which a front end that has died is noticed
UNKNOWN_S = 1.0  # in which what it said last is read
EXPIRY_S = 1.0  # between two looks for readers that have not come
GONE = "the pixels of its media were not kept, and cannot be read again: they were given as objects; send it again"
POISON = "two programs died that had this request; do not send it again unchanged"


class AdoptedStream(Stream):
    """A request of a front end that was lost, which its reader may take up behind the last token that it has.

    - ``reader``: the id that its reader knows. ``given``: the request as its front end told of it.
    - ``adopted_at``: clock time. ``taken``: its reader has come.
    - ``left_out``: characters of the tokens that are not given, as the reader has them.
    """

    def __init__(self, host: Adoptions, key: str, kept: Kept, note: RequestNote) -> None:
        super().__init__(host, decode_request(note, key, kept.opening.work))
        self.reader, self.adopted_at, self.given = kept.opening.reader, self.arrived, note.request
        self.taken = self.over = False
        self._entered, self._behind = True, -1
        self.left_out = 0

    def go_behind(self, after: int) -> None:
        """Leave out the tokens that the reader has, up to this index. Raises ``ResumeError`` for one that never was."""
        if after < -1 or (self.processed is not None and after >= self.processed.work.max_tokens):
            raise ResumeError(f"it has no token of index {after}", self.reader, "beyond")
        if self.done and self.error is None and after >= self.token_count:  # an error is told by reading it
            raise ResumeError(f"it ended with {self.token_count} tokens, before index {after}", self.reader, "beyond")
        self.taken, self._behind = True, after
        while self._tokens and self._tokens[0].index <= after:
            self.left_out += len(self._tokens.popleft().text)

    def _put(self, token: Token) -> None:
        if token.index > self._behind:
            super()._put(token)
        else:
            self.left_out += len(token.text)

    @property
    def stopped(self) -> bool:
        """True once one of its stop strings has come."""
        return self._text is not None and self._text.stopped

    def end(self, event: End) -> None:
        """End it; its reader hears of no index that it has been told of by nobody."""
        super().end(event)
        if self.taken and self.error is None and self._behind >= self.token_count:
            text = f"it ended with {self.token_count} tokens, before index {self._behind}"
            self.fail(ResumeError(text, self.reader, "beyond"))

    def fail(self, error: TrinityError, cause: BaseException | None = None) -> None:
        super().fail(error, cause)
        if hasattr(error, "request_id"):
            error.request_id = self.reader

    def _make_output(self, event: End) -> Output:
        return msgspec.structs.replace(super()._make_output(event), request_id=self.reader)


class Resumption:
    """A reader that comes back: ``async with pipe.resume("r", after=17) as tokens: async for token in tokens``."""

    def __init__(self, adoptions: Adoptions, request_id: str, after: int, within_s: float) -> None:
        self._adoptions, self._asked = adoptions, (request_id, after, within_s)
        self._stream: AdoptedStream | None = None

    async def __aenter__(self) -> AdoptedStream:
        self._stream = await self._adoptions.find(*self._asked)
        return self._stream

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stream is not None:
            self._stream.cancel()


class Adoptions:
    """Requests of other front ends: what they have told of them, and those that were adopted.

    Also the ``StreamHost`` of these.
    """

    def __init__(self, host: FrontendHost) -> None:
        self._host = host
        self._resume_s, self._keeper = 0.0, JournalKeeper(0)
        self._own = JournalStart("", "", ())
        self._listener: JournalListener | None = None
        self._adopted: dict[str, AdoptedStream] = {}
        self._changed = asyncio.Event()
        self._expiring: asyncio.Task[None] | None = None
        self._beginning: set[asyncio.Task[None]] = set()

    @property
    def address(self) -> str:
        """Address at which journals are brought; "" for none."""
        return str(self._listener.address) if self._listener is not None else ""

    async def start(self, buddy: Buddy, start: JournalStart, secret: bytes, config: ProcessConfig) -> None:
        """Take journals, if this pipeline is to. Raises ``ConfigError`` where it cannot listen."""
        self._own = start
        if buddy.listen is not None:
            self._resume_s = buddy.resume_s
            self._keeper = JournalKeeper(buddy.journal_bytes, buddy.resume_s)
            name, address = self._host.core.name, Address.parse(buddy.listen)
            self._listener = JournalListener(address, name, secret, config.tls, config.silence_s)
            await self._listener.start(self)
            self._expiring = asyncio.create_task(self._expire(), name="trinity-adoptions")

    async def aclose(self) -> None:
        """Take no more journals; requests that were adopted end as others do."""
        if self._listener is not None:
            await self._listener.aclose()
        tasks = [*self._beginning, *filter(None, [self._expiring])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for key, stream in list(self._adopted.items()):
            if not stream.taken:
                self._drop(key, stream)
        self._change()

    # ---------------------------------------------------------------- journals come in

    def refuse(self, start: JournalStart) -> str:
        if start.life == self._own.life:
            return "this pipeline would be its own buddy: name the address of another one"
        if start.model != self._own.model:
            return "this pipeline serves another model, or other weights: name a buddy on the same instances"
        if not set(start.instances) & set(self._own.instances):
            own, theirs = ", ".join(self._own.instances), ", ".join(start.instances)
            return f"this pipeline serves on {own}, and not on {theirs}: a buddy has the same instances"
        return ""

    def take(self, life: str, journal: Journal) -> None:
        if journal.whole:
            self._give_back(life)
        self._keeper.take(life, journal, time.monotonic())

    def _give_back(self, life: str) -> None:
        """End what was adopted of a front end that lives after all, but for what readers have come back for."""
        for key, stream in list(self._adopted.items()):
            if key.endswith(f"@{life}") and not stream.taken:
                self._drop(key, stream)

    def lose(self, life: str, why: str) -> None:
        fit, unfit = may_be_adopted(self._keeper.lose(life, time.monotonic()))
        if fit or unfit:
            logger.error("a front end was lost (%s): %d of its requests go on here", why, len(fit))
        for kept in fit:
            self._try_to_adopt(life, kept, None)
        for kept in unfit:
            self._try_to_adopt(life, kept, Failure("PoisonRequest", POISON))
        self._change()

    def _try_to_adopt(self, life: str, kept: Kept, failure: Failure | None) -> None:
        """Go on with a request. One of which that fails, for whatever reason, harms no other."""
        try:
            self._adopt(life, kept, failure)
        except Exception:
            logger.exception("request %s of a lost front end cannot go on", kept.opening.reader)

    def _adopt(self, life: str, kept: Kept, failure: Failure | None) -> None:
        opening, key = kept.opening, f"{kept.opening.key}@{life}"
        if key in self._adopted:  # it lost its channel before, and a reader has come since
            return
        note = msgspec.msgpack.decode(opening.note, type=RequestNote)
        stream = AdoptedStream(self, key, kept, note)
        if opening.unread and not note.request:
            failure = failure or Failure("BadMedia", GONE)
        work = msgspec.structs.replace(opening.work, request=key)
        processed = ProcessedRequest(work, (), note.clipped, note.emulated, note.stop)
        self._adopted[key] = self._host.streams[key] = stream
        self._feed(stream, processed, kept)
        stream.over = kept.closing is not None
        task = asyncio.create_task(self._go_on(stream, processed, kept, _find_end(key, kept, failure)), name=key)
        self._beginning.add(task)
        task.add_done_callback(self._beginning.discard)

    def _feed(self, stream: AdoptedStream, processed: ProcessedRequest, kept: Kept) -> None:
        """Give it the tokens that are known, as if they came now."""
        processor, now = self._host.processor, time.monotonic()
        assert processor is not None
        stream.begin(processed, lambda stop: TextStream(processor.tokenizer, stop, processed.work.prompt))
        for index, sampled in enumerate(kept.sampled):
            stream.deliver(Deliver(stream.request.request_id, index, sampled), now)

    async def _go_on(self, stream: AdoptedStream, processed: ProcessedRequest, kept: Kept, end: End | None) -> None:
        """Go on with it, or end it, once this pipeline's own buddy knows of it: readers may come back to that one."""
        opening, key = kept.opening, stream.request.request_id
        told = msgspec.structs.replace(processed, inputs=opening.inputs)
        outlived = opening.adoptions + 1
        await self._host.journal.note(stream, told, reader=opening.reader, given=stream.given, adoptions=outlived)
        if stream.stopped:
            end = end or End(key, "stop")
        if end is not None:
            stream.end(end)
        if stream.done:  # also as one whose tokens cannot be decoded is
            self._host.journal.end(stream)
        else:
            self._host.post(kept.make_adoption(key, time.monotonic()))
            self._host.hold_inputs(stream.request)

    # ---------------------------------------------------------------- readers come back

    async def find(self, request_id: str, after: int, within_s: float) -> AdoptedStream:
        """Find the request that a reader comes back for, and leave out what it has. Raises ``ResumeError``."""
        self._host.check_open()
        began = time.monotonic()
        while True:
            self._changed.clear()
            stream, problem = self._look(request_id)
            if stream is not None:
                stream.go_behind(after)
                if stream.done:
                    self._adopted.pop(stream.request.request_id, None)
                return stream
            patience = {"unknown": min(UNKNOWN_S, within_s), "alive": within_s}.get(problem.reason, 0.0)
            left = began + patience - time.monotonic()
            if left <= 0 or not self._keeper.lives:
                raise problem
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                raise self._look(request_id)[1] from None
            self._host.check_open()

    def _look(self, request_id: str) -> tuple[AdoptedStream | None, ResumeError]:
        found = [each for each in self._adopted.values() if each.reader == request_id]
        free = [each for each in found if not each.taken]
        if len(free) == 1:
            return free[0], ResumeError("", request_id)
        if len(free) > 1:
            text = f"{len(free)} requests that were adopted have this id; give each request an id that no other has"
            return None, ResumeError(text, request_id, "ambiguous")
        if self._keeper.knows(request_id):  # ahead of others of this id, for this one may be to come
            text = "the front end that has it lives: read it there, or come back once that has died"
            return None, ResumeError(text, request_id, "alive")
        if found:
            return None, ResumeError("another reader has come back for it", request_id, "taken")
        if request_id in self._host.streams:
            return None, ResumeError("it was sent to this pipeline: read its own stream", request_id, "served here")
        return None, ResumeError("nobody told this pipeline of it, or it is over: send it again", request_id, "unknown")

    def _change(self) -> None:
        self._changed.set()

    async def _expire(self) -> None:
        """End requests whose readers do not come back, and forget those that have ended."""
        while True:
            await asyncio.sleep(min(EXPIRY_S, self._resume_s))
            now = time.monotonic()
            self._keeper.expire(now)
            for key, stream in list(self._adopted.items()):
                if not stream.taken and stream.adopted_at + self._resume_s <= now:
                    logger.warning("no reader has come back for %s: it ends", stream.reader)
                    self._drop(key, stream)

    def _drop(self, key: str, stream: AdoptedStream) -> None:
        """End it: at the instances, or here where it was not sent to any yet."""
        self._adopted.pop(key, None)
        stream.cancel()
        stream.end(End(key, "cancelled"))

    # ---------------------------------------------------------------- what a stream asks of its pipeline

    async def submit(self, stream: Stream) -> None:
        raise AssertionError(f"{stream} was begun by another front end")

    def post(self, event: Value) -> None:
        self._host.post(event)

    def on_end(self, stream: Stream) -> None:
        """Count what ended here. One that its reader has come back for is forgotten."""
        assert isinstance(stream, AdoptedStream)
        key: Any = stream.request.request_id
        if stream.over:  # before this pipeline had it
            self._host.streams.pop(key, None)
        else:
            self._host.on_end(stream)
        if stream.taken:
            self._adopted.pop(key, None)

    def find_place(self, request_id: str) -> str:
        return self._host.find_place(request_id)

    async def move(self, request_id: str, to: str, within_s: float) -> None:
        await self._host.move(request_id, to, within_s)


def _find_end(key: str, kept: Kept, failure: Failure | None) -> End | None:
    """Tell how a request ends, or has ended; None where it goes on."""
    if kept.closing is not None:
        return End(key, kept.closing.reason, kept.closing.failure)
    return End(key, "error", failure) if failure is not None else None
