"""Forked instances of this host: they are this program's, and a launcher that has ended or is frozen is replaced.

An instance needs its launcher for no longer than the fork. Its program kills it by a descriptor of its process, and the
kernel does once the program has ended (docs/decisions/0123-launchers-that-nobody-depends-on.md).
"""

from __future__ import annotations

import asyncio
import logging
import time
from math import inf
from pathlib import Path

from trinity.errors import ConfigError
from trinity.remote.channel.channel import Address
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.supervision.fork_client import INSTANCE_STOP_S, Launcher
from trinity.remote.supervision.leftovers import make_shared_folder
from trinity.remote.supervision.supply import InstanceOrder, InstancePlace, InstanceProcess
from trinity.remote.supervision.warm_launchers import LAUNCHER_WAITS_S, leave_launcher, take_launcher

logger = logging.getLogger("trinity")
REPLACED_S = 30.0  # that a launcher must have lasted which took another's place, to be replaced at once in turn


class InstanceForks:
    """Forks instances, for whoever begins and ends their lives.

    - ``waits_s`` (seconds, 0): how long the launcher waits for another pipeline of this program in the end; 0: it ends.
    - ``opening`` (None): the launcher in use, and whether it is ours to leave.

    A launcher that has died is replaced at once, in the background, unless another was half a minute before; that one,
    and one that takes no order, are replaced at the next fork.
    """

    def __init__(self, waits_s: float = 0.0) -> None:
        self.opening: asyncio.Task[tuple[Launcher, bool]] | None = None
        self._waits_s, self._torch, self._closed = waits_s, True, False
        self._replaced = -inf  # when one took another's place, monotonic clock
        self._lives: set[InstanceProcess] = set()
        self._shared = make_shared_folder()

    async def fork(
        self,
        address: Address,
        secret: bytes,
        model: str,
        *,
        torch: bool = True,
        once: bool = True,
        tls: TLSConfig | None = None,
    ) -> InstanceProcess:
        """Fork an instance, as ``Launcher.launch`` does. ``torch``: of a launcher that is started for it."""
        self._torch = torch
        launcher, _ = await asyncio.shield(self._open())
        shared = str(self._shared.path) if self._shared is not None else ""
        process = await launcher.launch(address, secret, model, once=once, shared=shared, tls=tls)
        self._lives.add(process)
        return process

    async def kill(self, process: InstanceProcess) -> None:
        """End an instance."""
        await process.end()
        self._lives.discard(process)

    def _open(self) -> asyncio.Task[tuple[Launcher, bool]]:
        """Return the launcher in use, another where that is over."""
        former = self.opening
        if former is not None and not (former.done() and (former.exception() or former.result()[0].over)):
            return former
        self.opening = asyncio.get_running_loop().create_task(self._take())  # never cancelled: it would be left behind
        self.opening.add_done_callback(lambda done: done.exception())  # which the next fork raises again
        if former is not None and not former.exception():
            self._let_go(*former.result())
        return self.opening

    async def _take(self) -> tuple[Launcher, bool]:
        try:
            launcher, own = await take_launcher(self._torch)
        except OSError as error:
            raise ConfigError(f"a launcher of instance processes could not be started: {error}") from error
        loop = asyncio.get_running_loop()
        self._on_end = lambda: loop.call_soon_threadsafe(self._replace, launcher)
        launcher.on_end.add(self._on_end)
        return launcher, own

    def _replace(self, ended: Launcher) -> None:
        """Start another launcher in place of one that has ended.

        Where that never was ready, or was lately started so itself, only the next fork does: what kills it is not over.
        """
        if self._closed or ended.ready.exception() is not None:
            return
        soon = time.monotonic() - self._replaced < REPLACED_S
        when = "once an instance is" if soon else "now"
        logger.error(
            "the launcher of instance processes has ended; another is started %s, and no instance is lost", when
        )
        if not soon:
            self._replaced = time.monotonic()
            self._open()

    def _let_go(self, launcher: Launcher, own: bool) -> None:
        launcher.on_end.discard(self._on_end)
        if own:
            launcher.dismiss()

    async def close(self) -> None:
        """End every instance, leave or end the launcher, and remove what they have in shared memory."""
        self._closed = True
        try:
            async with asyncio.timeout(INSTANCE_STOP_S):
                await asyncio.gather(*map(self.kill, list(self._lives)))
        except TimeoutError:
            logger.error("processes of instances were killed and have not ended in %s s", INSTANCE_STOP_S)
        opening, self.opening = self.opening, None
        if opening is not None and not (await asyncio.wait([opening]) and opening.exception()):
            launcher, own = opening.result()
            launcher.on_end.discard(self._on_end)
            if own:
                await asyncio.to_thread(leave_launcher, launcher, self._waits_s)
        if self._shared is not None:
            self._shared.remove()


class ForkSupply(InstanceForks):
    """Supply of instances that listen on socket files.

    - ``folder``: of those. ``tls`` (None): with which its instances reach those on TCP.
    - ``waits_s`` (120): as ``InstanceForks`` has it.
    """

    def __init__(self, folder: Path, tls: TLSConfig | None = None, waits_s: float = LAUNCHER_WAITS_S) -> None:
        super().__init__(waits_s)
        self._folder, self._tls = folder, tls
        self._begun: dict[tuple[str, int], tuple[InstanceProcess, Path]] = {}

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        file = self._folder / f"{order.name}-{order.epoch}.sock"
        address = Address("unix", path=str(file))
        process = await self.fork(address, order.secret, order.model, torch=bool(order.model), tls=self._tls)
        self._begun[order.name, order.epoch] = process, file
        return InstancePlace(address, process)

    async def end(self, name: str, epoch: int) -> None:
        """Kill it, and wait for its end by the system's word.

        Its socket file goes too: the next life needs the inode on a disk that is full.
        """
        if (name, epoch) in self._begun:
            process, file = self._begun[name, epoch]
            await self.kill(process)
            file.unlink(missing_ok=True)
        self._begun.pop((name, epoch), None)

    async def aclose(self) -> None:
        await self.close()
