"""Clients that would have the server read its disk, ask this host or its network, or read for ever: each is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.hostile_media import CONFIG, INNER, LIMITS, OUTER, Tried, ask_chat, try_all
from support.http_server import serve_model
from support.picture_pages import PicturePages, serving
from trinity.server import connection

WANTED = {"send a request that is too long": (413, "body_too_large"), "send a slow request": (408, "body_timeout")}
BOUND_S = 80.0  # of an answer: forty times what bounds a fetch


@pytest.fixture(scope="module")
def outer() -> Iterator[PicturePages]:
    with serving(PicturePages(OUTER)) as pages:
        yield pages


@pytest.fixture(scope="module")
def inner(outer: PicturePages) -> Iterator[PicturePages]:
    with serving(PicturePages(INNER)) as pages:
        yield pages


async def test_whatever_is_tried_is_refused_by_name(
    outer: PicturePages, inner: PicturePages, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "LINGER_S", 60.0)  # a busy machine may send slowly
    async with serve_model("llava", "EPD", CONFIG, limits=LIMITS) as served:
        tries = await try_all(served, outer, inner)
        assert inner.asked == [], "nothing inside was reached"
        assert len({each.what for each in tries}) >= 14
        for each in tries:
            assert (each.status, each.code) == WANTED.get(each.what, (400, "invalid_media")), each
            assert each.seconds < BOUND_S, each
        answer = await served.http.post("/v1/chat/completions", json=ask_chat(f"{outer.url}/image"))
        assert answer.status_code == 200, "and what is allowed is served"


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    from sweeps import hostile_media

    tries = [Tried("read the disk", "chat: /etc/passwd", 400, "invalid_media", 0.1), Tried("x", "y", 200, "", 0.0)]
    assert hostile_media.report(tries) == 1
    printed = capsys.readouterr().out
    assert "| read the disk | `chat: /etc/passwd` | 400 | invalid_media | 0.10 |" in printed
    assert "1 of 2 were refused" in printed
    assert hostile_media.report(tries[:1]) == 0


def test_the_command_prints_what_attacks_cost(capsys: pytest.CaptureFixture[str]) -> None:
    from sweeps import hostile_media

    spent = hostile_media.Spent("x", 2048, 400, "invalid_media", 0.5, 0.25, 1 << 20, 3 << 20, 2 << 20, 0.1)
    hostile_media.report_spent([spent])
    row = "| x | 2 KiB | 400 | invalid_media | 0.50 | 0.25 | 1 MiB | 3 MiB | 2 MiB | 0.10 |"
    assert row in capsys.readouterr().out
