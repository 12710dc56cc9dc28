"""Terms of instance processes: their configuration, addresses, secret, and the setup message of each."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from trinity.config_classes import pack_config
from trinity.connector import Connector
from trinity.costs.device_memory import group_by_device
from trinity.emulation.model import EmulatedModel
from trinity.errors import ConfigError
from trinity.errors.arguments import check_arguments
from trinity.instance import Instance
from trinity.remote.buddy import Buddy
from trinity.remote.channel.channel import SECRET_VARIABLE, SHORTEST_SECRET, Address
from trinity.remote.channel.host_addresses import crosses_network, name_machine
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.channel.wire import RouteConfig, Setup
from trinity.remote.supervision.fork_client import kept_launcher as kept_launcher
from trinity.remote.supervision.supervisor_messages import (
    InstanceHealth,
)
from trinity.remote.supervision.supply import InstancePlace, Supply
from trinity.remote.supervision.warm_launchers import LAUNCHER_WAITS_S
from trinity.runtime.loader import ServingConfig, ServingOptions, config_digest, describe_tenant
from trinity.transport.auto import pick_scheme

logger = logging.getLogger("trinity")
SILENCE_S = 20.0  # long, because processes starve on an overloaded machine
SHORTEST_SILENCE_S = 2.0  # two heartbeats of an instance


@check_arguments
@dataclass(frozen=True)
class ProcessConfig:
    """Terms between a pipeline and its instance processes.

    - ``secret`` (at least 32 characters, None): shown to instances that run already, where TRINITY_SECRET has the same;
      None takes it from there. Instances that the pipeline starts get one drawn at random.
    - ``tls`` (None): ``TLSConfig``; control channels over TCP are then in mutual TLS, here and in instances that the
      pipeline starts. Those that run already need their own (``--tls-certificate``). Unix sockets have none.
    - ``trusted_network`` (False): say that only hosts you trust are on the network by which instances at an address, or
      of a ``supply``, are reached, where there is no ``tls``. Blocks are their transport's, which is told by itself:
      ``Connector("auto", options={"trusted_network": True})``.
    - ``silence_s`` (seconds, 20): a process that says nothing for longer is restarted. Requests go past it after two.
    - ``supply`` (None): where instances without an address come from; None forks them on this host. Those of any other
      may be on other hosts, and move blocks by a transport that leaves theirs. It is closed with the pipeline.
    - ``launcher_waits_s`` (seconds, 120): the process that forks instances, with torch in it, waits so long for the
      program's next pipeline, unless a ``secret`` was given; 0 ends it with its own.
    - ``attach`` (False): serve beside the pipeline that has set the instances up, and share them. Each has its address,
      name and roles as there. That one restarts and switches them; either may end without harm to the other's requests.
    - ``buddy`` (None): ``Buddy``, the pipeline that goes on with this one's requests when its program dies, and where
      others bring theirs to this one. For instances that run already.
    - ``on_change`` (None): called with the ``InstanceHealth`` of an instance whose state has changed.

    Raises ``ConfigError`` for a silence shorter than an instance's own pauses, a wait that is none, and for
    certificates that would not do.
    """

    secret: str | None = field(default=None, repr=False)
    silence_s: float = SILENCE_S
    on_change: Callable[[InstanceHealth], None] | None = None
    tls: TLSConfig | None = None
    supply: Supply | None = None
    launcher_waits_s: float = LAUNCHER_WAITS_S
    trusted_network: bool = False
    attach: bool = False
    buddy: Buddy | None = None

    def __post_init__(self) -> None:
        if self.secret is not None:
            _check_secret(self.secret)
        if self.tls is not None:
            self.tls.check()
        if not self.silence_s >= SHORTEST_SILENCE_S:
            raise ConfigError(
                f"silence_s is {self.silence_s!r}: instances speak every second, give {SHORTEST_SILENCE_S} or more"
            )
        if not self.launcher_waits_s >= 0:
            raise ConfigError(f"launcher_waits_s is {self.launcher_waits_s!r}: give seconds, 0 to wait for no pipeline")

    def check_place(self, name: str, place: InstancePlace, what: str = "instance") -> None:
        """Raise ``ConfigError`` where ``what`` is reached over a network in the clear, and nobody trusts that."""
        if self.trusted_network or place.trusted_network or place.tls is not None or not crosses_network(place.address):
            return
        raise ConfigError(
            f"{what} {name} is reached over a network, at {place.address}: give "
            "ProcessConfig(tls=TLSConfig(...)), and certificates where it runs (--tls-certificate), or say that only "
            "hosts you trust are on that network: ProcessConfig(trusted_network=True)"
        )


def make_setups(
    instances: Sequence[Instance],
    deployment: ServingConfig,
    connector: Connector,
    routing: str,
    supply: Supply | None = None,
) -> list[Setup]:
    """Build the setup message of every instance of a pipeline. Raises ``ConfigError`` as ``make_setup`` does.

    Those that come from a ``supply`` may be on any hosts: each is taken to be on its own.
    """
    pipeline = secrets.token_hex(8)
    config = config_digest(deployment.model)
    addresses = [each.address or (f"tcp:host-of-{each.name}:0" if supply is not None else None) for each in instances]
    routes = make_route_configs(connector, addresses)
    tenants = [
        replace(describe_tenant(each, deployment.cache), shares=address is None)
        for each, address in zip(instances, addresses, strict=True)
    ]
    devices = (each.device or deployment.device for each in instances)
    sharers = group_by_device(zip(map(name_machine, addresses), devices, strict=True))
    return [
        msgspec.structs.replace(
            make_setup(each, deployment, connector, routing),
            pipeline=pipeline,
            config=config,
            routes=routes,
            beside=tuple(tenants[other] for other in others),
        )
        for each, others in zip(instances, sharers, strict=True)
    ]


def make_route_configs(connector: Connector, addresses: Sequence[str | None]) -> dict[str, RouteConfig]:
    """Describe the connector's transports for instances at these addresses, by kind of block."""
    return {
        kind: RouteConfig(pick_scheme(route.name, addresses), route.timeout_s, route.verify, dict(route.options))
        for kind, route in connector.routes.items()
    }


