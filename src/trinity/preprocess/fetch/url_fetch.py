"""Fetches the URLs among a request's media on the event loop, bounded in bytes and time, with httpx2.

For a request from outside every host, port and address is judged (``UrlRules``), again after each redirect, and the
connection is made to the very address that was judged: no second look-up could give another (DNS rebinding). What went
wrong is logged, and not told: an error is no means to learn of the hosts inside. Logs have no whole URLs: what follows
the "?" may be a signature, which opens what the URL names.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import reprlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from trinity.errors import ConfigError, RequestError, describe_error, pip_install
from trinity.errors.plain_values import is_address
from trinity.preprocess.fetch.media_sources import check_bytes
from trinity.preprocess.media_limits import MediaLimits, MediaProblem
from trinity.preprocess.url_rules import UrlRules
from trinity.request import Media

logger = logging.getLogger("trinity")
_LONGEST_URL = 8192  # characters
_MOST_REDIRECTS = 5
_MOST_AT_ONCE = 64  # fetches of one processor
_AT_ONCE = 8  # of one request
_PORTS = {"http": 80, "https": 443}
_HEADERS = {"Accept-Encoding": "identity", "User-Agent": "trinity"}
_UNTOLD = (
    "cannot be fetched: its host is not known, does not answer with its content in time, or is not allowed here; give "
    "it as a data: URI"
)
_LOGGERS = ("httpx2", *(f"httpcore2.{part}" for part in ("connection", "http11", "http2", "proxy", "socks")))
_hidden: ContextVar[bool] = ContextVar("trinity_hidden_urls", default=False)
_MOST_LOOKUPS = 32  # at a time in this process
_PAUSE_S = 0.02  # between two tries for a thread of a look-up
_lookups = threading.BoundedSemaphore(_MOST_LOOKUPS)
CountBytes = Callable[[int], None]
FetchRules = Callable[[str], tuple[str, str]]
"""By a kind of media: the types to ask a server for, and the field of ``MediaLimits`` that bounds an item."""


def fetch_as_image(_: str) -> tuple[str, str]:
    return "image/*", "max_image_bytes"


def _count_nothing(_: int) -> None:
    """Nobody counts."""


class _Refused(Exception):
    """Reason why a URL is not fetched, for the log and for callers that are trusted."""


def is_url(source: Any) -> bool:
    """Tell if a source is an http(s) URL, which has to be fetched."""
    return is_address(source) and source[:5].lower() != "data:"


class UrlFetcher:
    """Fetches URLs for one processor.

    - ``limits``: who may fetch what, and how much.
    - ``rules_of`` (those of images): what holds for each kind of media.

    Raises ``ConfigError`` if they allow some, and httpx2 is not installed.
    """

    def __init__(self, limits: MediaLimits, rules_of: FetchRules = fetch_as_image) -> None:
        self._limits, self._rules_of = limits, rules_of
        self._rules = UrlRules.of(limits.allowed_hosts, limits.allowed_networks)
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)
        if limits.allow_urls or limits.allowed_hosts:
            _import_client()

    async def fetch_all(
        self, media: Sequence[Media], untrusted: bool, count: CountBytes = _count_nothing
    ) -> tuple[Media, ...]:
        """Replace each URL by its bytes, or by the ``MediaProblem`` that tells why there are none.

        ``count`` is called with the number of bytes that have come, for each few; what it raises ends all fetches.
        """
        own = asyncio.Semaphore(_AT_ONCE)

        async def fetch(item: Media) -> Media:
            if not is_url(item.source):
                return item
            async with own, self._slots:
                return Media(item.kind, await self._try(item, untrusted, count))

        tasks = [asyncio.ensure_future(fetch(item)) for item in media]
        try:
            return tuple(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def fetch_here(self, media: Sequence[Media], untrusted: bool) -> tuple[Media, ...]:
        """Fetch as ``fetch_all``, for a thread that may wait and may have an event loop of its own."""
        if not any(is_url(item.source) for item in media):
            return tuple(media)
        with ThreadPoolExecutor(1, thread_name_prefix="trinity-fetch") as thread:
            return thread.submit(
                lambda: asyncio.run(UrlFetcher(self._limits, self._rules_of).fetch_all(media, untrusted))
            ).result()

    async def _try(self, item: Media, untrusted: bool, count: CountBytes) -> bytes | MediaProblem:
        try:
            return await self.fetch(item.source, untrusted, item.kind, count)
        except MediaProblem as problem:
            return problem

    async def fetch(
        self, url: str, untrusted: bool = False, kind: str = "image", count: CountBytes = _count_nothing
    ) -> bytes:
        """Fetch an item of this kind, within ``url_timeout_s`` from first to last.

        Raises ``MediaProblem``, and the ``RequestError`` of ``count``: see ``fetch_all``.
        """
        free = self._limits.allow_urls and not untrusted
        shown = reprlib.repr(url)
        if not free and not self._rules.hosts:
            raise MediaProblem(
                f"{shown} is a URL, and URLs are not allowed here: set MediaLimits(allowed_hosts=...), allow_urls=True "
                "for requests of your own, or give bytes"
            )
        try:
            async with asyncio.timeout(self._limits.url_timeout_s):
                with hide_urls():
                    return await self._follow(url, None if free else self._rules, kind, count)
        except (MediaProblem, RequestError):
            raise
        except TimeoutError as exc:
            why = f"took longer to fetch than url_timeout_s ({self._limits.url_timeout_s:g} s)"
            raise self._explain(url, why, why, free) from exc
        except Exception as exc:  # of httpx2, its parts, the system's sockets and resolver
            why = str(exc) if isinstance(exc, _Refused) else describe_error(exc, 200)
            raise self._explain(url, why, f"{shown} cannot be fetched ({why})", free) from exc

    def _explain(self, url: str, why: str, told: str, free: bool) -> MediaProblem:
        if free:
            return MediaProblem(told)
        logger.info("%s was not fetched: %s", name_url(url), why)
        return MediaProblem(_UNTOLD)

    async def _follow(self, url: str, rules: UrlRules | None, kind: str, count: CountBytes) -> bytes:
        httpx2, (accept, bound) = _import_client(), self._rules_of(kind)
        if len(url) > _LONGEST_URL:
            raise _Refused(f"it has more than {_LONGEST_URL} characters")
        target = httpx2.URL(url)
        for _ in range(_MOST_REDIRECTS + 1):
            proxied = rules is None and bool(_list_proxies(*_PORTS))
            addresses = await _let_client_find(target) if proxied else await _judge(target, rules)
            async with httpx2.AsyncClient(verify=_tls(), trust_env=proxied, timeout=None) as client:
                answer = await self._ask(client, target, addresses, accept)
                try:
                    if not answer.has_redirect_location:
                        return await self._read(answer, bound, count)
                    target = target.join(answer.headers["Location"])
                finally:
                    await answer.aclose()
        raise _Refused(f"it leads on more than {_MOST_REDIRECTS} times")

    async def _ask(self, client: Any, target: Any, addresses: Sequence[str], accept: str) -> Any:
        """Ask any of the addresses, each in its share of the time; "": as the client finds the host."""
        httpx2 = _import_client()
        ends = time.monotonic() + self._limits.url_timeout_s
        for tried, address in enumerate(addresses):
            left = max(0.01, ends - time.monotonic()) / (len(addresses) - tried)
            request = client.build_request(
                "GET",
                target.copy_with(host=address, fragment=None) if address else target,
                headers={**_HEADERS, "Accept": accept, "Host": target.netloc.decode("ascii").rpartition("@")[2]},
                timeout=httpx2.Timeout(None, connect=left),
                extensions={"sni_hostname": target.raw_host.decode("ascii").removesuffix(".")},
            )
            try:
                return await client.send(request, stream=True)
            except (httpx2.ConnectError, httpx2.ConnectTimeout):
                if tried == len(addresses) - 1:
                    raise
        raise _Refused(f"the name {target.host} has no address")

    async def _read(self, answer: Any, bound: str, count: CountBytes) -> bytes:
        if answer.status_code != 200:
            raise _Refused(f"it answers with status {answer.status_code}")
        if answer.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise _Refused("it answers with compressed bytes, although none were asked for")  # they may become any size
        data = bytearray()  # one piece: of thousands the system would not get the memory back
        async for chunk in answer.aiter_raw():
            data += chunk
            check_bytes(len(data), self._limits, bound)
            count(len(chunk))
        return bytes(data)


async def _judge(target: Any, rules: UrlRules | None) -> list[str]:
    """Return the addresses of a URL's host that may be reached; ``rules`` None: all. Raises ``_Refused``."""
    if target.scheme not in _PORTS:
        raise _Refused(f"only http: and https: are fetched, not {target.scheme!r}")
    port = _PORTS[target.scheme] if target.port is None else target.port
    host = target.raw_host.decode("ascii")
    if rules is not None and target.userinfo:
        raise _Refused("it has a user name")
    if rules is not None and not rules.allows_host(host, port):
        raise _Refused(f"{host}:{port} is not among allowed_hosts")
    found = await look_up(host, port)
    if rules is None:
        return found
    allowed = [address for address in found if rules.allows_address(address)]
    if found and not allowed:
        raise _Refused(f"{host} has no address that is public or in allowed_networks, but {', '.join(found)}")
    return allowed


