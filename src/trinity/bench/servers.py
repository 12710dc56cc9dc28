"""Server: a measured engine in its own process, as its client sees it; and the engines to choose from."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import msgspec

from trinity.bench.engines import __file__ as _engines
from trinity.bench.machine import session_seconds
from trinity.errors import ConfigError, PeerLost, UnknownName

REPLY_LINE_BYTES = 1 << 26  # bytes of the longest line that a server sends
SERVER_START_S = 600.0  # a first start exports the checkpoint
PEERS = ("generate_batch", "openvino", "vllm")
DTYPES = ("float32", "bfloat16")
_MODULES = {"generate_batch": "transformers", "generate": "transformers"}
_ENDS_S, _PEER_ENDS_S = 10.0, 3.0  # seconds before a process is killed: some never exit by themselves


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine to measure: trinity under a placement, or a peer.

    - ``kind`` ("trinity"): the engine, or one of ``PEERS``.
    - ``placement`` ("EPD"): trinity's placement.
    - ``dtype`` ("float32"): one of ``DTYPES``.
    - ``threads`` (1): intra-op threads of an instance, and of a peer.
    - ``tokens`` (2048): token budget of a step, prefill tokens and decodes.
    - ``requests`` (32): requests that run at once, at most.
    - ``context`` (tokens, 2048): longest prompt with its output.
    - ``images`` (1): images of a request, at most.
    - ``media`` (1): images encoded in a step, at most.
    - ``caches`` (False): use the prefix cache and the image cache.
    - ``options`` (none): options of ``Pipeline``, see ``engines.serve_trinity``.
    - ``label`` (none): a name for tables instead of the one made of kind and placement.
    """

    kind: str = "trinity"
    placement: str = "EPD"
    dtype: str = "float32"
    threads: int = 1
    tokens: int = 2048
    requests: int = 32
    context: int = 2048
    images: int = 1
    media: int = 1
    caches: bool = False
    options: dict[str, Any] = {}
    label: str = ""

    @property
    def name(self) -> str:
        threads = f" x {self.threads} threads" if self.threads > 1 else ""
        caches = " with caches" if self.caches else ""
        return self.label or (f"trinity {self.placement}" if self.kind == "trinity" else self.kind) + threads + caches


class BenchRequest(msgspec.Struct, frozen=True):
    """A request, the same for all: ``spans`` (first, count) of visual tokens in ``ids``, ``images`` base64 JPEGs."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]
    images: list[str]
    tokens: int


class ServerAnswer:
    """Progress of a request: its tokens, their arrival times (``time.monotonic`` seconds), and how it ended."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []
        self.end = ""
        self.ended_at = 0.0
        self.done = asyncio.Event()

    def add(self, tokens: list[int], end: str, now: float) -> None:
        self.tokens += tokens
        self.times += [now] * len(tokens)
        if end:
            self.finish(end, now)

    def finish(self, end: str, now: float) -> None:
        self.end, self.ended_at = end, now
        self.done.set()


class BenchServer(Protocol):
    """Interface of a server to a benchmark: start, ask, stop."""

    engine: EngineSpec
    about: dict[str, Any]

    async def start(self) -> None: ...

    def ask(self, request: BenchRequest) -> ServerAnswer: ...

    @property
    def sessions(self) -> list[int]: ...

    async def stop(self) -> None: ...


def peers_folder() -> Path:
    """Folder of other engines' environments, see ``make bench-peers``: TRINITY_PEERS, else ``.peers``."""
    return Path(os.environ.get("TRINITY_PEERS", ".peers")).absolute()


def find_python(kind: str) -> Path:
    """Find the Python that runs an engine. Raises ``UnknownName``, and ``ConfigError`` where it is not installed."""
    if kind in ("trinity", "generate", "generate_batch"):
        return Path(sys.executable)
    if kind not in PEERS:
        raise UnknownName("engine", kind, PEERS)
    python = peers_folder() / kind / "bin" / "python"
    if not python.exists():
        raise ConfigError(
            f"{kind} is not installed: run make bench-peers (looked for {python}; TRINITY_PEERS sets another folder)"
        )
    return python


def is_installed(kind: str) -> bool:
    try:
        find_python(kind)
    except ConfigError:
        return False
    return True


def prepared_path(kind: str, checkpoint: Path) -> Path:
    """Folder of an engine's own form of a checkpoint, named by the checkpoint's path and weights."""
    weights = sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in checkpoint.iterdir())
    digest = hashlib.sha256(repr((str(checkpoint.resolve()), weights)).encode()).hexdigest()[:16]
    return peers_folder() / "prepared" / f"{kind}-{digest}"


