"""An instance that loads beside the one that it follows: what it has while it waits for the word, and thereafter."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.checkpoint_files import checkpoint
from support.emulated_pipelines import MODEL
from support.running_instances import LIVENESS_S, POOLS, SECRET
from trinity.connector import Connector
from trinity.emulation.model import EmulatedModel
from trinity.errors import ConfigError, PeerLost
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.remote.channel.channel import Address, Channel, connect
from trinity.remote.channel.wire import (
    Hello,
    InstanceFailure,
    InstanceInfo,
    InstancePrepared,
    ProceedInstance,
    Setup,
    StillBusy,
    StopInstance,
    decode,
    encode,
)
from trinity.remote.instance_setup import hold_instance_weights
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.instance_client import InstanceClient
from trinity.remote.supervision.process_config import make_setups
from trinity.remote.supervision.supply import InstancePlace
from trinity.runtime import loader
from trinity.runtime.loader import ServingConfig
from trinity.timeline import Timeline


def setup_of(roles: str, model: Path | EmulatedModel | None = None, way: str = "shm", **named: Any) -> Setup:
    config = ServingConfig(model=model or checkpoint("llava"), dtype="float32", cache=CacheConfig(pools=POOLS))
    [setup] = make_setups([Instance(roles, f"{roles}0", **named)], config, Connector(way), "round_robin")
    return msgspec.structs.replace(setup, waits=True)


@asynccontextmanager
async def waiting(launcher: Launcher, tmp_path: Path, setup: Setup) -> AsyncIterator[tuple[Channel, int]]:
    """Fork one, and send it its Setup; yield its channel and process."""
    address = Address("unix", path=str(tmp_path / "one.sock"))
    process = await launcher.launch(address, SECRET.encode(), setup.model)
    channel = None
    async with asyncio.timeout(LIVENESS_S):
        while channel is None:
            with suppress(PeerLost):
                channel = await connect(address, SECRET.encode(), encode(Hello("frontend")))
            await asyncio.sleep(0.01)
    channel.send(encode(setup))
    try:
        yield channel, process.number
    finally:
        await channel.aclose()
        await asyncio.wait_for(process.end(), LIVENESS_S)


async def hear(channel: Channel) -> tuple[Any, int]:
    """The next word of it, and how often it has said before that it lives."""
    beats = 0
    async with asyncio.timeout(LIVENESS_S):
        while isinstance(said := decode(await channel.receive()), StillBusy):
            beats += 1
    return said, beats


def pools_of(process: int) -> list[str]:
    """The memory files that it has open: its pools."""
    links = []
    for number in os.listdir(f"/proc/{process}/fd"):
        with suppress(OSError):
            links.append(os.readlink(f"/proc/{process}/fd/{number}"))
    return [each for each in links if each.startswith("/memfd")]


@pytest.fixture
def launcher(torch_launcher: Launcher) -> Launcher:
    return torch_launcher


@pytest.mark.parametrize(("roles", "way"), [("E", "shm"), ("D", "nixl"), ("PD", "auto")])
async def test_it_has_weights_and_no_pool_until_it_is_given_the_word(
    launcher: Launcher, tmp_path: Path, roles: str, way: str
) -> None:
    if way == "nixl":
        pytest.importorskip("nixl_cu13", reason="nixl is not installed")
    async with waiting(launcher, tmp_path, setup_of(roles, way=way)) as (channel, process):
        said, _ = await hear(channel)
        assert said == InstancePrepared(weights=True)
        assert pools_of(process) == []
        async with asyncio.timeout(LIVENESS_S):
            assert isinstance(decode(await channel.receive()), StillBusy), "it speaks while it waits"
        channel.send(encode(ProceedInstance()))
        said, _ = await hear(channel)
        assert isinstance(said, InstanceInfo)
        assert len(said.pools) == (1 if roles in "ED" else 2)
        assert pools_of(process) or way == "nixl"


async def test_it_does_not_wait_for_a_word_that_it_has(launcher: Launcher, tmp_path: Path) -> None:
    async with waiting(launcher, tmp_path, setup_of("D", MODEL)) as (channel, _):
        channel.send(encode(ProceedInstance()))
        assert (await hear(channel))[0] == InstancePrepared(weights=True)
        assert isinstance((await hear(channel))[0], InstanceInfo)


async def test_a_word_that_comes_before_it_listens_is_sent_once_it_does(launcher: Launcher, tmp_path: Path) -> None:
    address = Address("unix", path=str(tmp_path / "one.sock"))
    client = InstanceClient(setup_of("D", MODEL), Nobody(), Timeline(), lambda event: None)
    client.proceed()
    process = await launcher.launch(address, SECRET.encode(), "")
    place = InstancePlace(address, process)
    info = await asyncio.wait_for(client.attach(place, SECRET.encode()), LIVENESS_S)
    assert info.up.roles == "D"
    client.stop(at_once=True)
    await client.join()
    await asyncio.wait_for(process.wait(), LIVENESS_S)


class Nobody:
    """A pipeline that listens to nothing."""

    def send_to_frontend(self, messages: list[Any]) -> None: ...
    def on_lost(self, name: str, why: str, *, planned: bool) -> None: ...
    def on_back(self, member: InstanceClient) -> None: ...


async def test_another_word_ends_it(launcher: Launcher, tmp_path: Path) -> None:
    async with waiting(launcher, tmp_path, setup_of("D", MODEL)) as (channel, _):
        await hear(channel)
        channel.send(encode(StopInstance()))
        said, _ = await hear(channel)
        assert isinstance(said, InstanceFailure)
        assert "waits for the word to go on, and was sent StopInstance" in said.message


@pytest.mark.parametrize(
    ("room", "why"),
    [
        ({"pools": {"kv": 20}}, "needs at least one block of image"),
        ({"memory_bytes": 1000}, "for a block of each pool"),
    ],
)
async def test_what_cannot_be_loaded_is_said_before_the_word(
    room: dict[str, Any], why: str, launcher: Launcher, tmp_path: Path
) -> None:
    setup = setup_of("E", MODEL, **room)
    async with waiting(launcher, tmp_path, setup) as (channel, _):
        said, _ = await hear(channel)
        assert isinstance(said, InstanceFailure)
        assert why in said.message


def test_weights_that_memory_does_not_allow_twice_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = setup_of("D")
    needed = loader._count_weights(ServingConfig(model=checkpoint("llava"), dtype="float32"), "D", "cpu")
    monkeypatch.setattr("trinity.costs.pool_sizes.available_memory", lambda: 2 * needed - 1)
    assert hold_instance_weights(setup) is None
    monkeypatch.setattr("trinity.costs.pool_sizes.available_memory", lambda: 2 * needed)
    assert hold_instance_weights(setup) is not None


def test_weights_of_a_gpu_are_not_loaded_before_the_word() -> None:
    """Nothing asks for the device: there is none here."""
    assert hold_instance_weights(setup_of("D", device="cuda")) is None


def test_weights_that_are_held_are_those_that_the_instance_has() -> None:
    setup = setup_of("D")
    held = hold_instance_weights(setup)
    config = ServingConfig(model=checkpoint("llava"), dtype="float32", cache=CacheConfig(pools=POOLS))
    [loaded] = loader.load_instances(config, [Instance("D", "D0")], None)
    assert loaded.model.language is held.language  # type: ignore[union-attr, attr-defined]
    loaded.release()


def test_a_checkpoint_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        hold_instance_weights(msgspec.structs.replace(setup_of("D"), model=str(tmp_path)))
