"""HostActor: what runs on each of Ray's hosts: one launcher, which forks the instances there.

Ray runs it as an actor, in a process of its own, and runs it again where that is lost, here or on another host. The
kernel ends its launcher and its instances with it.
"""

from __future__ import annotations

import asyncio
import logging
import os
from typing import Any

from trinity.errors import ConfigError, TrinityError
from trinity.remote.channel.channel import Address
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.supervision.fork_supply import InstanceForks
from trinity.remote.supervision.supply import InstanceProcess
from trinity.transport.ucx_environment import take_interface_of

logger = logging.getLogger("trinity")
NEVER = -1  # the epoch before the first


class HostActor:
    """Begins and ends lives of instances on the host where Ray runs it.

    - ``threads``: of each instance's libraries.

    Instances listen at the address that the host has in Ray, and nowhere else. Answers are plain dictionaries, those of
    a begin that failed {"error", "kind"}: an error of Ray's would be about the actor.
    """

    def __init__(self, threads: int) -> None:
        self._address, self._node = find_node()
        self.forks = InstanceForks()
        self._lives: dict[tuple[str, int], InstanceProcess] = {}
        self._ended: dict[str, int] = {}  # by name: the last epoch that must not begin any more
        os.environ["OMP_NUM_THREADS"] = str(threads)  # else Ray's: one for each processor of the bundle
        take_interface_of(self._address)

    async def begin(
        self, name: str, epoch: int, secret: bytes, model: str, tls: tuple[str, str, str] | None
    ) -> dict[str, Any]:
        """Begin a life; return its "address", "process", "born" and "node" once it listens."""
        try:
            return await self._begin((name, epoch), secret, model, TLSConfig(*tls) if tls is not None else None)
        except (TrinityError, OSError) as error:
            kind = "ConfigError" if isinstance(error, ConfigError) else "PeerLost"
            return {"error": f"{name} on {self._address}: {error}", "kind": kind}

    async def _begin(self, life: tuple[str, int], secret: bytes, model: str, tls: TLSConfig | None) -> dict[str, Any]:
        if model and not os.path.isdir(model):
            raise ConfigError(f"there is no model at {model}: every host needs it at the same path")
        if tls is not None:
            tls.check()
        address = Address("tcp", host=self._address)
        forked = self._lives[life] = await self.forks.fork(address, secret, model, torch=bool(model), tls=tls)
        bound = await forked.find_address() if not self._is_given_up(life) else None
        if self._is_given_up(life):
            await self._kill(life)
            raise ConfigError("it was given up before it listened")
        return {
            "address": str(bound), "process": forked.number, "born": forked.born, "node": self._node,
        }  # fmt: skip

    def _is_given_up(self, life: tuple[str, int]) -> bool:
        return self._ended.get(life[0], NEVER) >= life[1]

    async def end(
        self, name: str, epoch: int, process: int | None = None, born: int | None = None, node: str = ""
    ) -> bool:
        """End a life, and every older one of that name; False if this actor cannot tell that it has ended.

        ``process``, ``born``, ``node``: as its begin has answered, by which one of an actor before this is found.
        """
        self._ended[name] = max(epoch, self._ended.get(name, NEVER))
        mine = [life for life in self._lives if life[0] == name and life[1] <= epoch]
        for life in mine:
            await self._kill(life)
        if (name, epoch) not in mine and process is not None and node == self._node:
            await InstanceProcess(process, born).end()
            return True
        return (name, epoch) in mine

    async def _kill(self, life: tuple[str, int]) -> None:
        forked = self._lives.get(life)
        if forked is not None:
            await self.forks.kill(forked)
        self._lives.pop(life, None)

    async def close(self) -> None:
        """End every instance and launcher, and remove what they have in shared memory."""
        await self.forks.close()


def find_node() -> tuple[str, str]:
    """Return the address of the host where Ray runs this process, and Ray's name for it."""
    import ray

    return str(ray.util.get_node_ip_address()), str(ray.get_runtime_context().get_node_id())


def end_process(process: int, born: int | None) -> None:
    """Kill a process of this host, told from a later one of its number by its start, and wait for its end. Blocks."""
    asyncio.run(InstanceProcess(process, born).end())
