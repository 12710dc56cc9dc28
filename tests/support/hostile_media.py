"""Media that a client of the server may name to reach what it must not: the disk, this host, a network, endless bodies.

``try_all`` sends each to a real server by HTTP and returns what it answered. Hosts are real and on the loopback; one of
their addresses is opened and stands for a public one. Only the resolver is a stand-in, for names that change.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

from support.http_server import ServedModel
from support.picture_pages import PicturePages
from trinity.preprocess.media_limits import MediaLimits
from trinity.server import ServerConfig

CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
OUTER, INNER = "127.0.0.2", "127.0.0.3"  # a public address, which tests cannot have, and one inside
LIMITS = MediaLimits(
    allowed_hosts=("*:*",), allowed_networks=(f"{OUTER}/32",), url_timeout_s=2.0, max_image_bytes=50_000
)
CONFIG = ServerConfig(max_body_bytes=1 << 20, body_timeout_s=2.0)
DISK = ("file:///etc/passwd", "FILE:///etc/passwd", "file://localhost/etc/passwd", "/etc/passwd", "../../etc/passwd",
        "/proc/self/environ", "/dev/zero", "~/.ssh/id_rsa")  # fmt: skip
LOOPBACK = ("127.0.0.1", "localhost", "127.1", "2130706433", "0x7f000001", "0", "[::1]", "[::ffff:127.0.0.1]")
PRIVATE = ("10.0.0.1", "172.16.0.1", "192.168.0.1", "100.64.0.1", "169.254.169.254", "[fd00:ec2::254]", "[fe80::1]")


class Tried(NamedTuple):
    """A try, and the answer to it after so many ``seconds``."""

    what: str
    sent: str
    status: int
    code: str
    seconds: float


@contextmanager
def rebinding(name: str, first: str, then: str) -> Iterator[None]:
    """Give a name one address the first time that it is looked up, and another ever after."""
    look_up, left = socket.getaddrinfo, [first]

    def resolve(host: str, port: int, *given: Any, **named: Any) -> Any:
        if host != name or named.get("flags"):
            return look_up(host, port, *given, **named)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (left.pop() if left else then, port))]

    with mock.patch.object(socket, "getaddrinfo", resolve):
        yield


def list_urls(own: str, outer: PicturePages, inner: PicturePages) -> Iterator[tuple[str, str]]:
    """Yield what each URL tries, and the URL. ``own``: the server's address."""
    away, inside = outer.url, f"{INNER}:{inner.port}"
    yield from (("read the disk", path) for path in DISK)
    yield from (("reach the loopback", f"http://{host}:{inner.port}/image") for host in LOOPBACK)
    yield "ask the server itself", f"{own}/metrics"
    yield from (("reach a private network", f"http://{host}/latest/meta-data/") for host in PRIVATE)
    yield "reach a private network", f"http://{inside}/image"
    for target in (f"http://{inside}/image", f"//{inside}/image", f"{own}/metrics", "http://169.254.169.254/",
                   "file:///etc/passwd", "ftp://127.0.0.1/a", "gopher://127.0.0.1/"):  # fmt: skip
        yield "be redirected there", f"{away}/to?{target}"
    yield "be redirected for ever", f"{away}/" + "to?/" * 9 + "image"
    yield "rebind a name", f"http://rebind.test:{outer.port}/to?/image"
    for page in ("endless", "large", "bomb"):
        yield "send an endless or large body", f"{away}/{page}"
    for page in ("drip", "slow-headers"):
        yield "send a slow body", f"{away}/{page}"
    yield "send what is no image", f"{away}/html"
    yield "give a password", f"http://user:password@{OUTER}:{outer.port}/image"
    yield "scan ports", f"http://{OUTER}:1/image"
    yield "use another scheme", f"ftp://{OUTER}/image"
    yield "send a broken data URI", "data:image/png;base64,AAAA"


async def try_all(served: ServedModel, outer: PicturePages, inner: PicturePages) -> list[Tried]:
    """Try each URL as an image of a chat, and the first of each kind in a response; then requests without end."""
    found: list[Tried] = []
    for what, url in list_urls(served.url, outer, inner):
        ways = [(CHAT, ask_chat(url))]
        if what not in {each.what for each in found}:
            ways.append((RESPONSES, ask_response(url)))
        for path, body in ways:
            with rebinding("rebind.test", OUTER, INNER):
                found.append(await _send(served, what, f"{path.rpartition('/')[2]}: {url}", path, json=body))
    for part in ({"type": "image", "path": "/etc/passwd"}, {"type": "image", "image": "/etc/passwd"}):
        body = {"messages": [{"role": "user", "content": [part]}]}
        found.append(await _send(served, "read the disk", str(part), CHAT, json=body))
    for what, sent, pieces in (
        ("send a request that is too long", "64 KiB, 17 times", _pieces(17, 64 << 10, 0.0)),
        ("send a slow request", "20 bytes in three seconds", _pieces(20, 1, 0.15)),
    ):
        headers = {"content-type": "application/json"}
        found.append(await _send(served, what, sent, CHAT, content=pieces, headers=headers))
    return found


def ask_chat(url: str) -> dict[str, Any]:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}


def ask_response(url: str) -> dict[str, Any]:
    part = {"type": "input_image", "image_url": url}
    return {"input": [{"role": "user", "content": [part]}], "max_output_tokens": 1}


async def _pieces(count: int, size: int, wait_s: float) -> AsyncIterator[bytes]:
    for _ in range(count):
        yield b" " * size
        await asyncio.sleep(wait_s)


async def _send(served: ServedModel, what: str, sent: str, path: str, **body: Any) -> Tried:
    began = time.monotonic()
    answer = await served.http.post(path, **body)
    code = "" if answer.status_code == 200 else answer.json()["error"]["code"]
    return Tried(what, sent, answer.status_code, code, time.monotonic() - began)
