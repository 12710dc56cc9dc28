"""Programs that serve on instances which run already, with a buddy; their readers come back to that one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from support import paths
from trinity.instance import Instance
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision.process_config import ProcessConfig

SECRET = "the secret of front ends that are buddies"
LIVENESS_S = 60.0
VICTIM = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from {module} import {make}
from support.buddy_programs import serve_aloud
asyncio.run(serve_aloud({make}({given!r}), {numbers!r}))
"""


@contextmanager
def listening(count: int, **environment: str) -> Iterator[list[str]]:
    """Run instances that serve one pipeline after another; yield where they listen."""
    command = [sys.executable, "-m", "trinity.instance", "--listen", "tcp:127.0.0.1:0"]
    known = os.environ | {"TRINITY_SECRET": SECRET} | environment
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, env=known, text=True) for _ in range(count)]
    try:
        yield [json.loads(each.stdout.readline())["listening"] for each in running if each.stdout is not None]
    finally:
        for each in running:
            each.kill()
            each.wait()
            if each.stdout is not None:
                each.stdout.close()


def make_pipeline(model: Any, roles: tuple[str, ...], addresses: list[str], **terms: Any) -> Pipeline:
    """Make a pipeline on these instances; ``terms`` are those of ``ProcessConfig``, ``cache`` and ``dtype`` aside."""
    placed = [Instance(letters, address=address) for letters, address in zip(roles, addresses, strict=True)]
    own = {name: terms.pop(name) for name in ("cache", "dtype") if name in terms}
    config = ProcessConfig(secret=SECRET, **terms)
    return Pipeline(model, placed, hosting="process", processes=config, **own)


async def serve_aloud(asked: tuple[Pipeline, list[Any]], numbers: list[int]) -> None:
    """Serve requests in a program that will be killed: each token is said once its reader has it."""
    pipe, requests = asked
    async with pipe:
        async with asyncio.timeout(LIVENESS_S):
            while pipe._config.processes.buddy is not None and not pipe.has_buddy:
                await asyncio.sleep(0.01)
        print("serves", flush=True)
        await asyncio.gather(*(read_aloud(pipe, requests[number]) for number in numbers))
        print("ended", flush=True)
        await asyncio.sleep(LIVENESS_S)


async def read_aloud(pipe: Pipeline, request: Any) -> None:
    async with pipe.stream(request) as tokens:
        async for token in tokens:
            os.write(1, f"{json.dumps([request.request_id, token.index, token.id, token.text])}\n".encode())


class Victim:
    """A program of these readers, to be killed. ``heard``: (token, text) of each index that each reader has."""

    def __init__(self, module: str, make: str, given: Any, numbers: list[int]) -> None:
        program = VICTIM.format(tests=str(paths.TESTS), module=module, make=make, given=given, numbers=numbers)
        self._process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        self.heard: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.ended = False

    def _take(self, line: str) -> None:
        if line.strip() == "ended":
            self.ended = True
        elif line.endswith("\n"):  # what a kill cut through, no reader has
            name, index, token, text = json.loads(line)
            assert index == len(self.heard[name])
            self.heard[name].append((token, text))

    async def begin(self) -> None:
        """Wait until it serves."""
        assert self._process.stdout is not None
        assert (await asyncio.to_thread(self._process.stdout.readline)).strip() == "serves"

    async def kill_after(self, tokens: int) -> None:
        """Kill it once its readers have so many tokens, and note all that they have."""
        stdout = self._process.stdout
        assert stdout is not None
        while sum(map(len, self.heard.values())) < tokens and not self.ended:
            self._take(await asyncio.to_thread(stdout.readline))
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        for line in await asyncio.to_thread(stdout.readlines):
            self._take(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()


@asynccontextmanager
async def victim(module: str, make: str, given: Any, numbers: list[int]) -> AsyncIterator[Victim]:
    made = Victim(module, make, given, numbers)
    try:
        await made.begin()
        yield made
    finally:
        made.close()


async def come_back(pipe: Pipeline, name: str, had: list[tuple[int, str]]) -> tuple[list[int], str]:
    """Read a request on at the buddy. Returns all tokens and all text that its reader has then."""
    async with asyncio.timeout(LIVENESS_S), pipe.resume(name, after=len(had) - 1) as tokens:
        rest: list[tuple[int, str]] = []
        async for token in tokens:
            assert token.index == len(had) + len(rest), "one token is missing, or came twice"
            rest.append((token.id, token.text))
    every = [*had, *rest]
    assert [token for token, _ in every] == tokens.output.token_ids, "its reader has other tokens"
    return tokens.output.token_ids, tokens.output.text


POOLS = CacheConfig(pools={"image": 12, "kv": 400})
