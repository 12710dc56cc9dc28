"""A loopback server of pictures that also answers slowly, endlessly, with redirects, or with what is no picture."""

from __future__ import annotations

import gzip
import io
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

import numpy as np
from PIL import Image

PIXELS = np.random.default_rng(0).integers(0, 255, (12, 16, 3), dtype=np.uint8)
PATIENCE = 400  # pieces of 50 ms that a slow page has: twenty seconds, unless the reader leaves


def as_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


PNG = as_png(Image.fromarray(PIXELS))


class PicturePages(ThreadingHTTPServer):
    """Remembers what was asked: ``asked`` has (path, Host), ``left`` counts slow pages whose reader has gone."""

    daemon_threads = True

    def __init__(self, address: str, port: int = 0) -> None:
        super().__init__((address, port), _Pages)
        self.asked: list[tuple[str, str]] = []
        self.left = 0
        self.pictures = {"/image": PNG}

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def url(self) -> str:
        return f"http://{self.server_address[0]!s}:{self.port}"


class _Pages(BaseHTTPRequestHandler):
    server: PicturePages

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Host", "")))
        page, _, target = self.path.removeprefix("/").partition("?")
        if page == "slow-headers":
            return self._slowly([b"HTTP/1.0 200 OK\r\n", *(b"X-%d: y\r\n" % (at % 90) for at in range(PATIENCE))])
        self.send_response({"missing": 404, "to": 302}.get(page, 200))
        if page == "to":
            self.send_header("Location", unquote(target))
        if page == "bomb":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        if page == "drip":
            self._slowly([b"x"] * PATIENCE)
        elif page == "endless":
            self._slowly([bytes(1 << 16)] * (1 << 16), pause_s=0)
        else:
            self.wfile.write(self._body(page))

    def _body(self, page: str) -> bytes:
        made = {
            "large": lambda: bytes(100_000),
            "bomb": lambda: gzip.compress(bytes(1 << 20)),
            "html": lambda: b"<html>",
        }
        return made.get(page, lambda: self.server.pictures.get(f"/{page}", b""))()

    def _slowly(self, pieces: list[bytes], pause_s: float = 0.05) -> None:
        try:
            for piece in pieces:
                self.wfile.write(piece)
                self.wfile.flush()
                time.sleep(pause_s)
        except OSError:
            self.server.left += 1  # the reader has gone, as it should

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(pages: PicturePages) -> Iterator[PicturePages]:
    thread = threading.Thread(target=pages.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield pages
    finally:
        pages.shutdown()
        pages.server_close()
        thread.join()
