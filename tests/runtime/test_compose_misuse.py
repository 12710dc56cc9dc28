"""Composition by hand, done wrong: each misuse is refused, so that none gives wrong tokens or ends a GPU's context."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

import trinity
from support.checkpoint_files import checkpoint
from support.composition import SIZES, Wires, load, prepared
from support.pipeline_driver import ONE, TWO, all_tokens
from trinity.core.messages import Work
from trinity.errors import ConfigError, StageError
from trinity.preprocess.processor import ProcessedRequest
from trinity.runtime import loader
from trinity.runtime.compose import LoadedStage
from trinity.runtime.core_thread import CoreThread
from trinity.runtime.host import InstanceHost
from trinity.transport import inproc


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


@asynccontextmanager
async def staged() -> AsyncIterator[tuple[LoadedStage, ProcessedRequest]]:
    """A stage of every role, and a prompt of two images."""
    async with prepared(TWO) as prompt, await load("EPD") as stage:
        yield stage, prompt


async def encoded(stage: LoadedStage, prompt: ProcessedRequest) -> list[tuple[int, ...]]:
    images = [stage.allocate("image", span.tokens) for span in prompt.work.media]
    await stage.encode(prompt, images)
    return images


def table(stage: LoadedStage, work: Work) -> tuple[int, ...]:
    return stage.allocate("kv", len(work.prompt) + work.max_tokens)


async def finished(stage: LoadedStage, work: Work, kv: Any, images: Any) -> list[int]:
    """Serve to the end what misuse has left as it was."""
    await stage.open(work, kv, images=images)
    tokens = [await stage.prefill(work)]
    while len(tokens) < work.max_tokens:
        tokens += await stage.decode(work.request)
    await stage.close(work.request)
    return [token for token in tokens if token is not None]


async def test_image_blocks_are_taken_named_once_and_enough() -> None:
    async with staged() as (stage, two):
        first, second = [stage.allocate("image", span.tokens) for span in two.work.media]
        free = next(block for block in range(8) if block not in {*first, *second})
        for wrong, said in (
            ([first, first], "name each once"),
            ([(first[0],) * len(first), second], "name each once"),
            ([first[:-1], second], "rows"),
            ([(), second], "rows"),
            ([first, (free,) * len(second)], "name each once"),
            ([first, [free, *second]], "allocate them first"),
            (None, "blocks"),
            (5, "blocks"),
            ([None, second], "blocks"),
        ):
            with pytest.raises(ConfigError, match=said):
                await stage.encode(two, wrong)  # type: ignore[arg-type]
        await stage.encode(two, [first, second])
        assert await finished(stage, two.work, table(stage, two.work), [first, second]) == TWO.tokens


async def test_blocks_of_an_open_request_are_its_own() -> None:
    async with staged() as (stage, two):
        images, work = await encoded(stage, two), two.work
        kv, other = table(stage, work), msgspec.structs.replace(work, request="other")
        for wrong in ((kv[0],) * len(kv), (*kv, kv[0])):
            with pytest.raises(ConfigError, match="name each once"):
                await stage.open(work, wrong, images=images)
        with pytest.raises(ConfigError, match="allocate them first"):
            await stage.open(work, (*kv, 63), images=images)
        for few in (
            [images[0]],
            [images[0], ()],
            [images[0], images[1][:-1]],
            [*images, images[0]],
            None,
            [None, None],
        ):
            with pytest.raises(ConfigError):
                await stage.open(work, kv, images=few)  # type: ignore[arg-type]
        await stage.open(work, kv, images=images)
        with pytest.raises(ConfigError, match=f"of request {work.request}, which is open"):
            await stage.open(other, kv, images=images)
        with pytest.raises(ConfigError, match=f"of request {work.request}, which is open"):
            await stage.encode(two, images)
        for kind, taken in (("kv", kv), ("image", images[0])):
            with pytest.raises(ConfigError, match=f"of request {work.request}, which is open"):
                stage.free(kind, taken)
        tokens = [await stage.prefill(work)]
        stage.free("image", images[0])  # its features are in the KV blocks now
        while len(tokens) < work.max_tokens:
            tokens += await stage.decode(work.request)
        assert tokens == TWO.tokens
        await stage.close(work.request)
        stage.free("kv", kv)


async def test_two_open_requests_may_share_features() -> None:
    async with staged() as (stage, two):
        images, work = await encoded(stage, two), two.work
        other = msgspec.structs.replace(work, request="other")
        for each in (work, other):
            await stage.open(each, table(stage, each), images=images)
        assert [await stage.prefill(each) for each in (work, other)] == [TWO.tokens[0]] * 2


async def test_a_prefill_goes_on_where_the_last_ended() -> None:
    async with staged() as (stage, two):
        images, work = await encoded(stage, two), two.work
        kv, last = table(stage, work), len(work.prompt)
        await stage.open(work, kv)
        with pytest.raises(ConfigError, match="images"):
            await stage.prefill(work)
        await stage.close(work.request)
        await stage.open(work, kv, images=images)
        with pytest.raises(ConfigError, match="filled up to 0: prefill it from there"):
            await stage.prefill(work, last - 3)
        other = msgspec.structs.replace(work, prompt=work.prompt[:-1])
        with pytest.raises(ConfigError, match="is open with other work"):
            await stage.prefill(other)
        await stage.prefill(work, 0, 3)
        with pytest.raises(ConfigError, match="filled up to 3: prefill it from there"):
            await stage.prefill(work, 4)
        with pytest.raises(ConfigError, match="has no token yet"):
            await stage.decode(work.request)
        await stage.prefill(work, 2, 5)  # once more is no harm
        tokens = [await stage.prefill(work, 5)]
        with pytest.raises(ConfigError, match="has its first token"):
            await stage.prefill(work)
        while len(tokens) < work.max_tokens:
            tokens += await stage.decode(work.request)
        assert tokens == TWO.tokens


@pytest.mark.parametrize("token", [10**9, 10**30, -1, 400, 1.5])
async def test_token_ids_lie_in_the_vocabulary(token: Any) -> None:
    async with staged() as (stage, _), prepared(ONE) as prompt:
        images, work = await encoded(stage, prompt), prompt.work
        kv = table(stage, work)
        with pytest.raises(ConfigError, match="token"):
            await stage.open(work, kv, images=images, tokens=(token,))
        odd = msgspec.structs.replace(work, prompt=(token, *work.prompt[1:]))
        with pytest.raises(ConfigError, match="token"):
            await stage.open(odd, kv, images=images)
        assert await finished(stage, work, kv, images) == ONE.tokens


async def test_a_request_that_a_stage_refuses_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async with staged() as (stage, two):
        images, work = await encoded(stage, two), two.work
        kv = table(stage, work)
        (language,) = [each for each in stage._stages if "P" in each.letters]

        def refuse(_: object) -> None:
            raise StageError("no", work.request)

        with monkeypatch.context() as patch:
            patch.setattr(language, "open", refuse)
            with pytest.raises(StageError):
                await stage.open(work, kv, images=images)
        assert await finished(stage, work, kv, images) == TWO.tokens


# ---------------------------------------------------------------- instances on a network of one's own


async def test_a_name_is_looked_at_before_weights_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Wires(trinity.Connector("shm"))
    first = await trinity.start_instance(checkpoint("llava"), "E", network, cache=SIZES)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "load_instances", lambda *_: pytest.fail("read"))
        with pytest.raises(ConfigError, match=r"E0: .* a name of its own"):
            await trinity.start_instance(checkpoint("llava"), "E", network, cache=SIZES)
    first.stop()
    await first.join()
    await network.connector.aclose()


async def test_an_instance_that_cannot_be_bound_leaves_no_pool_open(monkeypatch: pytest.MonkeyPatch) -> None:
    network, pools = Wires(trinity.Connector("shm")), []
    first, second = [trinity.Instance("E", name=name) for name in ("first", "second")]

    def fail(host: Any) -> None:
        pools.extend(host.loaded.memory.values())
        raise OSError("no thread")

    def refuse(_: object) -> bytes:
        raise OSError("no publishing")

    with monkeypatch.context() as patch:
        patch.setattr(InstanceHost, "start", fail)
        with pytest.raises(OSError, match="no thread"):
            await trinity.start_instance(checkpoint("llava"), first, network, cache=SIZES)
    assert pools
    assert all(pool.closed for pool in pools)
    await asyncio.to_thread(gc.collect)
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(network.connector.routes["image"].transport, "publish", refuse)
        with pytest.raises(OSError, match="no publishing"):
            await trinity.start_instance(checkpoint("llava"), second, network, cache=SIZES)
    await asyncio.to_thread(gc.collect)
    assert len(os.listdir("/proc/self/fd")) == before
    await network.connector.aclose()


@pytest.mark.parametrize("scheme", ["inproc", "shm", "auto"])
async def test_a_start_that_failed_leaves_nothing(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread (the guard of leaks looks), no descriptor, no published pool, and the name can be had again."""
    network, published = Wires(trinity.Connector(scheme)), dict(inproc._published)
    spec = trinity.Instance("EP", name="again")

    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(CoreThread, "start", fail)  # the lanes' threads run by then
        for _ in range(2):
            with pytest.raises(RuntimeError, match="can't start"):
                await trinity.start_instance(checkpoint("llava"), spec, network, cache=SIZES)
    assert inproc._published == published
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("trinity-again")]
    host = await trinity.start_instance(checkpoint("llava"), spec, network, cache=SIZES)
    with pytest.raises(ConfigError, match="a name of its own"):
        await trinity.start_instance(checkpoint("llava"), spec, network, cache=SIZES)
    host.stop()
    await host.join()
    await network.connector.aclose()
