"""A network between hosts has certificates, or somebody has said that it is trusted: once, and by who knows it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from remote.test_supervision import emulated
from support.certificates import Authority
from support.emulated_pipelines import MODEL
from support.running_instances import LIVENESS_S, SECRET
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.remote.channel.channel import Address
from trinity.remote.channel.host_addresses import crosses_network, is_numeric, is_own, name_machine
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.remote.supervision.supply import InstanceOrder, InstancePlace

FAR = [
    "tcp:203.0.113.9:7000",
    "tcp:[2001:db8::1]:7000",
    "tcp:0.0.0.0:7000",
    "tcp:alpha.example:7000",
    "tcp:localhost.example:1",
]
NEAR = ["tcp:127.0.0.1:7000", "tcp:127.9.9.9:7000", "tcp:[::1]:7000", "tcp:localhost:7000", "unix:/run/trinity.sock"]


def attached(address: str, **named: Any) -> Pipeline:
    terms = ProcessConfig(secret=SECRET, **named)
    return Pipeline(MODEL, [Instance("E"), Instance("PD", address=address)], hosting="process", processes=terms)


@pytest.mark.parametrize("address", FAR)
def test_an_instance_across_a_network_needs_certificates_or_a_word(address: str) -> None:
    with pytest.raises(ConfigError, match=r"instance PD0 is reached over a network, at tcp:.*ProcessConfig\(tls=.*or "
                       r"say that .*ProcessConfig\(trusted_network=True\)"):  # fmt: skip
        attached(address)
    attached(address, trusted_network=True)


def test_certificates_are_enough(tmp_path: Any) -> None:
    attached(FAR[0], tls=Authority(tmp_path, "authority").issue("all"))


@pytest.mark.parametrize("address", NEAR)
def test_what_stays_on_this_host_needs_neither(address: str) -> None:
    attached(address)


class Elsewhere:
    """A supply whose lives are all across a network, where nobody may be asked."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, int]] = []

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        return InstancePlace(Address.parse(FAR[0]))

    async def end(self, name: str, epoch: int) -> None:
        self.ended.append((name, epoch))

    async def aclose(self) -> None:
        pass


async def test_a_place_of_any_supply_is_asked_the_same_and_its_life_ended() -> None:
    supply = Elsewhere()
    async with asyncio.timeout(LIVENESS_S):
        with pytest.raises(ConfigError, match=r"reached over a network, at tcp:203.0.113.9:7000"):
            await emulated(supply=supply).start()
    assert {name for name, _ in supply.ended} == {"E0", "P0", "D0"}


def test_a_supply_that_was_told_is_not_asked_again() -> None:
    """As a RaySupply is: tests/remote/ray/test_ray_supply.py."""
    far, terms = Address.parse(FAR[0]), ProcessConfig()
    terms.check_place("P0", InstancePlace(far, trusted_network=True))
    terms.check_place("P0", InstancePlace(Address.parse(NEAR[0])))
    ProcessConfig(trusted_network=True).check_place("P0", InstancePlace(far))
    with pytest.raises(ConfigError, match="instance P0 is reached over a network"):
        terms.check_place("P0", InstancePlace(far))


# ---------------------------------------------------------------- addresses


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_every_numeric_address_but_the_loopback_crosses_a_network(
    host: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    assert is_numeric(str(host))
    assert crosses_network(Address("tcp", host=str(host), port=port)) is not host.is_loopback
    assert not crosses_network(Address("unix", path=str(host)))


@given(st.from_regex(r"[a-z][a-z.-]{0,20}", fullmatch=True).filter(lambda name: name != "localhost"))
def test_a_name_may_be_any_host(name: str) -> None:
    assert not is_numeric(name)
    assert crosses_network(Address("tcp", host=name, port=1))


def test_machines_are_told_apart_by_their_addresses() -> None:
    assert [name_machine(each) for each in (None, *NEAR)] == [""] * (1 + len(NEAR))
    assert name_machine(f"tcp:{socket.gethostname()}:7000") == ""
    assert name_machine(FAR[0]) == "203.0.113.9"
    assert name_machine("tcp:alpha.example:1") == name_machine("tcp:alpha.example:2") == "alpha.example"
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.9")
    assert not is_own("no address")
