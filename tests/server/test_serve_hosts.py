"""``trinity serve --hosts``: the server on instances that run already, by their file."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from server.test_serve_command import CHAT, until_ready
from support.checkpoint_files import checkpoint
from support.host_commands import HostCommand
from support.http_server import chat_body
from support.paths import ROOT
from support.running_instances import SECRET, free_port
from trinity.errors import ConfigError
from trinity.remote.hosts.hosts import plan_hosts, write_hosts
from trinity.server.command import _make_parser, make_served_pipeline

LIVENESS_S = 120.0


def test_words_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _make_parser().parse_args(["model", "--hosts", "a.toml", "--placement", "PD"])
    assert "not allowed with" in capsys.readouterr().err
    for words in (["--trusted-network"], ["--hosts-tls-key", "a.key"]):
        with pytest.raises(ConfigError, match="are of the network of --hosts FILE"):
            make_served_pipeline(_make_parser().parse_args(["model", *words]))
    for words in (["--attach"], ["--buddy", "unix:/a"], ["--journal", "unix:/a"]):
        with pytest.raises(ConfigError, match="share the instances of --hosts FILE"):
            make_served_pipeline(_make_parser().parse_args(["model", *words]))


@pytest.mark.slow
async def test_it_serves_on_them_and_leaves_them_running(tmp_path: Path) -> None:
    file, model = tmp_path / "hosts.toml", str(checkpoint("llama"))
    write_hosts(file, plan_hosts("1P1D", {"here": "127.0.0.1"}, port=free_port()))
    host = HostCommand(file, "here", "--model", model)
    try:
        await asyncio.to_thread(host.until_listening, 2)
        for _ in range(2):
            await serve_once(file, model)
            assert host.run.poll() is None
    finally:
        await asyncio.to_thread(host.close)


async def serve_once(file: Path, model: str) -> None:
    words = ["-m", "trinity", "serve", model, "--hosts", str(file), "--port", "0", "--dtype", "float32"]
    run = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, env={**os.environ, "TRINITY_SECRET": SECRET}, stdout=asyncio.subprocess.PIPE
    )
    assert run.stdout is not None
    try:
        async with asyncio.timeout(LIVENESS_S):
            url = (await run.stdout.readline()).decode().split(" at ")[1].split("/v1")[0]
            async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
                assert (await until_ready(http))[-1] == 200
                answer = await http.post(CHAT, json=chat_body())
                assert answer.status_code == 200, answer.text
            run.terminate()
            assert await run.wait() == 0
    finally:
        if run.returncode is None:
            run.kill()
            await run.wait()


@asynccontextmanager
async def served(file: Path, model: str, *further: str) -> AsyncIterator[tuple[Process, httpx2.AsyncClient]]:
    """A server on the instances of the file; it is killed at the end."""
    words = ["-m", "trinity", "serve", model, "--hosts", str(file), "--port", "0", "--dtype", "float32", *further]
    run = await asyncio.create_subprocess_exec(
        sys.executable, *words, cwd=ROOT, env={**os.environ, "TRINITY_SECRET": SECRET}, stdout=asyncio.subprocess.PIPE
    )
    assert run.stdout is not None
    try:
        url = (await run.stdout.readline()).decode().split(" at ")[1].split("/v1")[0]
        async with httpx2.AsyncClient(base_url=url, timeout=60) as http:
            assert (await until_ready(http))[-1] == 200
            yield run, http
    finally:
        if run.returncode is None:
            run.kill()
        await run.communicate()


async def read_some(http: httpx2.AsyncClient, body: dict[str, Any], events: int) -> list[dict[str, Any]]:
    """Read so many numbered events of a stream, each with its number."""
    found: list[dict[str, Any]] = []
    number = -1
    async with http.stream("POST", CHAT, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: {"):
                found.append({"number": number, **json.loads(line[6:])})
            if number >= 0 and len(found) > events:
                break
    return found


@pytest.mark.slow
async def test_a_client_of_a_killed_server_reads_on_at_its_buddy(tmp_path: Path) -> None:
    file, model, journal = tmp_path / "hosts.toml", str(checkpoint("llama")), f"unix:{tmp_path}/journal"
    write_hosts(file, plan_hosts("1P1D", {"here": "127.0.0.1"}, port=free_port()))
    host = HostCommand(file, "here", "--model", model)
    body = chat_body(temperature=0, max_tokens=400, ignore_eos=True)
    try:
        async with asyncio.timeout(LIVENESS_S):
            await asyncio.to_thread(host.until_listening, 2)
            async with (
                served(file, model, "--journal", journal) as (_, there),
                served(file, model, "--attach", "--buddy", journal) as (run, here),
            ):
                whole = (await there.post(CHAT, json=body)).json()["choices"][0]["message"]["content"]
                await asyncio.sleep(1.0)  # within which it reaches its buddy
                had = await read_some(here, {**body, "stream": True}, 12)
                run.kill()
                last = max(each["number"] for each in had)
                rest = await there.get(f"{CHAT}/{had[0]['id']}", headers={"last-event-id": str(last)})
                assert rest.status_code == 200
                chunks = [json.loads(line[6:]) for line in rest.text.split("\n") if line.startswith("data: {")]
                deltas = [each["choices"][0]["delta"].get("content") or "" for each in (*had, *chunks)]
                assert "".join(deltas) == whole
                assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    finally:
        await asyncio.to_thread(host.close)
