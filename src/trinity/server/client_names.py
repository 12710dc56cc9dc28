"""ClientNames: by what name a server knows a client, so that clients share what one could hold."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

from trinity.errors import ConfigError
from trinity.errors.arguments import show

ProxyNetwork = IPv4Network | IPv6Network
_MOST_FORWARDED = 4096  # bytes of a header of addresses: proxies add one each
_SITE_BITS = 64  # of an IPv6 address: a site has all of the other 64


def read_networks(given: Sequence[str]) -> tuple[ProxyNetwork, ...]:
    """Read networks of proxies. Raises ``ConfigError``."""
    try:
        return tuple(ip_network(each) for each in given)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"trusted_proxies are networks such as '10.0.0.0/8', got {show(given)} ({error})") from error


class ClientNames:
    """Names of clients: digests of their keys or addresses under a secret of this process, which tell neither.

    ``proxies``: networks whose word on a request's address is believed.
    """

    def __init__(self, proxies: Sequence[ProxyNetwork] = ()) -> None:
        self._proxies, self._secret = proxies, secrets.token_bytes(32)

    def name(self, key: bytes, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Name a client by its key, where there is one, else by the address that its request comes from."""
        known = b"key " + key if key else b"address " + self.find_address(peer, headers).encode()
        return hashlib.blake2b(known, key=self._secret, digest_size=8).hexdigest()

    def find_counted(self, peer: str) -> str | None:
        """Find the address that a connection counts for; None for a trusted proxy's, and for what is no address."""
        found = _read_address(peer)
        return None if found is None or any(found in each for each in self._proxies) else self.find_address(peer, [])

    def find_address(self, peer: str, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """Find the last address on a request's way that is no trusted proxy's; of IPv6 the network of 64 bits."""
        found = _read_address(peer)
        if found is None:
            return peer[:100]
        ways = _list_forwarded(headers) if self._proxies else []
        while ways and any(found in each for each in self._proxies):
            before = _read_address(ways.pop())
            if before is None:  # no address: the proxy that says so is the last one known
                break
            found = before
        return str(ip_network((found, _SITE_BITS), strict=False)) if isinstance(found, IPv6Address) else str(found)


def _list_forwarded(headers: Sequence[tuple[bytes, bytes]]) -> list[str]:
    """List the addresses that proxies have noted, the nearest last: of X-Forwarded-For, or else of Forwarded."""
    for name in (b"x-forwarded-for", b"forwarded"):
        text = b",".join(value for header, value in headers if header == name)[-_MOST_FORWARDED:].decode("latin-1")
        if not text:
            continue
        ways = [each.strip() for each in text.split(",")]
        return ways if name == b"x-forwarded-for" else [_read_for(each) for each in ways]
    return []


def _read_for(element: str) -> str:
    for pair in element.split(";"):
        name, _, value = pair.strip().partition("=")
        if name.lower() == "for":
            return value.strip('"')
    return ""


def _read_address(text: str) -> IPv4Address | IPv6Address | None:
    """Read an address, with a port or without; None where it is none."""
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        found = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return mapped or found
