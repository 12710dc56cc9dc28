"""Stream: reads the tokens of one request as they come."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import msgspec

from trinity import errors
from trinity.core.frontend import Abort, Deliver, End
from trinity.core.messages import Failure, Finished, Sampled, Value
from trinity.errors import ClosedError, RequestError, TrinityError, describe_error, own_errors
from trinity.errors.arguments import Positive, check_value
from trinity.errors.live_objects import forbid_copies
from trinity.metrics import SPANS
from trinity.preprocess.processor import ProcessedRequest
from trinity.preprocess.text.detokenizer import TextStream
from trinity.request import Output, Request, Token

DECODED_AT_ONCE = 64  # tokens of an output that nobody reads token by token: one look at a window for all of them


class StreamHost(Protocol):
    """Calls that a stream makes to its pipeline."""

    async def submit(self, stream: Stream) -> None: ...

    def post(self, event: Value) -> None: ...

    def on_end(self, stream: Stream) -> None: ...

    def find_place(self, request_id: str) -> str: ...

    async def move(self, request_id: str, to: str, within_s: float) -> None: ...


@forbid_copies("pass its tokens or its output")
class Stream:
    """One request in flight: ``async with pipe.stream(request) as tokens: async for token in tokens``.

    Leaving the block ends the request, and ``output`` is available after that. Entering and iterating raise the
    request's own error (``RequestError`` and its subclasses), or ``ClosedError`` if the pipeline was closed. A stream
    can be entered once.

    - ``host``: what serves it.
    - ``sampled``: all its tokens so far, as stages sampled them.
    - ``error``: what reading it raises after the tokens that have come; None where nothing went wrong.
    - ``encode_only``: it is to have features and no token.
    """

    encode_only: ClassVar[bool] = False  # it is to have no token: no row of a trace, no latency of one, no SLO

    def __init__(self, host: StreamHost, request: Request) -> None:
        self.request = request
        self.processed: ProcessedRequest | None = None
        self.arrived = time.monotonic()
        self.arrived_at = time.time()
        self.host = host
        self._entered = self._unread = False
        self._tokens: deque[Token] = deque()
        self._held: Token | None = None
        self._waiters: list[asyncio.Future[None]] = []
        self._text: TextStream | None = None
        self._pieces: list[str] = []
        self._decoded = 0  # count of tokens whose text is in ``_pieces`` or held back by ``_text``
        self._times: list[float] = []
        self.sampled: list[Sampled] = []
        self._output: Output | None = None
        self.error: TrinityError | None = None

    @property
    def output(self) -> Output:
        """The whole output. Raises ``RequestError`` while the request is being served."""
        if self._output is None:
            raise RequestError(
                "the output is available once the stream has ended; read it to its end first", self.request.request_id
            )
        return self._output

    @property
    def done(self) -> bool:
        """True once the request has ended, for whatever reason."""
        return self._output is not None

    @property
    def token_times(self) -> list[float]:
        """Arrival of each token, in seconds since the request's."""
        return [each - self.arrived for each in self._times]

    @property
    def token_count(self) -> int:
        """Number of tokens that have come."""
        return len(self.sampled)

    @property
    def place(self) -> str:
        """Name of the instance that has the request now, as far as is known; "" before and after."""
        return self.host.find_place(self.request.request_id)

    async def move(self, to: str, within_s: float = 30.0) -> None:
        """Have the request, which decodes, go on at this instance; no token is lost, and none comes twice.

        Returns once it is there. Raises ``MoveError`` where it goes on as before, or is not known to be there within
        ``within_s`` (seconds); ``ClosedError`` where the pipeline is not running; ``ConfigError`` for other arguments.
        """
        to, within_s = check_value("to", to, str), check_value("within_s", within_s, Positive)
        await self.host.move(self.request.request_id, to, within_s)

    def __repr__(self) -> str:
        begun = "in flight" if self._entered else "not begun"
        state = begun if self._output is None else self._output.finish_reason
        return f"Stream({self.request.request_id!r}: {len(self.sampled)} tokens, {state})"

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RequestError("a stream can be entered once; get a new one from the pipeline", self.request.request_id)
        self._entered = True
        self.arrived, self.arrived_at = time.monotonic(), time.time()
        await self.host.submit(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the request now; does nothing if it has ended."""
        if not self.done:
            self.host.post(Abort(self.request.request_id, "cancelled"))

    def __aiter__(self) -> Stream:
        if not self._entered:
            text = "a stream can only be read inside its block: async with pipe.stream(request) as tokens"
            raise RequestError(text, self.request.request_id)
        return self

    async def __anext__(self) -> Token:
        while not self._tokens and self._output is None and self._entered:
            await self._expect_change()
        if not self._tokens:
            self._check_end()
            raise StopAsyncIteration
        return self._tokens.popleft()

    def _check_end(self) -> None:
        """Raise the error of a request that gives no more tokens, or was not entered."""
        aiter(self)
        if self.error is not None:
            raise self.error

    def _expect_change(self) -> asyncio.Future[None]:
        """Return what is done once something may be read, or the request has ended. What comes at once wakes once."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        return waiter

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():  # its reader may have been cancelled
                waiter.set_result(None)
        self._waiters.clear()

    async def wait_first(self) -> None:
        """Wait until the first token has come or the request has ended; nothing is read by it."""
        aiter(self)
        while not self.sampled and not self.done:
            await self._expect_change()

    async def next_tokens(self) -> list[Token]:
        """Wait for the next token, and return all that wait; none at the end. Raises what iterating would."""
        while not self._tokens and self._output is None and self._entered:
            await self._expect_change()
        if not self._tokens:
            self._check_end()
        found = list(self._tokens)
        self._tokens.clear()
        return found

    async def collect(self) -> Output:
        """Wait for the whole output, without keeping tokens to be read one by one. Raises what iterating would."""
        aiter(self)
        self._unread = True
        while not self.done:
            await self._expect_change()
        self._tokens.clear()
        if self.error is not None:
            raise self.error
        return self.output

    def begin(
        self, processed: ProcessedRequest, make_text: Callable[[tuple[str, ...]], TextStream]
    ) -> ProcessedRequest:
        """Take the processed request, but for its inputs. Returns what is submitted.

        ``make_text`` makes its detokenizer from its stop strings.
        """
        self.processed = msgspec.structs.replace(processed, inputs=())
        with own_errors(self.request.request_id, "making the detokenizer", (asyncio.CancelledError,)):
            self._text = make_text(processed.stop)
        return processed

    def deliver(self, event: Deliver, now: float) -> None:
        """Take the next token, at this time of the monotonic clock.

        Text that may still change (part of a stop string or of a character) is held back. A token that cannot be
        decoded ends the request with an error.
        """
        try:
            self._take(event, now)
        except (KeyboardInterrupt, asyncio.CancelledError):
            raise
        except BaseException as error:  # a tokenizer may raise anything on a token id that a stage invented
            text = f"token {event.sampled.token} cannot be decoded to text ({describe_error(error)})"
            self.end(End(event.request, "error", Failure("RequestError", text)))
            self.host.post(Abort(event.request, "cancelled"))

    def _take(self, event: Deliver, now: float) -> None:
        stream, sampled = self._text, event.sampled
        assert stream is not None
        if self._output is not None or stream.stopped:
            return
        if self._unread and not stream.has_stops:
            self._note(sampled, now)
            if len(self.sampled) - self._decoded >= DECODED_AT_ONCE:
                self._decode_rest()
            return
        if self._decoded < len(self.sampled):
            self._decode_rest()
        text = stream.push(sampled.token)
        if not isinstance(text, str):
            raise TypeError(f"the tokenizer gave {type(text).__name__} in place of text")
        self._note(sampled, now)
        self._decoded += 1
        self._pieces.append(text)
        if not self._unread:
            self._show(Token(sampled.token, text, event.index, sampled.logprob, sampled.top), stream)
        if stream.stopped:
            self.host.post(Abort(self.request.request_id, "stop"))

    def _note(self, sampled: Sampled, now: float) -> None:
        self.sampled.append(sampled)
        self._times.append(now)
        if self._waiters and len(self._times) == 1:
            self._wake()

    def _decode_rest(self) -> None:
        """Decode the tokens that came since the last look, none of which is read for itself."""
        rest = self.sampled[self._decoded :]
        if rest and self._text is not None:
            self._decoded += len(rest)
            self._pieces.append(self._decode(self._text.push_all, [each.token for each in rest]))

    def _decode(self, read: Callable[..., str], *given: Any) -> str:
        """Ask the detokenizer. Raises ``RequestError`` for whatever the tokenizer raises, or gives in place of text."""
        try:
            text = read(*given)
            if isinstance(text, str):
                return text
            raise TypeError(f"the tokenizer gave {type(text).__name__} in place of text")
        except BaseException:
            with own_errors(self.request.request_id, "decoding the output to text", (asyncio.CancelledError,)):
                raise

    def _show(self, token: Token, stream: TextStream) -> None:
        if self._held is not None:
            self._release("")
        if stream.stopped or (token.text and not stream.holds):
            self._put(token)
        else:
            self._held = token  # the rest of its text, if it has any, is released with it

    def _release(self, text: str) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._put(Token(held.id, held.text + text, held.index, held.logprob, held.top_logprobs))

    def _put(self, token: Token) -> None:
        self._tokens.append(token)
        if self._waiters:
            self._wake()

    def end(self, event: End) -> None:
        """End the request: flush the text, make the output, wake the reader."""
        if self.done:
            return
        try:
            self._flush()
        except RequestError as error:  # the tokens are there, the end of their text is not
            failure = event.failure or Failure("RequestError", str(error))
            event = msgspec.structs.replace(event, reason="error", failure=failure)
        self._output = self._make_output(event)
        if event.failure is not None:
            self.fail(make_error(event.failure, self.request.request_id))
        self._wake()
        self.host.on_end(self)

    def fail(self, error: TrinityError, cause: BaseException | None = None) -> None:
        """Have iterating raise this error after the tokens that have come."""
        self.error = error
        if cause is not None:
            error.__cause__ = cause
        if isinstance(error, RequestError):
            error.output = self._output

    def close(self) -> None:
        """Have a reader that still waits get ``ClosedError``, as the pipeline closes."""
        if not self.done:
            self.error = ClosedError("the pipeline was closed while the request was being served")

    def _flush(self) -> None:
        self._decode_rest()
        rest = self._decode(self._text.finish) if self._text is not None else ""
        self._pieces.append(rest)
        self._release(rest)

    def _make_output(self, event: End) -> Output:
        finished = event.finished
        work = self.processed.work if self.processed is not None else None
        times = self.token_times
        asked = work is not None and work.sampling.logprobs is not None  # one that was adopted has its work for certain
        return Output(
            request_id=self.request.request_id,
            text="".join(self._pieces),
            token_ids=[each.token for each in self.sampled],
            finish_reason=event.reason,
            prompt_tokens=len(work.prompt) if work else 0,
            media_tokens=sum(span.tokens for span in work.media) if work else 0,
            cached_tokens=finished.cached_tokens if finished else 0,
            max_tokens=work.max_tokens if work else 0,
            clipped=self.processed.clipped if self.processed else False,
            ttft_s=times[0] if times else None,
            itl_s=[later - earlier for earlier, later in pairwise(times)],
            latency_s=time.monotonic() - self.arrived,
            spans=_fill_spans(finished),
            transfers=list(finished.transfers) if finished else [],
            preemptions=finished.preemptions if finished else 0,
            route=list(finished.route) if finished else [],
            attempts=event.attempts,
            lives=event.lives,
            former_lives=[msgspec.structs.asdict(each) for each in event.former],
            recomputed_tokens=event.recomputed,
            logprobs=[each.logprob for each in self.sampled] if asked else [],
            top_logprobs=[each.top for each in self.sampled] if asked else [],
            emulated=self.processed.emulated if self.processed else False,
        )


def _fill_spans(finished: Finished | None) -> dict[str, float]:
    """Return all spans in seconds, 0 for those that the request did not have."""
    known: dict[str, Any] = finished.spans if finished else {}
    return {name: known.get(name, 0.0) for name in SPANS}


def make_error(failure: Failure, request_id: str) -> TrinityError:
    """Make the typed error that a failure names; its fields become attributes."""
    kind = getattr(errors, failure.error, RequestError)
    error: TrinityError = kind(failure.message, request_id) if issubclass(kind, RequestError) else kind(failure.message)
    fields = dict(failure.fields)
    cause = getattr(errors, fields.pop("cause", ""), None)
    for name, value in fields.items():
        setattr(error, name, value)
    if cause is not None:
        error.__cause__ = cause(failure.message)
    return error


def make_late_failure(request: Request) -> Failure:
    """Make the failure of a request whose deadline passed while it was being preprocessed."""
    text = f"the deadline of {request.deadline_s} s passed before the request was prepared; give more time"
    return Failure("DeadlineExceeded", text)


def reduce_deadline(processed: ProcessedRequest, spent_s: float) -> ProcessedRequest:
    """Subtract the time that preprocessing took (seconds): the deadline counts from submission."""
    deadline = processed.work.deadline_s
    if deadline is None:
        return processed
    work = msgspec.structs.replace(processed.work, deadline_s=max(0.0, deadline - spent_s))
    return msgspec.structs.replace(processed, work=work)
