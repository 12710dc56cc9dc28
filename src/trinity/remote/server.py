"""Server of an instance process: listens, and serves one pipeline at a time, each with a worker of its own.

    TRINITY_SECRET=... trinity instance --listen tcp:127.0.0.1:7000

    TRINITY_SECRET=... trinity instance --hosts hosts.toml --on alpha

It prints each address in use as a line of JSON. Peers must hold the secret; a second pipeline is refused while one is
served. Instances that a pipeline starts itself run the same server, and end with their pipeline.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trinity.core.values import FRONTEND, is_frontend
from trinity.errors import ConfigError, HandshakeError, TransportError, TrinityError
from trinity.errors.parent_process import name_process
from trinity.memory.block_memory import BlockMemory
from trinity.remote.channel.channel import SECRET_VARIABLE, SHORTEST_SECRET, TIMEOUT_S, Address, Channel
from trinity.remote.channel.listener import listen
from trinity.remote.channel.tls import TLS_FILES, TLSConfig, join_files
from trinity.remote.channel.wire import Attach, Hello, InstanceFailure, Setup, decode, encode
from trinity.remote.fellow_front_ends import START_FIRST, refuse
from trinity.remote.worker import InstanceWorker
from trinity.transport.ucx_environment import take_interface_of

logger = logging.getLogger("trinity")
RELEASE_TRIES, RELEASE_S = 50, 0.05  # s between two looks if a pipeline's pools are free
_EXAMPLE = """example, on each host of a pipeline:
  TRINITY_SECRET=... trinity instance --listen tcp:10.0.0.2:7000
then: trinity.Pipeline(model, [trinity.Instance("E"), trinity.Instance("PD", address="tcp:10.0.0.2:7000")],
                       hosting="process", processes=trinity.ProcessConfig(secret=..., trusted_network=True),
                       connector=trinity.Connector("auto", options={"trusted_network": True}))"""
INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended


class InstanceServer:
    """Hands connections to the worker of the pipeline that is served now.

    - ``secret`` (bytes): shared with the pipeline and its other instances.
    - ``once`` (True): end after the first pipeline.
    - ``model`` (directory, None): a checkpoint on this machine, in place of the one that the pipeline names.
    - ``tls`` (None): certificates for channels over TCP, which are then all in TLS.
    - ``on_setup`` (nothing): called with the instance's name once a pipeline has sent it.
    """

    def __init__(
        self,
        secret: bytes,
        *,
        once: bool = True,
        model: str | None = None,
        tls: TLSConfig | None = None,
        on_setup: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._on_setup = on_setup
        self.secret, self.once, self.model, self.tls = secret, once, model, tls
        self.ended = asyncio.Event()
        self.worker: InstanceWorker | None = None
        self._address = ""
        self._turn = asyncio.Lock()
        self._waiting = False

    async def serve(self, address: Address, announce: Callable[[Address], None]) -> None:
        """Listen until the only pipeline has ended, or a thread of the instance has failed.

        ``announce`` is called with the address in use. Raises ``ConfigError`` if it cannot listen.
        """
        async with listen(address, self.secret, encode(Hello("instance")), self._accept, self.tls) as bound:
            self._address = str(bound)
            announce(bound)
            await self.ended.wait()

    async def _accept(self, channel: Channel) -> None:
        try:
            hello = decode(channel.hello)
            if isinstance(hello, Hello) and hello.name == FRONTEND:
                await self._serve(channel)
            elif isinstance(hello, Hello) and is_frontend(hello.name):
                await self._attach(channel, hello.name)
            elif self.worker is not None:
                await self.worker.greet(channel)
        except (TransportError, TimeoutError) as error:
            name = self.worker.hello.name if self.worker is not None else "an idle instance"
            logger.warning("a control channel of %s was dropped: %s", name, error or "no message came in time")
        finally:
            channel.abort()

    async def _serve(self, channel: Channel) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            setup = decode(await channel.receive())
        if not isinstance(setup, Setup):
            raise HandshakeError("the front end must send its Setup first", "control")
        if self._waiting or (self.worker is not None and not self.worker.leaving):
            text = f"the instance at {self._address} serves another pipeline: close that, or start another instance"
            channel.send(encode(InstanceFailure("OfferRefused", text, "busy")))
            return await channel.aclose()
        self._waiting = True  # at most one pipeline waits for the end of the previous one
        self._on_setup(setup.name)
        async with self._turn:
            self._waiting = False
            await self._work_for(channel, setup)

    async def _attach(self, channel: Channel, name: str) -> None:
        """Have the worker serve one more front end."""
        async with asyncio.timeout(TIMEOUT_S):
            said = decode(await channel.receive())
        if not isinstance(said, Attach) or said.name != name:
            raise HandshakeError(f"{name} must say first that it attaches", "control")
        if self.worker is None:
            await refuse(channel, f"the instance at {self._address} serves no pipeline: {START_FIRST}", "idle")
        else:
            await self.worker.fellows.attach(channel, said)

    async def _work_for(self, channel: Channel, setup: Setup) -> None:
        self.worker = InstanceWorker(self.secret, self._address, self.ended, self.model, self.tls)
        try:
            await self.worker.serve(channel, setup)
        finally:
            pools, self.worker = self.worker.pools, None
            if self.once:
                self.ended.set()
            else:
                await _wait_released(pools)


async def _wait_released(pools: list[weakref.ref[BlockMemory]]) -> None:
    """Wait until a pipeline's pools are freed: reference cycles and ending threads hold them a little longer."""
    for _ in range(RELEASE_TRIES):
        gc.collect()
        if not any(pool() for pool in pools):
            return
        await asyncio.sleep(RELEASE_S)
    logger.warning("pools of a pipeline that has ended are still in use")


