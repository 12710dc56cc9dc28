"""Files and URLs as sources of images: what is no file, is not allowed, or takes too long, holds no thread."""

from __future__ import annotations

import io
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from trinity.errors import ConfigError
from trinity.errors.plain_values import read_source
from trinity.preprocess import media_sources
from trinity.preprocess.media import read_image
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

PIXELS = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
DEFAULT = MediaLimits()


def _png() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(PIXELS).save(buffer, "PNG")
    return buffer.getvalue()


PNG = _png()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs here")
@pytest.mark.parametrize("linked", [False, True])
def test_a_fifo_is_refused_and_does_not_block(tmp_path: Path, linked: bool) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe")
    with pytest.raises(MediaProblem, match="not a regular file"):
        read_image(tmp_path / ("link.png" if linked else "pipe"), DEFAULT)


def test_a_file_that_becomes_a_fifo_between_two_looks_does_not_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is looked at is what was opened, not what had the name before."""
    path = tmp_path / "a.png"
    path.write_bytes(PNG)
    real = os.open

    def swap(*given: Any, **named: Any) -> int:
        path.unlink()
        os.mkfifo(path)
        return real(*given, **named)

    monkeypatch.setattr(os, "open", swap)
    with pytest.raises(MediaProblem, match="not a regular file"):
        read_image(path, DEFAULT)


def test_a_device_is_not_even_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """To open one may be enough: a watchdog begins to count, a tape rewinds."""
    monkeypatch.setattr(os, "open", lambda *_: pytest.fail("opened"))
    for path in ("/dev/null", "/dev/zero", "."):
        with pytest.raises(MediaProblem, match="not a regular file"):
            read_image(path, DEFAULT)


def test_a_relative_path_is_told_as_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with the folder of the server, and of a long one the end, which tells files apart."""
    monkeypatch.chdir(tmp_path)
    for given in ("pictures/no cat.png", Path("pictures/no cat.png")):
        with pytest.raises(MediaProblem, match=r"there is no file 'pictures/no cat.png'; check the path"):
            read_image(read_source(given), DEFAULT)
    with pytest.raises(MediaProblem, match=r"there is no file '\.\.\.a{4}.*/the one.png'") as found:
        read_image(read_source("a" * 200 + "/the one.png"), DEFAULT)
    assert len(str(found.value)) < 200
    (tmp_path / "a.png").write_bytes(PNG)
    assert np.array_equal(np.asarray(read_image(read_source("a.png"), DEFAULT)), PIXELS)


@pytest.mark.parametrize("given", ["s3:bucket/a.png", "S3://bucket/a.png", "file:///a.png", "data:image/png;base64,AA"])
@pytest.mark.parametrize("limits", [DEFAULT, MediaLimits(allow_paths=False)])
def test_addresses_of_other_schemes_are_refused_by_name(given: str, limits: MediaLimits) -> None:
    scheme = given.split(":")[0] + ":"
    for source in (given, read_source(given), read_source(Path(given))):
        with pytest.raises(MediaProblem, match=f"an address of the scheme '{scheme}', and only http: and https: are"):
            read_image(source, limits)


def test_a_file_that_is_called_like_an_address_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scan:1.png").write_bytes(PNG)
    assert np.array_equal(np.asarray(read_image(read_source("scan:1.png"), DEFAULT)), PIXELS)


def test_only_allowed_directories_are_read(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "inside-not"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "a.png").write_bytes(PNG)
    (inside / "link.png").symlink_to(outside / "a.png")
    (outside / "link.png").symlink_to(inside / "a.png")
    assert MediaLimits(allow_paths=(inside,)).allow_paths == (str(inside),)
    limits = MediaLimits(allow_paths=(inside,))
    path: Path | str
    for path in (inside / "a.png", outside / "link.png", inside / ".." / "in" / "a.png"):
        assert np.array_equal(np.asarray(read_image(path, limits)), PIXELS)
    for path in (
        outside / "a.png",
        inside / "link.png",
        inside / ".." / "inside-not" / "a.png",
        "/etc/hostname",
        "nix",
    ):
        with pytest.raises(MediaProblem, match="allow_paths of MediaLimits does not allow"):
            read_image(path, limits)
        with pytest.raises(MediaProblem, match="allow_paths"):
            read_image(path, MediaLimits(allow_paths=False))
    assert np.array_equal(np.asarray(read_image(PNG, MediaLimits(allow_paths=False))), PIXELS)


