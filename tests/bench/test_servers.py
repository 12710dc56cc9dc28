"""Engines in processes of their own: started, asked, gone; and who is told what where one is missing."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest

from support.fake_servers import FakeServer, asked, engine, right
from trinity.bench import servers
from trinity.bench.engines import __main__ as entry
from trinity.bench.servers import EngineSpec, Server, find_python, is_installed, prepared_path
from trinity.errors import ConfigError, PeerLost, UnknownName


async def test_requests_are_answered_with_their_own_tokens_as_they_come(tmp_path: Path) -> None:
    async with FakeServer(engine(), tmp_path) as server:
        requests = [asked(number, tokens=3 + number) for number in range(4)]
        answers = await server.complete(requests)
        assert server.about["engine"] == "fake"
        assert server.about["process"] != os.getpid()
        assert server.cpu_s > 0
    for request, answer in zip(requests, answers, strict=True):
        assert (answer.tokens, answer.end) == (right(request), "length")
        assert answer.times == sorted(answer.times)
        assert len(answer.times) == request.tokens
    assert len(set(answers[3].times)) > 1  # tokens come step by step, not at the end


async def test_a_request_that_fails_ends_alone(tmp_path: Path) -> None:
    async with FakeServer(engine(), tmp_path) as server:
        bad, good = server.ask(asked(text="refuse")), server.ask(asked(7))
        await bad.done.wait()
        await good.done.wait()
    assert bad.end == "error: ValueError: it is refused"
    assert (good.end, good.tokens) == ("length", right(asked(7)))


async def test_a_server_that_dies_fails_what_was_asked_of_it(tmp_path: Path) -> None:
    async with FakeServer(engine(), tmp_path) as server:
        with pytest.raises(PeerLost, match="it died"):
            await server.complete([asked(text="die"), asked()])
        later = server.ask(asked())
        await asyncio.wait_for(later.done.wait(), 120)
        assert later.end.startswith("error: the server is gone")


async def test_a_server_that_says_nonsense_fails_what_was_asked_of_it(tmp_path: Path) -> None:
    async with FakeServer(engine(), tmp_path) as server:
        answer = server.ask(asked(text="babble"))
        await asyncio.wait_for(answer.done.wait(), 120)
        assert "cannot be read (KeyError('out'))" in answer.end
        assert server.ask(asked()).end.startswith("error: the server is gone")


async def test_who_waits_for_an_answer_is_told_that_the_server_was_stopped(tmp_path: Path) -> None:
    async with FakeServer(engine(step_s=0.01), tmp_path) as server:
        answer = server.ask(asked(tokens=10_000))
    assert answer.end.startswith("error: the server is gone")


async def test_an_engine_that_takes_too_long_to_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "SERVER_START_S", 0.2)
    monkeypatch.setattr(servers, "_ENDS_S", 0.1)
    server = FakeServer(engine(silent=True), tmp_path)
    with pytest.raises(ConfigError, match=r"fake did not start within 0\.2 s: it said nothing"):
        await server.start()
    assert not server.sessions


async def test_an_engine_that_does_not_start_says_why(tmp_path: Path) -> None:
    server = FakeServer(engine(dies=True), tmp_path)
    with pytest.raises(ConfigError, match="fake did not start: no such luck"):
        await server.start()
    await server.stop()


async def test_stopping_ends_the_whole_session_and_twice_is_once(tmp_path: Path) -> None:
    server = FakeServer(engine(step_s=30), tmp_path)
    await server.start()
    (leader,) = server.sessions
    server.ask(asked())
    servers_ends, servers._ENDS_S = servers._ENDS_S, 0.1  # it is in a step that does not end
    try:
        await server.stop()
        await server.stop()
    finally:
        servers._ENDS_S = servers_ends
    with pytest.raises(ProcessLookupError):
        os.kill(leader, 0)


def test_peers_that_are_not_installed_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_PEERS", str(tmp_path))
    with pytest.raises(ConfigError, match="make bench-peers"):
        find_python("openvino")
    with pytest.raises(UnknownName, match="vllm"):
        find_python("sglang")
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    assert find_python("vllm") == python
    assert [is_installed(each) for each in ("trinity", "generate_batch", "vllm", "openvino")] == [
        True,
        True,
        True,
        False,
    ]


def test_the_command_reaches_engines_by_their_pythons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_PEERS", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "/mine")
    ours = Server(EngineSpec(), tmp_path)
    assert ours._command(Path(sys.executable)) == [sys.executable, "-m", "trinity.bench.engines", "trinity"]
    python = tmp_path / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    theirs = Server(EngineSpec(kind="vllm", threads=2), tmp_path)
    assert theirs._command(python)[1:] == [str(Path(entry.__file__).parent), "vllm"]
    seen = theirs._environment()
    assert seen["PYTHONPATH"].endswith("site")  # and not ours
    assert (seen["OMP_NUM_THREADS"], seen["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    assert ours._environment()["PYTHONPATH"] == "/mine"


def test_settings_say_what_an_engine_needs(tmp_path: Path) -> None:
    assert Server(EngineSpec(kind="generate"), tmp_path)._settings()["tokens"] == 0
    given = Server(EngineSpec(kind="openvino", tokens=64, options={"x": 1}), tmp_path)._settings()
    assert given["prepared"] == str(prepared_path("openvino", tmp_path))
    assert (given["tokens"], given["pipeline"], given["checkpoint"]) == (64, {"x": 1}, str(tmp_path.resolve()))
    json.dumps(given)


def test_what_an_engine_prepared_belongs_to_one_state_of_a_checkpoint(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"1")
    first = prepared_path("vllm", tmp_path)
    assert first == prepared_path("vllm", tmp_path) != prepared_path("openvino", tmp_path)
    weights.write_bytes(b"22")
    assert prepared_path("vllm", tmp_path) != first


def test_names_tell_engines_apart() -> None:
    every = [
        EngineSpec(),
        EngineSpec(placement="E+PD"),
        EngineSpec(threads=2),
        EngineSpec(caches=True),
        EngineSpec(kind="vllm"),
    ]
    assert [each.name for each in every] == [
        "trinity EPD",
        "trinity E+PD",
        "trinity EPD x 2 threads",
        "trinity EPD with caches",
        "vllm",
    ]


async def test_entry_by_path_finds_trinity_and_nothing_beside_it(tmp_path: Path) -> None:
    """As another engine's Python runs it: isolated, so that only the path given tells where trinity is."""
    program = (
        "import runpy, sys; sys.argv = ['engines', 'nothing', '0', '{}'];"
        f"runpy.run_path({str(Path(entry.__file__).parent)!r}, run_name='__main__')"
    )
    found = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", "-c", program, stderr=asyncio.subprocess.PIPE
    )
    _, said = await found.communicate()
    assert b"No module named 'trinity.bench.engines.serve_nothing'" in said