async def _let_client_find(target: Any) -> list[str]:
    """Leave it to the client to find the host, or the proxy to it, once the name that it will look up was answered for.

    Its own look-ups run on the threads that all of a program shares, where a name that nobody answers for would stay.
    The name of a host behind a proxy is that one's to look up: nobody here may know it.
    """
    from urllib.request import proxy_bypass  # as the client imports it; it takes a while

    past = proxy_bypass(target.netloc.decode("ascii"))
    proxies = (each if "://" in each else f"http://{each}" for each in _list_proxies(target.scheme))
    for each in (target,) if past else map(_import_client().URL, proxies):
        with suppress(OSError):  # the client says what is wrong
            await look_up(each.raw_host.decode("ascii"), each.port or 0)
    return [""]


def _list_proxies(*schemes: str) -> list[str]:
    """List the proxies that the environment names for these schemes."""
    names = [f"{scheme}_proxy" for scheme in (*schemes, "all")]
    return [found for name in names for each in (name, name.upper()) if (found := os.environ.get(each))]


def _import_client() -> Any:
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError(f"URLs are fetched with httpx2: {pip_install('server')}") from error
    return httpx2


def _tls() -> ssl.SSLContext:
    return _make_tls(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@functools.lru_cache(maxsize=4)
def _make_tls(*_: str | None) -> ssl.SSLContext:
    """Make a context with the system's authorities, which takes 20 ms; OpenSSL reads the variables itself."""
    return ssl.create_default_context()


@contextmanager
def hide_urls() -> Iterator[None]:
    """Drop the HTTP client's own log lines in the ``with`` block, which have whole URLs; nobody else's are dropped."""
    _add_filters()
    token = _hidden.set(True)
    try:
        yield
    finally:
        _hidden.reset(token)


@functools.cache
def _add_filters() -> None:
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_shown)


