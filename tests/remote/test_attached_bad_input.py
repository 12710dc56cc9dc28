"""What can be wrong with an instance that runs already, each as a typed error that says what to do."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

import trinity.remote.supervision.process_config
from support.checkpoint_files import checkpoint
from support.running_instances import LIVENESS_S, SECRET, by_hand, pipeline, request, tcp
from support.shared_launcher import sharing
from trinity.core.messages import FRONTEND
from trinity.errors import ConfigError, HandshakeError, LayoutMismatch, OfferRefused, PeerLost
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.channel import handshake
from trinity.remote.channel.channel import MAX_FRAME, Address, Channel, connect
from trinity.remote.channel.wire import Hello, Setup, encode
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.process_config import ProcessConfig, make_setups


@pytest.fixture(scope="module")
def launcher(torch_launcher: Launcher) -> Iterator[Launcher]:
    with sharing(torch_launcher):
        yield torch_launcher


async def refused(*instances: Instance, **named: Any) -> Exception:
    """How a pipeline fails to start on them."""
    with pytest.raises(trinity.TrinityError) as caught:
        async with asyncio.timeout(LIVENESS_S), pipeline(*instances, **named):
            pass
    return caught.value


def test_what_a_pipeline_needs_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_SECRET", raising=False)
    model, attached = checkpoint("llava"), Instance("EPD", address="tcp:127.0.0.1:1")
    with pytest.raises(ConfigError, match="hosting='process'"):
        Pipeline(model, [attached], processes=ProcessConfig(secret=SECRET))
    with pytest.raises(ConfigError, match="TRINITY_SECRET"):
        Pipeline(model, [attached], hosting="process")
    with pytest.raises(ConfigError, match="at least 32"):
        Pipeline(model, [attached], hosting="process", processes=ProcessConfig(secret="short"))
    with pytest.raises(ConfigError, match="no address"):
        Pipeline(
            model, [Instance("EPD", address="http://here")], hosting="process", processes=ProcessConfig(secret=SECRET)
        )


async def test_nobody_listens() -> None:
    error = await refused(Instance("EPD", address=str(tcp())))
    assert isinstance(error, PeerLost)
    assert "python -m trinity.instance --listen" in str(error)


async def test_another_secret(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (one,):
        error = await refused(one.instance("EPD"), secret="x" * 32)
        assert isinstance(error, HandshakeError)
        assert "ProcessConfig(secret=...)" in str(error)


async def test_another_version(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    async with by_hand(launcher, tcp()) as (one,):
        monkeypatch.setattr(handshake, "VERSION", handshake.VERSION + 1)
        error = await refused(one.instance("EPD"))
        assert isinstance(error, HandshakeError)
        assert f"version {handshake.VERSION - 1} of the protocol" in str(error)
        assert "install the same trinity" in str(error)


async def test_one_that_serves_another_pipeline(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (one,), pipeline(one.instance("EPD")) as pipe:
        error = await refused(one.instance("EPD"))
        assert isinstance(error, OfferRefused)
        assert error.reason == "busy"
        assert "another pipeline" in str(error)
        assert len((await pipe.complete(request())).token_ids) == 24


async def test_the_model_is_not_there(launcher: Launcher, tmp_path: Path) -> None:
    mine = tmp_path / "model"
    shutil.copytree(checkpoint("llava"), mine)
    async with by_hand(launcher, tcp()) as (one,):
        pipe = Pipeline(mine, [one.instance("EPD")], hosting="process", processes=ProcessConfig(secret=SECRET))
        await asyncio.to_thread(pipe._load_processor)
        setup = make_setups(pipe.instances, pipe._serving_config, pipe.connector, "round_robin")[0]
        shutil.rmtree(mine)
        assert "--model" in (await answered(one.address, setup))["message"]
        assert (await answered(one.address, setup))["error"] == "ConfigError"
        other = msgspec.structs.replace(setup, model=str(checkpoint("llava")), config="another")
        assert (await answered(one.address, other))["error"] == "LayoutMismatch"
        assert one.descriptors().count("/memfd") == 0


async def answered(address: Address, setup: Setup) -> dict[str, str]:
    channel = await connect(address, SECRET.encode(), encode(Hello(FRONTEND)))
    channel.send(encode(setup))
    answer = {"type": "StillBusy"}
    while answer["type"] == "StillBusy":
        answer = msgspec.msgpack.decode(await channel.receive())
    await channel.aclose()
    return answer


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"cache": CacheConfig(pools={"image": 8, "kv": 64}, kv_block_size=32)}, "kv blocks differ: "),
        ({"dtype": "bfloat16"}, "torch.bfloat16"),
        ({}, "runs model"),
    ],
    ids=["kv_block_size", "dtype", "checkpoint"],
)
async def test_instances_that_differ(
    launcher: Launcher, differs: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = {} if differs else {"model": str(other_weights(tmp_path))}

    def different(*given: Any) -> list[Setup]:
        first, *others = make_setups(*given)
        return [msgspec.structs.replace(first, serving={**first.serving, **differs}, **weights), *others]

    monkeypatch.setattr(trinity.remote.supervision.process_config, "make_setups", different)
    async with by_hand(launcher, tcp()) as (one,):
        error = await refused(Instance("EP", "left"), one.instance("D", "right"))
        assert isinstance(error, LayoutMismatch)
        assert said in str(error)
        assert "left" in str(error)
        assert "right" in str(error)
        await one.settled([each for each in one.descriptors() if each != "/memfd"])


def other_weights(folder: Path) -> Path:
    """The same checkpoint but for its last weights."""
    copy = folder / "other"
    shutil.copytree(checkpoint("llava"), copy)
    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-8, os.SEEK_END)
        last = file.read(8)
        file.seek(-8, os.SEEK_END)
        file.write(last[4:] + last[:4])
    return copy


@contextmanager
def largest_file(process: int, size: int) -> Iterator[None]:
    """No file of this process, nor of those that it forks, may be larger."""
    soft, hard = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.prlimit(process, resource.RLIMIT_FSIZE, (soft, hard))


async def test_no_room_for_the_pools_of_an_attached_one(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (one,):
        before = one.descriptors()
        with largest_file(one.process, 1 << 16):
            error = await refused(one.instance("EPD"))
            assert isinstance(error, ConfigError)
            assert "make the pools smaller" in str(error)
        await one.settled(before)
        error = await refused(Instance("EPD", address=str(one.address), pools={"image": 16, "kv": 1 << 40}))
        assert isinstance(error, ConfigError)
        assert "are missing" in str(error)
        await one.settled(before)
        async with pipeline(one.instance("EPD")) as pipe:
            assert len((await pipe.complete(request())).token_ids) == 24


async def test_no_room_for_the_pools_of_a_started_one(launcher: Launcher) -> None:
    with largest_file(launcher._process.pid, 1 << 16):
        error = await refused(Instance("E"), Instance("PD"))
    assert isinstance(error, ConfigError)
    assert "make the pools smaller" in str(error)
    assert children(launcher._process.pid) == []


def children(process: int) -> list[str]:
    return Path(f"/proc/{process}/task/{process}/children").read_text().split()


# ---------------------------------------------------------------- whatever connects to one that serves


async def dropped(address: Address, said: bytes) -> None:
    """Connect, say something that is no handshake; returns when the other end closes."""
    reader, writer = await asyncio.open_connection(address.host, address.port)
    writer.write(said)
    async with asyncio.timeout(LIVENESS_S):
        try:
            while await reader.read(4096):
                pass
        except ConnectionResetError:
            pass
    writer.close()


async def dropped_as_peer(address: Address, *said: bytes) -> None:
    """The same from one that holds the secret, and says this."""
    channel = await connect(address, SECRET.encode(), encode(Hello("instance")))
    for frame in said:
        channel.send(frame)
    async with asyncio.timeout(LIVENESS_S):
        with pytest.raises(PeerLost):
            await channel.receive()
    await channel.aclose()


async def cut_off(address: Address, frame: bytes) -> None:
    """The same from one that puts bytes of its own into somebody's channel."""
    channel = await connect(address, SECRET.encode(), encode(Hello("instance")))
    channel._writer.write(frame)
    async with asyncio.timeout(LIVENESS_S):
        with pytest.raises(PeerLost):
            await channel.receive()
    await channel.aclose()


