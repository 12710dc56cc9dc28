"""URLs of one's own requests: fetched where allowed, by any address of a name, and bounded in bytes and time."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from support.picture_pages import PIXELS, PicturePages, serving
from trinity.preprocess.fetch import url_fetch
from trinity.preprocess.fetch.url_fetch import UrlFetcher
from trinity.preprocess.media.images import read_image
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

OPEN = MediaLimits(allow_urls=True, url_timeout_s=100.0, max_image_bytes=50_000)  # for what comes
BRIEF = MediaLimits(allow_urls=True, url_timeout_s=1.0)
HASTY = MediaLimits(allow_urls=True, url_timeout_s=0.2)


def read(url: str, limits: MediaLimits) -> Any:
    """Fetch and read as a request of the program's own."""
    return np.asarray(read_image(asyncio.run(UrlFetcher(limits).fetch(url)), limits))


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving(PicturePages("127.0.0.1")) as pages:
        yield pages.url


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.mark.parametrize("page", ["image", "to?/image"])
def test_urls_are_read_where_allowed(server: str, page: str) -> None:
    assert np.array_equal(read(f"{server}/{page}", OPEN), PIXELS)


@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("missing", "status 404"),
        ("html", "not an image"),
        ("large", "max_image_bytes is 50000"),
        ("endless", "max_image_bytes is 50000"),
        ("bomb", "compressed bytes"),
        ("to?file:///etc/hostname", "cannot be fetched.*only http: and https:"),
        ("to?/to?/to?/to?/to?/to?/to?/image", "leads on more than 5 times"),
    ],
)
def test_bad_urls_say_why(server: str, page: str, why: str) -> None:
    with pytest.raises(MediaProblem, match=why):
        read(f"{server}/{page}", OPEN)


@pytest.mark.parametrize("url", ["http://", "http://[::1", "http://a:99999/", "https://\x00/", "http://" + "a" * 9000])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(MediaProblem, match="cannot be fetched"):
        read(url, OPEN)


def test_urls_are_refused_where_none_are_allowed() -> None:
    with pytest.raises(MediaProblem, match=r"URLs are not allowed here: set MediaLimits\(allowed_hosts"):
        read("https://example.org/a.png", MediaLimits())


def test_a_server_that_drips_or_is_not_there_holds_nothing(server: str) -> None:
    for page in ("drip", "slow-headers"):
        began = time.monotonic()
        with pytest.raises(MediaProblem, match=r"url_timeout_s \(0\.2 s\)"):
            read(f"{server}/{page}", HASTY)
        assert time.monotonic() - began < 60
    with pytest.raises(MediaProblem, match="cannot be fetched"):
        read("http://127.0.0.1:1/a.png", OPEN)


