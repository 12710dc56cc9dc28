"""A server over an emulated model, which needs no torch."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2

import trinity.server
from support.emulated_pipelines import MODEL, POOLS
from support.http_server import listening
from trinity.emulation.model import EmulatedModel
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.server.application import ModelServer
from trinity.server.command import DrainingServer
from trinity.traces.trace import SLO


@dataclass
class EmulatedServer:
    """A server on loopback."""

    pipe: Pipeline
    server: ModelServer
    url: str
    http: httpx2.AsyncClient
    uvicorn: DrainingServer


@asynccontextmanager
async def serve_emulated(
    placement: str = "1E1P1D",
    config: trinity.server.ServerConfig | None = None,
    model: EmulatedModel = MODEL,
    slo: SLO | None = None,
    **named: Any,
) -> AsyncIterator[EmulatedServer]:
    """Serve an emulated model over HTTP, for requests that a test gives to ``pipe``. ``named``: of ``Pipeline``."""
    async with Pipeline(model, placement, cache=CacheConfig(pools=POOLS), slo=slo, **named) as pipe:
        app = trinity.server.app(pipe, config)
        async with (
            listening(app, app.state.server, drain_s=5.0) as (url, running),
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
        ):
            yield EmulatedServer(pipe, app.state.server, url, http, running)
