"""Which hosts, ports and addresses the rules for URLs of others let pass."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.errors import ConfigError
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.url_rules import UrlRules

ANY = UrlRules.of(["*"], [])


@pytest.mark.parametrize(
    ("rule", "host", "port", "fits"),
    [
        ("example.com", "example.com", 443, True),
        ("example.com", "EXAMPLE.com.", 80, True),
        ("Example.COM", "example.com", 80, True),
        ("example.com", "example.com", 8080, False),
        ("example.com", "a.example.com", 80, False),
        ("example.com", "badexample.com", 80, False),
        ("example.com", "example.com.evil.org", 80, False),
        ("*.example.com", "a.b.example.com", 80, True),
        ("*.example.com", "example.com", 80, False),
        ("*.example.com", "badexample.com", 80, False),
        ("example.com:8443", "example.com", 8443, True),
        ("example.com:8443", "example.com", 443, False),
        ("example.com:*", "example.com", 22, True),
        ("*", "anything.at.all", 443, True),
        ("*", "anything.at.all", 22, False),
        ("[2a00::1]:81", "2a00::1", 81, True),
        ("192.0.2.7", "192.0.2.7", 80, True),
        ("xn--bcher-kva.example", "xn--bcher-kva.example", 80, True),
    ],
)
def test_a_rule_names_hosts_and_ports(rule: str, host: str, port: int, fits: bool) -> None:
    assert UrlRules.of([rule], []).allows_host(host, port) is fits


@pytest.mark.parametrize(
    "rule",
    [
        "",
        "https://example.com",
        "example.com/",
        "*example.com",
        "a.*.com",
        "a:0",
        "a:70000",
        "bücher.example",
        "user@example.com",
        "a b",
        "example.com:",
        "-:x",
    ],
)
def test_rules_of_no_such_form_are_refused_by_name(rule: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts has names such as"):
        MediaLimits(allowed_hosts=(rule,))


@pytest.mark.parametrize("network", ["10.3.0.1/16", "localhost", "300.1.1.1", ""])
def test_networks_of_no_such_form_are_refused_by_name(network: str) -> None:
    with pytest.raises(ConfigError, match="allowed_networks has networks such as"):
        MediaLimits(allowed_networks=(network,))


INSIDE = [
    "0.0.0.0",
    "10.1.2.3",
    "100.64.0.1",
    "100.100.100.200",
    "127.0.0.1",
    "127.255.0.9",
    "168.63.129.16",
    "169.254.169.254",
    "172.16.0.1",
    "172.31.255.255",
    "192.0.0.192",
    "192.0.2.1",
    "192.88.99.1",
    "192.168.1.1",
    "198.18.0.1",
    "203.0.113.5",
    "224.0.0.1",
    "239.255.255.255",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "::127.0.0.1",
    "::ffff:127.0.0.1",
    "::ffff:8.8.8.8",
    "::ffff:0:127.0.0.1",
    "64:ff9b::7f00:1",
    "64:ff9b::808:808",
    "64:ff9b:1::a00:1",
    "100::1",
    "2001::1",
    "2001:0:7f00:1::",
    "2001:db8::1",
    "2002:7f00:1::1",
    "3fff::1",
    "5f00::1",
    "fc00::1",
    "fd00:ec2::254",
    "fe80::1",
    "fe80::1%eth0",
    "fec0::1",
    "ff02::1",
]
OUTSIDE = [
    "8.8.8.8",
    "1.1.1.1",
    "172.15.0.1",
    "172.32.0.1",
    "192.167.1.1",
    "223.255.255.254",
    "2606:4700::1111",
    "2a00::1",
]


@pytest.mark.parametrize("address", INSIDE)
def test_addresses_that_are_not_public_are_refused(address: str) -> None:
    assert not ANY.allows_address(address)


@pytest.mark.parametrize("address", OUTSIDE)
def test_public_addresses_are_allowed(address: str) -> None:
    assert ANY.allows_address(address)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)))
def test_nothing_passes_that_python_knows_to_be_inside(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> None:
    """The oracle is Python's table of IANA's registries, which is another one than ours."""
    if ANY.allows_address(str(address)):
        inside = (address.is_private, address.is_loopback, address.is_link_local, address.is_multicast)
        assert not any((*inside, address.is_reserved, address.is_unspecified))
        assert getattr(address, "ipv4_mapped", None) is None


def test_networks_that_were_named_are_reached_besides() -> None:
    rules = UrlRules.of(["*"], ["10.3.0.0/16", "fd00::/8"])
    assert rules.allows_address("10.3.255.1")
    assert rules.allows_address("fd12::1")
    assert rules.allows_address("8.8.8.8")
    assert not rules.allows_address("10.4.0.1")
    assert not rules.allows_address("::ffff:10.3.0.1")
