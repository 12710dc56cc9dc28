"""Files of hosts: what is written is read, what is wrong is refused by name, and placements lie where KV stays."""

from __future__ import annotations

import contextlib
import os
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.emulated_pipelines import MODEL
from support.running_instances import SECRET
from trinity.costs.cluster import Cluster
from trinity.errors import ConfigError
from trinity.instance import Instance
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.remote.hosts import hosts
from trinity.remote.hosts.hosts import HostedInstance, HostEntry, HostTable, plan_hosts, read_hosts, write_hosts
from trinity.remote.supervision.process_config import ProcessConfig

TWO = {"alpha": "10.0.0.1", "beta": "10.0.0.2"}
WHOLE = """
[[hosts]]
name = "alpha"
address = "127.0.0.1"
model = "/models/llava"
ucx_device = "mlx5_0:1"
instances = [
    {roles = "P", port = 7000, device = "cuda:0", pools = {kv = 64, image = 8}},
    {roles = "D", port = 7001, name = "last", threads = 2, cores = [0, 1], memory_bytes = 1000},
]

[[hosts]]
name = "beta"
address = "::1"
instances = [{roles = "E", port = 7000}]
"""


def read(tmp_path: Path, text: str | bytes) -> HostTable:
    path = tmp_path / "hosts.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_hosts(path)


def test_what_a_file_says_is_the_pipelines_placement(tmp_path: Path) -> None:
    table = read(tmp_path, WHOLE)
    one, two, three = table.placement
    assert (one.name, one.roles, one.address, one.device) == ("P0", "P", "tcp:127.0.0.1:7000", "cuda:0")
    assert one.pools == {"kv": 64, "image": 8}
    assert (two.name, two.threads, two.cores, two.memory_bytes) == ("last", 2, (0, 1), 1000)
    assert (three.name, three.address) == ("E0", "tcp:[::1]:7000")
    assert table.list_on("alpha") == [one, two]
    assert table.list_on("beta") == [three]
    assert (table.find("alpha").model, table.find("alpha").ucx_device) == ("/models/llava", "mlx5_0:1")
    terms = ProcessConfig(secret=SECRET)
    assert str(Pipeline(MODEL, table.placement, hosting="process", processes=terms).placement) == "1P1D1E"


