"""URLs of requests from outside: whatever leads to a file, this host or a network inside is refused, and told nothing.

Servers are real and on the loopback, which one network is opened for; only the resolver is a stand-in where a name must
have an address that no server of names gives here.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from support.picture_pages import PNG, PicturePages, serving
from trinity.preprocess.fetch.url_fetch import UrlFetcher
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

OUTER, INNER = "127.0.0.2", "127.0.0.3"  # one stands for a public address, which tests cannot have
LIMITS = MediaLimits(
    allowed_hosts=("*:*",), allowed_networks=(f"{OUTER}/32",), url_timeout_s=100.0, max_image_bytes=50_000
)


def fetch(url: str, limits: MediaLimits = LIMITS) -> bytes:
    return asyncio.run(UrlFetcher(limits).fetch(url, untrusted=True))


def refusal(url: str, limits: MediaLimits = LIMITS) -> str:
    with pytest.raises(MediaProblem) as found:
        fetch(url, limits)
    return str(found.value)


@pytest.fixture
def outer() -> Iterator[PicturePages]:
    with serving(PicturePages(OUTER)) as pages:
        yield pages


@pytest.fixture
def inner(outer: PicturePages) -> Iterator[PicturePages]:
    """A server inside, on the port of the outer one, on an address that is not opened."""
    with serving(PicturePages(INNER, outer.port)) as pages:
        yield pages


class Names:
    """Stands in for the resolver: gives each name the next of its lists of addresses, the last one again and again."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: list[list[str]]) -> None:
        self.answers, self.asked = {name.replace("_", "."): found for name, found in answers.items()}, list[str]()
        self._look_up = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, port: int, *given: Any, **named: Any) -> Any:
        if host not in self.answers or named.get("flags"):
            return self._look_up(host, port, *given, **named)
        self.asked.append(host)
        found = self.answers[host].pop(0) if len(self.answers[host]) > 1 else self.answers[host][0]
        kinds = [(socket.AF_INET6 if ":" in address else socket.AF_INET, address) for address in found]
        return [(kind, socket.SOCK_STREAM, 6, "", (address, port)) for kind, address in kinds]


def test_an_allowed_host_is_fetched_and_told_its_own_name(outer: PicturePages, monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, pictures_test=[[OUTER]])
    limits = MediaLimits(allowed_hosts=("pictures.test:*",), allowed_networks=(f"{OUTER}/32",))
    assert fetch(f"http://pictures.test:{outer.port}/image", limits) == PNG
    assert outer.asked == [("/image", f"pictures.test:{outer.port}")]
    assert "not allowed" in refusal(f"{outer.url}/image", limits), "by its address it is another host"
    assert "not allowed" in refusal(f"http://other.test:{outer.port}/image", limits)
    assert len(outer.asked) == 1


HERE = ["127.0.0.1", "127.1", "2130706433", "0x7f000001", "0177.0.0.1", "localhost", "127.0.0.1.", "0", "[::1]", "[::]",
        "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[64:ff9b::7f00:1]"]  # fmt: skip


@pytest.mark.parametrize("host", HERE)
def test_this_host_is_not_reached_by_any_name_of_it(host: str) -> None:
    with serving(PicturePages("127.0.0.1")) as pages:
        assert "cannot be fetched" in refusal(f"http://{host}:{pages.port}/image")
        assert pages.asked == []


