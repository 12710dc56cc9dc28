"""ThreadInstances: instances on threads of this process begin and end while the others serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from trinity.connector import Connector
from trinity.core.messages import PeerDown, PeerLeaving, PeerRemoved, PeerUp
from trinity.core.routing.router import RoutingPolicy
from trinity.pipeline.frontend_host import FrontendHost
from trinity.remote.channel.agreement import check_loaded
from trinity.remote.supervision.planned_restart import WHY, WHY_REMOVED, Emptied
from trinity.runtime import loader
from trinity.runtime.host import InstanceHost, LoadedInstance
from trinity.runtime.shielded_wait import wait_shielded
from trinity.timeline import Timeline


class ThreadInstances:
    """Hosts of a pipeline, by name (``hosts``), as they come and go.

    - ``frontend``, ``timeline``, ``connector``: the pipeline's. ``policy``: makes the routing policy of each host.
    """

    def __init__(
        self,
        frontend: FrontendHost,
        timeline: Timeline,
        connector: Connector,
        policy: Callable[[], RoutingPolicy],
    ) -> None:
        self.hosts: dict[str, InstanceHost] = {}
        self._frontend, self._timeline = frontend, timeline
        self._connector, self._policy = connector, policy

    def start(self, loaded: Sequence[LoadedInstance]) -> None:
        """Have the pipeline's first instances serve."""
        self.hosts.update(loader.make_hosts(loaded, self._frontend, self._timeline, self._policy))
        self._frontend.reached.update(self.hosts)
        for host in self.hosts.values():
            host.start()

    def check_weights(self, loaded: LoadedInstance) -> None:
        """Raise ``LayoutMismatch`` where an instance has other weights than those that serve; it is released then.

        And ``ClosedError`` where the pipeline was closed meanwhile: those that served have no weights any more.
        """
        try:
            self._frontend.check_open()
            for host in self.hosts.values():
                check_loaded(loaded, host.loaded)
        except BaseException:
            loaded.release()
            raise

    def begin(self, loaded: LoadedInstance) -> None:
        """Have an instance serve beside the others, in a life that follows all former ones of its name.

        Raises ``ClosedError`` where the pipeline was closed meanwhile; it is released then.
        """
        try:
            self._frontend.check_open()
        except BaseException:
            loaded.release()
            raise
        former = self._frontend.core.router.replaced.get(loaded.spec.name, -1)
        loaded.settings = replace(loaded.settings, epoch=former + 1)
        [host] = loader.make_hosts([loaded], self._frontend, self._timeline, self._policy).values()
        for other in self.hosts.values():
            host.post(other.announcement())
        self.hosts[host.name] = self._frontend.reached[host.name] = host
        host.start()
        self._announce(host.announcement())

    async def replace(self, loaded: LoadedInstance, emptied: Emptied, note_end: Callable[[], None]) -> None:
        """End the instance of this name once it is empty, or emptied says no, and begin this one in its place.

        note_end: called once the work of the former one is done.
        """
        try:
            empty = await self._leave(loaded.spec.name, emptied)
        except BaseException:
            loaded.release()
            raise
        await wait_shielded(asyncio.ensure_future(self._exchange(loaded, empty, note_end)))

    async def end(self, name: str, emptied: Emptied, note_end: Callable[[], None]) -> None:
        """End an instance for good once it is empty, or emptied says no. ``note_end``: as in ``replace``."""
        empty = await self._leave(name, emptied)
        await wait_shielded(asyncio.ensure_future(self._remove(name, empty, note_end)))

    async def _leave(self, name: str, emptied: Emptied) -> bool:
        """Have new work go past an instance until it is empty. Cancelled meanwhile, it goes on as it was."""
        epoch = self.hosts[name].announcement().epoch
        self._announce(PeerLeaving(name, epoch, leaving=True))
        try:
            return await emptied()
        except BaseException:
            self._announce(PeerLeaving(name, epoch, leaving=False))
            raise

    async def _exchange(self, loaded: LoadedInstance, empty: bool, note_end: Callable[[], None]) -> None:
        try:
            await self._end(self.hosts[loaded.spec.name], empty, WHY, note_end)
        except BaseException:
            loaded.release()
            raise
        self.begin(loaded)

    async def _remove(self, name: str, empty: bool, note_end: Callable[[], None]) -> None:
        host = self.hosts[name]
        await self._end(host, empty, WHY_REMOVED, note_end)
        self._announce(PeerRemoved(name, host.announcement().epoch))

    async def _end(self, host: InstanceHost, empty: bool, why: str, note_end: Callable[[], None]) -> None:
        """End a life: its threads first, then everybody hears of it, and nobody reads its pools any more.

        Raises ``ClosedError`` where the pipeline was closed meanwhile: it ends the rest itself.
        """
        pools = dict(host.loaded.memory)
        host.stop(at_once=not empty)
        await host.join()
        note_end()
        self._frontend.check_open()
        self._announce(PeerDown(host.name, why, planned=True))
        self._connector.unbind(pools)
        del self.hosts[host.name]

    def _announce(self, message: PeerUp | PeerDown | PeerLeaving | PeerRemoved) -> None:
        """Tell the front end and every other instance."""
        for host in self.hosts.values():
            if host.name != message.name:
                host.post(message)
        self._frontend.post(message)
