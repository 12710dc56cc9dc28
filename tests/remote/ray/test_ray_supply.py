"""RaySupply and what it is made of where no Ray is installed: its refusals, its driver's losses, a host's actor."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from support.running_instances import SECRET
from trinity.core.messages import FRONTEND
from trinity.errors import ConfigError, PeerLost, TransportError
from trinity.remote.channel.channel import Address, connect
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.channel.wire import Hello, encode
from trinity.remote.ray import ray_host, ray_session, ray_supply
from trinity.remote.ray.ray_host import HostActor
from trinity.remote.ray.ray_supply import RaySupply
from trinity.remote.supervision.process_identity import has_ended, read_start
from trinity.remote.supervision.supply import InstanceOrder, InstanceProcess

KEY = SECRET.encode()
LIVENESS_S = 120.0
HOST = "127.0.0.1"


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_supply, "has_ray", lambda: True)


def order(name: str = "E0", epoch: int = 0, **named: Any) -> InstanceOrder:
    return InstanceOrder(name, epoch, name[0], KEY, **named)


# ---------------------------------------------------------------- bad use


def test_without_ray_it_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_supply, "has_ray", lambda: False)
    with pytest.raises(ConfigError, match=r"needs ray, here and on every host: pip install 'trinity-epd\[ray\]'"):
        RaySupply("1E1P1D", trusted_network=True)


@pytest.mark.parametrize(
    "given",
    [{"cpus": 0}, {"cpus": -1.0}, {"gpus": -1}, {"timeout_s": 0}, {"timeout_s": float("inf")}, {"address": 3},
     {"cluster": "H100"}, {"placement": 7}, {"placement": "QQ"}, {"trusted_network": "yes"}],
    ids=str,
)  # fmt: skip
def test_bad_arguments_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RaySupply(**{"placement": "1PD", **given})


async def test_a_network_that_nobody_trusts_needs_certificates() -> None:
    """It is refused before anything is begun, and before Ray is looked for."""
    supply = RaySupply("1E1P1D")
    with pytest.raises(ConfigError, match=r"ProcessConfig\(tls=.*or.*trusted_network=True"):
        await supply.begin(order())
    await supply.end("E0", 0)
    await supply.aclose()


async def test_an_instance_of_another_placement_is_refused() -> None:
    with pytest.raises(ConfigError, match="no instance D7"):
        await RaySupply("1E1P1D", trusted_network=True).begin(order("D7"))


# ---------------------------------------------------------------- a driver that fails

DRIVER = """
import json, sys, time
config = json.loads(sys.stdin.readline())
def say(**message): print(json.dumps(message), flush=True)
"""


def driven_by(monkeypatch: pytest.MonkeyPatch, program: str) -> RaySupply:
    """A supply whose driver is this program: Ray's own does not fail on demand."""
    monkeypatch.setattr(ray_session, "PROGRAM", ("-c", DRIVER + program))
    monkeypatch.setattr(ray_session, "RAY_JOIN_S", 1.0)
    monkeypatch.setattr(ray_session, "LATE_S", 0.5)
    monkeypatch.setattr(ray_session, "RAY_CLOSE_S", 1.0)
    monkeypatch.setattr(ray_supply, "END_AGAIN_S", 0.02)
    return RaySupply("1E1P1D", trusted_network=True, timeout_s=0.5)


FAILING = {
    "ends": ("sys.exit(1)", PeerLost, "driver of Ray has ended"),
    "ends at an order": ("say(ready=True); sys.stdin.readline()", PeerLost, "driver of Ray has ended"),
    "is silent": ("time.sleep(60)", PeerLost, "gave no answer within 1.5 s"),
    "is silent after its start": ("say(ready=True); time.sleep(60)", PeerLost, "driver of Ray does not answer"),
    "has no room": ("say(failed='no room', kind='ConfigError'); sys.stdin.read()", ConfigError, "no room"),
    "has no cluster": ("say(failed='none', kind='PeerLost'); sys.stdin.read()", PeerLost, "none"),
    "speaks something else": ("print('hello', flush=True); sys.stdin.read()", PeerLost, "driver of Ray said"),
}


