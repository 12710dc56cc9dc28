"""``trinity serve`` as a child process that strangers reach: its processes, its memory, and small HTTP clients.

Nothing here imports trinity: what it sees of a server, anybody outside sees.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
START_S = 300.0  # until a busy machine has loaded a tiny model; liveness only
TICKS = os.sysconf("SC_CLK_TCK")


class Answer(NamedTuple):
    """A response: its status (0: the connection ended without one), its body and the seconds that it took."""

    status: int
    body: bytes
    seconds: float

    def json(self) -> Any:
        return json.loads(self.body)


class Served(NamedTuple):
    """One process of a server: its number, its parent's, and its name in /proc."""

    pid: int
    parent: int
    name: str


def chat(text: str, images: tuple[str, ...] = (), **fields: Any) -> bytes:
    """Make the body of a greedy chat of one message; images are URLs, of data for example."""
    parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": each}} for each in images]
    content = [*parts, {"type": "text", "text": text}]
    return json.dumps({"messages": [{"role": "user", "content": content}], "temperature": 0, **fields}).encode()


async def ask(
    port: int, body: bytes = b"", path: str = CHAT, *, source: str = "127.0.0.1", timeout_s: float = 600.0
) -> Answer:
    """Send one request from a loopback address and read the whole response. Raises ``TimeoutError``."""
    began = time.monotonic()
    method = "POST" if body else "GET"
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(source, 0), limit=1 << 24)
        try:
            writer.write(head.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body)
            received = b""
            with suppress(ConnectionError):
                await writer.drain()
            with suppress(ConnectionError):
                received = await reader.read(-1)
        finally:
            writer.transport.abort()
    first, _, rest = received.partition(b"\r\n")
    _, _, content = rest.partition(b"\r\n\r\n")
    return Answer(int(first.split()[1]) if first else 0, content, time.monotonic() - began)


class ServeCommand:
    """A server's process. For ``with``: at the end it is stopped by SIGTERM.

    - ``model``: a checkpoint's directory. ``arguments``: further ones of ``trinity serve``.
    - ``log``: a file that its stderr is appended to.
    - ``around``: a command that runs it, such as ``unshare``, and becomes it (exec): ``process`` is the server.
    """

    def __init__(
        self,
        model: str | Path,
        *arguments: str,
        log: Path,
        environ: Mapping[str, str] | None = None,
        around: Sequence[str] = (),
    ) -> None:
        self._log = log.open("ab")
        mark = {"TRINITY_TESTED_SERVER": secrets.token_hex(8)}  # whoever is started by it has its environment
        self._mark = "=".join(*mark.items()).encode()
        command = [*around, sys.executable, "-m", "trinity", "serve", str(model), "--port", "0", *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=self._log, env={**os.environ, **(environ or {}), **mark}
        )
        assert self.process.stdout is not None
        first = self.process.stdout.readline().decode()
        found = re.search(r":(\d+)/v1", first)
        if found is None:
            self.process.kill()
            self.process.wait()
            self._close()
            raise RuntimeError(f"trinity serve did not start: {first!r}, {log.read_text(errors='replace')[-2000:]}")
        self.port = int(found[1])

    def __enter__(self) -> ServeCommand:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(120)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._close()

    def _close(self) -> None:
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._log.close()

    async def until_ready(self, seconds: float = START_S) -> float:
        """Wait until /ready answers 200; returns the seconds that took. Raises ``TimeoutError``, ``RuntimeError``."""
        began = time.monotonic()
        async with asyncio.timeout(seconds):
            while True:
                if self.process.poll() is not None:
                    raise RuntimeError(f"trinity serve has ended with {self.process.returncode}; see its log")
                with suppress(OSError, TimeoutError):
                    if (await ask(self.port, path="/ready", timeout_s=30)).status == 200:
                        return time.monotonic() - began
                await asyncio.sleep(0.1)

    def tree(self) -> list[Served]:
        """List the server's process and all that came of it, zombies left out, whether or not their parent is there."""
        found = list[Served]()
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            with suppress(OSError):
                if self._mark in (entry / "environ").read_bytes() and (fields := _read_stat(int(entry.name))):
                    name, state, parent, _ = fields
                    if state not in "ZX":
                        found.append(Served(int(entry.name), parent, name))
        return found

    def cpu_s(self) -> float:
        """Sum the CPU seconds of all its processes, those that have ended and were waited for included."""
        return sum(fields[3] for each in self.tree() if (fields := _read_stat(each.pid)))

    def memory(self) -> dict[str, int]:
        """Read the private bytes of each process, by ``name:pid``."""
        return {f"{each.name}:{each.pid}": size for each in self.tree() if (size := private_bytes(each.pid))}

    async def snapshots(self) -> AsyncIterator[dict[str, Any]]:
        """Follow the live feed: yields each snapshot as it comes; ends with the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=1 << 24)
        try:
            writer.write(b"GET /live/events HTTP/1.1\r\nhost: x\r\n\r\n")
            while line := await reader.readline():
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
        finally:
            writer.transport.abort()


def _read_stat(pid: int) -> tuple[str, str, int, float] | None:
    """Read a process's name, state, parent and CPU seconds, its ended children's included."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return name, fields[0], int(fields[1]), sum(map(int, fields[11:15])) / TICKS


def private_bytes(pid: int) -> int:
    """Read the bytes of a process that no other has; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(("Private_Dirty:", "Private_Clean:")))
