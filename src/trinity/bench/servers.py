"""Server: an engine under measurement in a process of its own, as its client sees it; and which engines there are."""

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

LINE = 1 << 26  # bytes: the longest line that a server says
START_S = 600.0  # a first start exports the checkpoint
PEERS = ("generate_batch", "openvino", "vllm")
DTYPES = ("float32", "bfloat16")
_MODULES = {"generate_batch": "transformers", "generate": "transformers"}
_ENDS_S, _PEER_ENDS_S = 10.0, 3.0  # some never end by themselves


class Engine(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be served with: trinity under a placement, or a peer.

    ``tokens`` bounds a step (prefill tokens and decodes), ``requests`` those that run at once. ``caches``: prefix and
    image caches. ``options`` go to ``Pipeline``, see ``engines.serve_trinity``.
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


class Asked(msgspec.Struct, frozen=True):
    """A request as every engine is given it; ``spans`` are (first, count) of visual tokens in ``ids``."""

    text: str
    ids: list[int]
    spans: list[tuple[int, int]]
    images: list[str]
    tokens: int


class Answer:
    """What became of a request: when its tokens came (``time.monotonic``), which they were, how it ended."""

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


class Peer(Protocol):
    """What a benchmark needs of an engine: started, asked, stopped."""

    engine: Engine
    about: dict[str, Any]

    async def start(self) -> None: ...

    def ask(self, request: Asked) -> Answer: ...

    @property
    def sessions(self) -> list[int]: ...

    async def stop(self) -> None: ...


def peers_folder() -> Path:
    """Where ``make bench-peers`` puts other engines' environments: TRINITY_PEERS, else ``.peers``."""
    return Path(os.environ.get("TRINITY_PEERS", ".peers")).absolute()


def python_of(kind: str) -> Path:
    """The Python that runs an engine. Raises ``UnknownName``, ``ConfigError`` where it is not installed."""
    if kind in ("trinity", "generate", "generate_batch"):
        return Path(sys.executable)
    if kind not in PEERS:
        raise UnknownName("engine", kind, PEERS)
    python = peers_folder() / kind / "bin" / "python"
    if not python.exists():
        raise ConfigError(f"{kind} is not installed: make bench-peers (looked for {python}; TRINITY_PEERS moves it)")
    return python


def installed(kind: str) -> bool:
    try:
        python_of(kind)
    except ConfigError:
        return False
    return True


def prepared(kind: str, checkpoint: Path) -> Path:
    """Where an engine keeps its own form of a checkpoint, by the checkpoint's path and weights."""
    weights = sorted((each.name, each.stat().st_size, each.stat().st_mtime_ns) for each in checkpoint.iterdir())
    digest = hashlib.sha256(repr((str(checkpoint.resolve()), weights)).encode()).hexdigest()[:16]
    return peers_folder() / "prepared" / f"{kind}-{digest}"


class Server:
    """An engine's process: ``async with Server(engine, checkpoint) as server``, then ``server.ask(request)``.

    Starting raises ``ConfigError`` where the engine is not installed or does not start, with the end of what it said.
    """

    def __init__(self, engine: Engine, checkpoint: Path) -> None:
        self.engine, self.checkpoint = engine, Path(checkpoint)
        self.about: dict[str, Any] = {}
        self._answers: dict[int, Answer] = {}
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
        """The session that its process and all of that one's children are in."""
        return [] if self._process is None else [self._process.pid]

    @property
    def cpu_s(self) -> float:
        return session_seconds(self.sessions)

    async def start(self) -> None:
        python = python_of(self.engine.kind)
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
        self._reader, self._writer = await asyncio.open_connection(sock=ours, limit=LINE)
        try:
            async with asyncio.timeout(START_S):
                first = await self._reader.readline()
        except TimeoutError as error:
            said = self.said()
            await self.stop()
            raise ConfigError(f"{self.engine.name} did not start within {START_S:g} s: {said}") from error
        except BaseException:
            await self.stop()
            raise
        if not first:
            said = self.said()
            await self.stop()
            raise ConfigError(f"{self.engine.name} did not start: {said}")
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
            given["prepared"] = str(prepared(self.engine.kind, self.checkpoint))
        return {**given, "pipeline": given["options"], "checkpoint": str(self.checkpoint.resolve())}

    def _environment(self) -> dict[str, str]:
        threads = str(self.engine.threads)
        given = {"OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
        given |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        if self.engine.kind == "vllm":
            given["PYTHONPATH"] = str(Path(_engines).parent / "site")
        else:
            given["PYTHONPATH"] = (
                os.environ.get("PYTHONPATH", "") if python_of(self.engine.kind).samefile(sys.executable) else ""
            )
        return {**os.environ, **given}

    def said(self, lines: int = 6) -> str:
        """The end of what its process wrote."""
        self._log.seek(0)
        return " | ".join(self._log.read().decode(errors="replace").strip().splitlines()[-lines:]) or "it said nothing"

    def ask(self, request: Asked) -> Answer:
        """Send a request now; never blocks. Its tokens come to the answer."""
        answer = Answer()
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
            why = f"it said what nobody here understands ({error!r}): "
        self._give_up(why)

    def _give_up(self, why: str = "") -> None:
        """No answer comes any more; whoever waits for one waits without end."""
        for answer in self._answers.values():
            answer.finish(f"error: the server is gone: {why}{self.said(2)}", time.monotonic())
        self._answers.clear()

    def _take(self, out: list[tuple[int, list[int], str]], now: float) -> None:
        for number, tokens, end in out:
            answer = self._answers.get(number)
            if answer is not None:
                answer.add(tokens, end, now)
                if end:
                    del self._answers[number]

    async def complete(self, requests: list[Asked]) -> list[Answer]:
        """All of them at once, to their ends. Raises ``PeerLost`` where the server goes."""
        answers = [self.ask(each) for each in requests]
        for answer in answers:
            await answer.done.wait()
        if self._reading is not None and self._reading.done():
            raise PeerLost(f"{self.engine.name} is gone: {self.said()}", "bench")
        return answers

    async def stop(self) -> None:
        """Hang up, wait, and end what is left of its session. Twice is once."""
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