@pytest.mark.parametrize("case", FAILING)
async def test_a_driver_that_fails_is_a_typed_error_soon(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, kind, said = FAILING[case]
    supply = driven_by(monkeypatch, program)
    async with asyncio.timeout(LIVENESS_S):
        with pytest.raises(kind, match=said):
            await supply.begin(order())
        await supply.aclose()
        await supply.aclose()


@pytest.mark.parametrize("line", ["5", "[]", "null", "{", "hello", "[" * 100_000])
async def test_a_driver_that_makes_no_sense_is_ended(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would live on beside the next, with its hosts, and nobody would close it."""
    saying = f"say(ready=True); sys.stdin.readline(); print({line!r}, flush=True); sys.stdin.read()"
    supply = driven_by(monkeypatch, saying)
    async with asyncio.timeout(LIVENESS_S):
        session = await supply._get_session()
        with pytest.raises(PeerLost, match="driver of Ray has ended"):
            await supply.begin(order())
        await session._process.wait()
        assert session.ended
        assert await supply._get_session() is not session
        await supply.aclose()


ONCE = """
say(ready=True)
asked = json.loads(sys.stdin.readline())
say(id=asked["id"], address="tcp:127.0.0.1:7000", process=2147483647, born=1, node="there")
asked = json.loads(sys.stdin.readline())
assert asked["name"] == "E0" and asked["process"] == 2147483647 and asked["node"] == "there", asked
"""


async def test_a_life_outlasts_its_driver_and_is_ended_by_the_next(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its process and node are known: the next driver looks there, whatever has become of the actor."""
    supply = driven_by(monkeypatch, ONCE)
    place = await supply.begin(order())
    assert place.address == Address("tcp", host=HOST, port=7000)
    assert place.trusted_network, "RaySupply was told, and the pipeline does not ask again"
    answering = "say(ready=True)\nasked = json.loads(sys.stdin.readline())\n"
    answering += "assert asked['end'] is None, 'an actor of another session'\nsay(id=asked['id'], ended=True)\n"
    monkeypatch.setattr(ray_session, "PROGRAM", ("-c", DRIVER + answering + "sys.stdin.read()"))
    async with asyncio.timeout(LIVENESS_S):
        await supply.end("E0", 0)  # the driver ends instead of an answer
    assert [said.getMessage() for said in caplog.records if "not certain" in said.getMessage()]
    await supply.aclose()


async def test_a_life_that_never_began_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    supply = driven_by(monkeypatch, "say(ready=True)\nsys.stdin.read()")
    beginning = asyncio.ensure_future(supply.begin(order()))
    await asyncio.sleep(0)
    beginning.cancel()
    await asyncio.gather(beginning, return_exceptions=True)
    async with asyncio.timeout(LIVENESS_S):
        await supply.end("E0", 0)
        await supply.aclose()


async def test_two_pipelines_need_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    supply = driven_by(monkeypatch, ONCE)
    await supply.begin(order())
    with pytest.raises(ConfigError, match="each pipeline needs a RaySupply of its own"):
        await supply.begin(order())
    await supply.aclose()


# ---------------------------------------------------------------- the actor of a host


@asynccontextmanager
async def actor(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[HostActor]:
    monkeypatch.setattr(ray_host, "find_node", lambda: (HOST, "node"))
    monkeypatch.setattr(os, "environ", os.environ.copy())
    made = HostActor(1)
    try:
        yield made
    finally:
        await made.close()


async def listens(answer: dict[str, Any]) -> bool:
    try:
        channel = await connect(Address.parse(answer["address"]), KEY, encode(Hello(FRONTEND)))
    except TransportError:
        return False
    await channel.aclose()
    return True


async def test_lives_on_a_host_listen_where_it_says_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    async with actor(monkeypatch) as one, asyncio.timeout(LIVENESS_S):
        answers = await asyncio.gather(*(one.begin(name, 0, KEY, "", None) for name in ("P0", "D0")))
        assert len({each["address"] for each in answers}) == 2
        for answer in answers:
            assert answer["address"].startswith(f"tcp:{HOST}:")
            assert answer["node"] == "node"
            assert await listens(answer)
        assert await one.end("P0", 0)
        assert has_ended(answers[0]["process"], answers[0]["born"])
        assert not await one.end("P0", 0), "it has none any more"
        assert not await one.end("E0", 3), "it never had it"
        assert await listens(answers[1])
    assert has_ended(answers[1]["process"], answers[1]["born"])


async def test_a_life_of_an_actor_before_is_found_by_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    born = read_start(sleeping.pid)
    try:
        async with actor(monkeypatch) as one, asyncio.timeout(LIVENESS_S):
            assert not await one.end("P0", 0, sleeping.pid, born, "another node")
            assert sleeping.poll() is None
            assert await one.end("P0", 0, sleeping.pid, born, "node")
        assert has_ended(sleeping.pid, born)
    finally:
        sleeping.kill()
        sleeping.wait()


async def test_a_begin_that_comes_after_its_end_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders that a lost actor left unanswered reach the next one, whatever has been decided meanwhile."""
    async with actor(monkeypatch) as one, asyncio.timeout(LIVENESS_S):
        await one.end("P0", 1)
        answer = await one.begin("P0", 1, KEY, "", None)
        assert answer == {"error": f"P0 on {HOST}: it was given up before it listened", "kind": "ConfigError"}
        assert not one._lives
        assert await listens(await one.begin("P0", 2, KEY, "", None))


async def test_an_end_while_it_begins_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    async with actor(monkeypatch) as one, asyncio.timeout(LIVENESS_S):
        await one.begin("D0", 0, KEY, "", None)
        for turns in (1, 3, 10):
            beginning = asyncio.ensure_future(one.begin("P0", turns, KEY, "", None))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            await one.end("P0", turns)
            answer = await beginning
            assert "error" in answer or not await listens(answer)
            assert [name for name, _ in one._lives] == ["D0"]


async def test_a_host_without_the_model_or_with_bad_certificates_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with actor(monkeypatch) as one:
        answer = await one.begin("P0", 0, KEY, str(tmp_path / "model"), None)
        assert "there is no model at" in answer["error"]
        assert answer["kind"] == "ConfigError"
        answer = await one.begin("P0", 0, KEY, "", TLSConfig("a.pem", "a.key", "b.pem").paths())
        assert "is no file" in answer["error"]
        assert one.forks.opening is None, "nothing was started for them"


async def test_a_frozen_launcher_is_replaced_and_its_lives_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with actor(monkeypatch) as one, asyncio.timeout(LIVENESS_S):
        first = await one.begin("P0", 0, KEY, "", None)
        assert one.forks.opening is not None
        frozen = one.forks.opening.result()[0]
        frozen.silent = True  # as after an order that it did not take
        second = await one.begin("D0", 0, KEY, "", None)
        await asyncio.wrap_future(frozen.ended)
        assert await listens(first)
        assert await listens(second)


async def test_a_process_is_ended_by_number_and_start() -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        born = read_start(sleeping.pid)
        assert born is not None
        await InstanceProcess(sleeping.pid, born + 1).end()  # another of its number: not ours
        assert sleeping.poll() is None
        await InstanceProcess(sleeping.pid, born).end()
        assert has_ended(sleeping.pid, born)
    finally:
        sleeping.kill()
        sleeping.wait()
