"""The live page in a notebook: a frame with a snapshot in it, and scripts that hand it newer ones."""

from __future__ import annotations

from html import unescape
from pathlib import Path
from typing import Any

import msgspec
import pytest

from support.chromium import chromium
from support.emulated_pipelines import MODEL, POOLS
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ConfigError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.live_snapshot import take_snapshot
from trinity.pipeline.live_view import LiveView

HOSTILE = "</script><script>parent.document.title='taken'</script>"


def emulated() -> Pipeline:
    return Pipeline(MODEL, "1E1P1D", cache=CacheConfig(pools=POOLS))


async def test_a_view_is_one_frame_that_may_reach_nothing() -> None:
    async with emulated() as pipe, pipe.stream(EmulatedRequest(max_tokens=90, request_id=HOSTILE)):
        shown = LiveView(pipe)._repr_html_()
        update = LiveView(pipe).make_update(msgspec.json.encode(take_snapshot(pipe)))
    assert shown.startswith("<div><iframe ")
    assert shown.count("<") == 4, "all of the page is escaped"
    assert 'sandbox="allow-scripts"' in shown
    assert HOSTILE not in unescape(shown)
    assert "</script" not in update


async def test_outside_of_a_notebook_it_says_what_to_do() -> None:
    async with emulated() as pipe:
        with pytest.raises(ConfigError, match="followed in a notebook"):
            await LiveView(pipe).follow()


async def test_in_a_notebook_scripts_follow_the_page_until_the_pipeline_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    import IPython.display

    shown: list[Any] = []

    class Handle:
        def update(self, what: Any) -> None:
            shown.append(what)

    def display(what: Any, **_: Any) -> Handle:
        shown.append(what)
        return Handle()

    monkeypatch.setattr(IPython, "get_ipython", lambda: "a shell")
    monkeypatch.setattr(IPython.display, "display", display)
    async with emulated() as pipe:
        view = LiveView(pipe, every_s=0.01)
        await view.follow(0.1)
    assert "<iframe" in shown[0].data
    assert len(shown) > 3
    assert view.frame in shown[-1].data


@pytest.mark.slow
async def test_chromium_draws_the_frame_and_what_comes_later(tmp_path: Path) -> None:
    async with chromium(tmp_path / "profile") as page, emulated() as pipe:
        view = LiveView(pipe)
        notebook = tmp_path / "notebook.html"
        notebook.write_text(f"<title>notebook</title>{view._repr_html_()}", encoding="utf-8")
        await page.open(notebook.as_uri())
        await page.size(1000, 760)
        async with pipe.stream(EmulatedRequest(max_tokens=400, request_id=HOSTILE)) as tokens:
            await tokens.wait_first()
            later = msgspec.json.encode(take_snapshot(pipe, 2))
        await page.evaluate("window.heard = []")
        await page.evaluate(view.make_update(later))
        await page.evaluate("new Promise(done => setTimeout(done, 1500))")
        await page.draw(tmp_path / "view.png")
        assert (tmp_path / "view.png").stat().st_size > 10_000
        assert await page.evaluate("document.title") == "notebook"
        assert page.problems == []
