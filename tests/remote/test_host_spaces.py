"""Two hosts without Ray, each with network and processes of its own: exact, KV inside a host, kills survived."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from support import namespaces
from support.asked_program import check_told, make_wanted
from support.certificates import make_certificates
from support.checkpoint_files import checkpoint
from support.host_spaces import HostSpaces, host_spaces
from sweeps import host_kills
from trinity.costs.cluster import Cluster
from trinity.remote.supervision.process_identity import has_ended, read_start

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(namespaces.missing()), reason=namespaces.missing()),
]
LIVENESS_S = 120.0
ALPHA, BETA = {"P0", "D0"}, {"P1", "D1", "E0"}


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[HostSpaces]:
    """P and D on each host, E on the second."""
    placed = msgspec.structs.replace(Cluster.of("H100", 5), hosts=("alpha",) * 2 + ("beta",) * 3)
    tls = make_certificates(tmp_path)
    with host_spaces(tmp_path, "1E2P2D", tls, "--model", str(checkpoint("llava")), cluster=placed) as hosts:
        assert [set(hosts.until_listening(number)) for number in (0, 1)] == [ALPHA, BETA]
        hosts.run(checkpoint("llava"), tls)
        yield hosts


def test_two_hosts_serve_exactly_and_what_is_killed_comes_back(serving: HostSpaces) -> None:
    wanted, said = make_wanted(), list[str]()
    ways = set[tuple[str, ...]]()
    for _ in range(4):
        told = serving.ask("up")
        assert check_told(told, wanted)
        assert told["errors"] == {}
        ways |= {tuple(each) for each in told["ways"]}
        said += told["said"]
    assert ways == {
        ("image", "E0", "P0", "nixl"),  # between the hosts
        ("image", "E0", "P1", "shm"),
        ("kv", "P0", "D0", "shm"),  # never between P0 and D1: KV stays inside a host
        ("kv", "P1", "D1", "shm"),
    }
    here, far = socket.gethostname(), serving.spaces[1].address
    assert sorted(line for line in said if line.startswith("blocks of kind")) == [  # each once
        f"blocks of kind image go from host {far} to host {here} by nixl",
        f"blocks of kind image stay on host {far}, moved by shm",
        *sorted(f"blocks of kind kv stay on host {host}, moved by shm" for host in (here, far)),
    ]
    victim = serving.commands[1].instances()[0]
    before = sum(epoch for _, epoch, _ in told["health"].values())
    os.kill(victim, signal.SIGKILL)
    assert set(serving.commands[1].until_listening(1)) < BETA
    until = time.monotonic() + LIVENESS_S
    while sum(epoch for _, epoch, _ in told["health"].values()) == before:
        assert time.monotonic() < until
        told = serving.ask("on")
        check_told(told, wanted)
    assert check_told(serving.ask("up"), wanted)
    births = {each: read_start(each) for command in serving.commands for each in command.processes()}
    assert serving.end() == 0
    for command in serving.commands:
        command.send(signal.SIGTERM)
        assert command.run.wait(LIVENESS_S) == 0
    assert all(has_ended(*birth) for birth in births.items()), "nothing is left behind"


def test_kills_of_each_kind(tmp_path: Path) -> None:
    """``python tests/sweeps/host_kills.py`` has 50."""
    counted = host_kills.run(len(host_kills.KINDS), 3, tmp_path)
    assert counted["kills"] == len(host_kills.KINDS)
    assert counted["answers"]
