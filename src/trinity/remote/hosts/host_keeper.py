"""HostKeeper: all instances of one host, each in a process of its own; one that has ended is begun again.

    TRINITY_SECRET=... trinity instance --hosts hosts.toml --on alpha

A launcher imports torch once and forks them; the kernel ends all of them with this command.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trinity.errors import ConfigError, TrinityError
from trinity.instance import Instance
from trinity.remote.channel.channel import Address
from trinity.remote.channel.host_addresses import is_numeric, is_own
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.hosts.hosts import HostEntry, HostTable
from trinity.remote.supervision.fork_supply import InstanceForks
from trinity.transport.ucx_environment import DEVICES_VARIABLE, take_interface_of

logger = logging.getLogger("trinity")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # before a life that follows; doubled each time
STEADY_LIFE_S = 30.0  # after one so long, the pause is the first again


class HostKeeper:
    """Keeps the instances of a host running until it is cancelled.

    - ``instances``: with their addresses. ``secret``: shown by pipelines that use them.
    - ``announce``: called with the name and address of each that listens.
    - ``model`` (""): a checkpoint's directory here, in place of the pipeline's.
    - ``emulated`` (False): start without torch, for pipelines of an ``EmulatedModel``.
    - ``tls`` (None): certificates for channels over TCP.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        secret: bytes,
        announce: Callable[[str, Address], None],
        *,
        model: str = "",
        emulated: bool = False,
        tls: TLSConfig | None = None,
    ) -> None:
        self._instances, self._secret, self._announce = list(instances), secret, announce
        self._model, self._emulated, self._tls = model, emulated, tls
        self._forks = InstanceForks()

    async def run(self) -> None:
        """Run until it is cancelled; then end all of them."""
        try:
            async with asyncio.TaskGroup() as group:
                for each in self._instances:
                    group.create_task(self._keep(each.name, Address.parse(each.address or "")))
        finally:
            await self._forks.close()

    async def _keep(self, name: str, address: Address) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            why = await self._live(name, address)
            pause_s = FIRST_PAUSE_S if time.monotonic() - began > STEADY_LIFE_S else pause_s
            logger.warning("instance %s at %s: %s; it is begun again in %.1f s", name, address, why, pause_s)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _live(self, name: str, address: Address) -> str:
        """Begin a life and wait for its end; return why it ended, or could not begin."""
        try:
            process = await self._forks.fork(
                address, self._secret, self._model, torch=not self._emulated, once=False, tls=self._tls
            )
        except (TrinityError, OSError) as error:
            return str(error)
        try:
            self._announce(name, await process.find_address())
            await process.wait()
            return f"process {process.number} has ended"
        except TrinityError as error:
            return str(error)
        finally:
            await self._forks.kill(process)


def check_host(host: HostEntry, model: Path | None) -> str:
    """Return the model's directory on this host, "" for the pipeline's, after a look at what cannot come right later.

    Raises ``ConfigError`` for an address of another machine, and for a directory that is not there.
    """
    if is_numeric(host.address) and not is_own(host.address):
        raise ConfigError(
            f"host {host.name} has address {host.address}, which is none of this machine's: run this there, or name "
            "another host with --on"
        )
    found = str(model.resolve()) if model is not None else host.model
    if found and not os.path.isdir(found):
        raise ConfigError(f"there is no model at {found}: give its directory on this host with --model")
    return found


def keep_host(
    table: HostTable,
    name: str,
    secret: bytes,
    announce: Callable[[str, Address], None],
    *,
    model: Path | None = None,
    emulated: bool = False,
    tls: TLSConfig | None = None,
) -> int:
    """Run the instances of the host of this name until SIGTERM; return the process's exit code.

    Raises ``ConfigError`` for a host that is not this one, or lacks what it needs.
    """
    host = table.find(name)
    directory = check_host(host, model)
    if tls is not None:
        tls.check()
    if host.ucx_device:
        os.environ.setdefault(DEVICES_VARIABLE, host.ucx_device)
    with suppress(OSError):  # a name that nobody knows is told of by the instances, which cannot listen there
        take_interface_of(socket.gethostbyname(host.address))
    instances = table.list_on(name)

    async def run() -> int:
        keeper = HostKeeper(instances, secret, announce, model=directory, emulated=emulated, tls=tls)
        running = asyncio.ensure_future(keeper.run())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        await asyncio.wait([running])
        return 0 if running.cancelled() else running.result() or 1

    return asyncio.run(run())
