"""All instances of a host by one command: they serve, come back after a loss, and end with it, however it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from remote.test_supervision import serves
from support import emulated_pipelines
from support.host_commands import HostCommand, host_command
from support.pipeline_options import pipeline_options
from support.running_instances import SECRET, free_port
from trinity.errors import ConfigError
from trinity.pipeline import Pipeline
from trinity.remote.hosts import host_keeper
from trinity.remote.hosts.host_keeper import HostKeeper, check_host
from trinity.remote.hosts.hosts import HostedInstance, HostEntry, HostTable, write_hosts
from trinity.remote.server import main
from trinity.remote.supervision.process_identity import has_ended, read_start

LIVENESS_S = 60.0
PLACES = {"alpha": ("127.0.0.1", "E"), "beta": ("127.0.0.2", "PD")}


def make_table() -> HostTable:
    """E on one address of the loopback, P and D on another, which are two hosts to trinity."""
    entries = []
    for name, (address, roles) in PLACES.items():
        instances = tuple(HostedInstance(roles=each, port=free_port()) for each in roles)
        entries.append(HostEntry(name=name, address=address, instances=instances))
    return HostTable(tuple(entries))


@pytest.fixture
def table(tmp_path: Path) -> HostTable:
    made = make_table()
    write_hosts(tmp_path / "hosts.toml", made)
    return made


def emulated(table: HostTable, **named: Any) -> Pipeline:
    settings = {"pools": emulated_pipelines.POOLS, "silence_s": 2.0, "secret": SECRET, **named}
    return Pipeline(emulated_pipelines.MODEL, table.placement, hosting="process", **pipeline_options(settings))


@pytest.fixture
def both(tmp_path: Path, table: HostTable) -> Iterator[list[HostCommand]]:
    file = tmp_path / "hosts.toml"
    with host_command(file, "alpha", "--emulated") as alpha, host_command(file, "beta", "--emulated") as beta:
        assert alpha.until_listening(1) == {"E0": table.placement[0].address}
        assert beta.until_listening(2) == {each.name: each.address for each in table.placement[1:]}
        yield [alpha, beta]


def births(command: HostCommand) -> dict[int, int | None]:
    return {each: read_start(each) for each in [*command.processes(), command.own()]}


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + LIVENESS_S
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.01)


def until_another(command: HostCommand, lost: int) -> int:
    """The one instance that is there in place of a lost one. Each look is one read: two may see two states."""
    seen = list[int]()

    def is_there() -> bool:
        seen[:] = command.instances()
        return len(seen) == 1 and seen != [lost]

    until(is_there)
    return seen[0]


async def test_two_hosts_serve_and_what_is_killed_comes_back(table: HostTable, both: list[HostCommand]) -> None:
    async with emulated(table) as pipe, asyncio.timeout(2 * LIVENESS_S):
        await serves(pipe)
        for command, count in zip(both, (1, 2), strict=True):
            [victim, *others] = command.instances()
            assert len(others) == count - 1
            epochs = sum(health.epoch for health in pipe.health.values())
            os.kill(victim, signal.SIGKILL)
            assert (await asyncio.to_thread(command.hear))["instance"] in ("E0", "P0", "D0")
            while sum(health.epoch for health in pipe.health.values()) == epochs:
                await asyncio.sleep(0.01)
            await serves(pipe)
            assert set(others) < set(command.instances()), "the others have gone on"


@pytest.mark.slow
async def test_a_lost_launcher_is_replaced(table: HostTable, both: list[HostCommand]) -> None:
    """No instance ends with it."""
    async with emulated(table) as pipe, asyncio.timeout(2 * LIVENESS_S):
        await serves(pipe)
        before = births(both[1])
        old = both[1].launcher()
        os.kill(old, signal.SIGKILL)
        await asyncio.to_thread(until, lambda: has_ended(old, before[old]))
        await serves(pipe)
        assert not any(has_ended(each, born) for each, born in before.items() if each != old)


@pytest.mark.parametrize(
    "number",
    [*(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGTERM, signal.SIGINT)), signal.SIGKILL],
)
def test_all_end_with_their_command(both: list[HostCommand], number: signal.Signals) -> None:
    began = [births(command) for command in both]
    assert [len(each) for each in began] == [3, 4], "a command, a launcher, and the instances"
    for command in both:
        command.send(number)
    codes = {signal.SIGTERM: 0, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert [command.run.wait(LIVENESS_S) for command in both] == [codes[number]] * 2
    until(lambda: all(has_ended(*birth) for births in began for birth in births.items()))


async def test_a_command_that_is_started_again_is_found_again(
    tmp_path: Path, table: HostTable, both: list[HostCommand]
) -> None:
    async with emulated(table) as pipe, asyncio.timeout(2 * LIVENESS_S):
        await serves(pipe)
        await asyncio.to_thread(both[1].close)
        again = HostCommand(tmp_path / "hosts.toml", "beta", "--emulated")
        try:
            await asyncio.to_thread(again.until_listening, 2)
            await serves(pipe)
            assert [pipe.health[name].epoch > 0 for name in ("E0", "P0", "D0")] == [False, True, True]
        finally:
            await asyncio.to_thread(again.close)


def test_a_port_that_is_taken_is_tried_again(tmp_path: Path, table: HostTable) -> None:
    """By another program, or by one of before that ends still."""
    file, errors = tmp_path / "hosts.toml", tmp_path / "errors"
    with errors.open("wb") as to, host_command(file, "alpha", "--emulated") as first:
        first.until_listening(1)
        with host_command(file, "alpha", "--emulated", errors=to) as second:
            until(lambda: errors.read_text().count("is begun again in") >= 2)
            first.close()
            assert second.until_listening(1) == {"E0": table.placement[0].address}
    said = errors.read_text()
    assert f"instance E0 at {table.placement[0].address}: the instance has ended before it listened" in said
    assert "begun again in 0.2 s" in said
    assert "begun again in 0.4 s" in said, "each pause is longer"


def test_nobody_has_to_read_what_it_prints(both: list[HostCommand]) -> None:
    [victim] = both[0].instances()
    assert both[0].run.stdout is not None
    both[0].run.stdout.close()
    for _ in range(2):
        os.kill(victim, signal.SIGKILL)
        victim = until_another(both[0], victim)
    assert both[0].run.poll() is None


async def test_a_frozen_launcher_does_not_hide_an_end() -> None:
    """By the system's word the instance has ended, and another launcher begins the next."""
    heard: asyncio.Queue[str] = asyncio.Queue()
    entry = HostEntry(name="here", address="127.0.0.1", instances=(HostedInstance(roles="PD", port=free_port()),))
    placement = HostTable((entry,)).placement
    keeper = HostKeeper(placement, SECRET.encode(), lambda name, bound: heard.put_nowait(name), emulated=True)
    running = asyncio.ensure_future(keeper.run())
    try:
        async with asyncio.timeout(2 * LIVENESS_S):
            await heard.get()
            [life] = keeper._forks._lives
            assert keeper._forks.opening is not None
            frozen = keeper._forks.opening.result()[0]
            os.kill(frozen._process.pid, signal.SIGSTOP)
            life.kill()
            assert await heard.get() == "PD0"
            assert keeper._forks.opening.result()[0] is not frozen
    finally:
        running.cancel()
        await asyncio.wait([running])
    assert await asyncio.to_thread(frozen._process.wait, LIVENESS_S) == -signal.SIGKILL