def _is_shown(record: logging.LogRecord) -> bool:
    return not _hidden.get()


def name_url(url: str) -> str:
    """Name a URL for a log, shortened: without the user, the password, and what follows "?" or "#"."""
    bare = url.partition("#")[0].partition("?")[0]
    scheme, slashes, rest = bare.partition("//")
    host, slash, path = rest.partition("/")
    return reprlib.repr(f"{scheme}{slashes}{host.rpartition('@')[2]}{slash}{path}")


async def look_up(host: str, port: int) -> list[str]:
    """Look a host's name up: its addresses, in the resolver's order. Raises ``OSError``.

    Nothing interrupts the system's resolver, so it runs on a thread of its own, which a slow server of names may keep
    for longer than the caller waits. There are at most ``_MOST_LOOKUPS`` of these threads. What is an address already
    needs none: nobody is asked for it.
    """
    with suppress(OSError, UnicodeError):  # it is a name
        return _addresses(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST))
    while not _lookups.acquire(blocking=False):
        await asyncio.sleep(_PAUSE_S)
    return await asyncio.wrap_future(_start_lookup(host, port))


def _start_lookup(host: str, port: int) -> Future[list[str]]:
    found: Future[list[str]] = Future()
    found.set_running_or_notify_cancel()  # a caller that leaves takes nothing from the thread

    def resolve() -> None:
        try:
            found.set_result(_addresses(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)))
        except Exception as error:
            found.set_exception(error)
        finally:
            _lookups.release()

    try:
        threading.Thread(target=resolve, name="trinity-lookup", daemon=True).start()
    except RuntimeError as error:  # the system has no thread to give
        _lookups.release()
        raise OSError(str(error)) from error
    return found


def _addresses(found: Sequence[tuple[Any, ...]]) -> list[str]:
    known = (socket.AF_INET, socket.AF_INET6)
    return list(dict.fromkeys(str(where[0]) for family, *_, where in found if family in known))
