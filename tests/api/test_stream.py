"""Stream by itself: what a reader sees of deliveries that come late, after the end, or with text held back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.emulated_pipelines import MODEL, POOLS, asked, check, serve
from support.made_tokenizers import cases, tokenizer
from trinity.core.frontend import Abort, Deliver, End
from trinity.core.messages import Failure, Finished, ResolvedSampling, Sampled, Value, Work
from trinity.errors import ClosedError, DeadlineExceeded, MigrationError, PeerLost, RequestError, TrinityError
from trinity.memory.cache_config import CacheConfig
from trinity.metrics import SPANS
from trinity.pipeline import Pipeline
from trinity.pipeline.stream import DECODED_AT_ONCE, Stream, make_error
from trinity.preprocess.processor import ProcessedRequest
from trinity.preprocess.text.detokenizer import TextStream
from trinity.request import Output, Request, Sampling, Token
from trinity.traces.trace import SLO


class Desk:
    """Stands in for the pipeline."""

    def __init__(self, make_text: Callable[[tuple[str, ...]], Any] | None = None) -> None:
        self.make_text = make_text or Letters
        self.posted: list[Value] = []
        self.over: list[Stream] = []

    async def submit(self, stream: Stream) -> None:
        resolved = ResolvedSampling(logprobs=stream.request.sampling.logprobs)
        work = Work(request=stream.request.request_id, prompt=(1, 2, 3), max_tokens=5, sampling=resolved)
        processed = ProcessedRequest(work, clipped=True, stop=tuple(stream.request.sampling.stop or ()))
        stream.begin(processed, self.make_text)  # type: ignore[arg-type]

    def post(self, event: Value) -> None:
        self.posted.append(event)

    def on_end(self, stream: Stream) -> None:
        self.over.append(stream)

    async def move(self, request_id: str, to: str, within_s: float) -> None: ...

    def find_place(self, request_id: str) -> str:
        return "" if self.over else "P"


class Reading:
    """Reads what there is to read of a stream, now and then."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.found = stream, list[Token]()

    def read(self) -> None:
        self.found += self.stream._tokens
        self.stream._tokens.clear()


