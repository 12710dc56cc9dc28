"""``trinity serve --hosts``: the server on instances that run already, by their file."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import httpx2
import pytest

from server.test_serve_command import CHAT, until_ready
from support.checkpoint_files import checkpoint
from support.host_commands import HostCommand
from support.http_server import chat_body
from support.paths import ROOT
from support.running_instances import SECRET, free_port
from trinity.errors import ConfigError
from trinity.remote.hosts import plan_hosts, write_hosts
from trinity.server.command import _make_parser, make_served_pipeline

LIVENESS_S = 120.0


def test_words_that_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _make_parser().parse_args(["model", "--hosts", "a.toml", "--placement", "PD"])
    assert "not allowed with" in capsys.readouterr().err
    for words in (["--trusted-network"], ["--hosts-tls-key", "a.key"]):
        with pytest.raises(ConfigError, match="are of the network of --hosts FILE"):
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