HOST = '[[hosts]]\nname = "a"\naddress = "10.0.0.1"\ninstances = [{roles = "PD", port = 7000}]\n'
WRONG: dict[str, tuple[str | bytes, str]] = {
    "no TOML": ("[[hosts]\n", r"not in TOML.*line 1"),
    "no text": (b"\xff", r"no text in UTF-8 .*byte 0"),
    "nested": ("a = " + "[" * 5000, r"nested too deep"),
    "nothing": ("", r"missing required field `hosts`"),
    "no host": ("hosts = []", r"no host has an instance"),
    "another field": ("x = 1\n" + HOST, r"unknown field `x`"),
    "another field of a host": (HOST + "ports = 1", r"unknown field `ports` - at `\$.hosts\[0\]`"),
    "another type": (HOST.replace("7000", '"7000"'), r"got `str` - at `\$.hosts\[0\].instances\[0\].port`"),
    "a large port": (HOST.replace("7000", "70000"), r"<= 65535 - at"),
    "any port": (HOST.replace("7000", "0"), r">= 1 - at"),
    "roles": (HOST.replace("PD", "XY"), r"unknown stage X, Y"),
    "a device": (HOST.replace("7000}", '7000, device = "tpu"}'), r"cpu"),
    "a name": (HOST.replace('"a"', '"a b"'), r"a host's name has letters"),
    "no address": (HOST.replace("10.0.0.1", ""), r"host a has address ''"),
    "a port in the address": (HOST.replace("10.0.0.1", "10.0.0.1:7000"), r"give its IP address or its name"),
    "every address": (HOST.replace("10.0.0.1", "0.0.0.0"), r"give its IP address or its name"),
    "an address of many": (HOST.replace("10.0.0.1", "ff02::1"), r"give its IP address or its name"),
    "half an address": (HOST.replace("10.0.0.1", "10.0.0"), r"give its IP address or its name"),
    "an empty label": (HOST.replace("10.0.0.1", "a..b"), r"give its IP address or its name"),
    "a long label": (HOST.replace("10.0.0.1", "a" * 64 + ".net"), r"give its IP address or its name"),
    "a scope of no letters": (HOST.replace("10.0.0.1", "fe80::1%\\n"), r"give its IP address or its name"),
    "a size of nothing": (HOST.replace("7000}", "7000, memory_bytes = 0}"), r">= 1 - at"),
    "a pool below nothing": (HOST.replace("7000}", "7000, pools = {kv = -1}}"), r">= 0 - at"),
    "a key of many parts": (".".join("a" * 500_000) + " = 1", r"more than 64 dots"),
    "two of a name": (HOST + HOST.replace("0.1", "0.2"), r"name of a host is given twice: a"),
    "two of an address": (HOST + HOST.replace('"a"', '"b"'), r"address of a host is given twice: 10.0.0.1"),
    "two of a port": (HOST.replace("7000}", '7000}, {roles = "E", port = 7000}'), r"port of host a is given twice"),
    "two of an instance's name": (HOST.replace("7000}", '7000, name = "x"}, {roles = "E", port = 1, name = "x"}'),
                                  r"a name of its own"),
    "cores without threads": (HOST.replace("7000}", "7000, threads = 3, cores = [1]}"), r"threads .* do not fit"),
    "a name of no letters": (HOST.replace("7000}", '7000, name = "a\\u007f"}'), r"name is .*: give up to 40"),
    "a name that is a path": (HOST.replace("7000}", '7000, name = "../../tmp/up"}'), r"give up to 40 letters, digits"),
    "a pool of no letters": (HOST.replace("7000}", '7000, pools = {"a\\u007f" = 1}}'), r"has a pool .* printed"),
    "a model that is no path": (HOST + 'model = "a\\nb"', r"cannot be printed"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_refused_with_its_place_and_the_form(case: str, tmp_path: Path) -> None:
    text, says = WRONG[case]
    with pytest.raises(ConfigError, match=says) as caught:
        read(tmp_path, text)
    assert str(caught.value).startswith(str(tmp_path / "hosts.toml"))
    assert "a file of hosts has [[hosts]], each with name, address and instances" in str(caught.value)


@pytest.mark.parametrize(
    ("one", "two"), [("::1", "0:0:0:0:0:0:0:1"), ("Host", "hOST"), ("10.0.0.1", "::ffff:10.0.0.1")]
)
def test_an_address_in_two_spellings_is_given_twice(one: str, two: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="address of a host is given twice"):
        read(tmp_path, HOST.replace("10.0.0.1", one) + HOST.replace("10.0.0.1", two).replace('"a"', '"b"'))


def test_a_file_that_would_be_too_large_to_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = read(tmp_path, HOST)
    monkeypatch.setattr(hosts, "MOST_HOSTS_BYTES", 50)
    with pytest.raises(ConfigError, match="at most 50 bytes"):
        write_hosts(tmp_path / "large.toml", table)
    assert not (tmp_path / "large.toml").exists()


def test_a_file_that_cannot_be_read_or_never_ends_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.toml"):
        read_hosts(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        read_hosts(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        read_hosts("/dev/zero")
    monkeypatch.setattr(hosts, "MOST_HOSTS_BYTES", len(HOST) - 1)
    with pytest.raises(ConfigError, match="no more are read"):
        read(tmp_path, HOST)


@given(st.text(max_size=200) | st.binary(max_size=200))
def test_any_text_is_a_table_or_a_typed_error(tmp_path_factory: pytest.TempPathFactory, text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else text.encode(errors="replace")
    with contextlib.suppress(ConfigError):
        read(tmp_path_factory.getbasetemp(), content)


# ---------------------------------------------------------------- written and read again

NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8"), max_size=12).filter(str.isprintable)
ONE_HOSTS = st.ip_addresses().filter(lambda each: not (each.is_unspecified or each.is_multicast))
ADDRESSES = ONE_HOSTS.map(str) | st.from_regex(r"[a-z][a-z0-9-]{0,8}[a-z0-9]\.local", fullmatch=True)


@st.composite
def tables(draw: st.DrawFn) -> HostTable:
    names = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    addresses = draw(st.lists(ADDRESSES, min_size=len(names), max_size=len(names), unique=True))
    entries, number = [], 0
    for name, address in zip(names, addresses, strict=True):
        ports = draw(st.lists(st.integers(1, 65_535), min_size=1, max_size=3, unique=True))
        instances = []
        for port in ports:
            number += 1
            instances.append(
                HostedInstance(
                    roles=draw(st.sampled_from(("E", "P", "D", "PD", "EPD"))),
                    port=port,
                    name=draw(st.sampled_from(("", f"{draw(NAMES)}-{number}"))),
                    device=draw(st.sampled_from((None, "cpu", "cuda:3"))),
                    threads=draw(st.integers(1, 3)),
                    memory_bytes=draw(st.none() | st.integers(1, 1 << 40)),
                    pools=draw(st.none() | st.dictionaries(TEXTS, st.integers(0, 999), max_size=2)),
                )
            )
        model, device = draw(TEXTS), draw(TEXTS)
        entries.append(
            HostEntry(name=name, address=address, instances=tuple(instances), model=model, ucx_device=device)
        )
    return HostTable(tuple(entries))


@given(tables())
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, table: HostTable) -> None:
    path = tmp_path_factory.getbasetemp() / "written.toml"
    write_hosts(path, table)
    assert read_hosts(path) == table
    assert len(tomllib.loads(path.read_text())["hosts"]) == len(table.hosts)
    every = [each for host in table.hosts for each in table.list_on(host.name)]
    assert every == table.placement, "each instance is on one host, and has the name that the pipeline gives it"


def test_a_table_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot write"):
        write_hosts(tmp_path / "none" / "hosts.toml", plan_hosts("PD", TWO))
    with pytest.raises(ConfigError, match="table is"):
        write_hosts(tmp_path / "hosts.toml", "PD")  # type: ignore[arg-type]


# ---------------------------------------------------------------- out of a placement


def placed(table: HostTable) -> dict[str, set[str]]:
    return {host.name: {each.name for each in table.list_on(host.name)} for host in table.hosts}


@pytest.mark.parametrize(
    ("placement", "addresses", "there"),
    [
        ("1E1P1D", TWO, {"alpha": {"P0", "D0"}, "beta": {"E0"}}),
        (Placement.parse("2E1P2D"), TWO, {"alpha": {"P0", "D0", "D1"}, "beta": {"E0", "E1"}}),
        ("2E1P1D", {**TWO, "gamma": "10.0.0.3"}, {"alpha": {"P0", "D0"}, "beta": {"E0"}, "gamma": {"E1"}}),
        ("1P1D", TWO, {"alpha": {"P0", "D0"}}),
        ("1E1P1D", {"only": "10.0.0.1"}, {"only": {"E0", "P0", "D0"}}),
        ("3EPD", TWO, {"alpha": {"EPD0", "EPD2"}, "beta": {"EPD1"}}),  # no KV moves
        ("1E2PD", TWO, {"alpha": {"E0", "PD1"}, "beta": {"PD0"}}),
    ],
)
def test_what_exchanges_kv_is_on_one_host(placement: Any, addresses: dict[str, str], there: object) -> None:
    table = plan_hosts(placement, addresses)
    assert placed(table) == there
    for host in table.hosts:
        assert [each.port for each in host.instances] == [*range(7000, 7000 + len(host.instances))]


def test_a_clusters_hosts_are_obeyed_by_name_or_in_order() -> None:
    cluster = Cluster.of("H100", 4, per_host=2)
    together = [{"P0", "D0"}, {"P1", "D1"}]
    assert list(placed(plan_hosts("2P2D", TWO, cluster)).values()) == together
    named = {"host1": "10.0.0.1", "more": "10.0.0.2", "host0": "10.0.0.3"}
    assert placed(plan_hosts("2P2D", named, cluster)) == {"host1": together[1], "host0": together[0]}
    assert placed(plan_hosts("2P2D", TWO, Cluster.of("H100", 4))) == {"alpha": {"P0", "P1", "D0", "D1"}}
    with pytest.raises(ConfigError, match="2 hosts, and 1 have an address: alpha"):
        plan_hosts("2P2D", {"alpha": "10.0.0.1"}, cluster)


def test_gpus_of_each_host_are_numbered() -> None:
    table = plan_hosts("2E1P1D", TWO, device="cuda", port=9000)
    devices = [(each.name, each.address, each.device) for each in table.placement]
    assert devices == [
        ("P0", "tcp:10.0.0.1:9000", "cuda:0"),
        ("D0", "tcp:10.0.0.1:9001", "cuda:1"),
        ("E0", "tcp:10.0.0.2:9000", "cuda:0"),
        ("E1", "tcp:10.0.0.2:9001", "cuda:1"),
    ]


def test_instances_keep_what_a_file_has_and_no_more_is_dropped() -> None:
    eye = Instance("E", "eye", pools={"image": 4}, threads=2, cores=(0, 1), memory_bytes=5, device="cuda:1")
    table = plan_hosts([eye, Instance("PD")], TWO, device="cuda")
    assert replace(table.placement[0], address=None) == eye
    assert table.placement[1].device == "cuda:0"
    for more in (Instance("PD", address="tcp:10.0.0.1:7"), Instance("PD", reservation="optimistic")):
        with pytest.raises(ConfigError, match="PD0 has settings that a file of hosts has no place for"):
            plan_hosts([more], TWO)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"addresses": {}}, "no host has an address"),
        ({"addresses": {"a": "nowhere at all"}}, "give its IP address"),
        ({"placement": "1E"}, "no instance for stage"),
        ({"port": 0}, "port is"),
        ({"port": 65_535}, "port is"),
        ({"device": "tpu"}, "device"),
        ({"cluster": "H100"}, "cluster is"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        plan_hosts(**{"placement": "1P1D", "addresses": TWO, **given})


def test_an_unknown_host_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"no host 'gamma', only alpha, beta"):
        plan_hosts("1E1P1D", TWO).find("gamma")
