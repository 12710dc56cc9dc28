"""Addresses of hosts: whether one is this machine's, and whether it can be reached from others."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from trinity.remote.channel.channel import Address


def name_machine(address: str | None) -> str:
    """Name the machine where an instance runs, "" for this one; addresses that differ are taken for machines."""
    host = Address.parse(address).host if address is not None else ""
    return "" if host in ("", "localhost", socket.gethostname()) or is_own(host) else host


def name_host(address: Address) -> str:
    """Name the host of an address for people, and for who asks if two are on one; this one has its own name."""
    return name_machine(str(address)) or socket.gethostname()


def is_own(host: str) -> bool:
    """Tell if a numeric address is one of this host's interfaces: no others can be bound. Asks no name service."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM, flags=socket.AI_NUMERICHOST)
    except (OSError, UnicodeError):
        return False
    for family, kind, _, _, place in found:
        with suppress(OSError), socket.socket(family, kind) as probe:
            probe.bind(place)
            return True
    return False


def is_numeric(host: str) -> bool:
    """Tell if a host is named by an IP address."""
    with suppress(ValueError):
        ipaddress.ip_address(host)
        return True
    return False


def crosses_network(address: Address) -> bool:
    """Tell if what goes to an address passes a network: over TCP, and not by the loopback. Asks no name service."""
    if address.scheme != "tcp" or address.host == "localhost":
        return False
    return not (is_numeric(address.host) and ipaddress.ip_address(address.host).is_loopback)