def make_setup(spec: Instance, deployment: ServingConfig, connector: Connector, routing: str) -> Setup:
    """Build the setup message of one instance process. Raises ``ConfigError`` for objects that cannot be sent."""
    if deployment.observe is not None:
        raise ConfigError("observe= is an object of this process and cannot be sent to another: use hosting='thread'")
    if not all(isinstance(each, str) for each in spec.stages):
        raise ConfigError(
            "a stage's factory is an object of this process and cannot be sent to another: give stages= the name of "
            "its entry point trinity.stages, or use hosting='thread'"
        )
    if any(rules is not None and rules.cost is not None for rules in (spec.rules, deployment.rules)):
        raise ConfigError(
            "cost= of rules is an object of this process and cannot be sent to another: give the pipeline an slo=, for "
            "which instances measure it, or use hosting='thread'"
        )
    return Setup(
        instance=pack_config(replace(spec, address=None)),
        serving=pack_config(deployment, ServingOptions),
        model="" if isinstance(deployment.model, EmulatedModel) else str(deployment.model.resolve()),
        paced=deployment.model if isinstance(deployment.model, EmulatedModel) else None,
        routes=make_route_configs(connector, [spec.address]),
        routing=routing,
    )


def parse_addresses(instances: Sequence[Instance]) -> dict[str, Address]:
    """Parse the addresses of instances that were started by hand, by name. Raises ``ConfigError``."""
    return {each.name: Address.parse(each.address) for each in instances if each.address is not None}


def resolve_secret(instances: Sequence[Instance], secret: str | None) -> bytes | None:
    """Return the secret as bytes, from TRINITY_SECRET if instances run already; None: to be drawn.

    Raises ``ConfigError`` if it is missing or too short.
    """
    attached = [each.name for each in instances if each.address is not None]
    if secret is None and attached:
        secret = os.environ.get(SECRET_VARIABLE)
    if secret is None and attached:
        raise ConfigError(
            f"{', '.join(attached)} run already: give secret=, or set {SECRET_VARIABLE} as it is where they run"
        )
    return _check_secret(secret).encode() if secret is not None else None


def _check_secret(secret: str) -> str:
    if len(secret) < SHORTEST_SECRET:
        raise ConfigError(f"the pipeline's secret has {len(secret)} characters; at least {SHORTEST_SECRET} are needed")
    return secret


def check_hosting(hosting: str, instances: Sequence[Instance], config: ProcessConfig) -> Literal["thread", "process"]:
    """Return ``hosting`` if it is valid and its instances can run so; else raise ``ConfigError``."""
    if hosting not in ("thread", "process"):
        raise ConfigError(f"hosting must be 'thread' or 'process', got {hosting!r}")
    addresses = parse_addresses(instances)
    if addresses and hosting == "thread":
        raise ConfigError("instances with an address are processes: use hosting='process' with them")
    if config.attach and (config.supply is not None or len(addresses) < len(instances)):
        raise ConfigError("ProcessConfig(attach=True) starts no instance: give each its address=, and no supply=")
    if config.buddy is not None and len(addresses) < len(instances):
        raise ConfigError(
            "a Buddy serves on the same instances: give each its address=, so that they outlive a program"
        )
    for text in config.buddy.addresses if config.buddy is not None else ():
        config.check_place("of a journal", InstancePlace(Address.parse(text), tls=config.tls), "the other side")
    if config.supply is not None and hosting == "thread":
        raise ConfigError("instances of a supply are processes: use hosting='process' with it")
    for name, address in addresses.items():
        config.check_place(name, InstancePlace(address, tls=config.tls))
    return "process" if hosting == "process" else "thread"
