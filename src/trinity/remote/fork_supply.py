"""ForkSupply: instances of this host, forked by a launcher, which the supervisor's core numbers and replaces."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from trinity.errors import ConfigError
from trinity.remote.channel import Address
from trinity.remote.fork_client import LAUNCHER_ENDED, Launcher
from trinity.remote.process_identity import read_start
from trinity.remote.supply import InstanceOrder, InstancePlace, InstanceProcess
from trinity.remote.tls import TLSConfig
from trinity.remote.warm_launchers import LAUNCHER_WAITS_S, leave_launcher, take_launcher

logger = logging.getLogger("trinity")


class ForkSupply:
    """Forks each life as a process that listens on a socket file.

    - ``folder``: of the socket files. ``shared`` (""): folder for what UCX keeps in shared memory.
    - ``tls`` (None): with which its instances reach those on TCP.
    - ``waits_s`` (seconds, 120): how long a launcher waits for another pipeline of this program; 0: it ends.
    - ``on_gone`` (None): called with the number of a launcher that has ended by itself, or could not be started.

    A life is begun by the launcher that was opened last. Raises ``LauncherSilent`` where that takes no orders: then
    another is opened, and the old one ended once no life that it has begun is left.
    """

    def __init__(
        self,
        folder: Path,
        *,
        shared: str = "",
        tls: TLSConfig | None = None,
        waits_s: float = LAUNCHER_WAITS_S,
        on_gone: Callable[[int], None] | None = None,
    ) -> None:
        self._folder, self._shared, self._tls, self._waits_s = folder, shared, tls, waits_s
        self._on_gone = on_gone or (lambda number: None)
        self.launchers: dict[int, asyncio.Task[tuple[Launcher, bool] | None]] = {}  # and whether it is ours to leave
        self._watches: set[asyncio.Task[None]] = set()
        self._processes: dict[tuple[str, int], InstanceProcess] = {}

    # ------------------------------------------------------------ launchers

    def open_launcher(self, number: int, torch: bool = True) -> None:
        """Start a launcher, or take one that waits, under a number that is larger than those before.

        ``torch``: as ``Launcher`` has it.
        """
        loop = asyncio.get_running_loop()  # never cancelled: a launcher that nobody holds would be left behind
        self.launchers[number] = loop.create_task(self._get_launcher(number, torch))

    async def _get_launcher(self, number: int, torch: bool) -> tuple[Launcher, bool] | None:
        try:
            found = await take_launcher(torch)
        except OSError as error:
            logger.error("a launcher of instance processes could not be started: %s", error)
            self._on_gone(number)
            return None
        watch = asyncio.get_running_loop().create_task(self._await_end(number, found[0]))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        return found

    async def _await_end(self, number: int, launcher: Launcher) -> None:
        await asyncio.shield(asyncio.wrap_future(launcher.ended))
        if number in self.launchers:
            logger.error("the launcher of instance processes has ended; another is started when one is needed")
            self._on_gone(number)

    async def end_launcher(self, number: int) -> None:
        """Leave a launcher to the next pipeline, or end it with what it has begun. Takes a moment."""
        getting = self.launchers.pop(number, None)
        found = await getting if getting is not None else None
        if found is not None and found[1]:
            await asyncio.to_thread(leave_launcher, found[0], self._waits_s)

    # ------------------------------------------------------------ lives

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        newest = max(self.launchers, default=None)
        found = await asyncio.shield(self.launchers[newest]) if newest is not None else None
        if found is None:
            raise ConfigError(LAUNCHER_ENDED)
        address = Address("unix", path=str(self._folder / f"{order.name}-{order.epoch}.sock"))
        number, exit_code = await found[0].launch(
            address, order.secret, order.model, shared=self._shared, tls=self._tls
        )
        process = InstanceProcess(number, read_start(number), exit_code)
        self._processes[order.name, order.epoch] = process
        return InstancePlace(address, process)

    async def end(self, name: str, epoch: int) -> None:
        """Kill it, and wait for its end by the system's word."""
        process = self._processes.get((name, epoch))
        if process is not None:
            await process.end()
        self._processes.pop((name, epoch), None)

    async def aclose(self) -> None:
        for process in self._processes.values():
            process.kill()
        self._processes.clear()
        for number in list(self.launchers):
            await self.end_launcher(number)
        for watch in list(self._watches):
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
