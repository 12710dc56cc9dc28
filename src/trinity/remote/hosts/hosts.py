"""Host table: which instances run on which hosts, in a small TOML file that every host and the pipeline read.

    [[hosts]]
    name = "alpha"
    address = "10.0.0.1"
    instances = [
        {roles = "P", port = 7000, device = "cuda:0"},
        {roles = "D", port = 7001, device = "cuda:1"},
    ]

``trinity instance --hosts FILE --on alpha`` starts those of a host; ``read_hosts(FILE).placement`` is the pipeline's.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from trinity.costs.cluster import Cluster
from trinity.errors import ConfigError
from trinity.errors.arguments import Count, DeviceName, InstanceName, Whole, check_call, check_struct
from trinity.errors.files import read_regular_file, write_file
from trinity.instance import GivenPlacement, Instance, list_instances
from trinity.remote.channel.host_addresses import is_numeric
from trinity.remote.hosts.host_groups import KV_HOST, assign_hosts

MOST_HOSTS_BYTES = 1 << 20  # of a file: ten thousand instances
FIRST_PORT, LAST_PORT = 7000, 65_535
_FORM = "a file of hosts has [[hosts]], each with name, address and instances, and these roles and port (docs/hosts.md)"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*")
_MOST_DOTS = 64  # in a line: tomllib's time grows with the square of a dotted key's length
Port = Annotated[int, msgspec.Meta(ge=1, le=LAST_PORT)]


class HostedInstance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Instance that listens at a port of its host. Its other fields are those of ``Instance``."""

    roles: str
    port: Port
    name: InstanceName = ""
    device: DeviceName | None = None
    threads: Whole = 1
    cores: tuple[int, ...] = ()
    memory_bytes: Whole | None = None
    pools: dict[str, Count] | None = None

    def __post_init__(self) -> None:
        check_struct(self)
        if any(not text.isprintable() for text in self.pools or ()):
            raise ConfigError(f"the instance at port {self.port} has a pool whose name cannot be printed")


class HostEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Host with its instances.

    - ``name``: by which ``trinity instance --on NAME`` knows it. ``address``: at which its instances listen.
    - ``model`` (""): the checkpoint's directory there, where it differs from the pipeline's.
    - ``ucx_device`` (""): interface for NIXL and UCX, such as "mlx5_0:1"; that of the address where none is given.
    """

    name: str
    address: str
    instances: tuple[HostedInstance, ...]
    model: str = ""
    ucx_device: str = ""

    def __post_init__(self) -> None:
        check_struct(self)
        if not _NAME.fullmatch(self.name):
            raise ConfigError(f"a host's name has letters, digits, '.', '_' and '-', got {self.name!r:.80}")
        if not _is_address(self.address):
            raise ConfigError(
                f"host {self.name} has address {self.address!r:.80}: give its IP address or its name on the network, "
                "and to each of its instances a port"
            )
        if any(not text.isprintable() for text in (self.model, self.ucx_device)):
            raise ConfigError(f"host {self.name} has a model or ucx_device that cannot be printed")

    def locate(self, instance: HostedInstance) -> str:
        """Return where an instance of this host listens, as ``Instance.address`` has it."""
        return f"tcp:{f'[{self.address}]' if ':' in self.address else self.address}:{instance.port}"


class HostTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All hosts of a pipeline. Raises ``ConfigError`` where two have a name, an address or an instance in common."""

    hosts: tuple[HostEntry, ...]

    def __post_init__(self) -> None:
        check_struct(self)
        _check_once("name of a host", (each.name for each in self.hosts))
        _check_once("address of a host", (_normalize(each.address) for each in self.hosts))
        for each in self.hosts:
            _check_once(f"port of host {each.name}", (instance.port for instance in each.instances))
        if not self.placement:
            raise ConfigError("no host has an instance")

    @property
    def placement(self) -> list[Instance]:
        """Instances of all hosts with their addresses, in order: ``Pipeline(model, table.placement)``."""
        return list_instances([_make_instance(host, each) for host in self.hosts for each in host.instances])

    def find(self, name: str) -> HostEntry:
        """Return the host of this name. Raises ``ConfigError``."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise ConfigError(f"there is no host {name!r:.80}, only {', '.join(host.name for host in self.hosts)}")

    def list_on(self, name: str) -> list[Instance]:
        """List the instances of the host of this name. Raises ``ConfigError``."""
        host = self.find(name)
        places = {host.locate(each) for each in host.instances}
        return [each for each in self.placement if each.address in places]


def _make_instance(host: HostEntry, each: HostedInstance) -> Instance:
    given: dict[str, Any] = {name: getattr(each, name) for name in each.__struct_fields__ if name != "port"}
    return Instance(**given, address=host.locate(each))


def _is_address(text: str) -> bool:
    """Tell if a text is the IP address of one host, or could be a name on a network. Asks nobody."""
    if is_numeric(text) and text.isprintable():
        found = ipaddress.ip_address(text)
        return not (found.is_unspecified or found.is_multicast)
    return bool(_HOST_NAME.fullmatch(text)) and not re.fullmatch(r"[\d.]+", text)


def _normalize(address: str) -> str:
    """Return the one spelling of an address that has several."""
    if not is_numeric(address):
        return address.lower()
    found = ipaddress.ip_address(address)
    return str(getattr(found, "ipv4_mapped", None) or found)


def _check_once(what: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise ConfigError(f"the {what} is given twice: {value}")
        seen.add(value)


# ---------------------------------------------------------------- the file


@check_call
def read_hosts(path: str | Path) -> HostTable:
    """Read a file of hosts. Raises ``ConfigError``, which names the file, and the line or the field."""
    content = read_regular_file(path, most=MOST_HOSTS_BYTES)
    if any(line.count(b".") > _MOST_DOTS for line in content.split(b"\n")):
        raise ConfigError(f"{path} has a line with more than {_MOST_DOTS} dots; {_FORM}")
    try:
        return msgspec.convert(tomllib.loads(content.decode()), HostTable)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is no text in UTF-8 ({error.reason} at byte {error.start}); {_FORM}") from error
    except RecursionError as error:
        raise ConfigError(f"{path} is nested too deep; {_FORM}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not in TOML: {error}; {_FORM}") from error
    except ValueError as error:  # ``msgspec.ValidationError`` says where; an error of ours lost nothing but its type
        raise ConfigError(f"{path}: {error}; {_FORM}") from error


@check_call
def write_hosts(path: str | Path, table: HostTable) -> None:
    """Write a file of hosts, whole or not at all. Raises ``ConfigError`` where it cannot be written, or read again."""
    content = format_hosts(table).encode()
    if len(content) > MOST_HOSTS_BYTES:
        raise ConfigError(f"a file of hosts has at most {MOST_HOSTS_BYTES} bytes, this would have {len(content)}")
    write_file(path, content)


def format_hosts(table: HostTable) -> str:
    """Format hosts as TOML, an instance on each line."""
    return "\n".join(_format_host(each) for each in table.hosts)


def _format_host(host: HostEntry) -> str:
    fields = msgspec.to_builtins(host)
    instances = fields.pop("instances")
    lines = ["[[hosts]]", *(f"{name} = {_format_value(value)}" for name, value in fields.items())]
    return "\n".join([*lines, "instances = [", *(f"    {_format_value(each)}," for each in instances), "]", ""])


def _format_value(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_quote(str(name))} = {_format_value(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_format_value, value))}]"
    return _quote(value, bare=False) if isinstance(value, str) else str(value)


def _quote(text: str, *, bare: bool = True) -> str:
    """Quote a text as TOML's basic strings are, which JSON's are but for what is not printed."""
    return text if bare and re.fullmatch(r"[A-Za-z0-9_-]+", text) else json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------- a table out of a placement


@check_call
def plan_hosts(
    placement: GivenPlacement,
    addresses: Mapping[str, str],
    cluster: Cluster | None = None,
    *,
    port: Port = FIRST_PORT,
    device: Literal["cpu", "cuda"] = "cpu",
) -> HostTable:
    """Put the instances of a placement on hosts, so that KV stays inside of one (TriInfer 5.5).

    - ``placement``: "1E1P1D", a ``Placement``, or instances, with no more settings than a file of hosts has.
    - ``addresses``: of each host, by its name. Hosts that get no instance are left out.
    - ``cluster`` (None): ``Cluster`` that was planned for: instances are together as on its hosts, which are those of
      ``addresses`` by name, or else in order. With none, all that exchange KV are on the first host, and others on the
      rest in turn.
    - ``port`` (7000): of the first instance of each host; others have the next.
    - ``device`` ("cpu"): "cuda" numbers the GPUs of each host: its instances take cuda:0, cuda:1, ...

    Raises ``ConfigError``, for a cluster of more hosts than have an address, too.
    """
    instances = list_instances(placement)
    labels, arranged = assign_hosts([each.roles for each in instances], cluster)
    chosen = _choose_hosts(labels, list(addresses), planned=arranged is not None)
    grouped: dict[str, list[Instance]] = {name: [] for name in addresses}
    for label, instance in zip(labels, instances, strict=True):
        grouped[chosen[label]].append(instance)
    used = [name for name in addresses if grouped[name]]
    return HostTable(tuple(_plan_host(name, addresses[name], grouped[name], port, device) for name in used))


def _choose_hosts(labels: Iterable[str], names: list[str], *, planned: bool) -> dict[str, str]:
    """Choose a host for each group of instances."""
    groups = list(dict.fromkeys(labels))
    if not names:
        raise ConfigError('no host has an address: give them by name, as in {"alpha": "10.0.0.1"}')
    if planned and set(groups) <= set(names):
        return {each: each for each in groups}
    if planned and len(groups) > len(names):
        raise ConfigError(f"the cluster has {len(groups)} hosts, and {len(names)} have an address: {', '.join(names)}")
    if planned:
        return dict(zip(groups, names, strict=False))
    rest = itertools.cycle(names[1:] if KV_HOST in groups and len(names) > 1 else names)
    return {each: names[0] if each == KV_HOST else next(rest) for each in groups}


def _plan_host(name: str, address: str, instances: list[Instance], port: int, device: str) -> HostEntry:
    hosted = (
        _describe_instance(each, port + number, f"cuda:{number}" if device == "cuda" else None)
        for number, each in enumerate(instances)
    )
    return HostEntry(name=name, address=address, instances=tuple(hosted))


def _describe_instance(each: Instance, port: int, device: str | None) -> HostedInstance:
    """Describe an instance as a file does. Raises ``ConfigError`` for settings that it has no place for."""
    fields = {name: getattr(each, name) for name in HostedInstance.__struct_fields__ if name != "port"}
    if Instance(**fields) != each:
        raise ConfigError(
            f"{each.name} has settings that a file of hosts has no place for, or an address: plan without them, and "
            "give them to the instances of its placement"
        )
    pools = dict(each.pools) if each.pools is not None else None
    return HostedInstance(**{**fields, "port": port, "device": each.device or device, "pools": pools})
