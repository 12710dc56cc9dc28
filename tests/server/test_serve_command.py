"""The command in a process of its own: ready once the model is there, drained by SIGTERM, gone when it says so."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from support.checkpoint_files import checkpoint
from support.http_server import chat_body, listening, serve_model
from support.paths import ROOT
from trinity import ConfigError, Pipeline
from trinity.core.failure_policy import NO_RECOVERY, FailurePolicy
from trinity.server.application import ModelServer
from trinity.server.command import _make_parser, make_served_pipeline, make_server_config, open_port, serve_until_signal
from trinity.server.settings import ServerConfig

CHAT = "/v1/chat/completions"


@contextlib.asynccontextmanager
async def command(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run ``trinity serve`` on a free port; yields the process and its address."""
    given = [str(checkpoint("llama")), "--placement", "PD", "--port", "0", *arguments]
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trinity", "serve", *given,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert run.stdout is not None
    try:
        async with asyncio.timeout(60):
            first = (await run.stdout.readline()).decode()
        yield run, first.split(" at ")[1].split("/v1")[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            run.kill()
        await run.wait()


async def until_ready(http: httpx2.AsyncClient) -> list[int]:
    found: list[int] = []
    async with asyncio.timeout(100):
        while not found or found[-1] != 200:
            found.append((await http.get("/ready")).status_code)
            await asyncio.sleep(0.05)
    return found


async def test_a_running_request_ends_within_the_drain_and_new_ones_are_refused() -> None:
    async with command("--drain", "200") as (run, url), httpx2.AsyncClient(base_url=url, timeout=60) as http:
        assert (await http.get("/health")).status_code == 200
        codes = await until_ready(http)
        assert set(codes) <= {200, 503}
        body = chat_body(stream=True, max_tokens=1900, ignore_eos=True, temperature=0)
        body |= {"n": 4, "logprobs": True, "top_logprobs": 20}  # more than sockets hold, so it ends with its reader
        async with http.stream("POST", CHAT, json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("data: {")
            run.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                while (await http.get("/ready")).status_code != 503:
                    await asyncio.sleep(0.01)
            refused = await http.post(CHAT, json=chat_body())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            rest = [line async for line in lines if line]
        assert rest[-1] == "data: [DONE]", "the running request was cut off"
        async with asyncio.timeout(60):
            assert await run.wait() == 0


async def test_what_takes_longer_than_the_drain_ends_with_an_error() -> None:
    async with serve_model() as served:
        body = chat_body(stream=True, max_tokens=1500, ignore_eos=True)
        async with served.http.stream("POST", CHAT, json=body) as response:
            lines = response.aiter_lines()
            await anext(lines)
            draining = asyncio.create_task(served.server.drain(0.05))
            rest = [line async for line in lines if line]
            await draining
        assert json.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "unavailable"
        assert served.pipe.metrics.summary()["finished"] == {"cancelled": 1}


async def test_a_client_that_comes_early_is_told_when_to_come_again() -> None:
    """OpenAI's client then waits as long as it is told, twice, in place of twice a second at most."""
    server = ModelServer(Pipeline(checkpoint("llama"), "PD", dtype="float32"), ServerConfig())
    async with listening(server.make_app(), server) as (url, _), httpx2.AsyncClient(base_url=url, timeout=60) as http:
        for early in (await http.post(CHAT, json=chat_body()), await http.get("/v1/models")):
            assert (early.status_code, early.json()["error"]["code"]) == (503, "loading")
        async with server.pipe, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            answer = await client.chat.completions.create(**chat_body(model="llama", max_tokens=2))
            assert answer.usage is not None
            assert answer.usage.completion_tokens == 2
        late = await http.post(CHAT, json=chat_body())
        assert (late.status_code, late.json()["error"]["code"]) == (503, "unavailable")
    assert float(early.headers["retry-after"]) >= 5 > float(late.headers["retry-after"])


async def test_what_is_loaded_is_no_longer_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection would go through 400,000 objects of torch and transformers while every request waits."""
    frozen: list[int] = []

    def count() -> None:  # and freeze nothing: what the tests have is to be freed; another one may have frozen torch
        frozen.append(gc.get_freeze_count() + len(gc.get_objects()))

    monkeypatch.setattr(gc, "freeze", count)

    def leave(*_: object, flush: bool = False) -> None:
        if frozen:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("builtins.print", leave)  # "serving ..." is said once all is there
    async with asyncio.timeout(100):
        await serve_until_signal(_make_parser().parse_args([str(checkpoint("llama")), "--placement=PD", "--port=0"]))
    assert len(frozen) == 1
    assert frozen[0] > 100_000


async def test_an_idle_server_ends_without_a_word() -> None:
    """What is frozen would outlive Python's last collection, and triton's bindings then list it in a hundred lines."""
    async with command() as (run, url), httpx2.AsyncClient(base_url=url, timeout=60) as http:
        await until_ready(http)
        assert run.stdout is not None
        assert b"serving" in await run.stdout.readline(), "from where on all is frozen"
        run.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            _, said = await run.communicate()
    assert run.returncode == 0
    assert b"leaked" not in said


async def test_a_port_in_use_and_a_model_that_is_not_there() -> None:
    with open_port("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="give another --port"):
        open_port("127.0.0.1", taken.getsockname()[1])
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "trinity", "serve", "no/such/model", "--port", "0",
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(60):
        _, said = await run.communicate()
    assert run.returncode == 2
    assert b"trinity serve: " in said
    assert b"no/such/model" in said
    assert b"Traceback" not in said


def test_arguments_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_API_KEY", "of-the-environment")
    given = ["m", "--api-key", "a", "--served-model-name", "x", "--served-model-name", "y", "--max-body-mb", "2"]
    config = make_server_config(_make_parser().parse_args(given))
    assert config.api_keys == ("a", "of-the-environment")
    assert config.models == ("x", "y")
    assert config.max_body_bytes == 2 << 20
    with pytest.raises(ConfigError, match="tool_format"):
        make_server_config(_make_parser().parse_args(["m", "--tool-parser", "unheard-of"]))


def test_several_encoders_for_one_request_are_an_argument_too() -> None:
    model = str(checkpoint("llava"))
    for words, wanted in (([], 1), (["--spread=3"], 3)):
        pipe = make_served_pipeline(_make_parser().parse_args([model, "--placement=3E1PD", *words]))
        assert pipe._frontend.core.dispatch.spread == wanted
    with pytest.raises(ConfigError, match="spread"):
        make_served_pipeline(_make_parser().parse_args([model, "--spread=0"]))


FEW = ["--retry-share=.05", "--deaths=2", "--alone-after=1"]


def test_what_survives_a_loss_is_an_argument_too() -> None:
    model = str(checkpoint("llama"))
    few = FailurePolicy(retry_share=0.05, deaths=2, alone_after=1)
    for words, wanted in (
        ([], FailurePolicy()),
        (["--recoveries=0", "--wait=0"], NO_RECOVERY),
        (FEW, few),
    ):
        pipe = make_served_pipeline(_make_parser().parse_args([model, "--placement=PD", *words]))
        assert pipe._frontend.core.options.failures == wanted
    with pytest.raises(ConfigError, match="recoveries"):
        make_served_pipeline(_make_parser().parse_args([model, "--recoveries=-1"]))


async def test_mounted_under_a_prefix_in_another_app() -> None:
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse
    from starlette.routing import Mount, Route

    async def home(request: Any) -> PlainTextResponse:
        return PlainTextResponse("mine")

    async with serve_model() as served:
        ours = served.server.make_app()
        outer = Starlette(routes=[Route("/", home), Mount("/llm", ours)])
        async with listening(outer, served.server) as (url, _), httpx2.AsyncClient(base_url=url, timeout=60) as http:
            assert (await http.get("/")).text == "mine"
            assert (await http.get("/llm/ready")).status_code == 200
            found = await http.post("/llm/v1/chat/completions", json=chat_body(max_tokens=2))
            assert found.json()["usage"]["completion_tokens"] == 2
            assert (await http.get("/llm/v1/nothing")).json()["error"]["code"] == "unknown_path"