def test_the_interface_of_its_address_is_for_ucx(table: HostTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for Ray's hosts: one that the file or the environment names goes before."""
    found: list[str | None] = []

    class Noted(HostKeeper):
        def __init__(self, *given: Any, **named: Any) -> None:
            found.append(os.environ.get("UCX_NET_DEVICES"))

        async def run(self) -> None:
            raise ConfigError("no more")

    monkeypatch.setattr(host_keeper, "HostKeeper", Noted)
    said = HostEntry(name="said", address="127.0.0.3", instances=table.hosts[0].instances, ucx_device="mlx5_0:1")
    tables = [(table, "alpha"), (HostTable((said,)), "said"), (HostTable((said,)), "said")]
    for number, (each, name) in enumerate(tables):
        given = os.environ.copy()
        given.pop("UCX_NET_DEVICES", None)
        monkeypatch.setattr(os, "environ", {**given, "UCX_NET_DEVICES": "eth7"} if number == 2 else given)
        with pytest.raises(ConfigError, match="no more"):
            host_keeper.keep_host(each, name, b"", lambda name, bound: None)
    assert found == ["lo", "mlx5_0:1", "eth7"]


def test_what_cannot_come_right_later_is_refused_at_once(tmp_path: Path) -> None:
    instances = (HostedInstance(roles="PD", port=7000),)
    here = HostEntry(name="here", address="127.0.0.1", instances=instances, model=str(tmp_path / "none"))
    there = HostEntry(name="there", address="203.0.113.9", instances=instances)
    with pytest.raises(ConfigError, match=r"there has address 203.0.113.9, which is none of this machine's"):
        check_host(there, None)
    with pytest.raises(ConfigError, match=r"there is no model at .*none: give its directory on this host with --model"):
        check_host(here, None)
    assert check_host(here, tmp_path) == str(tmp_path)
    named = HostEntry(name="named", address="alpha.example", instances=instances)
    assert check_host(named, None) == "", "who has this name is not asked"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "one of the arguments --listen --hosts is required"),
        (["--hosts", "a.toml"], "--hosts FILE and --on NAME go together"),
        (["--listen", "unix:/a", "--on", "alpha"], "--hosts FILE and --on NAME go together"),
        (["--listen", "unix:/a", "--hosts", "a.toml", "--on", "alpha"], "not allowed with"),
        (["--hosts", "a.toml", "--on", "alpha", "--once"], "--once is for --listen"),
        (["--listen", "unix:/a", "--emulated"], "--emulated is for --hosts"),
        (["--hosts", "a.toml", "--on", "alpha", "--tls-key", "k"], "TLS needs all of"),
        (["--hosts", "a.toml", "--on", "alpha"], "set TRINITY_SECRET"),
    ],
)
def test_words_that_do_not_go_together(
    words: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRINITY_SECRET", raising=False)
    with pytest.raises(SystemExit):
        main(words)
    assert says in capsys.readouterr().err


def test_an_unknown_host_ends_the_command_in_one_line(tmp_path: Path, table: HostTable) -> None:
    with host_command(tmp_path / "hosts.toml", "gamma", errors=subprocess.PIPE) as command:
        assert command.run.wait(LIVENESS_S) == 2
        assert command.run.stderr is not None
        with command.run.stderr as said:
            assert said.read() == b"trinity instance: there is no host 'gamma', only alpha, beta\n"
