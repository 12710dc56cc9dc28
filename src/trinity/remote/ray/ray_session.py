"""RaySession: a Ray driver, as the pipeline's side has it: starts the process, gives it orders, ends it."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import sys
from contextlib import suppress
from typing import Any

from trinity.errors import ConfigError, PeerLost
from trinity.remote.ray.ray_bundles import HostGroup

logger = logging.getLogger("trinity")
PROGRAM = ("-m", "trinity.remote.ray.ray_driver")
RAY_JOIN_S = 30.0  # for Ray's library to join a cluster, or to find that there is none
RAY_CLOSE_S = 20.0  # for the driver to end what it has begun, and itself
LATE_S = 5.0  # beyond the driver's own limit of an order
LINE_BYTES = 1 << 20
_ERRORS: dict[str, type[ConfigError] | type[PeerLost]] = {"ConfigError": ConfigError, "PeerLost": PeerLost}


class RaySession:
    """One driver, its placement group and its actors, until its process ends.

    - ``ended``: nothing can be asked of it any more.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.ended = False
        self._process = process
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, group: HostGroup, *, address: str, threads: int, timeout_s: float) -> RaySession:
        """Start a driver and wait until Ray has given it hosts.

        Raises ``ConfigError`` where Ray has too little, ``PeerLost`` where there is no cluster; both within
        ``timeout_s`` and what it takes to join.
        """
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, *PROGRAM, stdin=pipe, stdout=pipe, limit=LINE_BYTES
        )
        session = cls(process)
        bundles = [(bundle.names, bundle.resources) for bundle in group.bundles]
        config = {"address": address, "bundles": bundles, "strategy": group.strategy}
        await session.join({**config, "threads": threads, "timeout_s": timeout_s})
        return session

    async def join(self, config: dict[str, Any]) -> None:
        """Have the driver join the cluster and place the bundles; the process ends where that fails. See ``open``."""
        within_s = config["timeout_s"] + RAY_JOIN_S
        self._write(config)
        try:
            async with asyncio.timeout(within_s):
                opened = await self._read_line()
        except TimeoutError as error:
            await self._kill()
            raise PeerLost(f"Ray at {config['address']} gave no answer within {within_s:g} s", "control") from error
        except BaseException:
            await self._kill()
            raise
        if "failed" in opened:
            await self.aclose()
            raise _make_error(opened["failed"], opened["kind"])
        self._reading = asyncio.ensure_future(self._read())

    async def ask(self, order: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Give an order and return its answer. Raises ``PeerLost`` or ``ConfigError``, within the time given."""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._write({"id": number, **order})
            async with asyncio.timeout(timeout_s + LATE_S):
                found: dict[str, Any] = await answer
        except TimeoutError as error:
            raise PeerLost("the driver of Ray does not answer", "control", order["name"]) from error
        finally:
            self._asked.pop(number, None)
        if "error" in found:
            raise _make_error(found["error"], found["kind"])
        return found

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if self.ended or self._process.returncode is not None:
            raise _lost()
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def _read_line(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise _lost()
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
        raise PeerLost(f"the driver of Ray said {line[:80]!r}", "control")  # some library that Ray's has loaded did

    async def _read(self) -> None:
        """Pass on answers until its process ends, or makes no sense: then it is ended, with what it has begun."""
        try:
            while True:
                answer = await self._read_line()
                waiting = self._asked.get(answer.get("id", -1))
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer)
        except PeerLost as error:
            logger.error("%s; another is started when one is needed", error)
            with suppress(ProcessLookupError):
                self._process.kill()
        finally:
            self.ended = True
            for waiting in self._asked.values():
                if not waiting.done():
                    waiting.set_exception(_lost())

    async def aclose(self) -> None:
        """Have it end all that it has begun, and itself; it is killed where that takes too long."""
        self.ended = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(RAY_CLOSE_S):
                await self._process.wait()
        except TimeoutError:
            logger.error("the driver of Ray has not ended in %s s and is killed", RAY_CLOSE_S)
            await self._kill()

    async def _kill(self) -> None:
        self.ended = True
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()


def _make_error(text: str, kind: str) -> ConfigError | PeerLost:
    return ConfigError(text) if _ERRORS.get(kind) is ConfigError else PeerLost(text, "control")


def _lost() -> PeerLost:
    return PeerLost("the driver of Ray has ended (see its output above)", "control")
