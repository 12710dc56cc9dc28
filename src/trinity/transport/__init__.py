"""Transports: how paged blocks move between instances. Each is chosen by name and keeps one contract."""

from trinity.transport.base import Remote as Remote
from trinity.transport.base import Transport as Transport
from trinity.transport.registry import make_transport as make_transport