def test_a_name_that_nobody_answers_for_cannot_hold_a_thread(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver is a stand-in: a server of names that is silent cannot be had here."""
    answered = threading.Event()
    look_up, url = socket.getaddrinfo, "http://nobody.invalid/a.png"

    def silent(host: str, *given: Any, **named: Any) -> Any:
        if host == "nobody.invalid" and not named.get("flags"):  # whether it is an address is told without asking
            assert answered.wait(60)
            raise OSError("no such name")
        return look_up(host, *given, **named)

    async def all_at_once() -> list[Any]:
        """The last one finds all threads of look-ups taken."""
        fetches = [UrlFetcher(HASTY).fetch(url) for _ in range(url_fetch._MOST_LOOKUPS + 1)]
        return await asyncio.gather(*fetches, return_exceptions=True)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        found = asyncio.run(all_at_once())
        assert {str(each) for each in found} == {"took longer to fetch than url_timeout_s (0.2 s)"}
        lookups = [thread for thread in threading.enumerate() if thread.name == "trinity-lookup"]
        assert len(lookups) == url_fetch._MOST_LOOKUPS
    finally:
        answered.set()
    for thread in lookups:
        thread.join(60)
    with pytest.raises(MediaProblem, match="cannot be fetched"):
        read(url, HASTY)
    assert np.array_equal(read(f"{server}/image", OPEN), PIXELS)


@pytest.fixture
def silent_names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A resolver that answers for no name, as behind a wall that only a proxy has a door in."""
    over, look_up = threading.Event(), socket.getaddrinfo

    def silent(host: str, *given: Any, **named: Any) -> Any:
        if host.endswith(".invalid") and not named.get("flags"):
            assert over.wait(60)
            raise OSError("no such name")
        return look_up(host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    yield
    over.set()


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_name_that_the_proxy_alone_knows_is_not_asked_for(
    scheme: str, silent_names: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 3b0380c it was looked up here first, for as long as the fetch had."""
    with serving(PicturePages("127.0.0.1")) as pages:
        pages.pictures["/http://inside.invalid/image"] = pages.pictures["/image"]
        monkeypatch.setenv("HTTP_PROXY", f"{scheme}127.0.0.1:{pages.port}")
        monkeypatch.setenv("NO_PROXY", "elsewhere.invalid")
        assert np.array_equal(read("http://inside.invalid/image", OPEN), PIXELS)
        with pytest.raises(MediaProblem, match="took longer"):
            read("http://elsewhere.invalid/image", HASTY)
        assert [path for path, _ in pages.asked] == ["http://inside.invalid/image"]


@pytest.mark.parametrize("proxy", ["http://nobody.invalid:3128", "nobody.invalid:3128"])
@pytest.mark.parametrize("through", ["a proxy", "no proxy"])
def test_a_proxy_that_nobody_answers_for_holds_no_thread_of_the_program(
    through: str, proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client looks up names by itself where proxies are set: of the proxy, and of hosts that go past it."""
    monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("NO_PROXY", "" if through == "a proxy" else "*")
    answered, askers = threading.Event(), list[str]()

    def silent(host: str, *given: Any, **named: Any) -> Any:
        if named.get("flags"):
            raise OSError("a name")
        askers.append(threading.current_thread().name)
        assert answered.wait(60)
        raise OSError("no such name")

    async def fetch() -> None:
        with pytest.raises(MediaProblem, match="took longer"):
            await UrlFetcher(HASTY).fetch("http://silent.invalid/a.png")
        answered.set()  # before the loop waits for its own threads

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    asyncio.run(fetch())
    assert {name.partition("_")[0] for name in askers} == {"trinity-lookup"}


def test_no_log_has_what_a_query_may_keep_secret(server: str, caplog: pytest.LogCaptureFixture) -> None:
    """A signed URL is a key to what it names. The client's own lines have whole URLs; others who use it keep theirs."""
    caplog.set_level(logging.DEBUG)
    secret = "X-Signature=c0ffee"
    read(f"{server}/image?{secret}", OPEN)
    read(f"{server}/to?/image?{secret}", OPEN)
    bare = MediaLimits(allowed_hosts=("elsewhere.test",))
    with pytest.raises(MediaProblem):
        asyncio.run(UrlFetcher(bare).fetch(f"{server.replace('//', '//user:c0ffee@')}/a.png?{secret}", untrusted=True))
    assert "c0ffee" not in caplog.text
    assert "was not fetched" in caplog.text
    httpx2.get(f"{server}/image?mine")
    assert "image?mine" in caplog.text


def addresses(*found: Any) -> Any:
    """Stand in for the resolver, which here knows no name with several addresses; what is an address stays one."""
    look_up = socket.getaddrinfo

    def resolve(host: str, *given: Any, **named: Any) -> Any:
        if host != "several.test" or named.get("flags"):
            return look_up(host, *given, **named)
        return list(found)

    return resolve


def tcp(address: str, port: int = 80) -> Any:
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", (address, port))


@pytest.fixture
def hole() -> Iterator[tuple[str, int]]:
    """An address that answers nothing: a listener whose queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.9", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        yield listener.getsockname()
        for each in waiting:
            each.close()


def test_a_name_is_reached_by_any_of_its_addresses(hole: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``socket.create_connection``: a family of no use here, or an address that is silent, is not the end."""
    absent = (12, socket.SOCK_STREAM, 6, "", ("x", 0))  # 12 was DECnet
    silent, here, url = tcp(hole[0]), tcp("127.0.0.1"), f"http://several.test:{hole[1]}/image"
    with serving(PicturePages("127.0.0.1", hole[1])) as pages:
        for first in ([absent], [silent], [silent, absent, tcp("127.0.0.8")]):
            with monkeypatch.context() as patch:
                patch.setattr(socket, "getaddrinfo", addresses(*first, here))
                assert np.array_equal(read(url, BRIEF), PIXELS)
        assert pages.asked[-1] == ("/image", f"several.test:{hole[1]}"), "the server is told its name"
    for found, said in (
        ([], "no address"),
        ([absent], "no address"),
        ([silent] * 2, "cannot be fetched|url_timeout_s"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", addresses(*found))
            with pytest.raises(MediaProblem, match=said):
                read(url, BRIEF)


def test_an_address_needs_no_thread_to_be_looked_up(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(url_fetch, "_lookups", threading.BoundedSemaphore(1))
    assert url_fetch._lookups.acquire(timeout=60)
    assert np.array_equal(read(f"{server}/image", OPEN), PIXELS)
    with pytest.raises(MediaProblem, match="url_timeout_s"):
        read("http://several.test/image", HASTY)


@pytest.fixture
def tls_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PicturePages]:
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl here to make a certificate")
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    asked = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {certificate}"
    subprocess.run(
        [program, *asked.split(), "-addext", "subjectAltName=DNS:localhost"], check=True, capture_output=True
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    pages = PicturePages("127.0.0.1")
    pages.socket = context.wrap_socket(pages.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with serving(pages):
        yield pages


def test_a_server_that_drips_under_tls_holds_nothing(tls_server: PicturePages) -> None:
    where = f"https://localhost:{tls_server.port}"
    assert np.array_equal(read(f"{where}/image", OPEN), PIXELS)
    began = time.monotonic()
    with pytest.raises(MediaProblem, match=r"url_timeout_s \(1 s\)"):
        read(f"{where}/drip", BRIEF)
    assert time.monotonic() - began < 60


def test_a_certificate_is_compared_with_the_name_and_not_the_address(
    tls_server: PicturePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection goes to an address that was looked up before: the name must still be the server's."""
    limits = MediaLimits(allowed_hosts=("*:*",), allowed_networks=("127.0.0.1/32",), url_timeout_s=100.0)

    def fetch(host: str) -> bytes:
        return asyncio.run(UrlFetcher(limits).fetch(f"https://{host}:{tls_server.port}/image", untrusted=True))

    assert fetch("localhost")
    monkeypatch.setattr(socket, "getaddrinfo", addresses(tcp("127.0.0.1")))
    for host in ("several.test", "127.0.0.1"):
        with pytest.raises(MediaProblem, match="cannot be fetched"):
            fetch(host)
