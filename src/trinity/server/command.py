"""Command ``trinity serve``: one model behind an OpenAI-compatible server, drained on SIGTERM.

    trinity serve path/to/llava --placement 1E2P1D --port 8000

The port is open while weights are loaded: /health answers, /ready says 503 until the model is there.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from trinity.core.frontend import FrontendOptions
from trinity.errors import ConfigError
from trinity.memory.freed_memory import return_large_at_once
from trinity.pipeline import FailurePolicy, Pipeline
from trinity.pipeline.deploy import read_hosted_options
from trinity.preprocess import worker_processes
from trinity.preprocess.media_limits import MediaLimits
from trinity.remote.buddy import Buddy
from trinity.remote.channel.tls import TLS_FILES
from trinity.server.acceptor import ConnectionAcceptor, OncePerMinute, default_connections
from trinity.server.application import ModelServer
from trinity.server.http_protocol import BoundedProtocol
from trinity.server.loop_watch import LoopWatch
from trinity.server.settings import ServerConfig

logger = logging.getLogger("trinity.server")
KEY_VARIABLE = "TRINITY_API_KEY"
SWITCH_S = 0.0005  # a thread that wants the interpreter waits so long for one that has it: Python's 5 ms are ten times
# what the event loop does between two waits, and it waits at each of a request's dozen rounds
KEEP_ALIVE_S = 75  # s of an idle connection: longer than clients keep theirs, which otherwise meet a closed one
_REPEATED = OncePerMinute()
LAST_S = 5  # s that connections have to close behind the drain


class DrainingServer(uvicorn.Server):
    """uvicorn's server, which drains on the first signal, its port still open: /ready says 503 meanwhile.

    The second signal ends it at once. Connections are limited by ``ServerConfig.max_connections``.
    """

    def __init__(self, config: uvicorn.Config, server: ModelServer, drain_s: float) -> None:
        super().__init__(config)
        self._server, self._drain_s = server, drain_s
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening: list[socket.socket] = []
        self.acceptor: ConnectionAcceptor | None = None
        logging.getLogger("uvicorn.error").addFilter(_REPEATED)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve at listening sockets, which are closed in the end."""
        self._loop, self._listening = asyncio.get_running_loop(), sockets or []
        await super().serve([])  # uvicorn accepts at none: it has no limit
        if self._draining is not None:
            self._draining.cancel()
            await asyncio.wait([self._draining])

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.acceptor = ConnectionAcceptor(
            self._listening,
            self._make_connection,
            self._server.config.max_connections or default_connections(),
            self.config.ssl,
            self._server.config.trusted_proxies,
        )
        self.acceptor.start()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.acceptor is not None:
            self.acceptor.close()
        await super().shutdown(sockets)

    def _make_connection(self) -> BoundedProtocol:
        return BoundedProtocol(self.config, self.server_state, self.lifespan.state)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._loop is None or self._server.draining:
            super().handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(self.begin_drain)

    def begin_drain(self) -> None:
        """Drain, then stop."""
        if self._draining is None:
            logger.info("draining: running requests have %g s", self._drain_s)
            self._draining = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._server.drain(self._drain_s)
        finally:
            self.should_exit = True  # whatever it met


