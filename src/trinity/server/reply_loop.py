"""The way of a call through the pipeline and back to its client, whole or token by token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

from trinity.errors import ClosedError
from trinity.pipeline import Pipeline
from trinity.pipeline.copies import copy_request
from trinity.pipeline.stream import Stream
from trinity.preprocess.preparation_lanes import run_beside_loop
from trinity.request import Output, Request, Token
from trinity.server.connection import Exchange
from trinity.server.fields import ParsedCall

T = TypeVar("T")
SERVED_ENDS = ("stop", "length")
MOST_DESCRIBED = 4096  # tokens, and likely ones beside them, that are written on the loop at once: some milliseconds
NUMBERED = ("chatcmpl-", "cmpl-")  # ids of answers whose events may be numbered


class Reply(Protocol):
    """Turns tokens and outputs into what the clients of an endpoint read. ``index`` counts answers."""

    def begin(self, index: int, prompt: tuple[int, ...]) -> bytes: ...

    def add(self, index: int, tokens: Sequence[Token]) -> bytes: ...

    def end(self, index: int, output: Output) -> bytes: ...

    def close(self, outputs: Sequence[Output]) -> bytes: ...

    def whole(self, outputs: Sequence[Output], tokens: Sequence[Sequence[Token]], prompt: tuple[int, ...]) -> bytes: ...


async def answer_call(pipe: Pipeline, exchange: Exchange, call: ParsedCall, reply: Reply) -> None:
    """Serve a call to its end. What goes wrong before the response has started is raised; after that it is an event.

    Raises ``ClientGone`` as soon as the client has left: its requests have ended then.
    """
    requests: Sequence[Request] = call.requests  # whose copies cost a tenth of a server's time for a request
    if call.choices > 1:
        copies = [await run_beside_loop(partial(copy_request, n=call.choices), request) for request in call.requests]
        requests = [each for some in copies for each in some]
    async with exchange.until_gone():
        if call.stream:
            numbered = pipe.has_buddy and len(requests) == 1 and requests[0].request_id.startswith(NUMBERED)
            described = 1 + (call.logprobs or 0)
            await _StreamedCall(pipe, exchange, reply, numbered and not call.tools.schemas, described).run(requests)
        else:
            served = await run_all(
                [_collect(pipe, exchange, request, call.logprobs is not None) for request in requests]
            )
            outputs, tokens, prompts = zip(*served, strict=True)
            write = partial(reply.whole, outputs, tokens, prompts[0])
            described = sum(map(len, tokens)) * (1 + (call.logprobs or 0))
            body = await asyncio.to_thread(write) if described > MOST_DESCRIBED else write()
            await exchange.reply(200, body)


async def run_all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run coroutines side by side. If one fails, the others are cancelled and its own error is raised."""
    if len(work) == 1:
        return [await work[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


@asynccontextmanager
async def open_stream(pipe: Pipeline, exchange: Exchange, request: Request) -> AsyncGenerator[Stream]:
    """Open a request's stream, whose end is added to the exchange's trace."""
    async with pipe.stream(request) as stream:
        try:
            yield stream
        finally:
            exchange.trace.add(stream)


async def _collect(
    pipe: Pipeline, exchange: Exchange, request: Request, keep_tokens: bool
) -> tuple[Output, list[Token], tuple[int, ...]]:
    """Serve a request to its end: its output, its tokens if they are wanted, and its prompt."""
    tokens: list[Token] = []
    async with open_stream(pipe, exchange, request) as stream:
        if keep_tokens:
            tokens = [token async for token in stream]
        else:
            await stream.collect()
    return check_output(stream), tokens, prompt_of(stream)


def check_output(stream: Stream) -> Output:
    """Return the output of a request that was served to its end. Raises ``ClosedError`` for one that was cut off."""
    if stream.output.finish_reason not in SERVED_ENDS:
        raise ClosedError(f"the request was ended by the server ({stream.output.finish_reason}); send it again")
    return stream.output


def prompt_of(stream: Stream) -> tuple[int, ...]:
    """Token ids of a stream's prompt."""
    return stream.processed.work.prompt if stream.processed is not None else ()


def take_pieces(tokens: Sequence[Token], at_once: int) -> Iterator[Sequence[Token]]:
    """Yield so many tokens at a time."""
    for start in range(0, len(tokens), at_once):
        yield tokens[start : start + at_once]


def add_numbered(reply: Reply, index: int, tokens: Sequence[Token]) -> bytes:
    """Encode tokens of a choice, each event with its token's index: a connection may be cut behind any of them."""
    said = ((token.index, reply.add(index, [token])) for token in tokens)
    return b"".join(b"id: %d\n%s" % each for each in said if each[1])


class _StreamedCall:
    """A streamed response: each write has all tokens that wait, within ``MOST_DESCRIBED`` of all choices.

    - ``numbered``: each event says which token it has.
    - ``described``: tokens that are written for each of the output, likely ones included.
    """

    def __init__(self, pipe: Pipeline, exchange: Exchange, reply: Reply, numbered: bool, described: int) -> None:
        self._pipe, self._exchange, self._reply, self._numbered = pipe, exchange, reply, numbered
        self._described, self._written = described, 0
        self._turn = asyncio.Lock()  # of those who write: choices run side by side
        self._last = b""  # the end of the choice that ended last, which leaves with the end of all

    async def run(self, requests: Sequence[Request]) -> None:
        at_once = MOST_DESCRIBED // (self._described * len(requests)) or 1
        outputs = await run_all([self._serve(index, request, at_once) for index, request in enumerate(requests)])
        await self._send(self._last + await self._write(partial(self._reply.close, outputs)), last=True)

    async def _serve(self, index: int, request: Request, at_once: int) -> Output:
        reply = self._reply
        async with open_stream(self._pipe, self._exchange, request) as stream:
            tokens = await stream.next_tokens()  # what can go wrong has mostly gone wrong by now
            events = reply.begin(index, prompt_of(stream))
            while tokens:
                for some in take_pieces(tokens, at_once):
                    said = add_numbered(reply, index, some) if self._numbered else reply.add(index, some)
                    await self._send(events + said)
                    events = b""
                    if len(some) < len(tokens):
                        await asyncio.sleep(0)  # others' turn
                self._written += len(tokens) * self._described
                tokens = await stream.next_tokens()
        last = await self._write(partial(reply.end, index, check_output(stream)))
        ended, self._last = self._last, events + last
        await self._send(ended)
        return stream.output

    async def _write(self, write: Callable[[], bytes]) -> bytes:
        """Encode an end, which of a response repeats all likely tokens."""
        many = self._described > 1 and self._written > MOST_DESCRIBED
        return await asyncio.to_thread(write) if many else write()

    async def _send(self, events: bytes, *, last: bool = False) -> None:
        if not events:
            return
        async with self._turn:
            if not self._exchange.status:
                await self._exchange.start_events()
            await self._exchange.send_events(events, last=last)
