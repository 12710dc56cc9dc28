"""Stages and instances of a tiny LLaVA put together by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trinity
from support.checkpoint_files import checkpoint
from support.pipeline_driver import Case
from trinity.core.messages import Value
from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.runtime.compose import LoadedStage
from trinity.runtime.host import InstanceHost

SIZES = trinity.CacheConfig(pools={"image": 8, "kv": 64}, image_block_size=10, kv_block_size=4)


@asynccontextmanager
async def prepared(case: Case) -> AsyncIterator[ProcessedRequest]:
    processor = await asyncio.to_thread(RequestProcessor, checkpoint("llava"))
    try:
        yield await processor.aprocess(case.request())
    finally:
        await asyncio.to_thread(processor.close)


async def load(roles: str, **settings: Any) -> LoadedStage:
    return await trinity.load_stage(checkpoint("llava"), roles, **{"dtype": "float32", "cache": SIZES, **settings})


class Wires:
    """Carries messages between instances of this process, and keeps what they say to the front end."""

    def __init__(self, connector: trinity.Connector) -> None:
        self.loop, self.connector = asyncio.get_running_loop(), connector
        self.hosts: dict[str, InstanceHost] = {}
        self.said: asyncio.Queue[Value] = asyncio.Queue()
        self.sent: list[tuple[str, str]] = []

    def send_to_peer(self, name: str, message: Value) -> None:
        self.sent.append((name, type(message).__name__))
        self.hosts[name].post(message)

    def send_to_frontend(self, messages: list[Value]) -> None:
        for message in messages:
            self.said.put_nowait(message)

    def report_crash(self, name: str, error: BaseException) -> None:
        raise AssertionError(f"{name} failed") from error
