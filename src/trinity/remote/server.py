"""A process that is an instance: it listens, and serves one pipeline after another.

    TRINITY_SECRET=... python -m trinity.instance --listen tcp:127.0.0.1:7000

It prints the address in force as a line of JSON. Whoever connects must hold the secret; a second pipeline is refused
while one is served. The instances that a pipeline starts itself are the same, and end with their pipeline.
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
from collections.abc import Callable
from pathlib import Path

from trinity.core.messages import FRONTEND
from trinity.errors import HandshakeError, TransportError, TrinityError
from trinity.memory.block_memory import BlockMemory
from trinity.remote.channel import TIMEOUT_S, Address, Channel, listen
from trinity.remote.session import Standalone
from trinity.remote.wire import Broken, Hello, Setup, decode, encode

logger = logging.getLogger("trinity")
SECRET = "TRINITY_SECRET"
RELEASE_TRIES, RELEASE_S = 50, 0.05
INTERRUPTED = 130  # the exit code of a program that Ctrl-C ended


class Listener:
    """Hands connections to the ``Standalone`` of the pipeline that is served now. ``once``: end after the first."""

    def __init__(self, secret: bytes, *, once: bool = True, model: str | None = None) -> None:
        self.secret, self.once, self.model = secret, once, model
        self.ended = asyncio.Event()
        self.session: Standalone | None = None
        self._address = ""
        self._turn = asyncio.Lock()
        self._next = False

    async def serve(self, address: Address, announce: Callable[[Address], None]) -> None:
        """Listen until the only pipeline has ended, or a thread of the instance has failed. Raises ``ConfigError``."""
        async with listen(address, self.secret, encode(Hello("instance")), self._accepted) as bound:
            self._address = str(bound)
            announce(bound)
            await self.ended.wait()

    async def _accepted(self, channel: Channel) -> None:
        try:
            hello = decode(channel.hello)
            if isinstance(hello, Hello) and hello.name == FRONTEND:
                await self._serve(channel)
            elif self.session is not None:
                await self.session.greet(channel)
        except (TransportError, TimeoutError) as error:
            name = self.session.hello.name if self.session is not None else "an idle instance"
            logger.warning("a control channel of %s was dropped: %s", name, error or "nothing was said in time")
        finally:
            channel.abort()

    async def _serve(self, channel: Channel) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            setup = decode(await channel.receive())
        if not isinstance(setup, Setup):
            raise HandshakeError("the front end must send its Setup first", "control")
        if self._next or (self.session is not None and not self.session.leaving):
            text = f"the instance at {self._address} serves another pipeline: close that, or start another instance"
            channel.send(encode(Broken("OfferRefused", text, "busy")))
            return await channel.aclose()
        self._next = True  # at most one waits for the end of the one before
        async with self._turn:
            self._next = False
            await self._session(channel, setup)

    async def _session(self, channel: Channel, setup: Setup) -> None:
        self.session = Standalone(self.secret, self._address, self.ended, self.model)
        try:
            await self.session.serve(channel, setup)
        finally:
            pools, self.session = self.session.pools, None
            if self.once:
                self.ended.set()
            else:
                await _released(pools)


async def _released(pools: list[weakref.ref[BlockMemory]]) -> None:
    """Until the memory of a pipeline is free: it hangs on cycles, and a moment longer on threads that end."""
    for _ in range(RELEASE_TRIES):
        gc.collect()
        if not any(pool() for pool in pools):
            return
        await asyncio.sleep(RELEASE_S)
    logger.warning("pools of a pipeline that has ended are still in use")


def serve(
    address: str,
    secret: bytes,
    announce: Callable[[Address], None] = lambda bound: None,
    *,
    once: bool = True,
    model: str | None = None,
) -> int:
    """Serve one pipeline, or one after another; the process's exit code."""

    async def listening() -> None:
        await Listener(secret, once=once, model=model).serve(Address.parse(address), announce)

    gc.freeze()  # what is imported stays: to look through it again costs half a second
    try:
        asyncio.run(listening())
    except TrinityError as error:
        print(f"trinity: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def main() -> int:
    """``python -m trinity.instance --listen ADDRESS``: one instance, served to whoever holds the secret."""
    parser = argparse.ArgumentParser(prog="python -m trinity.instance", description=main.__doc__)
    parser.add_argument("--listen", required=True, help="unix:/path or tcp:host:port (port 0: any free one)")
    parser.add_argument("--model", type=Path, help="the checkpoint's directory on this machine, if it differs")
    parser.add_argument("--once", action="store_true", help="end with the first pipeline")
    asked = parser.parse_args()
    secret = os.environ.get(SECRET, "")
    if len(secret) < 32:
        parser.error(f"set {SECRET} to the pipeline's secret, at least 32 characters that only its hosts know")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    def announce(bound: Address) -> None:
        print(json.dumps({"listening": str(bound)}), flush=True)

    model = str(asked.model.resolve()) if asked.model is not None else None
    return serve(asked.listen, secret.encode(), announce, once=asked.once, model=model)


if __name__ == "__main__":
    raise SystemExit(main())
