"""Pipelines and streams, started, left early, cancelled anywhere, closed: nothing stays, nothing hangs."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
import time

import pytest

from support.checkpoint_files import checkpoint
from support.pipeline_driver import (
    GOOD,
    LONG,
    ONE,
    PLACES,
    TEXT,
    TWO,
    all_tokens,
    good_ones,
    nothing_left,
    serving,
    threads_of,
)
from support.pipeline_options import pipeline_options
from support.wrapped_transports import WrappedTransport
from trinity.core.messages import Submit, Work
from trinity.errors import BadMedia, ClosedError, ConfigError, RequestError
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


def make(placement: str = "E+P+D", **settings: object) -> Pipeline:
    return Pipeline(checkpoint("llava"), placement, dtype="float32", **pipeline_options(settings))  # type: ignore[arg-type]


# ---------------------------------------------------------------- start and end


async def test_started_by_hand_once() -> None:
    pipe = make()
    with pytest.raises(ClosedError, match="not started"):
        await pipe.complete(TEXT.request())
    with pytest.raises(ClosedError, match="not started"):
        _ = pipe.processor
    await pipe.start()
    with pytest.raises(ClosedError, match="starts once"):
        await pipe.start()
    await good_ones(pipe)
    await pipe.aclose()
    await pipe.aclose()
    nothing_left(pipe)


async def test_a_closed_pipeline_refuses_and_cannot_start_again() -> None:
    async with serving() as pipe:
        pass
    with pytest.raises(ClosedError, match="closed; make a new one"):
        await pipe.complete(TEXT.request())
    with pytest.raises(ClosedError, match="closed; make a new one"):
        async with pipe.stream(TEXT.request()):
            pytest.fail("a closed pipeline must not let a stream in")
    with pytest.raises(ClosedError, match="starts once"):
        await pipe.start()


async def test_never_started_can_be_closed() -> None:
    pipe = make()
    await pipe.aclose()
    with pytest.raises(ClosedError, match="starts once"):
        await pipe.start()


async def test_closed_while_it_starts() -> None:
    pipe = make()
    starting = asyncio.ensure_future(pipe.start())
    await asyncio.sleep(0)
    await pipe.aclose()
    with pytest.raises(ClosedError, match="while it started"):
        await starting
    nothing_left(pipe)


async def test_cancelled_while_it_starts() -> None:
    pipe = make()
    starting = asyncio.ensure_future(pipe.start())
    await asyncio.sleep(0.005)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    with pytest.raises(ClosedError):
        await pipe.start()
    nothing_left(pipe)


async def test_closed_with_requests_in_flight() -> None:
    """Wherever a request is, being prepared or being decoded, its reader gets ClosedError and leaves."""
    pipe = make()
    await pipe.start()
    readers = [asyncio.ensure_future(pipe.complete(LONG.request())) for _ in range(4)]
    while not any(host.core.state.decoding for host in pipe.hosts.values()):
        await asyncio.sleep(0.001)
    readers += [asyncio.ensure_future(pipe.complete(case.request(max_tokens=500))) for case in GOOD]
    await asyncio.sleep(0)
    async with asyncio.timeout(120):
        await asyncio.gather(pipe.aclose(), pipe.aclose())
        found = await asyncio.gather(*readers, return_exceptions=True)
    assert [type(error) for error in found] == [ClosedError] * len(readers)
    assert pipe.metrics.summary()["finished"] == {"cancelled": len(readers)}
    nothing_left(pipe)


async def test_every_close_waits_until_all_is_quiet() -> None:
    """Steps and pulls in flight use memory: aclose() returns after them, also the second of two."""
    pipe = make(connector=WrappedTransport(delay_s=0.1))
    await pipe.start()
    readers = [asyncio.ensure_future(pipe.complete(case.request())) for case in GOOD]
    while not any(host._tasks for host in pipe.hosts.values()):
        await asyncio.sleep(0.001)
    first = asyncio.ensure_future(pipe.aclose())
    await asyncio.sleep(0)
    await pipe.aclose()
    nothing_left(pipe)
    assert first.done()
    assert not any(host._tasks for host in pipe.hosts.values())
    await asyncio.gather(*readers, return_exceptions=True)


async def test_cancelling_the_close_does_not_cut_it_short() -> None:
    pipe = make(connector=WrappedTransport(delay_s=0.1))
    await pipe.start()
    reader = asyncio.ensure_future(pipe.complete(ONE.request()))
    while not any(host._tasks for host in pipe.hosts.values()):
        await asyncio.sleep(0.001)
    closing = asyncio.ensure_future(pipe.aclose())
    for _ in range(3):
        await asyncio.sleep(0)
        closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    nothing_left(pipe)
    await asyncio.gather(reader, return_exceptions=True)


def test_a_program_that_forgets_to_close_ends_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    """The loop is gone, and threads find nobody to tell: no traceback, and as daemons they do not keep the program."""
    pipe = make("EP+D")

    async def forgetful() -> None:
        await pipe.start()
        async with pipe.stream(LONG.request()) as tokens:
            while (await anext(tokens)).index < 2:  # beyond its migration, whose task would be left behind as well
                pass

    asyncio.run(forgetful())
    assert all(thread.daemon for host in pipe.hosts.values() for thread in threads_of(host))
    for host in pipe.hosts.values():
        host.post(Submit(Work(request="too large", prompt=(1,) * 1_000_000)))  # answered by a word to the front end
        host._join()
    assert not caplog.records
    stop(pipe)


def test_another_event_loop_is_told_so() -> None:
    pipe = make("EP+D")

    async def start_and_leave() -> None:
        await pipe.start()

    async def use() -> None:
        with pytest.raises(ConfigError, match="another event loop"):
            await pipe.complete(TEXT.request())

    asyncio.run(start_and_leave())
    asyncio.run(use())
    stop(pipe)


def stop(pipe: Pipeline) -> None:
    """What aclose() would do, without the loop that the pipeline ran on."""
    for host in pipe.hosts.values():
        host.stop(at_once=True)
        host._join()
    pipe.processor.close()


async def test_the_constructor_is_quick() -> None:
    """Tokenizer and weights are loaded at start, on a thread: the loop goes on."""
    began = time.thread_time()
    pipe = make()
    assert time.thread_time() - began < 0.1
    turns = 0
    starting = asyncio.ensure_future(pipe.start())
    while not starting.done():
        turns += 1
        await asyncio.sleep(0.001)
    assert turns > 3
    await pipe.aclose()


# ---------------------------------------------------------------- streams


async def test_a_stream_gives_tokens_in_order_and_then_its_output() -> None:
    async with serving() as pipe, pipe.stream(TWO.request()) as tokens:
        with pytest.raises(RequestError, match="once the stream has ended"):
            _ = tokens.output
        found = [token async for token in tokens]
        assert [token.id for token in found] == TWO.tokens == tokens.output.token_ids
        assert [token.index for token in found] == list(range(len(found)))
        assert "".join(token.text for token in found) == tokens.output.text
        assert [token async for token in tokens] == []  # reading on gives nothing more
        assert tokens.done


async def test_a_stream_left_early_is_cancelled() -> None:
    async with serving() as pipe:
        async with pipe.stream(LONG.request()) as tokens:
            async for token in tokens:
                if token.index == 2:
                    break
        assert tokens.output.finish_reason == "cancelled"
        assert len(tokens.output.token_ids) < LONG.max_tokens
        async with asyncio.timeout(120):
            await pipe.wait_idle()
        assert all(host.core.idle() for host in pipe.hosts.values())
        await good_ones(pipe)


async def test_no_token_after_leaving() -> None:
    async with serving("EPD") as pipe:
        async with pipe.stream(LONG.request()) as tokens:
            await anext(aiter(tokens))
        count = len(tokens.output.token_ids)
        steps = pipe.hosts["EPD0"].steps
        await pipe.wait_idle()
        assert len(tokens.output.token_ids) == count
        assert pipe.hosts["EPD0"].steps <= steps + 1, "a step was started for a request that nobody reads"


async def test_an_error_in_the_users_block_comes_through() -> None:
    pipe = make()

    async def careless() -> None:
        async with pipe, pipe.stream(LONG.request()) as tokens:
            async for _ in tokens:
                _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        await careless()
    nothing_left(pipe)


async def test_a_stream_is_entered_once_and_read_inside() -> None:
    async with serving() as pipe:
        stream = pipe.stream(TEXT.request())
        with pytest.raises(RequestError, match="async with"):
            async for _ in stream:
                pass
        async with stream:
            pass
        with pytest.raises(RequestError, match="can be entered once"):
            async with stream:
                pass


async def test_leaving_after_the_pipeline_has_closed() -> None:
    async with serving() as pipe:
        async with pipe.stream(LONG.request()) as tokens:
            await anext(aiter(tokens))
            await pipe.aclose()
            with pytest.raises(ClosedError):
                async for _ in tokens:
                    pass
        assert tokens.output.finish_reason == "cancelled"


async def test_slow_readers_lose_nothing() -> None:
    async with serving() as pipe, pipe.stream(ONE.request()) as tokens:
        await pipe.complete(TWO.request())
        while not tokens.done:
            await asyncio.sleep(0.001)
        assert [token.id async for token in tokens] == ONE.tokens


async def test_a_stop_string_ends_the_output_before_it() -> None:
    async with serving() as pipe:
        whole = await pipe.complete(TEXT.request(max_tokens=24))
        text = whole.text
        stop = text[len(text) // 2 :][:2]
        sampling = Sampling(ignore_eos=True, stop=(stop,))
        outputs = await asyncio.gather(
            *(pipe.complete(TEXT.request(max_tokens=24, sampling=sampling)) for _ in range(8))
        )
        assert {output.text for output in outputs} == {text[: text.index(stop)]}
        assert {output.finish_reason for output in outputs} == {"stop"}
        assert {len(output.token_ids) for output in outputs} == {len(outputs[0].token_ids)}
        assert len(outputs[0].token_ids) < 24
        for place in range(1, 24):  # a reader may leave while the instance has yet to tell how it ended
            async with pipe.stream(TEXT.request(max_tokens=24, sampling=sampling)) as tokens:
                async for token in tokens:
                    if token.index == place:
                        break
            assert tokens.output.finish_reason in ("stop", "cancelled")


# ---------------------------------------------------------------- cancelled at random points


@pytest.mark.parametrize("placement", [*PLACES, "2E2P2D"])
async def test_cancelled_at_random_points(placement: str) -> None:
    """64 requests in random bursts, half of them cancelled at a random moment; the rest is exact, nothing leaks."""
    chance = random.Random(placement)
    async with serving(placement) as pipe:
        cases = [chance.choice(GOOD) for _ in range(64)]
        readers: list[asyncio.Task[object]] = []
        cancelled = set(chance.sample(range(64), 32))
        for index, case in enumerate(cases):
            readers.append(asyncio.ensure_future(pipe.complete(case.request())))
            if index in cancelled:
                pipe.loop.call_later(chance.random() ** 2 * 0.2, readers[index].cancel)
            if chance.random() < 0.2:
                await asyncio.sleep(chance.random() * 0.01)
        found = await asyncio.gather(*readers, return_exceptions=True)
        for index, (case, answer) in enumerate(zip(cases, found, strict=True)):
            if index not in cancelled:
                assert getattr(answer, "token_ids", answer) == case.tokens
        assert sum(isinstance(answer, asyncio.CancelledError) for answer in found) >= 8
        async with asyncio.timeout(120):
            await pipe.wait_idle()
        await good_ones(pipe)


async def test_cancelled_while_it_is_prepared() -> None:
    async with serving() as pipe:
        readers = [asyncio.ensure_future(pipe.complete(TWO.request())) for _ in range(6)]
        await asyncio.sleep(0)
        assert pipe._frontend.preparing == 6
        for reader in readers:
            reader.cancel()
        found = await asyncio.gather(*readers, return_exceptions=True)
        assert [type(each) for each in found] == [asyncio.CancelledError] * 6
        assert pipe._frontend.preparing == 0
        assert not pipe._frontend.streams
        assert pipe.metrics.summary()["finished"] == {"cancelled": 6}
        await good_ones(pipe)


async def test_cancelled_while_its_blocks_are_on_their_way() -> None:
    async with serving("E+P+D", connector=WrappedTransport(delay_s=0.03)) as pipe:
        for _ in range(3):
            reader = asyncio.ensure_future(pipe.complete(TWO.request()))
            while not any(host._tasks for host in pipe.hosts.values()):
                await asyncio.sleep(0.001)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
        await good_ones(pipe)


# ---------------------------------------------------------------- beside others


async def test_two_pipelines_over_one_model() -> None:
    async with serving("E+P+D") as one, serving("EPD") as other:
        await asyncio.gather(good_ones(one, 2), good_ones(other, 2))
        await one.aclose()
        await good_ones(other)


async def test_two_models_in_one_process() -> None:
    requests = [Request("Hello world", max_tokens=8, sampling=Sampling(ignore_eos=True)) for _ in range(6)]
    async with Pipeline(checkpoint("llama"), "P+D", dtype="float32") as text_only, serving("ED+P") as pipe:
        alone = await text_only.complete(requests[0])
        outputs, _ = await asyncio.gather(asyncio.gather(*map(text_only.complete, requests)), good_ones(pipe, 2))
        assert {tuple(output.token_ids) for output in outputs} == {tuple(alone.token_ids)}
        with pytest.raises(BadMedia, match="text only"):
            await text_only.complete(ONE.request())


async def test_the_loop_stays_free_while_requests_are_served() -> None:
    """No callback of ours takes long on the loop's thread (the suite's guard measures each one)."""
    async with serving("E+P+D") as pipe:
        gc.freeze()  # what other tests of this process have left is not looked through
        began = time.thread_time()
        try:
            await good_ones(pipe, rounds=8)
        finally:
            gc.unfreeze()
        assert threading.current_thread() is threading.main_thread()
        spent = time.thread_time() - began
        lanes = [thread.ident or 0 for host in pipe.hosts.values() for thread in threads_of(host)[1:]]
        stages = sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in lanes)
        assert spent < stages, f"the loop used {spent:.2f} s of CPU for {stages:.2f} s of model time"