@pytest.mark.parametrize(
    "fields",
    [
        {"max_pixels": -1},
        {"max_images": True},
        {"max_processed_pixels": 1.5},
        {"max_processed_bytes": None},
        {"max_prompt_tokens": "9"},
        {"url_timeout_s": 0},
        {"url_timeout_s": float("nan")},
        {"preprocess_timeout_s": "1"},
        {"allow_urls": 1},
        {"allow_paths": "/tmp"},
        {"allow_paths": ("",)},
        {"allow_paths": (3,)},
        {"allow_paths": ("half \ud800",)},
        {"allow_paths": None},
    ],
)
def test_limits_of_odd_values_are_refused_by_name(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(fields))):
        MediaLimits(**fields)


class _Pages(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        page = self.path.removeprefix("/")
        if page == "slow-headers":
            return self._drip_headers()
        if page.startswith("to-"):
            targets = {"to-image": "/image", "to-file": "file:///etc/hostname", "to-self": "/to-self"}
            self.send_response(302)
            self.send_header("Location", targets[page])
            self.end_headers()
            return
        self.send_response(404 if page == "missing" else 200)
        self.end_headers()
        if page == "drip":
            self._drip()
        else:
            self.wfile.write(PNG if page == "image" else bytes(100_000) if page == "large" else b"<html>")

    def _drip_headers(self) -> None:
        try:
            self.wfile.write(b"HTTP/1.0 200 OK\r\n")
            for number in range(400):  # twenty seconds, unless the reader leaves; each line within any socket's timeout
                self.wfile.write(b"X-%d: y\r\n" % (number % 90))
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass

    def _drip(self) -> None:
        try:
            for _ in range(400):  # twenty seconds, unless the reader leaves
                self.wfile.write(b"x")
                self.wfile.flush()
                time.sleep(0.05)
        except OSError:
            pass  # the reader has left, as it should

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    pages = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    pages.daemon_threads = True
    thread = threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{pages.server_address[1]}"
    pages.shutdown()
    pages.server_close()
    thread.join()


@pytest.fixture
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


OPEN = MediaLimits(allow_urls=True, url_timeout_s=2.0, max_image_bytes=50_000)


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize("page", ["image", "to-image"])
def test_urls_are_read_where_allowed(server: str, page: str) -> None:
    assert np.array_equal(np.asarray(read_image(f"{server}/{page}", OPEN)), PIXELS)


@pytest.mark.usefixtures("no_proxy")
@pytest.mark.parametrize(
    ("page", "why"),
    [
        ("missing", "404"),
        ("html", "not an image"),
        ("large", "max_image_bytes is 50000"),
        ("to-file", "cannot be fetched"),
        ("to-self", "cannot be fetched"),
    ],
)
def test_bad_urls_say_why(server: str, page: str, why: str) -> None:
    with pytest.raises(MediaProblem, match=why):
        read_image(f"{server}/{page}", OPEN)


@pytest.mark.usefixtures("no_proxy")
def test_a_server_that_drips_or_is_not_there_cannot_hold_a_thread(server: str) -> None:
    for page in ("drip", "slow-headers"):
        began = time.monotonic()
        with pytest.raises(MediaProblem, match=r"url_timeout_s \(0\.2 s\)"):
            read_image(f"{server}/{page}", MediaLimits(allow_urls=True, url_timeout_s=0.2))
        assert time.monotonic() - began < 5
    with pytest.raises(MediaProblem, match="cannot be fetched"):
        read_image("http://127.0.0.1:1/a.png", OPEN)


@pytest.mark.usefixtures("no_proxy")
def test_a_name_that_nobody_answers_for_cannot_hold_a_thread(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The resolver is a stand-in: a server of names that is silent cannot be had here."""
    answered, limits = threading.Event(), MediaLimits(allow_urls=True, url_timeout_s=0.2)
    look_up, url = socket.getaddrinfo, "http://nobody.invalid/a.png"

    def silent(host: str, *given: Any, **named: Any) -> Any:
        if host == "nobody.invalid" and not named.get("flags"):  # whether it is an address is told without asking
            assert answered.wait(60)
            raise OSError("no such name")
        return look_up(host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        for _ in range(media_sources._MOST_LOOKUPS + 1):  # the last one finds all threads of look-ups taken
            with pytest.raises(MediaProblem, match=r"url_timeout_s \(0\.2 s\)"):
                read_image(url, limits)
        lookups = [thread for thread in threading.enumerate() if thread.name == "trinity-lookup"]
        assert len(lookups) == media_sources._MOST_LOOKUPS
    finally:
        answered.set()
    for thread in lookups:
        thread.join(60)
    with pytest.raises(MediaProblem, match="cannot be fetched"):
        read_image(url, limits)
    assert np.array_equal(np.asarray(read_image(f"{server}/image", OPEN)), PIXELS)


def addresses(*found: Any) -> Any:
    """Stand in for the resolver, which here knows no name with several addresses; what is an address stays one."""
    look_up = socket.getaddrinfo

    def resolve(host: str, *given: Any, **named: Any) -> Any:
        if host != "several.test" or named.get("flags"):
            return look_up(host, *given, **named)
        return list(found)

    return resolve


def tcp(where: tuple[str, int]) -> Any:
    return (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "", where)


@pytest.fixture
def hole() -> Iterator[tuple[str, int]]:
    """An address that answers nothing: a listener whose queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:
            each.setblocking(False)
            each.connect_ex(listener.getsockname())
        yield listener.getsockname()
        for each in waiting:
            each.close()


def test_a_name_is_reached_by_any_of_its_addresses(
    server: str, hole: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As ``socket.create_connection``: a family that the system lacks, or an address that is silent, is not the end."""
    monkeypatch.setenv("no_proxy", "several.test")
    port = int(server.rpartition(":")[2])
    here, absent = tcp(("127.0.0.1", port)), (12, socket.SOCK_STREAM, 6, "", ("x", port))  # 12 was DECnet
    for first in ([absent], [tcp(hole)], [tcp(hole), absent, tcp(hole)]):
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", addresses(*first, here))
            picture = read_image(f"http://several.test:{port}/image", OPEN)
        assert np.array_equal(np.asarray(picture), PIXELS)
    for found, said in (([], "no address"), ([absent], "not supported"), ([tcp(hole)] * 3, r"url_timeout_s \(2 s\)")):
        with monkeypatch.context() as patch:
            patch.setattr(socket, "getaddrinfo", addresses(*found))
            with pytest.raises(MediaProblem, match=said):
                read_image(f"http://several.test:{port}/image", OPEN)


@pytest.mark.usefixtures("no_proxy")
def test_an_address_needs_no_thread_to_be_looked_up(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_sources, "_lookups", threading.BoundedSemaphore(1))
    assert media_sources._lookups.acquire(timeout=1)
    assert np.array_equal(np.asarray(read_image(f"{server}/image", OPEN)), PIXELS)
    with pytest.raises(MediaProblem, match="url_timeout_s"):
        read_image("http://several.test/image", MediaLimits(allow_urls=True, url_timeout_s=0.2))


def test_a_server_that_drips_under_tls_cannot_hold_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS wraps a socket in another: the inner one is not what must be cut."""
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
    pages = ThreadingHTTPServer(("127.0.0.1", 0), _Pages)
    pages.daemon_threads = True
    pages.socket = context.wrap_socket(pages.socket, server_side=True)
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    monkeypatch.setenv("no_proxy", "localhost")
    thread = threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    where, limits = f"https://localhost:{pages.server_address[1]}", MediaLimits(allow_urls=True, url_timeout_s=1.0)
    try:
        assert np.array_equal(np.asarray(read_image(f"{where}/image", limits)), PIXELS)
        for page in ("drip", "slow-headers"):
            began = time.monotonic()
            with pytest.raises(MediaProblem, match=r"url_timeout_s \(1 s\)"):
                read_image(f"{where}/{page}", limits)
            assert time.monotonic() - began < 10
    finally:
        pages.shutdown()
        pages.server_close()
        thread.join()
