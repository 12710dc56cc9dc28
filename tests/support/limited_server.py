"""Program that serves an emulated model with few open files: ``limited_server.py FILES CONNECTIONS``; prints its port.

It runs until its input ends.
"""

from __future__ import annotations

import asyncio
import resource
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import uvicorn  # noqa: E402

from support.emulated_pipelines import MODEL, POOLS  # noqa: E402
from trinity.memory.cache_config import CacheConfig  # noqa: E402
from trinity.pipeline import Pipeline  # noqa: E402
from trinity.server.application import ModelServer  # noqa: E402
from trinity.server.command import DrainingServer, _make_parser, open_port, uvicorn_options  # noqa: E402
from trinity.server.settings import ServerConfig  # noqa: E402


async def serve(connections: int | None) -> None:
    async with Pipeline(MODEL, "EPD", cache=CacheConfig(pools=POOLS)) as pipe:
        server = ModelServer(pipe, ServerConfig(max_connections=connections))
        with open_port("127.0.0.1", 0) as opened:
            options = uvicorn_options(_make_parser().parse_args(["emulated"]))
            http = DrainingServer(uvicorn.Config(server.make_app(), **options), server, 1.0)
            print(opened.getsockname()[1], flush=True)
            serving = asyncio.create_task(http.serve([opened]))
            await asyncio.to_thread(sys.stdin.read)
            http.should_exit = True
            await serving


if __name__ == "__main__":
    files, limit = int(sys.argv[1]), int(sys.argv[2]) or None
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))
    asyncio.run(serve(limit))
