"""A server over a tiny model, reached as the world reaches it: by uvicorn on loopback and OpenAI's own client."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
import openai
import transformers  # noqa: F401  (a second or two, which the loop of the first test would not have)
import uvicorn

import trinity
import trinity.server
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity.server.application import ModelServer
from trinity.server.command import DrainingServer
from trinity.server.http_protocol import BoundedProtocol

QUIET: dict[str, Any] = {
    "log_config": None,
    "lifespan": "off",
    "ws": "none",
    "access_log": False,
    "http": BoundedProtocol,
}


@dataclass
class ServedModel:
    """A server on loopback: ``url`` ends before /v1; ``client`` is openai's, ``http`` a plain one."""

    pipe: trinity.Pipeline
    server: ModelServer
    url: str
    client: openai.AsyncOpenAI
    http: httpx2.AsyncClient
    uvicorn: DrainingServer


@asynccontextmanager
async def serve_model(
    name: str | Path = "llama",
    placement: str = "PD",
    config: trinity.server.ServerConfig | None = None,
    key: str = "none",
    **settings: Any,
) -> AsyncIterator[ServedModel]:
    """Serve a tiny checkpoint, or one of a directory, over HTTP. At the end no request of it may be left."""
    model = checkpoint(name) if isinstance(name, str) else name
    async with trinity.Pipeline(model, placement, dtype="float32", **pipeline_options(settings)) as pipe:
        app = trinity.server.app(pipe, config)
        async with (
            listening(app, app.state.server) as (url, running),
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client,
            httpx2.AsyncClient(base_url=url, timeout=60) as http,
        ):
            yield ServedModel(pipe, app.state.server, url, client, http, running)
        assert not app.state.server.active, "an exchange is left"
        assert not app.state.server.held.held, "bytes of a body are counted still"
        await pipe.wait_idle()
        assert not pipe.streams


@asynccontextmanager
async def listening(app: Any, server: ModelServer, drain_s: float = 30.0) -> AsyncIterator[tuple[str, DrainingServer]]:
    """Run an app by uvicorn on a free port; yields its address and the server."""
    with socket.create_server(("127.0.0.1", 0)) as opened:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)  # a reader that is slow is soon seen
        running = DrainingServer(uvicorn.Config(app, **QUIET, timeout_graceful_shutdown=5), server, drain_s)
        task = asyncio.create_task(running.serve([opened]))
        while not running.started:
            await asyncio.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{opened.getsockname()[1]}", running
        finally:
            running.should_exit = True
            await task


@cache
def answer_of_transformers(name: str, text: str, tokens: int) -> tuple[tuple[int, ...], str]:
    """Ids and text that transformers' documented chat route answers greedily, as its users call it."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint(name))
    model: Any = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32)
    messages = [{"role": "user", "content": text}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    made = model.generate(**inputs, do_sample=False, max_new_tokens=tokens, pad_token_id=0)
    ids = made[0, inputs["input_ids"].shape[1] :].tolist()
    return tuple(ids), tokenizer.decode(ids, skip_special_tokens=True)


def chat_body(text: str = "Good morning", **fields: Any) -> dict[str, Any]:
    """Body of a chat of one message."""
    return {"messages": [{"role": "user", "content": text}], **fields}


async def settled(pipe: trinity.Pipeline) -> int:
    """Wait until nothing runs; then the count of tokens that the pipeline has made so far."""
    async with asyncio.timeout(120):
        while pipe.streams:
            await asyncio.sleep(0.01)
        await pipe.wait_idle()
    return int(pipe.metrics.summary()["tokens"]["output"])
