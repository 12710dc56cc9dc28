"""Composition by hand: stages, pools, a connector and instances without a Pipeline give the model's own tokens."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any

import pytest
import torch

import trinity
from support.checkpoint_files import checkpoint
from support.composition import SIZES, Wires, load, prepared
from support.lender import ready
from support.pipeline_driver import ONE, TEXT, TWO, Case, all_tokens
from support.wrapped_transports import WrappedTransport
from trinity.core.messages import Emit, Finished, Forget, Submit
from trinity.errors import ClosedError, ConfigError, IntegrityError, LayoutMismatch, OfferRefused
from trinity.memory.block_memory import BlockMemory, BlockShape


@pytest.fixture(scope="module", autouse=True)
def expected() -> None:
    all_tokens()


async def composed(case: Case, connector: trinity.Connector) -> tuple[list[int], list[dict[str, Any]]]:
    """Serve a request on an E, a P and a D; its tokens, and the records of what moved."""
    moved: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        prompt = await stack.enter_async_context(prepared(case))
        encoder, prefill, decode = [await stack.enter_async_context(await load(letter)) for letter in "EPD"]
        work = prompt.work
        images = [encoder.allocate("image", span.tokens) for span in work.media]
        await encoder.encode(prompt, images)
        places = [prefill.allocate("image", span.tokens) for span in work.media]
        for span, here, there in zip(work.media, images, places, strict=True):
            pools = encoder.pools["image"], here, prefill.pools["image"], there
            moved.append(await connector.move(*pools, rows=span.tokens))
        kv = prefill.allocate("kv", len(work.prompt))
        await prefill.open(work, kv, images=places)
        assert await prefill.prefill(work, 0, 5) is None
        tokens = [await prefill.prefill(work, 5)]
        assert tokens[0] is not None
        table = decode.allocate("kv", len(work.prompt) + work.max_tokens)
        pools = prefill.pools["kv"], kv, decode.pools["kv"], table[: len(kv)]
        moved.append(await connector.move(*pools, rows=len(work.prompt)))
        await decode.open(work, table, tokens=[tokens[0]])
        while len(tokens) < work.max_tokens:
            tokens += await decode.decode(work.request)
        await prefill.close(work.request)
        await decode.close(work.request)
    return [token for token in tokens if token is not None], moved


@pytest.mark.parametrize("case", [TEXT, ONE, TWO], ids=["text", "an image", "two images"])
async def test_stages_and_a_connector_give_the_models_own_tokens(case: Case) -> None:
    connector = trinity.Connector()
    tokens, moved = await composed(case, connector)
    assert tokens == case.tokens
    assert [record["kind"] for record in moved] == ["image"] * len(case.pictures) + ["kv"]
    assert all(record["scheme"] == "inproc" and record["bytes"] > 0 for record in moved)
    await connector.aclose()


@pytest.mark.parametrize("medium", ["shm", "nixl", "nixl-push", {"image": "inproc", "kv": "shm"}], ids=str)
async def test_over_every_transport(medium: Any) -> None:
    if isinstance(medium, str):
        ready(medium.partition("-")[0])
    connector = trinity.Connector(medium, verify="always")
    tokens, moved = await composed(ONE, connector)
    assert tokens == ONE.tokens
    assert all(record["digest_s"] >= 0 for record in moved)
    await connector.aclose()


# ---------------------------------------------------------------- one stage


async def test_blocks_are_taken_and_given_back() -> None:
    async with await load("PD") as stage:
        assert stage.roles == "PD"
        assert set(stage.pools) == {"image", "kv"}
        first, second = stage.allocate("kv", 9), stage.allocate("kv", 4)
        assert (len(first), len(second)) == (3, 1)
        assert not set(first) & set(second)
        stage.free("kv", first)
        with pytest.raises(ConfigError, match="63 of 64 are free: free some"):
            stage.allocate("kv", 64 * 4)
        with pytest.raises(ConfigError, match="no audio blocks"):
            stage.allocate("audio", 1)
        stage.free("kv", second)
        assert len(stage.allocate("kv", 64 * 4)) == 64


async def test_what_a_stage_does_not_serve_is_refused_by_name() -> None:
    async with prepared(ONE) as prompt, await load("D") as stage:
        with pytest.raises(ConfigError, match=r"load_stage\(model, 'E'\) serves E"):
            await stage.encode(prompt, [(0,)])
        with pytest.raises(ConfigError, match="nobody is not open"):
            await stage.decode("nobody")
        with pytest.raises(ConfigError, match="image"):
            stage.allocate("image", 1)
    with pytest.raises(ClosedError, match="load it again"):
        await stage.decode("nobody")
    await stage.aclose()


async def test_several_requests_decode_in_one_step() -> None:
    async with prepared(TEXT) as one, prepared(ONE) as two, await load("EPD") as stage:
        tokens: dict[str, list[int]] = {}
        for prompt in (one, two):
            work = prompt.work
            images = [stage.allocate("image", span.tokens) for span in work.media]
            if images:
                await stage.encode(prompt, images)
            await stage.open(work, stage.allocate("kv", len(work.prompt) + work.max_tokens), images=images)
            first = await stage.prefill(work)
            assert first is not None
            tokens[work.request] = [first]
        for _ in range(7):
            for name, token in zip(tokens, await stage.decode(*tokens), strict=True):
                tokens[name].append(token)
    assert list(tokens.values()) == [TEXT.tokens, ONE.tokens]


@pytest.mark.parametrize(
    ("roles", "settings"),
    [
        ("X", {}),
        ("E", {"cache": trinity.CacheConfig(pools={"image": 0})}),
        (trinity.Instance("E", image_budget=2), {}),
        (trinity.Instance("E", address="tcp:127.0.0.1:1"), {}),
    ],
    ids=str,
)
async def test_what_cannot_be_loaded_is_refused(roles: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await load(roles, **settings)


@pytest.mark.parametrize(
    ("model", "roles", "settings"),
    [
        (None, "E", {}),
        ("no such folder", "E", {}),
        (..., 3, {}),
        (..., "E", {"dtype": "float99"}),
        (..., "E", {"dtype": 16}),
        (..., "E", {"cache": 5}),
    ],
    ids=str,
)
async def test_wrong_types_and_values_are_refused(model: Any, roles: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        await trinity.load_stage(checkpoint("llava") if model is ... else model, roles, **settings)
    network = Wires(trinity.Connector())
    with pytest.raises(ConfigError):
        await trinity.start_instance(checkpoint("llava") if model is ... else model, roles, network, **settings)


async def test_a_network_is_one_and_names_are_once() -> None:
    with pytest.raises(ConfigError, match="network"):
        await trinity.start_instance(checkpoint("llava"), "E", object())  # type: ignore[arg-type]
    network = Wires(trinity.Connector())
    first = await trinity.start_instance(checkpoint("llava"), "E", network, cache=SIZES)
    with pytest.raises(ConfigError, match=r"E0: .* a name of its own"):
        await trinity.start_instance(checkpoint("llava"), "E", network, cache=SIZES)
    first.stop()
    await first.join()
    await network.connector.aclose()


async def test_blocks_that_are_not_of_the_pool_or_not_taken_are_refused() -> None:
    async with prepared(ONE) as prompt, await load("EPD") as stage:
        for wrong in ([8], [-1], "a", 3, [0.5]):
            with pytest.raises(ConfigError):
                await stage.encode(prompt, [wrong])  # type: ignore[list-item]
            with pytest.raises(ConfigError):
                stage.free("image", wrong)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="has 1 images"):
            await stage.encode(prompt, [])
        with pytest.raises(ConfigError):
            await stage.open(prompt.work, [64])
        blocks = stage.allocate("kv", 8)
        for given in ([*blocks, *blocks], [63]):
            with pytest.raises(ConfigError, match="free each once"):
                stage.free("kv", given)
        for rows in (-1, "a", 2.5):
            with pytest.raises(ConfigError, match="rows"):
                stage.allocate("kv", rows)  # type: ignore[arg-type]


async def test_a_request_is_driven_as_it_can_be() -> None:
    async with prepared(TEXT) as prompt, await load("PD") as stage:
        work = prompt.work
        last, most = len(work.prompt), work.max_tokens
        with pytest.raises(ConfigError, match="not open"):
            await stage.prefill(work)
        with pytest.raises(ConfigError, match="KV blocks hold 4 tokens, and the prompt has"):
            await stage.open(work, stage.allocate("kv", 1))
        table = stage.allocate("kv", last + most)
        await stage.open(work, table)
        with pytest.raises(ConfigError, match="open already"):
            await stage.open(work, table)
        with pytest.raises(ConfigError, match="has no token yet"):
            await stage.decode(work.request)
        for start, end in ((0, last + 1), (last, last), (3, 2)):
            with pytest.raises(ConfigError, match=f"none of a prompt of {last} tokens"):
                await stage.prefill(work, start, end)
        tokens = [await stage.prefill(work)]
        with pytest.raises(ConfigError, match="name each once"):
            await stage.decode(work.request, work.request)
        while len(tokens) < most:
            tokens += await stage.decode(work.request)
        with pytest.raises(ConfigError, match=f"has its max_tokens, {most}"):
            await stage.decode(work.request)
        assert tokens == TEXT.tokens
        await stage.close(work.request)
        with pytest.raises(ConfigError, match="not open"):
            await stage.decode(work.request)
        await stage.open(work, table[: -(-last // 4)], tokens=[1])
        for _ in range(-last % 4):
            await stage.decode(work.request)
        with pytest.raises(ConfigError, match=r"KV blocks of request .* hold"):
            await stage.decode(work.request)
    assert all(memory.closed for memory in stage.pools.values())
    for call in (lambda: stage.allocate("kv", 1), lambda: stage.free("kv", table)):
        with pytest.raises(ClosedError, match="load it again"):
            call()


@pytest.mark.parametrize("wrong", [None, 3, "work", object()], ids=["none", "a number", "a text", "an object"])
async def test_values_of_other_types_are_refused_by_name(wrong: Any) -> None:
    async with prepared(ONE) as prompt, await load("EPD") as stage:
        await stage.open(prompt.work, stage.allocate("kv", len(prompt.work.prompt)))
        said = []
        for call in (
            stage.encode(wrong, [(0,)]),
            stage.open(wrong, [0]),
            stage.open(prompt.work, [1], tokens=wrong),
            stage.prefill(wrong),
            stage.prefill(prompt.work, "a" if wrong is None else object()),  # type: ignore[arg-type]
            stage.decode(prompt.work.request, 7 if isinstance(wrong, str) else wrong),  # type: ignore[arg-type]
        ):
            with pytest.raises(ConfigError) as caught:
                await call
            said.append(str(caught.value).split()[0])
        assert said == ["prompt", "work", "tokens", "work", "start", "requests"]


# ---------------------------------------------------------------- moving


def pool(kind: str = "kv", rows: int = 4, blocks: int = 8) -> BlockMemory:
    made = BlockMemory(BlockShape(kind, (2, 2, 1, rows, 8), torch.float32), blocks, shared=True)
    made.tensor.copy_(torch.rand(made.tensor.shape))
    return made


async def test_a_move_carries_rows_and_nothing_else() -> None:
    source, target, connector = pool(), pool(), trinity.Connector()
    before = target.tensor.clone()
    record = await connector.move(source, [5, 2], target, [1, 7], rows=5)
    assert torch.equal(target.tensor[1], source.tensor[5])
    assert torch.equal(target.tensor[7, ..., :1, :], source.tensor[2, ..., :1, :])
    assert torch.equal(target.tensor[7, ..., 1:, :], before[7, ..., 1:, :])
    assert record["bytes"] == 5 * source.block_bytes // 4
    assert (await connector.move(target, [0], source, [0]))["bytes"] == source.block_bytes
    assert torch.equal(source.tensor[0], target.tensor[0])
    target.close()
    for pools in ((source, target), (target, source)):
        with pytest.raises(ClosedError, match="kv blocks is closed"):
            await connector.move(pools[0], [0], pools[1], [0])
    await connector.aclose()
    with pytest.raises(ClosedError):
        await connector.move(source, [0], target, [0])


@pytest.mark.parametrize(
    ("target", "blocks", "places", "rows", "error"),
    [
        (pool("image"), [0], [0], None, ConfigError),
        (pool(rows=8), [0], [0], None, LayoutMismatch),
        (pool(), [8], [0], None, OfferRefused),
        (pool(), [-1], [0], None, OfferRefused),
        (pool(), [0], [9], None, OfferRefused),
        (pool(), [0, 1], [0], None, OfferRefused),
        (pool(), [0, 1], [0, 0], None, OfferRefused),
        (pool(), [0, 1], [0, 1], 9, ConfigError),
        (pool(), [0, 1], [0, 1], 4, ConfigError),
        (pool(), [0], [0], 2.5, ConfigError),
        (pool(), "a", [0], None, ConfigError),
        (pool(), [0], 3, None, ConfigError),
    ],
)
async def test_a_move_that_cannot_be_is_refused_before_a_byte_moves(
    target: BlockMemory, blocks: Any, places: Any, rows: Any, error: type[Exception]
) -> None:
    connector, before = trinity.Connector(), target.tensor.clone()
    with pytest.raises(error):
        await connector.move(pool(), blocks, target, places, rows=rows)
    assert torch.equal(target.tensor, before)
    await connector.aclose()


async def test_blocks_that_arrive_altered_are_noticed() -> None:
    def spoil(memory: BlockMemory, blocks: Any) -> None:
        memory.tensor[list(blocks)] += 1

    connector = trinity.Connector(WrappedTransport(after=spoil), verify="always")
    with pytest.raises(IntegrityError):
        await connector.move(pool(), [1], pool(), [2])
    await connector.aclose()


# ---------------------------------------------------------------- instances on a network of one's own


@pytest.mark.parametrize("placement", [("E", "PD"), ("EP", "D"), ("E", "P", "D")], ids=str)
async def test_instances_serve_on_a_network_of_ones_own(placement: tuple[str, ...]) -> None:
    case = TWO
    network = Wires(trinity.Connector())
    cache = trinity.CacheConfig(pools={"image": 8, "kv": 256}, kv_block_size=4)
    async with prepared(case) as prompt:
        for roles in placement:
            host = await trinity.start_instance(checkpoint("llava"), roles, network, dtype="float32", cache=cache)
            network.hosts[host.name] = host
        for host in network.hosts.values():
            for peer in network.hosts.values():
                host.post(peer.announcement())
        next(iter(network.hosts.values())).post(Submit(prompt.work, prompt.inputs))
        tokens: dict[int, int] = {}
        async with asyncio.timeout(60):
            while len(tokens) < case.max_tokens:
                message = await network.said.get()
                if isinstance(message, Emit):
                    tokens |= {index: sampled.token for _, _, index, sampled in message.rows()}
                assert not isinstance(message, Finished) or message.failure is None
        for host in network.hosts.values():
            host.post(Forget(prompt.work.request))
            host.stop()
            await host.join()
            assert host.core.idle()
    assert [tokens[index] for index in range(case.max_tokens)] == case.tokens
    assert {name for _, name in network.sent} >= {"Offer", "Ready", "Commit", "Release"}
    await network.connector.aclose()