def serve_instance(
    address: str,
    secret: bytes,
    announce: Callable[[Address], None] = lambda bound: None,
    *,
    once: bool = True,
    model: str | None = None,
    tls: TLSConfig | None = None,
) -> int:
    """Serve one pipeline, or one after another; return the process's exit code."""

    async def listen_and_serve() -> None:
        if tls is not None:
            tls.check()
        server = InstanceServer(secret, once=once, model=model, tls=tls, on_setup=name_process)
        await server.serve(Address.parse(address), announce)

    gc.freeze()  # modules stay: collecting them again takes half a second
    try:
        asyncio.run(listen_and_serve())
    except TrinityError as error:
        print(f"trinity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def _make_parser() -> argparse.ArgumentParser:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="trinity instance", description=main.__doc__, epilog=_EXAMPLE, formatter_class=formatter
    )
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--listen", help="unix:/path or tcp:host:port (port 0: any free one)")
    where.add_argument("--hosts", metavar="FILE", help="all instances of a host of this file, see docs/hosts.md")
    parser.add_argument("--on", metavar="NAME", help="the host of --hosts that this is")
    parser.add_argument("--model", type=Path, help="the checkpoint's directory on this machine, if it differs")
    parser.add_argument("--once", action="store_true", help="end with the first pipeline; with --listen")
    parser.add_argument("--emulated", action="store_true", help="start without torch, with --hosts")
    for name in TLS_FILES:
        parser.add_argument(
            f"--tls-{name}", help=f"file in PEM: TLS for channels over TCP, see trinity.TLSConfig.{name}"
        )
    return parser


def _read_arguments(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, bytes, TLSConfig | None]:
    """Return the arguments, the secret and the certificates. Exits where they do not go together."""
    parser = _make_parser()
    given = parser.parse_args(arguments)
    if bool(given.hosts) != bool(given.on):
        parser.error("--hosts FILE and --on NAME go together")
    if given.once and given.hosts:
        parser.error("--once is for --listen: instances of --hosts serve one pipeline after another")
    if given.emulated and given.listen:
        parser.error("--emulated is for --hosts: an instance of --listen imports torch once it has to")
    try:
        tls = join_files((getattr(given, f"tls_{name}") for name in TLS_FILES), [f"--tls-{name}" for name in TLS_FILES])
    except ConfigError as error:
        parser.error(str(error))
    secret = os.environ.get(SECRET_VARIABLE, "")
    if len(secret) < SHORTEST_SECRET:
        hint = f"at least {SHORTEST_SECRET} characters that only its hosts know"
        parser.error(f"set {SECRET_VARIABLE} to the pipeline's secret, {hint}")
    return given, secret.encode(), tls


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one instance that serves any pipeline which holds the secret, or all instances of a host."""
    given, secret, tls = _read_arguments(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if given.hosts:
        from trinity.remote.hosts.host_keeper import keep_host
        from trinity.remote.hosts.hosts import read_hosts

        options = {"model": given.model, "emulated": given.emulated, "tls": tls}
        return keep_host(read_hosts(given.hosts), given.on, secret, _announce_named, **options)

    def announce(bound: Address) -> None:
        print(json.dumps({"listening": str(bound)}), flush=True)

    model = str(given.model.resolve()) if given.model is not None else None
    with suppress(ConfigError):  # of an address that is none, which is told below
        take_interface_of(Address.parse(given.listen).host)
    return serve_instance(given.listen, secret, announce, once=given.once, model=model, tls=tls)


def _announce_named(name: str, bound: Address) -> None:
    with suppress(OSError):  # who read the output may have gone; the instances serve on
        print(json.dumps({"instance": name, "listening": str(bound)}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