def _make_parser() -> argparse.ArgumentParser:
    """Make the parser of the command's arguments."""
    parser = argparse.ArgumentParser(
        prog="trinity serve",
        description="Serve a model to OpenAI's clients.",
        epilog="examples: trinity serve shapes, "
        "trinity serve path/to/llava --placement 1E2P1D --hosting process --api-key SECRET",
    )
    parser.add_argument("model", help="a checkpoint's directory, a hub id that is cached, or shapes")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--placement", default="EPD", help="EPD (default), 1E2P1D, ...")
    where.add_argument(
        "--hosts", metavar="FILE", help="instances of this file of hosts, which run already (docs/hosts.md)"
    )
    parser.add_argument(
        "--trusted-network", action="store_true", help="only hosts you trust are on the network of --hosts"
    )
    parser.add_argument("--attach", action="store_true", help="serve beside the server that has set up --hosts")
    parser.add_argument("--buddy", metavar="ADDRESS", help="where another server of --hosts has its --journal")
    parser.add_argument("--journal", metavar="ADDRESS", help="where others whose buddy this is bring their requests")
    for name in TLS_FILES:
        parser.add_argument(f"--hosts-tls-{name}", metavar="FILE", help="in PEM: TLS for control channels of --hosts")
    parser.add_argument("--hosting", choices=("thread", "process"), default="thread", help="of instances")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for all (give a key then)")
    parser.add_argument("--port", type=int, default=8000, help="0 for a free one, which is printed")
    parser.add_argument("--served-model-name", action="append", default=[], metavar="NAME", help="may be repeated")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY", help=f"may be repeated; also ${KEY_VARIABLE}"
    )
    parser.add_argument("--drain", type=float, default=30.0, metavar="S", help="seconds for what runs, on SIGTERM")
    parser.add_argument("--deadline", type=float, metavar="S", help="longest time of a request, in seconds")
    parser.add_argument("--tool-parser", default="auto", help="auto, hermes, llama3_json, qwen3_coder or none")
    parser.add_argument("--max-body-mb", type=int, default=64, metavar="MB", help="longest body")
    parser.add_argument(
        "--max-connections", type=int, metavar="N", help="open at once (by default what the limit of open files allows)"
    )
    _add_failure_options(parser)
    parser.add_argument(
        "--trusted-proxy", action="append", default=[], metavar="CIDR", help="whose X-Forwarded-For holds; repeatable"
    )
    parser.add_argument(
        "--preprocess-processes", type=int, default=2, metavar="N", help="for media, and N for texts; 0: threads"
    )
    parser.add_argument("--max-waiting", type=int, default=1024, metavar="N", help="requests that may wait")
    parser.add_argument("--spread", type=int, metavar="N", help="encoders for the images of one request (1)")
    parser.add_argument(
        "--allow-media-host", action="append", default=[], metavar="HOST", help="whose images are fetched; repeatable"
    )
    parser.add_argument(
        "--allow-media-network", action="append", default=[], metavar="CIDR", help="private addresses to reach"
    )
    parser.add_argument(
        "--transparency", choices=("white", "drop"), default="white", help="behind images, or drop their alpha"
    )
    parser.add_argument("--download", action="store_true", help="fetch from the hub what its cache lacks")
    parser.add_argument("--dtype", default="auto", help="of weights and caches")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--tls-certificate", metavar="FILE", help="of the server, PEM; with --tls-key")
    parser.add_argument("--tls-key", metavar="FILE", help="its key, PEM")
    parser.add_argument("--no-live", action="store_true", help="serve no live page at /live")
    parser.add_argument("--access-log", action="store_true", help="log each request")
    return parser


def _add_failure_options(parser: argparse.ArgumentParser) -> None:
    """Add those of ``FailurePolicy``."""
    parser.add_argument("--recoveries", type=int, default=2, metavar="N", help="losses that a request survives")
    parser.add_argument("--deaths", type=int, default=3, metavar="N", help="of instances with a request, that end it")
    parser.add_argument("--alone-after", type=int, default=2, metavar="N", help="of them, after which it runs alone")
    parser.add_argument("--retry-share", type=float, default=0.2, metavar="X", help="of requests, that go on at once")
    parser.add_argument("--wait", type=float, default=600.0, metavar="S", help="for a lost stage to be back; 0: none")


def make_server_config(arguments: argparse.Namespace) -> ServerConfig:
    """Make the server's settings of the command's arguments and the environment."""
    keys = [*arguments.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]
    return ServerConfig(
        models=arguments.served_model_name or [name_served(arguments.model)],
        api_keys=keys,
        max_body_bytes=arguments.max_body_mb << 20,
        max_connections=arguments.max_connections,
        deadline_s=arguments.deadline,
        tool_format=arguments.tool_parser,
        live=not arguments.no_live,
        trusted_proxies=arguments.trusted_proxy,
    )


def name_served(model: str) -> str:
    """Name a model for clients: a directory by its own name, one of the hub as it is asked for."""
    path = Path(model)
    return path.resolve().name if path.exists() else model.partition("@")[0]


