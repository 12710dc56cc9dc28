"""TLS on control channels over TCP: what it hides, whom it lets in, and what each refusal says."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from support.certificates import Authority, run
from support.relay import relay
from support.running_instances import LIVENESS_S, SECRET, by_hand, tcp
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.errors import ConfigError, HandshakeError
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.channel import listener as listeners
from trinity.remote.channel.channel import Address, Channel, connect
from trinity.remote.channel.listener import listen
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.supervision.fork_client import kept_launcher
from trinity.remote.supervision.process_config import ProcessConfig

KEY = SECRET.encode()
PROMPT = b"what nobody on the way may read"
LOCAL = Address.parse("tcp:127.0.0.1:0")
MODEL = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(source="nothing takes time"))
UNKNOWN = "self-signed certificate in certificate chain|unable to get local issuer certificate"
POOLS = {"image": 64, "kv": 64}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "ours")


@pytest.fixture(scope="module")
def one(authority: Authority) -> TLSConfig:
    return authority.issue("one")


@pytest.fixture(scope="module")
def two(authority: Authority) -> TLSConfig:
    return authority.issue("two")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> TLSConfig:
    return Authority(tmp_path_factory.mktemp("another"), "theirs").issue("stranger")


async def echo(channel: Channel) -> None:
    async for frame in channel:
        channel.send(frame)


async def ask(address: Address, tls: TLSConfig | None, message: bytes = PROMPT) -> bytes:
    async with asyncio.timeout(LIVENESS_S):
        channel = await connect(address, KEY, b"client", tls=tls)
        channel.send(message)
        found = await channel.receive()
        await channel.aclose()
        return found


class Copier:
    """Passes bytes on as they are, and keeps a copy."""

    def __init__(self, target: Address) -> None:
        self.target, self.copied = target, bytearray()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection(self.target.host, self.target.port)
        await join(reader, writer, back, there, self.copied)


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    back: asyncio.StreamReader,
    there: asyncio.StreamWriter,
    copied: bytearray,
) -> None:
    async def pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(1 << 16):
                copied.extend(data)
                target.write(data)

    ways = [asyncio.ensure_future(pass_on(reader, there)), asyncio.ensure_future(pass_on(back, writer))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        there.transport.abort()
        writer.transport.abort()


# ---------------------------------------------------------------- what it hides


@pytest.mark.parametrize("hidden", [False, True], ids=["clear", "tls"])
async def test_who_stands_on_the_line_reads_nothing(one: TLSConfig, two: TLSConfig, hidden: bool) -> None:
    async with listen(LOCAL, KEY, b"server", echo, one if hidden else None) as bound:
        copier = Copier(bound)
        async with relay(copier) as address:  # type: ignore[arg-type]
            assert await ask(address, two if hidden else None) == PROMPT
    assert (PROMPT in copier.copied) is not hidden
    assert len(copier.copied) > 2 * len(PROMPT)


async def test_long_messages_and_the_end_of_a_channel(one: TLSConfig, two: TLSConfig) -> None:
    long = os.urandom(3 << 20)
    async with listen(LOCAL, KEY, b"server", echo, one) as bound:
        assert await ask(bound, two, long) == long
        channel = await connect(bound, KEY, b"client", tls=two)
        inside = channel._writer.get_extra_info("ssl_object")
        assert inside.version() == "TLSv1.3"
        channel.abort()
        assert channel.closed


async def test_a_unix_socket_has_none(one: TLSConfig, tmp_path: Path) -> None:
    address = Address("unix", path=str(tmp_path / "s"))
    async with listen(address, KEY, b"server", echo, one):
        assert await ask(address, None) == PROMPT
        assert await ask(address, one) == PROMPT


# ---------------------------------------------------------------- who is refused


async def refused(server: TLSConfig | None, client: TLSConfig | None, secret: bytes = KEY) -> str:
    async with listen(LOCAL, secret, b"server", echo, server) as bound:
        with pytest.raises(HandshakeError) as caught:
            await ask(bound, client)
    return str(caught.value)


async def test_a_client_without_tls_is_told(one: TLSConfig, caplog: pytest.LogCaptureFixture) -> None:
    assert "takes TLS alone, and this side speaks none: give both sides" in await refused(one, None)
    assert "the peer speaks no TLS, and this side nothing else" in caplog.text


async def test_a_server_without_tls_is_told(one: TLSConfig, caplog: pytest.LogCaptureFixture) -> None:
    assert "speaks no TLS: give both sides" in await refused(None, one)
    assert "the peer speaks TLS, and this side none" in caplog.text


async def test_a_client_of_another_authority(
    one: TLSConfig, stranger: TLSConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """It accepts our authority itself, so that the server alone has something against it."""
    trusting = dataclasses.replace(stranger, authority=one.authority)
    assert "does not accept this side's certificate" in await refused(one, trusting)
    assert "CERTIFICATE_VERIFY_FAILED" in caplog.text


async def test_a_server_of_another_authority(one: TLSConfig, stranger: TLSConfig) -> None:
    said = await refused(stranger, one)
    assert "the certificate of 127.0.0.1" in said
    assert re.search(f"is not accepted: ({UNKNOWN}); one authority has to vouch for both", said)


async def test_an_expired_certificate_is_refused_by_the_peer(authority: Authority, one: TLSConfig) -> None:
    old = authority.issue("old", days=-1)
    assert "is not accepted: certificate has expired" in await refused(old, one)
    assert "does not accept this side's certificate" in await refused(one, old)


async def test_a_client_without_a_certificate_gets_no_greeting(one: TLSConfig) -> None:
    async with listen(LOCAL, KEY, b"server", echo, one) as bound:
        context = ssl.create_default_context(cafile=one.authority)
        context.check_hostname = False
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(bound.host, bound.port, ssl=context)
            assert await asyncio.wait_for(reader.read(), LIVENESS_S) == b""
            writer.transport.abort()
        assert await ask(bound, one) == PROMPT


async def test_older_tls_is_refused(one: TLSConfig, caplog: pytest.LogCaptureFixture) -> None:
    async with listen(LOCAL, KEY, b"server", echo, one) as bound:
        context = one.make_context(server=False)
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionResetError)):
            await asyncio.open_connection(bound.host, bound.port, ssl=context, server_hostname="")
    assert "UNSUPPORTED_PROTOCOL" in caplog.text


async def test_another_secret_inside_tls(one: TLSConfig, two: TLSConfig) -> None:
    assert "the secrets differ" in await refused(one, two, b"s" * 32)


@pytest.mark.parametrize("owner", ["another", "the server"])
async def test_who_has_a_certificate_and_no_secret_cannot_stand_between(
    one: TLSConfig, two: TLSConfig, owner: str
) -> None:
    """It ends TLS on both sides with a certificate of the authority, and would read what it passes on."""
    copied = bytearray()
    held = two if owner == "another" else one
    async with listen(LOCAL, KEY, b"server", echo, one) as bound:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            context = held.make_context(server=False)
            back, there = await asyncio.open_connection(bound.host, bound.port, ssl=context, server_hostname="")
            await join(reader, writer, back, there, copied)

        context = held.make_context(server=True)
        async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as between:
            port = between.sockets[0].getsockname()[1]
            with pytest.raises(HandshakeError):
                await ask(Address("tcp", host="127.0.0.1", port=port), two)
    assert copied.startswith(b"TRNY")
    assert PROMPT not in copied


async def test_a_rightful_client_comes_through_a_crowd_in_tls(
    one: TLSConfig, two: TLSConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are dropped before TLS get an alert, which sends them back to try again."""
    monkeypatch.setattr(listeners, "MAX_UNAUTHENTICATED", 2)
    async with listen(LOCAL, KEY, b"server", echo, one) as bound:
        silent = [await asyncio.open_connection(bound.host, bound.port) for _ in range(8)]
        found = await asyncio.gather(*[ask(bound, two) for _ in range(6)])
        assert found == [PROMPT] * 6
        assert (await asyncio.wait_for(silent[0][0].read(), LIVENESS_S))[:1] == b"\x15"
        for _, writer in silent:
            writer.transport.abort()