@pytest.mark.parametrize(
    "target",
    [
        "http://{inner}/image",
        "//{inner}/image",
        "http://127.0.0.1:{port}/image",
        "http://[::ffff:7f00:3]:{port}/image",
        "http://169.254.169.254/latest/meta-data/",
        "http://inside.test:{port}/image",
        "http://user:password@{outer}/image",
        "file:///etc/hostname",
        "ftp://{inner}/image",
        "gopher://{inner}/image",
        "data:image/png;base64,AAAA",
    ],
)
def test_redirects_are_judged_as_what_was_asked(
    target: str, outer: PicturePages, inner: PicturePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    Names(monkeypatch, inside_test=[[INNER]])
    filled = target.format(inner=f"{INNER}:{inner.port}", outer=f"{OUTER}:{outer.port}", port=inner.port)
    assert "cannot be fetched" in refusal(f"{outer.url}/to?{filled}")
    assert len(outer.asked) == 1, "it leads there"
    assert inner.asked == []


def test_redirects_are_followed_a_few_times(outer: PicturePages) -> None:
    assert fetch(f"{outer.url}/to?{outer.url}/to?/image") == PNG
    assert "cannot be fetched" in refusal(f"{outer.url}/" + "to?/" * 9 + "image")
    assert len(outer.asked) == 3 + 6


def test_a_name_that_changes_its_address_is_reached_where_it_was_judged(
    outer: PicturePages, inner: PicturePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rebinding: the second answer is an address inside. Nobody asks a second time."""
    names = Names(monkeypatch, rebind_test=[[OUTER], [INNER]])
    assert fetch(f"http://rebind.test:{outer.port}/image") == PNG
    assert names.asked == ["rebind.test"]
    assert "cannot be fetched" in refusal(f"http://rebind.test:{outer.port}/image"), "now it is inside"
    assert inner.asked == []


def test_a_redirect_to_a_name_that_has_changed_is_judged_anew(
    outer: PicturePages, inner: PicturePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    Names(monkeypatch, rebind_test=[[OUTER], [INNER]])
    assert "cannot be fetched" in refusal(f"http://rebind.test:{outer.port}/to?/image")
    assert (len(outer.asked), inner.asked) == (1, [])


def test_of_several_addresses_only_public_ones_are_tried(
    outer: PicturePages, inner: PicturePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    Names(monkeypatch, mixed_test=[["::ffff:127.0.0.3", INNER, "10.0.0.1", OUTER]])
    assert fetch(f"http://mixed.test:{outer.port}/image") == PNG
    assert inner.asked == []


def test_ports_are_those_of_the_web_unless_others_are_named(outer: PicturePages) -> None:
    limits = MediaLimits(allowed_hosts=(OUTER,), allowed_networks=(f"{OUTER}/32",))
    assert "not allowed" in refusal(f"{outer.url}/image", limits)
    limits = MediaLimits(allowed_hosts=(f"{OUTER}:{outer.port}",), allowed_networks=(f"{OUTER}/32",))
    assert fetch(f"{outer.url}/image", limits) == PNG


def test_proxies_of_the_environment_are_not_used(
    outer: PicturePages, inner: PicturePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy would look the name up itself, from inside."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, f"http://{INNER}:{inner.port}")
    assert fetch(f"{outer.url}/image") == PNG
    assert inner.asked == []


def test_allow_urls_is_for_requests_of_ones_own(outer: PicturePages) -> None:
    assert "URLs are not allowed here" in refusal(f"{outer.url}/image", MediaLimits(allow_urls=True))
    assert outer.asked == []


@pytest.mark.parametrize("page", ["endless", "large", "bomb"])
def test_bodies_without_end_are_cut(page: str, outer: PicturePages) -> None:
    assert any(each in refusal(f"{outer.url}/{page}") for each in ("max_image_bytes", "cannot be fetched"))


@pytest.mark.parametrize("page", ["drip", "slow-headers"])
def test_slow_bodies_are_cut(page: str, outer: PicturePages) -> None:
    hasty = MediaLimits(allowed_hosts=("*:*",), allowed_networks=(f"{OUTER}/32",), url_timeout_s=0.2)
    assert "cannot be fetched" in refusal(f"{outer.url}/{page}", hasty)


def test_errors_do_not_tell_what_is_inside(
    outer: PicturePages, inner: PicturePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host that is there, one that is not, a port that is closed, a name nobody has: one and the same answer."""
    Names(monkeypatch, inside_test=[[INNER]], outside_test=[[OUTER]])
    told = {
        refusal(url)
        for url in (
            f"http://{INNER}:{inner.port}/image",
            f"http://{INNER}:{inner.port}/missing",
            f"http://{INNER}:1/image",
            f"http://inside.test:{inner.port}/image",
            "http://nobody.invalid/image",
            f"http://10.255.255.1:{inner.port}/image",
            f"http://{OUTER}:1/image",
            f"{outer.url}/missing",
            f"{outer.url}/to?http://{INNER}:{inner.port}/image",
            f"{outer.url}/to?http://{INNER}:1/image",
            f"http://user@outside.test:{outer.port}/image",
        )
    }
    assert len(told) == 1, told
    assert inner.asked == []
