"""Instances that run before a pipeline does, as if somebody had started them by hand."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.core.failure_policy import NO_RECOVERY
from trinity.errors import TransportError, TrinityError
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.channel.channel import Address, connect
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.channel.wire import Hello, encode
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.supply import InstanceProcess
from trinity.request import Output, Request, Sampling

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
GREEDY = Sampling(ignore_eos=True)
SECRET = "the secret of a pipeline and of its tests"
POOLS = {"image": 16, "kv": 256}
LIVENESS_S = 60.0
OWN_FOLDER = re.compile(r"trinity-\w+/")  # of UCX's shared memory
KIND = re.compile(r"/dev/shm/\w+_|[^:]*")  # of what a descriptor is: those of UCX have names of their own
IDLE_SOCKETS = 3  # a loop's own pair, and the one that listens


def request(max_tokens: int = 24) -> Request:
    return Request("<image>\nWhat is this?", images=PHOTOS[:1], max_tokens=max_tokens, sampling=GREEDY)


def free_port() -> int:
    with socket.socket() as probing:
        probing.bind(("127.0.0.1", 0))
        return int(probing.getsockname()[1])


def tcp() -> Address:
    return Address("tcp", host="127.0.0.1", port=free_port())


@dataclass
class ByHand:
    """One such instance: where it listens, and its process."""

    address: Address
    life: InstanceProcess

    @property
    def process(self) -> int:
        return self.life.number

    def instance(self, roles: str, name: str = "", **named: Any) -> Instance:
        return Instance(roles, name, address=str(self.address), pools=POOLS, **named)

    async def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process, number)
        await asyncio.wait_for(self.life.wait(), LIVENESS_S)

    def descriptors(self) -> list[str]:
        return descriptors(self.process)

    async def settled(self, had: list[str]) -> None:
        """Until it has nothing open but what it ``had``."""
        until = time.monotonic() + LIVENESS_S
        while left := Counter(self.descriptors()) - Counter(had):
            assert time.monotonic() < until, f"left open: {left}"
            await asyncio.sleep(0.05)


def descriptors(process: int) -> list[str]:
    """What a process has open, by kind: sockets, memory files, pipes."""
    found = []
    for number in os.listdir(f"/proc/{process}/fd"):
        with suppress(OSError):
            link = OWN_FOLDER.sub("", os.readlink(f"/proc/{process}/fd/{number}"))
            found.append(KIND.match(link).group())  # type: ignore[union-attr]
    return sorted(found)


@asynccontextmanager
async def by_hand(
    launcher: Launcher, *addresses: Address, model: str | None = None, tls: TLSConfig | None = None
) -> AsyncIterator[list[ByHand]]:
    """Instances at these addresses, each up and listening."""
    running = [await started(launcher, address, model, tls) for address in addresses]
    try:
        yield running
    finally:
        for each in running:
            await each.kill()


async def started(
    launcher: Launcher, address: Address, model: str | None = None, tls: TLSConfig | None = None
) -> ByHand:
    known = str(checkpoint("llava")) if model is None else model
    life = await launcher.launch(address, SECRET.encode(), known, once=False, tls=tls)
    async with asyncio.timeout(LIVENESS_S):
        while True:
            with suppress(TransportError):
                channel = await connect(address, SECRET.encode(), encode(Hello("test")), tls=tls)
                await channel.aclose()
                one = ByHand(address, life)
                while one.descriptors().count("socket") > IDLE_SOCKETS:
                    await asyncio.sleep(0.01)
                return one
            await asyncio.sleep(0.02)


@asynccontextmanager
async def pipeline(*instances: Instance, **named: Any) -> AsyncIterator[Pipeline]:
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "pools": POOLS, "secret": SECRET}
    settings |= {"failures": NO_RECOVERY, **named}  # tests look at what a loss is; tests/e2e/ at what survives it
    async with Pipeline(checkpoint("llava"), list(instances), **pipeline_options(settings)) as pipe:
        yield pipe


async def recovered(pipe: Pipeline, asked: Request) -> Output:
    """The first answer after a loss; until the instance is back, requests are refused with a typed error."""
    async with asyncio.timeout(LIVENESS_S):
        while True:
            try:
                return await pipe.complete(asked)
            except TrinityError:
                await asyncio.sleep(0.05)
