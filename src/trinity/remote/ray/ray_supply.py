"""RaySupply: instances on the hosts of a Ray cluster, where Ray finds room for them (extra ``ray``).

Ray says where instances run, and runs them elsewhere after a host is lost. Messages and blocks never go through it
(docs/decisions/0072-hosts-of-a-ray-cluster.md).
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import sys
from dataclasses import dataclass
from typing import Any

from trinity.costs.cluster import Cluster
from trinity.errors import ConfigError, TransportError, pip_install
from trinity.errors.arguments import Number, Positive, check_arguments
from trinity.instance import GivenPlacement
from trinity.remote.channel.channel import Address
from trinity.remote.ray.ray_bundles import plan_bundles
from trinity.remote.ray.ray_session import RaySession
from trinity.remote.supervision.fork_client import INSTANCE_START_S
from trinity.remote.supervision.supply import InstanceOrder, InstancePlace

logger = logging.getLogger("trinity")
END_S = 30.0  # for an actor to be there again, or for Ray to look on its node without it
REACH_S = 5.0  # to reach an instance, which listens already
END_AGAIN_S = 0.5  # between two tries


@dataclass
class RayLife:
    """A life that was ordered: of which session, and once it listens, its process and the node that has it."""

    session: RaySession
    process: int | None = None
    born: int | None = None
    node: str = ""


def has_ray() -> bool:
    """Tell if Ray's library is installed."""
    return importlib.util.find_spec("ray") is not None


def find_cluster() -> str:
    """Return the address of the cluster that this process has joined, as in an actor; else "auto", for Ray to look."""
    ray: Any = sys.modules.get("ray")
    joined = ray is not None and ray.is_initialized()
    return str(ray.get_runtime_context().gcs_address) if joined else "auto"


@check_arguments
class RaySupply:
    """Starts the instances of one pipeline on hosts of a Ray cluster: ``ProcessConfig(supply=RaySupply(...))``.

    - ``placement``: as the pipeline has it; instances with an address are left to who started them.
    - ``cluster`` (None): ``Cluster`` that was planned for: instances are together on hosts as on its. With none, those
      that exchange KV are on one host, and the others there as well if it has room (TriInfer 5.5).
    - ``address`` ("auto"): of Ray's head, "host:port"; "auto" is the cluster of this program, or of this host.
    - ``cpus`` (1), ``gpus`` (0): for each instance. The GPUs of a host are numbered from cuda:0 there, so that each
      instance says which it takes.
    - ``trusted_network`` (False): say that only hosts you trust are on the network of control channels, which then need
      no ``ProcessConfig(tls=...)``. Blocks are their transport's: ``Connector(options={"trusted_network": True})``.
    - ``timeout_s`` (s, 120): for Ray to find hosts, and again for an instance to listen there.

    Each host needs trinity, the checkpoint at the same path, and with TLS a certificate at the same paths. Raises
    ``ConfigError`` where ray is not installed, and for a placement or cluster that does not fit.
    """

    def __init__(
        self,
        placement: GivenPlacement,
        cluster: Cluster | None = None,
        *,
        address: str = "auto",
        cpus: Positive = 1.0,
        gpus: Number = 0.0,
        trusted_network: bool = False,
        timeout_s: Positive = INSTANCE_START_S,
    ) -> None:
        if not has_ray():
            raise ConfigError(f"a RaySupply needs ray, here and on every host: {pip_install('ray')}")
        if not math.isfinite(timeout_s):
            raise ConfigError("timeout_s must be finite: nobody could be told that Ray has no room")
        self.group = plan_bundles(placement, cluster, cpus, gpus)
        self._address, self._threads = address, max(1, int(cpus))
        self._trusted, self._timeout_s = trusted_network, timeout_s
        self._opening: asyncio.Task[RaySession] | None = None
        self._lives: dict[tuple[str, int], RayLife] = {}

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        bundle, life = self.group.find(order.name), (order.name, order.epoch)
        if order.tls is None and not self._trusted:
            raise ConfigError(
                "instances on Ray's hosts are reached over a network: give ProcessConfig(tls=TLSConfig(...)), or say "
                "that only hosts you trust are on it: RaySupply(..., trusted_network=True)"
            )
        if life in self._lives:
            raise ConfigError(f"{order.name} was begun already: each pipeline needs a RaySupply of its own")
        session = await self._get_session()
        known = self._lives[life] = RayLife(session)
        given = {"name": order.name, "epoch": order.epoch, "secret": order.secret.hex(), "model": order.model}
        tls = order.tls.paths() if order.tls is not None else None
        answer = await session.ask({"begin": bundle, **given, "tls": tls}, self._timeout_s)
        known.process, known.born, known.node = answer["process"], answer["born"], answer["node"]
        logger.info("instance %s is at %s, on Ray's node %s", order.name, answer["address"], known.node[:8])
        reached = Address.parse(answer["address"])
        return InstancePlace(reached, tls=order.tls, listen_s=REACH_S, trusted_network=self._trusted)

    async def _get_session(self) -> RaySession:
        """Return the session, a new one where the last has ended or could not be opened."""
        old = self._opening
        if old is None or (old.done() and (old.cancelled() or old.exception() is not None or old.result().ended)):
            address = find_cluster() if self._address == "auto" else self._address
            opening = RaySession.open(self.group, address=address, threads=self._threads, timeout_s=self._timeout_s)
            self._opening = asyncio.ensure_future(opening)
        assert self._opening is not None
        return await asyncio.shield(self._opening)

    async def end(self, name: str, epoch: int) -> None:
        """Return once its process has ended, or the node that it was on; where Ray cannot tell, this waits."""
        known = self._lives.get((name, epoch))
        while known is not None:
            try:
                await self._end(name, epoch, known)
            except TransportError as error:
                logger.warning("the end of %s is not certain yet: %s", name, error)
                await asyncio.sleep(END_AGAIN_S)
            else:
                self._lives.pop((name, epoch), None)
                return

    async def _end(self, name: str, epoch: int, known: RayLife) -> None:
        if known.process is None and known.session.ended:
            return  # nobody heard of its process, whose actor has ended with its session
        session = await self._get_session()
        bundle = self.group.find(name) if session is known.session else None
        place = {"process": known.process, "born": known.born, "node": known.node}
        await session.ask({"end": bundle, "name": name, "epoch": epoch, **place}, END_S)

    async def aclose(self) -> None:
        self._lives.clear()
        opening, self._opening = self._opening, None
        if opening is None:
            return
        opening.cancel()
        [session] = await asyncio.gather(opening, return_exceptions=True)
        if isinstance(session, RaySession):
            await session.aclose()