async def test_strangers_do_not_disturb_a_pipeline(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (one,), pipeline(Instance("EP"), one.instance("D")) as pipe:
        before = (await pipe.complete(request()), one.descriptors())
        greeting = handshake.MAGIC + handshake.VERSION.to_bytes(2, "big") + b"\0" + b"n" * 32
        hello = encode(Hello("EP0"))
        async with asyncio.TaskGroup() as group:
            for said in (b"", b"GET / HTTP/1.1\r\n\r\n" * 9, os.urandom(4096), greeting + b"p" * 32, greeting[:20]):
                group.create_task(dropped(one.address, said))
            for frame in (b"\xc1 garbage", encode(Hello("EP0", pipeline="another")), hello):
                group.create_task(dropped_as_peer(one.address, frame))
            group.create_task(dropped_as_peer(one.address))
            for raw in ((MAX_FRAME + 1).to_bytes(4, "big") + bytes(16), bytes(4 + 16 + 16), hello * 9):
                group.create_task(cut_off(one.address, raw))
            for _ in range(4):
                assert (await pipe.complete(request())).token_ids == before[0].token_ids
        assert (await pipe.complete(request())).token_ids == before[0].token_ids
        await one.settled(before[1])


async def test_a_peer_that_says_garbage_is_lost_and_started_again(launcher: Launcher) -> None:
    async with by_hand(launcher, tcp()) as (one,), pipeline(one.instance("EPD")) as pipe:
        wanted = (await pipe.complete(request())).token_ids
        channel = cast(Channel, pipe.processes["EPD0"]._channel)
        channel.send(b"\xc1 garbage")
        async with asyncio.timeout(LIVENESS_S):
            while pipe.processes["EPD0"].setup.epoch == 0:
                await asyncio.sleep(0.02)
        assert (await pipe.complete(request())).token_ids == wanted


async def test_an_address_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        text = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
        from trinity.remote.server import serve_instance

        assert await asyncio.to_thread(serve_instance, text, SECRET.encode()) == 1
