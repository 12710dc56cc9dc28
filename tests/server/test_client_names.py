"""Names of clients: by key or by the address that a trusted proxy has noted, never the key or the address itself."""

from __future__ import annotations

from typing import Any

import pytest

from support.http_server import chat_body, serve_model
from trinity import ConfigError
from trinity.server import ServerConfig
from trinity.server.application import ModelServer
from trinity.server.client_names import ClientNames, read_networks
from trinity.server.command import _make_parser, make_server_config
from trinity.server.connection import Exchange

FORWARDED, X_FORWARDED = b"forwarded", b"x-forwarded-for"


@pytest.mark.parametrize(
    ("peer", "headers", "found"),
    [
        ("192.0.2.1", [], "192.0.2.1"),
        ("192.0.2.1", [(X_FORWARDED, b"198.51.100.7")], "192.0.2.1"),  # no proxy of ours says so
        ("10.0.0.1", [], "10.0.0.1"),
        ("10.0.0.1", [(X_FORWARDED, b"198.51.100.7")], "198.51.100.7"),
        ("10.0.0.1", [(X_FORWARDED, b"6.6.6.6, 198.51.100.7")], "198.51.100.7"),  # the first is what a client says
        ("10.0.0.1", [(X_FORWARDED, b"6.6.6.6, 198.51.100.7, 10.9.9.9")], "198.51.100.7"),
        ("10.0.0.1", [(X_FORWARDED, b"6.6.6.6"), (X_FORWARDED, b"198.51.100.7")], "198.51.100.7"),
        ("10.0.0.1", [(X_FORWARDED, b"198.51.100.7:1234")], "198.51.100.7"),
        ("10.0.0.1", [(X_FORWARDED, b"unknown")], "10.0.0.1"),
        ("10.0.0.1", [(X_FORWARDED, b"198.51.100.7, unknown, 10.9.9.9")], "10.9.9.9"),
        ("10.0.0.1", [(X_FORWARDED, b"10.0.0.9, 10.0.0.8")], "10.0.0.9"),
        ("10.0.0.1", [(X_FORWARDED, b"[2001:db8::1]:99")], "2001:db8::/64"),
        ("10.0.0.1", [(X_FORWARDED, b"2001:db8::1:2:3:4")], "2001:db8::/64"),
        ("10.0.0.1", [(FORWARDED, b'for=6.6.6.6, for="[2001:db8:0:1::7]:4711";proto=https')], "2001:db8:0:1::/64"),
        ("10.0.0.1", [(FORWARDED, b"proto=http;For=198.51.100.7;by=10.0.0.1")], "198.51.100.7"),
        ("10.0.0.1", [(FORWARDED, b"for=_hidden")], "10.0.0.1"),
        ("10.0.0.1", [(FORWARDED, b"for=6.6.6.6"), (X_FORWARDED, b"198.51.100.7")], "198.51.100.7"),
        ("::ffff:10.0.0.1", [(X_FORWARDED, b"198.51.100.7")], "198.51.100.7"),
        ("fd00::1", [(X_FORWARDED, b"198.51.100.7")], "198.51.100.7"),
        ("2001:db8::2", [], "2001:db8::/64"),
        ("10.0.0.1", [(X_FORWARDED, b"\xff" * 100 + b"," * 9000 + b"198.51.100.7")], "198.51.100.7"),
        ("", [(X_FORWARDED, b"198.51.100.7")], ""),  # a Unix socket
    ],
)
def test_addresses(peer: str, headers: list[tuple[bytes, bytes]], found: str) -> None:
    names = ClientNames(read_networks(["10.0.0.0/8", "fd00::/8"]))
    assert names.find_address(peer, headers) == found


def test_names_tell_clients_apart_and_nothing_else() -> None:
    names, others = ClientNames(), ClientNames()
    given: list[tuple[bytes, str]] = [
        (b"", "192.0.2.1"),
        (b"", "192.0.2.2"),
        (b"Bearer a", "192.0.2.1"),
        (b"Bearer b", ""),
    ]
    made = [names.name(key, peer, []) for key, peer in given]
    assert len(set(made)) == 4
    assert made == [names.name(key, peer, []) for key, peer in given]
    assert names.name(b"Bearer a", "192.0.2.9", []) == made[2], "a key is one client wherever it is used"
    assert not set(made) & {others.name(key, peer, []) for key, peer in given}, "no list of addresses finds them"
    assert all(len(each) == 16 for each in made)


async def test_a_key_is_one_client_however_it_is_spelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 82dc40f9 each spelling was another client, which had turns of its own."""
    found, name = list[str](), ModelServer.name_client

    def note(server: ModelServer, exchange: Exchange) -> str:
        found.append(name(server, exchange))
        return found[-1]

    monkeypatch.setattr(ModelServer, "name_client", note)
    async with serve_model(config=ServerConfig(api_keys=["secret", "other"])) as served:
        for sent in ("Bearer secret", "bearer secret", "BEARER   secret", "bEaReR secret", "Bearer other"):
            answer = await served.http.post(
                "/v1/chat/completions", json=chat_body(max_tokens=1), headers={"authorization": sent}
            )
            assert answer.status_code == 200
    assert len(found) == 5
    assert len(set(found[:4])) == 1
    assert found[4] != found[0]


@pytest.mark.parametrize(
    ("peer", "found"),
    [
        ("192.0.2.9", "192.0.2.9"),
        ("::ffff:192.0.2.9", "192.0.2.9"),
        ("2001:db8::2", "2001:db8::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("10.0.0.1", None),
        ("::ffff:10.0.0.1", None),
        ("fd00::1", None),
        ("", None),
    ],
)
def test_the_address_that_a_connection_counts_for(peer: str, found: str | None) -> None:
    assert ClientNames(read_networks(["10.0.0.0/8", "fd00::/8"])).find_counted(peer) == found


@pytest.mark.parametrize("wrong", ["10.0.0.1/8", "proxy", 7])
def test_wrong_networks(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="trusted_proxies"):
        ServerConfig(trusted_proxies=[wrong])


def test_the_command() -> None:
    given = ["model", "--trusted-proxy", "10.0.0.0/8", "--trusted-proxy", "fd00::/8"]
    assert make_server_config(_make_parser().parse_args(given)).trusted_proxies == read_networks(given[2::2])
