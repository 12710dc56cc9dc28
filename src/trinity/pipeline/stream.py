"""Stream: reads the tokens of one request as they come."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

import msgspec

from trinity import errors
from trinity.core.frontend import Abort, Deliver, End
from trinity.core.messages import Failure, Finished, Value
from trinity.errors import ClosedError, RequestError, TrinityError, own_errors
from trinity.metrics import SPANS, Metrics
from trinity.preprocess.detokenizer import TextStream
from trinity.preprocess.processor import ProcessedRequest
from trinity.request import Output, Request, Token
from trinity.traces.trace import Trace

logger = logging.getLogger("trinity")


class StreamHost(Protocol):
    """Calls that a stream makes to its pipeline."""

    async def submit(self, stream: Stream) -> None: ...

    def post(self, event: Value) -> None: ...

    def on_end(self, stream: Stream) -> None: ...

    def find_place(self, request_id: str) -> str: ...

    async def move(self, request_id: str, to: str, within_s: float) -> None: ...


class Stream:
    """One request in flight: ``async with pipe.stream(request) as tokens: async for token in tokens``.

    Leaving the block ends the request, and ``output`` is available after that. Entering and iterating raise the
    request's own error (``RequestError`` and its subclasses), or ``ClosedError`` if the pipeline was closed. A stream
    can be entered once.
    """

    _encode_only: ClassVar[bool] = False  # it is to have no token: no row of a trace, no latency of one, no SLO

    def __init__(self, host: StreamHost, request: Request) -> None:
        self.request = request
        self.processed: ProcessedRequest | None = None
        self.arrived = time.monotonic()
        self.arrived_at = time.time()
        self._host = host
        self._entered = self._unread = False
        self._tokens: deque[Token] = deque()
        self._held: Token | None = None
        self._wake = asyncio.Event()
        self._text: TextStream | None = None
        self._pieces: list[str] = []
        self._times: list[float] = []
        self._ids: list[int] = []
        self._logprobs: list[float | None] = []
        self._top_logprobs: list[tuple[tuple[int, float], ...] | None] = []
        self._output: Output | None = None
        self._error: TrinityError | None = None

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
        return len(self._ids)

    @property
    def place(self) -> str:
        """Name of the instance that has the request now, as far as is known; "" before and after."""
        return self._host.find_place(self.request.request_id)

    async def move(self, to: str, within_s: float = 30.0) -> None:
        """Have the request, which decodes, go on at this instance; no token is lost, and none comes twice.

        Returns once it is there. Raises ``MoveError`` where it goes on as before, or is not known to be there within
        ``within_s`` (seconds); ``ClosedError`` where the pipeline is not running.
        """
        await self._host.move(self.request.request_id, to, within_s)

    def __repr__(self) -> str:
        begun = "in flight" if self._entered else "not begun"
        state = begun if self._output is None else self._output.finish_reason
        return f"Stream({self.request.request_id!r}: {len(self._ids)} tokens, {state})"

    async def __aenter__(self) -> Self:
        if self._entered:
            raise RequestError("a stream can be entered once; get a new one from the pipeline", self.request.request_id)
        self._entered = True
        self.arrived, self.arrived_at = time.monotonic(), time.time()
        await self._host.submit(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def cancel(self) -> None:
        """End the request now; does nothing if it has ended."""
        if not self.done:
            self._host.post(Abort(self.request.request_id, "cancelled"))

    def __aiter__(self) -> Stream:
        if not self._entered:
            text = "a stream can only be read inside its block: async with pipe.stream(request) as tokens"
            raise RequestError(text, self.request.request_id)
        return self

    async def __anext__(self) -> Token:
        aiter(self)
        while not self._tokens:
            if self.done:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._tokens.popleft()

    async def wait_first(self) -> None:
        """Wait until the first token has come or the request has ended; nothing is read by it."""
        aiter(self)
        while not self._ids and not self.done:
            self._wake.clear()
            await self._wake.wait()

    async def next_tokens(self) -> list[Token]:
        """Wait for the next token, and return all that wait; none at the end. Raises what iterating would."""
        try:
            found = [await anext(self)]
        except StopAsyncIteration:
            return []
        found += self._tokens
        self._tokens.clear()
        return found

    async def collect(self) -> Output:
        """Wait for the whole output, without keeping tokens to be read one by one. Raises what iterating would."""
        aiter(self)
        self._unread = True
        self._tokens.clear()
        async for _ in self:
            pass
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

    def deliver(self, event: Deliver) -> None:
        """Take the next token. Text that may still change (part of a stop string or of a character) is held back.

        A token that cannot be decoded ends the request with an error.
        """
        try:
            self._take(event)
        except Exception as error:  # a tokenizer may raise anything on a token id that a stage invented
            text = f"token {event.sampled.token} cannot be decoded to text ({error!r})"
            self.end(End(event.request, "error", Failure("RequestError", text)))
            self._host.post(Abort(event.request, "cancelled"))

    def _take(self, event: Deliver) -> None:
        assert self._text is not None
        if self.done or self._text.stopped:
            return
        sampled = event.sampled
        text = self._decode(lambda stream: stream.push(sampled.token))
        self._times.append(time.monotonic())
        self._ids.append(sampled.token)
        self._pieces.append(text)
        self._logprobs.append(sampled.logprob)
        if len(self._ids) == 1:
            self._wake.set()
        self._top_logprobs.append(sampled.top)
        if not self._unread:
            self._show(Token(sampled.token, text, event.index, sampled.logprob, sampled.top))
        if self._text.stopped:
            self._host.post(Abort(self.request.request_id, "stop"))

    def _decode(self, read: Callable[[TextStream], str]) -> str:
        """Ask the detokenizer. Raises ``RequestError`` for whatever the tokenizer raises, or gives in place of text."""
        if self._text is None:
            return ""
        with own_errors(self.request.request_id, "decoding the output to text", (asyncio.CancelledError,)):
            text = read(self._text)
            if not isinstance(text, str):
                raise TypeError(f"the tokenizer gave {type(text).__name__} in place of text")
            return text

    def _show(self, token: Token) -> None:
        assert self._text is not None
        if self._held is not None:
            self._release("")
        if self._text.stopped or token.text:
            self._put(token)
        else:
            self._held = token  # its text, if it has any, is released with it

    def _release(self, text: str) -> None:
        if self._held is not None:
            held, self._held = self._held, None
            self._put(Token(held.id, text, held.index, held.logprob, held.top_logprobs))

    def _put(self, token: Token) -> None:
        self._tokens.append(token)
        self._wake.set()

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
        self._wake.set()
        self._host.on_end(self)

    def fail(self, error: TrinityError, cause: BaseException | None = None) -> None:
        """Have iterating raise this error after the tokens that have come."""
        self._error = error
        if cause is not None:
            error.__cause__ = cause
        if isinstance(error, RequestError):
            error.output = self._output

    def close(self) -> None:
        """Have a reader that still waits get ``ClosedError``, as the pipeline closes."""
        if not self.done:
            self._error = ClosedError("the pipeline was closed while the request was being served")

    def _flush(self) -> None:
        rest = self._decode(lambda stream: "" if stream.stopped else stream.finish())
        self._pieces.append(rest)
        if rest and self._held is None and self._tokens:
            last = self._tokens.pop()
            self._held = Token(last.id, last.text + rest, last.index, last.logprob, last.top_logprobs)
            rest = self._held.text
        self._release(rest)

    def _make_output(self, event: End) -> Output:
        finished = event.finished
        work = self.processed.work if self.processed is not None else None
        times, asked = self.token_times, self.request.sampling.logprobs is not None
        return Output(
            request_id=self.request.request_id,
            text="".join(self._pieces),
            token_ids=self._ids,
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
            logprobs=self._logprobs if asked else [],
            top_logprobs=self._top_logprobs if asked else [],
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


def record_end(stream: Stream, metrics: Metrics, trace: Trace) -> None:
    """Count a request that has ended, and add it to the trace. What cannot be recorded is logged: its reader waits."""
    try:
        error = type(stream._error).__name__ if isinstance(stream._error, RequestError) else ""
        metrics.add(stream.output, stream._encode_only, error)
        if not stream._encode_only:  # a row is a prompt and an output, to plan on
            trace.append(make_trace_row(stream))
    except Exception:
        logger.exception("request %s has ended and could not be recorded", stream.request.request_id)


def record_refused(stream: Stream, error: RequestError, metrics: Metrics) -> None:
    """Count a request that never started."""
    metrics.add_refused(error, stream._encode_only)


def make_trace_row(stream: Stream) -> dict[str, Any]:
    """Make the trace row of a request that has ended."""
    output, work = stream.output, stream.processed.work if stream.processed else None
    media = work.given_media if work else ()
    return {
        "timestamp": max(0.0, stream.arrived_at * 1000),  # a wall clock may stand before 1970
        "request_id": output.request_id,
        "session": stream.request.session,
        "input_length": output.prompt_tokens,
        "text_length": output.prompt_tokens - output.media_tokens,
        "output_length": len(output.token_ids),
        "max_tokens": output.max_tokens,
        "images": [
            {"width": span.width or None, "height": span.height or None, "tokens": span.tokens, "content": span.content}
            for span in media
        ],
        "finish_reason": output.finish_reason,
        "ttft_s": output.ttft_s,
        "itl_s": output.itl_s,
        "latency_s": output.latency_s,
        "spans": output.spans,
        "emulated": output.emulated,
    }