class Letters:
    """Token 1 is "a", 2 is "b", ...; 0 has no text; 26 ("z") is held back until the next."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop, self.stopped, self.held = stop, False, ""

    def push(self, token: int) -> str:
        letter = chr(96 + token) if token else ""
        if letter in self.stop and letter:
            self.stopped = True
            return ""
        if letter == "z":
            self.held += letter
            return ""
        text, self.held = self.held + letter, ""
        return text if letter else ""

    @property
    def holds(self) -> bool:
        return bool(self.held)

    @property
    def has_stops(self) -> bool:
        return bool(self.stop)

    def push_all(self, tokens: list[int]) -> str:
        return "".join(map(self.push, tokens))

    def finish(self) -> str:
        text, self.held = self.held, ""
        return text


async def entered(**fields: Any) -> tuple[Desk, Stream]:
    desk = Desk()
    stream = Stream(desk, Request("hello", request_id="r", **fields))
    await stream.__aenter__()
    return desk, stream


def deliver(stream: Stream, *tokens: int, start: int = 0) -> None:
    for index, token in enumerate(tokens, start):
        stream.deliver(Deliver("r", index, Sampled(token, logprob=-float(token))), time.monotonic())


async def read(stream: Stream) -> list[Token]:
    return [token async for token in stream]


FINISHED = Finished(
    request="r",
    attempt=0,
    reason="length",
    count=3,
    spans={"prefill": 0.5},
    cached_tokens=2,
    transfers=({"kind": "kv"},),
    route=("P0", "D0"),
)


async def test_output() -> None:
    desk, stream = await entered()
    deliver(stream, 1, 2, 3)
    stream.end(End("r", "length", None, FINISHED))
    output = stream.output
    assert (output.text, output.token_ids, output.finish_reason) == ("abc", [1, 2, 3], "length")
    assert (output.prompt_tokens, output.cached_tokens, output.max_tokens, output.clipped) == (3, 2, 5, True)
    assert (output.route, output.transfers) == (["P0", "D0"], [{"kind": "kv"}])
    assert output.spans == {**dict.fromkeys(SPANS, 0.0), "prefill": 0.5}
    assert output.logprobs == []  # not asked for
    assert len(output.itl_s) == 2
    assert output.ttft_s is not None
    assert 0 <= output.ttft_s <= output.ttft_s + sum(output.itl_s) <= output.latency_s
    assert desk.over == [stream]
    assert [token.id for token in await read(stream)] == [1, 2, 3]


async def test_the_whole_output_is_waited_for_without_reading_a_token() -> None:
    _, stream = await entered()
    deliver(stream, 1)
    waiting = asyncio.ensure_future(stream.collect())
    await asyncio.sleep(0)
    deliver(stream, 2, 26, start=1)
    await asyncio.sleep(0)
    assert not waiting.done()
    stream.end(End("r", "length", None, FINISHED))
    output = await waiting
    assert (output.text, output.token_ids, output.finish_reason) == ("abz", [1, 2, 26], "length")
    assert await read(stream) == []


async def test_tokens_that_nobody_reads_are_decoded_in_runs() -> None:
    """A look at a window costs as much for 64 tokens as for one; the text is whole at any end."""
    _, stream = await entered()
    looks = list[int]()
    push_all = stream._text.push_all  # type: ignore[union-attr]
    stream._text.push_all = lambda tokens: looks.append(len(tokens)) or push_all(tokens)  # type: ignore[union-attr, method-assign, func-returns-value]
    deliver(stream, 1, 2)
    waiting = asyncio.ensure_future(stream.collect())
    await asyncio.sleep(0)
    deliver(stream, *[3] * (2 * DECODED_AT_ONCE + 5), start=2)
    assert looks == [DECODED_AT_ONCE] * 2
    stream.end(End("r", "cancelled"))
    output = await waiting
    assert looks == [DECODED_AT_ONCE, DECODED_AT_ONCE, 5]
    assert output.text == "ab" + "c" * (2 * DECODED_AT_ONCE + 5)
    assert len(output.token_ids) == len(output.itl_s) + 1 == len(output.text)


async def test_tokens_that_come_in_one_go_wake_a_reader_once_and_are_read_together() -> None:
    _, stream = await entered()
    found, woken = list[list[int]](), 0

    async def read_on() -> None:
        nonlocal woken
        while tokens := await stream.next_tokens():
            found.append([token.id for token in tokens])
            woken += 1

    reader = asyncio.ensure_future(read_on())
    await asyncio.sleep(0)
    for start in (0, 3, 6):
        deliver(stream, 1, 2, 3, start=start)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    deliver(stream, 4, start=9)
    stream.end(End("r", "length"))
    await reader
    assert found == [[1, 2, 3]] * 3 + [[4]]


async def test_two_readers_and_one_that_was_cancelled() -> None:
    _, stream = await entered()
    readers = [asyncio.ensure_future(anext(stream)) for _ in range(3)]
    await asyncio.sleep(0)
    readers[1].cancel()
    deliver(stream, 1, 2)
    assert [(await readers[at]).id for at in (0, 2)] == [1, 2]
    assert readers[1].cancelled()
    last = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    last.cancel()
    await asyncio.sleep(0)
    deliver(stream, 3, start=2)
    stream.end(End("r", "length"))
    assert (await anext(stream)).id == 3
    assert await stream.next_tokens() == []


async def test_a_loop_that_reads_goes_over_to_the_whole_at_any_token() -> None:
    _, stream = await entered()
    deliver(stream, 1, 26)
    assert (await anext(stream)).text == "a"
    waiting = asyncio.ensure_future(stream.collect())
    await asyncio.sleep(0)
    deliver(stream, 2, 26, start=2)
    stream.end(End("r", "length"))
    assert (await waiting).text == "azbz"
    assert await read(stream) == []


async def test_waiting_for_the_whole_raises_its_error_and_stops_at_a_stop_string() -> None:
    desk, stream = await entered(sampling=Sampling(stop=("c",)))
    waiting = asyncio.ensure_future(stream.collect())
    await asyncio.sleep(0)
    deliver(stream, 1, 3, 2)
    assert desk.posted == [Abort("r", "stop")]
    stream.end(End("r", "error", Failure("MigrationError", "lost")))
    with pytest.raises(MigrationError, match="lost") as caught:
        await waiting
    assert caught.value.output is stream.output
    assert stream.output.text == "a"
    with pytest.raises(RequestError, match="can only be read inside its block"):
        await Stream(desk, Request("hello", request_id="r")).collect()


async def test_logprobs_where_asked_for() -> None:
    _, stream = await entered(sampling=Sampling(logprobs=0))
    deliver(stream, 1, 2)
    stream.end(End("r", "length"))
    assert stream.output.logprobs == [-1.0, -2.0]
    assert [token.logprob for token in await read(stream)] == [-1.0, -2.0]


async def test_an_end_twice_is_one() -> None:
    desk, stream = await entered()
    stream.end(End("r", "cancelled"))
    stream.end(End("r", "error", Failure("StageError", "late")))
    assert stream.output.finish_reason == "cancelled"
    assert len(desk.over) == 1
    assert await read(stream) == []


async def test_nothing_comes_after_a_stop_string() -> None:
    """Tokens that a slower channel had held up arrive in one go with the one that completes the stop string."""
    desk, stream = await entered(sampling=Sampling(stop=("c",)))
    deliver(stream, 1, 3, 2, 2)
    assert desk.posted == [Abort("r", "stop")]
    stream.end(End("r", "stop"))
    assert stream.output.text == "a"
    assert stream.output.token_ids == [1, 3]
    assert [token.id for token in await read(stream)] == [1, 3]


async def test_nothing_comes_after_the_end() -> None:
    _, stream = await entered()
    deliver(stream, 1)
    stream.end(End("r", "cancelled"))
    deliver(stream, 2, start=1)
    assert stream.output.token_ids == [1]
    assert [token.id for token in await read(stream)] == [1]


@pytest.mark.parametrize(
    ("tokens", "texts"),
    [
        ((1, 26), ["a", "z"]),  # held text goes out with its own token at the end
        ((26, 1), ["", "za"]),
        ((1, 0), ["a", ""]),
        ((0, 0), ["", ""]),
        ((26,), ["z"]),
    ],
)
async def test_text_held_back_is_not_lost(tokens: tuple[int, ...], texts: list[str]) -> None:
    _, stream = await entered()
    deliver(stream, *tokens)
    stream.end(End("r", "length"))
    found = await read(stream)
    assert [token.text for token in found] == texts
    assert [token.index for token in found] == list(range(len(tokens)))
    assert "".join(texts) == stream.output.text


@settings(max_examples=300)
@given(cases, st.lists(st.text("thecat s\ufffdé你", min_size=1, max_size=5), max_size=2), st.data())
def test_a_reader_that_is_ahead_gets_the_whole_text(
    case: tuple[str, list[int]], stop: list[str], data: st.DataObject
) -> None:
    """Token by token, whenever it reads: also the rest of a character of which a token had the beginning."""
    name, ids = case

    async def read_all() -> tuple[list[Token], Output]:
        stream = Stream(
            Desk(lambda stop: TextStream(tokenizer(name), stop)), Request("", sampling=Sampling(stop=tuple(stop)))
        )
        await stream.__aenter__()
        reading = Reading(stream)
        for index, token in enumerate(ids):
            stream.deliver(Deliver("r", index, Sampled(token)), 0.0)
            if data.draw(st.booleans()):
                reading.read()
        stream.end(End("r", "length"))
        reading.read()
        return reading.found, stream.output

    found, output = asyncio.run(read_all())
    assert "".join(token.text for token in found) == output.text
    assert [token.id for token in found] == output.token_ids


async def test_leaving_cancels_unless_it_has_ended() -> None:
    desk, stream = await entered()
    await stream.__aexit__(None, None, None)
    assert desk.posted == [Abort("r", "cancelled")]
    desk, stream = await entered()
    stream.end(End("r", "length"))
    await stream.__aexit__(None, None, None)
    assert desk.posted == []


async def test_the_error_comes_after_the_tokens_and_again_and_again() -> None:
    _, stream = await entered()
    deliver(stream, 1)
    stream.end(End("r", "deadline", Failure("DeadlineExceeded", "too late")))
    assert (await anext(stream)).id == 1
    for _ in range(2):
        with pytest.raises(DeadlineExceeded, match="too late") as caught:
            await anext(stream)
    assert caught.value.output is stream.output
    assert caught.value.request_id == "r"


async def test_a_closed_pipeline_is_what_the_reader_hears_of() -> None:
    _, stream = await entered()
    stream.close()
    stream.end(End("r", "cancelled"))
    with pytest.raises(ClosedError):
        await read(stream)


async def test_closing_after_the_end_changes_nothing() -> None:
    _, stream = await entered()
    stream.end(End("r", "length"))
    stream.close()
    assert await read(stream) == []


FIELDS = {"source": "P0", "target": "D0", "kind": "kv", "cause": "PeerLost"}


def test_failures_become_the_errors_that_they_name() -> None:
    error = make_error(Failure("MigrationError", "lost", FIELDS), "r")
    assert isinstance(error, MigrationError)
    assert (error.source, error.target, error.kind, error.request_id) == ("P0", "D0", "kv", "r")
    assert type(error.__cause__) is PeerLost
    assert not hasattr(error, "cause")


@pytest.mark.parametrize(("name", "kind"), [("NoSuchError", RequestError), ("TrinityError", TrinityError)])
def test_other_failures(name: str, kind: type[TrinityError]) -> None:
    error = make_error(Failure(name, "something"), "r")
    assert type(error) is kind
    assert error.__cause__ is None


async def test_a_row_that_cannot_be_recorded_keeps_no_reader_waiting(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A trace that refuses a row once left the front end with an exception in place of an end."""
    pipe = Pipeline(MODEL, "1E1P1D", cache=CacheConfig(pools=POOLS))
    monkeypatch.setattr(pipe.trace, "append", lambda row: pipe.trace.attainment(SLO(1.0, 1.0)))  # raises TraceError
    async with pipe:
        requests = asked()
        check(await serve(pipe, requests), requests)
    assert "could not be recorded" in caplog.text
