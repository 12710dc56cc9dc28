"""A page in a headless Chromium, driven over two pipes (the DevTools protocol); nothing is fetched from elsewhere."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import shutil
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

MOST_BYTES = 64 << 20
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-proxy-server",
    "--remote-debugging-pipe",
    "about:blank",
)


class Page:
    """One page: ``problems`` has what its console said, errors and what its policy refused."""

    def __init__(self, to: asyncio.StreamWriter, of: asyncio.StreamReader) -> None:
        self._to, self._of = to, of
        self._session = ""
        self._sent = 0
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def ask(self, method: str, **fields: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        self._sent += 1
        message: dict[str, Any] = {"id": self._sent, "method": method, "params": fields}
        if self._session:
            message["sessionId"] = self._session
        answer = self._waiting[self._sent] = asyncio.get_running_loop().create_future()
        self._to.write(msgspec.json.encode(message) + b"\0")
        found = await asyncio.wait_for(answer, 120)
        assert "error" not in found, found
        return dict(found["result"])

    async def listen(self) -> None:
        """Read answers and events until the browser is gone."""
        with suppress(asyncio.IncompleteReadError):
            while True:
                message = msgspec.json.decode((await self._of.readuntil(b"\0"))[:-1])
                if "id" in message:
                    self._waiting.pop(message["id"]).set_result(message)
                else:
                    self._note(message["method"], message["params"])

    def _note(self, method: str, fields: dict[str, Any]) -> None:
        if method in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(str(fields))
        elif method == "Network.requestWillBeSent":
            self.requests.append(fields["request"]["url"])

    async def attach(self) -> None:
        """Take the browser's first page."""
        (target,) = [each for each in (await self.ask("Target.getTargets"))["targetInfos"] if each["type"] == "page"]
        asked = await self.ask("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = asked["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.ask(f"{domain}.enable")

    async def open(self, url: str) -> None:
        """Go to an address and wait until it is there."""
        await self.ask("Page.navigate", url=url)
        await self.until(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    async def evaluate(self, script: str) -> Any:
        """Value of an expression, or of its promise."""
        found = await self.ask("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def until(self, script: str, seconds: float = 30) -> Any:
        """Wait until an expression is true; returns its value."""
        async with asyncio.timeout(seconds):
            while not (found := await self.evaluate(script)):
                await asyncio.sleep(0.05)
        return found

    async def size(self, width: int, height: int) -> None:
        """Set the size of the window, in pixels."""
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    async def draw(self, path: Path) -> None:
        """Write a picture of the window."""
        path.write_bytes(b64decode((await self.ask("Page.captureScreenshot", format="png"))["data"]))


@asynccontextmanager
async def chromium(folder: Path) -> AsyncIterator[Page]:
    """Start a browser with a profile in ``folder``. Skips where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("needs Chromium, to look at a page")
    (in_read, in_write), (out_read, out_write) = os.pipe(), os.pipe()

    def place_pipes() -> None:
        """Put them where Chromium looks for them; by way of others, as these may be taken by one of the two."""
        reads, writes = (fcntl.fcntl(each, fcntl.F_DUPFD, 10) for each in (in_read, out_write))
        os.dup2(reads, 3)
        os.dup2(writes, 4)

    process = await asyncio.create_subprocess_exec(
        program,
        f"--user-data-dir={folder}",
        *FLAGS,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
        close_fds=False,
        preexec_fn=place_pipes,
    )
    os.close(in_read)
    os.close(out_write)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=MOST_BYTES)
    reading, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(out_read, "rb"))
    writing, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(in_write, "wb"))
    page = Page(asyncio.StreamWriter(writing, protocol, None, loop), reader)
    listening = asyncio.create_task(page.listen())
    try:
        await page.attach()
        yield page
    finally:
        with suppress(Exception):
            await page.ask("Browser.close")
        with suppress(ProcessLookupError):
            process.terminate()
        await process.wait()
        writing.close()
        reading.close()
        listening.cancel()
        await asyncio.wait([listening])
