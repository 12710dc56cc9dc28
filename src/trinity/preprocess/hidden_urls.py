"""Keeps URLs of requests out of logs: what follows their "?" may be a signature, which opens what the URL names."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache

_CLIENT = ("httpx2", *(f"httpcore2.{part}" for part in ("connection", "http11", "http2", "proxy", "socks")))
_hidden: ContextVar[bool] = ContextVar("trinity_hidden_urls", default=False)


@contextmanager
def hide_urls() -> Iterator[None]:
    """Drop the HTTP client's own log lines in the ``with`` block, which have whole URLs; nobody else's are dropped."""
    _add_filters()
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


@cache
def _add_filters() -> None:
    for name in _CLIENT:
        logging.getLogger(name).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not _hidden.get()


def name_url(url: str) -> str:
    """Name a URL for a log, shortened: without the user, the password, and what follows "?" or "#"."""
    bare = url.partition("#")[0].partition("?")[0]
    scheme, slashes, rest = bare.partition("//")
    host, slash, path = rest.partition("/")
    return reprlib.repr(f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}")