def make_served_pipeline(arguments: argparse.Namespace) -> Pipeline:
    """Make the pipeline that the arguments name."""
    tls = [getattr(arguments, f"hosts_tls_{name}") for name in TLS_FILES]
    peers = (arguments.attach, arguments.buddy, arguments.journal)
    if not arguments.hosts and (arguments.trusted_network or any(tls)):
        raise ConfigError("--trusted-network and --hosts-tls-... are of the network of --hosts FILE")
    if not arguments.hosts and any(peers):
        raise ConfigError("--attach, --buddy and --journal are of servers that share the instances of --hosts FILE")
    placed: dict[str, Any] = {"placement": arguments.placement, "hosting": arguments.hosting}
    if arguments.hosts:
        buddy = Buddy(arguments.buddy, arguments.journal) if arguments.buddy or arguments.journal else None
        shared = {"trusted_network": arguments.trusted_network, "attach": arguments.attach, "buddy": buddy}
        placed = read_hosted_options(arguments.hosts, tls, **shared)
    return Pipeline(
        arguments.model,
        **placed,
        dtype=arguments.dtype,
        device=arguments.device,
        max_waiting=arguments.max_waiting,
        max_waiting_bytes=3
        * FrontendOptions.max_waiting_bytes
        // 4,  # the rest is for bodies: max_held_bytes, and what reads them
        spread=arguments.spread,
        failures=FailurePolicy(
            recoveries=arguments.recoveries,
            wait_s=arguments.wait,
            retry_share=arguments.retry_share,
            deaths=arguments.deaths,
            alone_after=arguments.alone_after,
        ),
        download=arguments.download,
        transparency=arguments.transparency,
        limits=MediaLimits(
            allow_paths=False,
            processes=arguments.preprocess_processes,
            allowed_hosts=tuple(arguments.allow_media_host),
            allowed_networks=tuple(arguments.allow_media_network),
        ),
    )


def open_port(host: str, port: int) -> socket.socket:
    """Open the port before anything is loaded. Raises ``ConfigError``."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"cannot listen at {host}:{port} ({error}); give another --port or --host") from error


def uvicorn_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options of uvicorn: heads are bounded, no proxy is believed, and nothing is said about the server itself."""
    return {
        "access_log": arguments.access_log,
        "date_header": False,
        "http": BoundedProtocol,
        "lifespan": "off",
        "log_level": "info" if arguments.access_log else "warning",
        "proxy_headers": False,
        "server_header": False,
        "ssl_certfile": arguments.tls_certificate,
        "ssl_keyfile": arguments.tls_key,
        "timeout_graceful_shutdown": LAST_S,
        "timeout_keep_alive": KEEP_ALIVE_S,
        "ws": "none",
    }


def keep_loaded() -> None:
    """Take what is loaded out of Python's collections: to look at it stops all requests for 0.3 s each time."""
    gc.collect()
    gc.freeze()


async def serve_until_signal(arguments: argparse.Namespace) -> None:
    """Serve until a signal comes. Raises ``TrinityError`` where the model or the port cannot be had."""
    pipe, config = make_served_pipeline(arguments), make_server_config(arguments)
    server = ModelServer(pipe, config)
    with open_port(arguments.host, arguments.port) as opened:
        http = DrainingServer(uvicorn.Config(server.make_app(), **uvicorn_options(arguments)), server, arguments.drain)
        scheme = "https" if arguments.tls_certificate else "http"
        address = f"{scheme}://{arguments.host}:{opened.getsockname()[1]}"
        print(f"trinity at {address}/v1: loading {arguments.model}", flush=True)
        serving = asyncio.create_task(http.serve([opened]))
        starting = asyncio.create_task(pipe.start())
        try:
            async with LoopWatch() as server.watch:
                await asyncio.wait([serving, starting], return_when=asyncio.FIRST_COMPLETED)
                if starting.done():
                    starting.result()
                    keep_loaded()
                    print(f"serving {', '.join(server.models)} on {pipe.placement}", flush=True)
                await serving
        finally:
            http.should_exit = True
            await asyncio.wait([serving])
            await pipe.aclose()
            await asyncio.gather(starting, return_exceptions=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Raises ``TrinityError`` where the model or the port cannot be had."""
    asked = _make_parser().parse_args(arguments)
    sys.setswitchinterval(SWITCH_S)
    worker_processes.forks_itself = True  # it serves nothing before it has its model
    if asked.hosts or asked.hosting == "process":
        return_large_at_once()
    try:
        asyncio.run(serve_until_signal(asked))
    finally:
        gc.unfreeze()  # the end of the process collects it all, or bindings write a hundred lines of what leaks
    return 0
