"""Rules for URLs of others: hosts and ports by a list, and addresses that are nobody's inside (SSRF).

A rule names hosts as users write them; addresses are judged after the name was looked up, one by one, and the
connection is made to an address that was judged. Registries: IANA's special-purpose addresses for IPv4 and IPv6.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

import msgspec

from trinity.errors import ConfigError
from trinity.errors.arguments import show

USUAL_PORTS = frozenset({80, 443})
_HOST = re.compile(
    r"(?P<host>\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|\[[0-9a-f:.]+\])\.?(:(?P<port>[0-9]{1,5}|\*))?", re.ASCII
)
_PUBLIC_IPV6 = ip_network("2000::/3")  # all that is assigned; IPv4 in IPv6 (mapped, NAT64) lies outside of it
_NOT_PUBLIC = tuple(
    map(
        ip_network,
        (
            "0.0.0.0/8",
            "10.0.0.0/8",
            "100.64.0.0/10",
            "127.0.0.0/8",
            "168.63.129.16/32",  # a cloud's own host, as its machines see it
            "169.254.0.0/16",
            "172.16.0.0/12",
            "192.0.0.0/24",
            "192.0.2.0/24",
            "192.88.99.0/24",
            "192.168.0.0/16",
            "198.18.0.0/15",
            "198.51.100.0/24",
            "203.0.113.0/24",
            "224.0.0.0/3",  # multicast and reserved
            "2001::/23",  # Teredo, benchmarks, ORCHID
            "2001:db8::/32",
            "2002::/16",  # 6to4
            "3fff::/20",
        ),
    )
)


class HostRule(msgspec.Struct, frozen=True):
    """One entry of a list: ``host`` may begin with a star; ``ports`` None: all."""

    host: str
    ports: frozenset[int] | None

    def fits(self, host: str, port: int) -> bool:
        """Tell if a host and port fall under this rule."""
        named = self.host in ("*", host) or (self.host.startswith("*.") and host.endswith(self.host[1:]))
        return named and (self.ports is None or port in self.ports)


class UrlRules(msgspec.Struct, frozen=True):
    """Hosts that may be asked, and networks beyond the public ones that may be reached."""

    hosts: tuple[HostRule, ...] = ()
    networks: tuple[IPv4Network | IPv6Network, ...] = ()

    @classmethod
    def of(cls, hosts: Sequence[str], networks: Sequence[str]) -> UrlRules:
        """Read rules as ``MediaLimits`` has them. Raises ``ConfigError``."""
        return cls(tuple(map(_read_host, hosts)), tuple(map(_read_network, networks)))

    def allows_host(self, host: str, port: int) -> bool:
        """Tell if a host as in a URL may be asked on this port."""
        plain = host.lower().removesuffix(".")
        return any(rule.fits(plain, port) for rule in self.hosts)

    def allows_address(self, text: str) -> bool:
        """Tell if a connection to this address may be made: it is public, or in a network that was named."""
        address = ip_address(text)
        if any(address in network for network in self.networks):
            return True
        public = address.version == 4 or address in _PUBLIC_IPV6
        return public and not any(address in network for network in _NOT_PUBLIC)


def _read_host(text: str) -> HostRule:
    found = _HOST.fullmatch(text.lower())
    port = found["port"] if found else None
    if found is None or (port not in (None, "*") and not 0 < int(port) < 1 << 16):
        raise ConfigError(
            f'allowed_hosts has names such as "example.com", "*.example.com", "example.com:8080" or "*", in ASCII; got '
            f"{show(text)}"
        )
    ports = USUAL_PORTS if port is None else None if port == "*" else frozenset({int(port)})
    return HostRule(found["host"].strip("[]"), ports)


def _read_network(text: str) -> IPv4Network | IPv6Network:
    try:
        return ip_network(text)
    except ValueError as error:
        raise ConfigError(f'allowed_networks has networks such as "10.3.0.0/16"; {error}') from error
