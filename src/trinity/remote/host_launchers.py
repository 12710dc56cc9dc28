"""HostLaunchers: forks instances of one host that listen on a network, for whoever begins and ends their lives."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from trinity.remote.channel import Address
from trinity.remote.fork_client import Launcher
from trinity.remote.leftovers import make_shared_folder
from trinity.remote.process_identity import read_start
from trinity.remote.supply import InstanceProcess
from trinity.remote.tls import TLSConfig


@dataclass(frozen=True, eq=False)
class ForkedLife:
    """A life that was forked here: its process, and the launcher that has it."""

    process: InstanceProcess
    launcher: Launcher

    async def find_address(self) -> Address:
        """Wait until it listens; return where. Raises ``ConfigError``, ``LauncherSilent``."""
        return await self.launcher.find_address(self.process.number)


class HostLaunchers:
    """Launchers of instances, of which the newest takes orders; one that is frozen stays until no life of it is left.

    The kernel ends a launcher with the process that has this, and each instance with its launcher.
    """

    def __init__(self) -> None:
        self.launchers: list[Launcher] = []
        self._lives: set[ForkedLife] = set()
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
    ) -> ForkedLife:
        """Fork an instance, as ``Launcher.launch`` does. ``torch``: of a launcher that is started for it."""
        launcher, shared = self._get_launcher(torch), str(self._shared.path) if self._shared is not None else ""
        number, exit_code = await launcher.launch(address, secret, model, once=once, shared=shared, tls=tls)
        life = ForkedLife(InstanceProcess(number, read_start(number), exit_code), launcher)
        self._lives.add(life)
        await self._close_unused()
        return life

    def _get_launcher(self, torch: bool) -> Launcher:
        if not self.launchers or self.launchers[-1].silent or self.launchers[-1].ended.done():
            self.launchers.append(Launcher(torch))
        return self.launchers[-1]

    async def kill(self, life: ForkedLife) -> None:
        """End a life."""
        await life.process.end()
        self._lives.discard(life)
        await self._close_unused()

    async def _close_unused(self) -> None:
        """End launchers that take no orders and have no life any more."""
        used = [each.launcher for each in self._lives]
        unused = [each for each in self.launchers[:-1] if each not in used]
        self.launchers = [each for each in self.launchers if each not in unused]  # before anybody else looks
        for old in unused:
            await asyncio.to_thread(old.close)

    async def close(self) -> None:
        """End every instance and launcher, and remove what they have in shared memory."""
        launchers, self.launchers = self.launchers, []
        for launcher in launchers:
            await asyncio.to_thread(launcher.close)
        if self._shared is not None:
            self._shared.remove()