class Server:
    """An engine's process: ``async with Server(engine, checkpoint) as server``, then ``server.ask(request)``.

    Starting raises ``ConfigError``, with the end of the log, where the engine is not installed or does not start.
    """

    def __init__(self, engine: EngineSpec, checkpoint: Path) -> None:
        self.engine, self.checkpoint = engine, Path(checkpoint)
        self.about: dict[str, Any] = {}
        self._answers: dict[int, ServerAnswer] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._asked = 0

    async def __aenter__(self) -> Server:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @property
    def sessions(self) -> list[int]:
        """The session of the server's process and all its children; empty when it is stopped."""
        return [] if self._process is None else [self._process.pid]

    @property
    def cpu_s(self) -> float:
        return session_seconds(self.sessions)

    async def start(self) -> None:
        python = find_python(self.engine.kind)
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        with theirs:
            self._process = subprocess.Popen(
                [*self._command(python), str(theirs.fileno()), json.dumps(self._settings())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                env=self._environment(),
            )
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=REPLY_LINE_BYTES)
        try:
            async with asyncio.timeout(SERVER_START_S):
                first = await self._reader.readline()
        except TimeoutError as error:
            log = self.log_tail()
            await self.stop()
            raise ConfigError(f"{self.engine.name} did not start within {SERVER_START_S:g} s: {log}") from error
        except BaseException:
            await self.stop()
            raise
        if not first:
            log = self.log_tail()
            await self.stop()
            raise ConfigError(f"{self.engine.name} did not start: {log}")
        self.about = json.loads(first)
        self._reading = asyncio.create_task(self._read())

    def _command(self, python: Path) -> list[str]:
        module = _MODULES.get(self.engine.kind, self.engine.kind)
        if python == Path(sys.executable):
            return [str(python), "-m", "trinity.bench.engines", module]
        return [str(python), str(Path(_engines).parent), module]

    def _settings(self) -> dict[str, Any]:
        given = msgspec.to_builtins(self.engine)
        if self.engine.kind == "generate":
            given["tokens"] = 0
        if self.engine.kind in ("openvino", "vllm"):
            given["prepared"] = str(prepared_path(self.engine.kind, self.checkpoint))
        return {**given, "pipeline": given["options"], "checkpoint": str(self.checkpoint.resolve())}

    def _environment(self) -> dict[str, str]:
        threads = str(self.engine.threads)
        given = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        given |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if self.engine.kind == "vllm":
            given["PYTHONPATH"] = str(Path(_engines).parent / "site")
        else:
            given["PYTHONPATH"] = (
                os.environ.get("PYTHONPATH", "") if find_python(self.engine.kind).samefile(sys.executable) else ""
            )
        return {**os.environ, **given}

    def log_tail(self, lines: int = 6) -> str:
        """Return the end of the process's log, joined into one line."""
        self._log.seek(0)
        return " | ".join(self._log.read().decode(errors="replace").strip().splitlines()[-lines:]) or "it said nothing"

    def ask(self, request: BenchRequest) -> ServerAnswer:
        """Send a request now, without blocking; its tokens are added to the answer."""
        answer = ServerAnswer()
        if self._reading is None or self._reading.done():
            answer.finish("error: the server is gone", time.monotonic())
            return answer
        self._asked += 1
        self._answers[self._asked] = answer
        self._writer.write(b'{"id":%d,' % self._asked + msgspec.json.encode(request)[1:] + b"\n")
        return answer

    async def _read(self) -> None:
        why = ""
        try:
            while line := await self._reader.readline():
                self._take(msgspec.json.decode(line)["out"], time.monotonic())
        except OSError:
            pass  # it hung up with something of ours unread
        except Exception as error:
            why = f"it sent a message that cannot be read ({error!r}): "
        self._give_up(why)

    def _give_up(self, why: str = "") -> None:
        """Fail all open answers: none comes any more, and their readers would wait for ever."""
        for answer in self._answers.values():
            answer.finish(f"error: the server is gone: {why}{self.log_tail(2)}", time.monotonic())
        self._answers.clear()

    def _take(self, out: list[tuple[int, list[int], str]], now: float) -> None:
        for number, tokens, end in out:
            answer = self._answers.get(number)
            if answer is not None:
                answer.add(tokens, end, now)
                if end:
                    del self._answers[number]

    async def complete(self, requests: list[BenchRequest]) -> list[ServerAnswer]:
        """Send all requests at once and wait for all. Raises ``PeerLost`` where the server is gone."""
        answers = [self.ask(each) for each in requests]
        for answer in answers:
            await answer.done.wait()
        if self._reading is not None and self._reading.done():
            raise PeerLost(f"{self.engine.name} is gone: {self.log_tail()}", "bench")
        return answers

    async def stop(self) -> None:
        """Hang up, wait, and kill what is left of the session. A second call does nothing."""
        process, self._process = self._process, None
        if process is None:
            return
        self._writer.close()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
            self._give_up()
        with suppress(OSError):
            await self._writer.wait_closed()
        with suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(process.wait, _ENDS_S if self.engine.kind == "trinity" else _PEER_ENDS_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)
        self._log.close()