async def test_who_gives_way_leaves_no_transport_without_its_descriptor(
    one: TLSConfig, two: TLSConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled as its handshake ended, asyncio's transport lived on, while its descriptor was closed beneath it.

    The next connection with that descriptor failed, whosever it was (RuntimeError: used by transport).
    """
    made = asyncio.StreamReaderProtocol.connection_made
    left = list[asyncio.Task[Any]]()

    def leave(protocol: asyncio.StreamReaderProtocol, transport: Any) -> None:
        made(protocol, transport)
        if not left and transport.get_extra_info("sockname")[1] == bound.port:
            left.extend(task for task in asyncio.all_tasks() if "Listener._serve" in repr(task.get_coro()))
            for task in left:
                task.cancel()

    async with listen(LOCAL, KEY, b"server", echo, one) as bound:
        monkeypatch.setattr(asyncio.StreamReaderProtocol, "connection_made", leave)
        assert await ask(bound, two) == PROMPT, "it came again"
        assert len(left) == 1
        transports: dict[int, Any] = vars(asyncio.get_running_loop())["_transports"]
        assert [each for each in transports.values() if not each.is_closing() and each._sock.fileno() < 0] == []


# ---------------------------------------------------------------- files that would not do


def broken(authority: Authority, one: TLSConfig, two: TLSConfig, what: str) -> TLSConfig:
    junk = authority.folder / "junk.pem"
    junk.write_text("no certificate")
    if what == "encrypted":
        locked = authority.folder / "locked.key"
        run("ec", "-in", str(one.key), "-out", str(locked), "-aes128", "-passout", "pass:open sesame")
        return dataclasses.replace(one, key=locked)
    return {
        "missing": lambda: dataclasses.replace(one, key=authority.folder / "nowhere"),
        "a folder": lambda: dataclasses.replace(one, authority=authority.folder),
        "no certificate": lambda: dataclasses.replace(one, certificate=junk),
        "no authority": lambda: dataclasses.replace(one, authority=junk),
        "another's key": lambda: dataclasses.replace(one, key=two.key),
        "expired": lambda: authority.issue("late", days=-1),
    }[what]()


REASONS = {
    "missing": "nowhere is no file",
    "a folder": "is no file",
    "no certificate": "are no certificate and its key in PEM",
    "no authority": "has no certificate of an authority",
    "another's key": "are no certificate and its key in PEM",
    "encrypted": "is encrypted",
    "expired": "certificate has expired",
}


@pytest.mark.parametrize("what", REASONS)
def test_files_that_would_not_do(authority: Authority, one: TLSConfig, two: TLSConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=REASONS[what]):
        ProcessConfig(tls=broken(authority, one, two, what))


def test_a_certificate_that_its_own_authority_does_not_vouch_for(one: TLSConfig, stranger: TLSConfig) -> None:
    with pytest.raises(ConfigError, match=f"is not one that .* vouches for now: ({UNKNOWN})"):
        ProcessConfig(tls=dataclasses.replace(stranger, authority=one.authority))


def test_the_command_refuses_such_files(one: TLSConfig) -> None:
    for given, said in (
        ([f"--tls-certificate={one.certificate}"], "all of --tls-certificate, --tls-key and --tls-authority"),
        ([f"--tls-{name}={one.key}" for name in ("certificate", "key", "authority")], "trinity: "),
    ):
        command = [sys.executable, "-m", "trinity.instance", "--listen", "tcp:127.0.0.1:0", *given]
        ended = subprocess.run(
            command, env={**os.environ, "TRINITY_SECRET": SECRET}, capture_output=True, text=True, timeout=LIVENESS_S
        )
        assert ended.returncode
        assert said in ended.stderr
        assert "Traceback" not in ended.stderr


# ---------------------------------------------------------------- whole pipelines


def asked() -> list[EmulatedRequest]:
    return [EmulatedRequest(text_tokens=9 + at, max_tokens=5, request_id=f"{PROMPT.decode()} {at}") for at in range(4)]


async def answers(instances: list[Instance], tls: TLSConfig | None) -> list[list[int]]:
    terms = ProcessConfig(secret=SECRET, tls=tls)
    cache = CacheConfig(pools=POOLS)
    async with asyncio.timeout(LIVENESS_S):
        async with Pipeline(MODEL, instances, hosting="process", processes=terms, cache=cache) as pipe:
            outputs = await asyncio.gather(*[pipe.complete(each) for each in asked()])
    return [list(each.token_ids) for each in outputs]


@asynccontextmanager
async def copied_on_the_way(*targets: Address) -> AsyncIterator[tuple[list[Copier], list[str]]]:
    copiers = [Copier(each) for each in targets]
    async with relay(copiers[0]) as first, relay(copiers[1]) as second:  # type: ignore[arg-type]
        yield copiers, [str(first), str(second)]


async def test_tokens_are_equal_over_tls_and_nobody_reads_them(one: TLSConfig, two: TLSConfig) -> None:
    """E is the pipeline's own and reaches P and D over TCP, as D does P: by way of relays, all in TLS or in clear."""
    found, read = [], []
    async with kept_launcher(torch=False) as launcher:
        for theirs, ours in ((one, two), (None, None)):
            async with (
                by_hand(launcher, tcp(), tcp(), model="", tls=theirs) as hosts,
                copied_on_the_way(*[each.address for each in hosts]) as (copiers, where),
            ):
                instances = [Instance("E"), Instance("P", address=where[0]), Instance("D", address=where[1])]
                found.append(await answers(instances, ours))
                read.append([PROMPT in each.copied for each in copiers])
    assert found[0] == found[1]
    assert [len(each) for each in found[0]] == [5] * 4
    assert read == [[False, False], [True, True]]


async def test_the_command_serves_in_tls(one: TLSConfig, two: TLSConfig) -> None:
    names = zip(("certificate", "key", "authority"), one.paths(), strict=True)
    given = ["--listen", "tcp:127.0.0.1:0", "--once", *[f"--tls-{name}={path}" for name, path in names]]
    server = subprocess.Popen(
        [sys.executable, "-m", "trinity.instance", *given],
        stdout=subprocess.PIPE,
        env={**os.environ, "TRINITY_SECRET": SECRET},
        text=True,
    )
    try:
        assert server.stdout is not None
        there = Instance("EPD", address=json.loads(server.stdout.readline())["listening"])
        with pytest.raises(HandshakeError, match="takes TLS alone"):
            await answers([there], None)
        assert [len(each) for each in await answers([there], two)] == [5] * 4
    finally:
        server.kill()
        server.wait()
        assert server.stdout is not None
        server.stdout.close()
