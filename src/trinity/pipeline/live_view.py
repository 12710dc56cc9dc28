"""LiveView: the live page in a notebook, fed by the cell that shows it, without a server."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing, suppress
from html import escape
from importlib import import_module
from typing import Any

import msgspec

from trinity.errors import ConfigError
from trinity.errors.arguments import Positive, check_arguments
from trinity.pipeline.live_feed import LiveFeed
from trinity.pipeline.live_page import embed_snapshot
from trinity.pipeline.live_snapshot import take_snapshot
from trinity.pipeline.pipeline import Pipeline

HEIGHT = 720  # pixels of the frame


@check_arguments
class LiveView:
    """A pipeline as the live page shows it, in a notebook: the value of a cell, or ``await view.follow()``.

    - ``pipe``: the pipeline.
    - ``every_s`` (s, 0.5): from one snapshot to the next.

    The value of a cell shows one snapshot. The page is in a frame that may run its own script and reach nothing.
    Raises ``ConfigError`` for what is no pipeline or no time.
    """

    def __init__(self, pipe: Pipeline, every_s: Positive = 0.5) -> None:
        self._pipe, self._every_s = pipe, every_s
        self.frame = f"trinity-live-{secrets.token_hex(6)}"

    def _repr_html_(self) -> str:
        page = embed_snapshot(msgspec.json.encode(take_snapshot(self._pipe)))
        return (
            f'<div><iframe name="{self.frame}" sandbox="allow-scripts" srcdoc="{escape(page)}" width="100%" '
            f'height="{HEIGHT}" frameborder="0"></iframe></div>'
        )

    async def follow(self, seconds: float = 60.0) -> None:
        """Show the page and have it follow the pipeline for so long, or until that is closed.

        Other cells run when it is a task: ``asyncio.create_task(LiveView(pipe).follow(600))``. Raises ``ConfigError``
        outside of a notebook.
        """
        try:
            shown: Any = import_module("IPython.display")
            found = import_module("IPython").get_ipython()
        except ModuleNotFoundError:
            found = None
        if found is None:
            raise ConfigError("a live view is followed in a notebook; elsewhere serve it: trinity.server.app(pipe)")
        shown.display(shown.HTML(self._repr_html_()))
        handle = shown.display(shown.Javascript(""), display_id=True)
        feed = LiveFeed(self._pipe, self._every_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), aclosing(feed.follow()) as snapshots:
                async for snapshot in snapshots:
                    handle.update(shown.Javascript(self.make_update(snapshot)))

    def make_update(self, snapshot: bytes) -> str:
        """Script that passes a snapshot to the frame."""
        text = snapshot.decode().replace("<", "\\u003c")
        return (
            f"for (const frame of document.querySelectorAll('iframe[name=\"{self.frame}\"]'))"
            f' frame.contentWindow.postMessage({{snapshot: {text}}}, "*");'
        )
