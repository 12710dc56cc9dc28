"""Supply: where a pipeline's instances come from. Each of their lives begins at a place, and ends for certain.

``ForkSupply`` (``fork_supply``) forks them on this host, ``AttachedSupply`` has those that run already. One of your
own goes into ``ProcessConfig(supply=...)``, and ``trinity.testing.supply_contract`` checks it
(docs/decisions/0071-where-instances-come-from.md).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import select
import signal
import time
import weakref
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from trinity.errors import ConfigError, describe_error
from trinity.remote.channel.channel import Address
from trinity.remote.channel.tls import TLSConfig
from trinity.remote.supervision.process_identity import has_ended

END_POLL_S, END_LOOK_S = 0.005, 0.1  # between two looks if a process has ended that was killed, or was not
LISTEN_S = 30.0  # for an instance to listen: it loads its model later


@dataclass(frozen=True)
class InstanceOrder:
    """One life that a pipeline needs.

    - ``name``, ``epoch``: of the life; an instance that is started again has the next epoch.
    - ``roles``: such as "PD".
    - ``secret``: it must prove that it holds this, on every connection.
    - ``model`` (""): the checkpoint's directory as the pipeline has it; "" for an emulated one.
    - ``tls`` (None): the pipeline's ``ProcessConfig(tls=...)``, for a channel over TCP.
    """

    name: str
    epoch: int
    roles: str
    secret: bytes = field(repr=False)
    model: str = ""
    tls: TLSConfig | None = None


class InstanceProcess:
    """Process on this host, of which it is certain that it is no later one of its number.

    - ``number``: its process number. ``born``: its start, as ``read_start`` has it; None if it had ended by then.
    - ``listening``: done with the address of an instance once it listens.

    It need be no child of this program. Where the system has descriptors of processes it is held by one, and its end is
    known once nothing of it can write any more.
    """

    def __init__(self, number: int, born: int | None) -> None:
        self.number, self.born = number, born
        self.listening = concurrent.futures.Future[Address]()
        self._poll: select.poll | None = None
        with suppress(OSError, AttributeError):  # a sandbox, or another system
            self._hold(os.pidfd_open(number))

    def _hold(self, descriptor: int) -> None:
        weakref.finalize(self, os.close, descriptor)
        if not has_ended(self.number, self.born):  # else it may be of a later one
            self._descriptor, self._poll = descriptor, select.poll()
            self._poll.register(descriptor, select.POLLIN)

    def has_ended(self) -> bool:
        """Tell if it has ended, with all of its threads."""
        return bool(self._poll.poll(0)) if self._poll is not None else has_ended(self.number, self.born)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            if self._poll is not None:
                signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)
            elif not self.has_ended():
                os.kill(self.number, signal.SIGKILL)

    async def find_address(self) -> Address:
        """Wait until it listens; return where: its order may have asked for any free port.

        Raises ``ConfigError`` if it ends before that, or does not listen within ``LISTEN_S``.
        """
        until = time.monotonic() + LISTEN_S
        while not self.listening.done():
            if self.has_ended() or time.monotonic() > until:
                word = "has ended before it listened" if self.has_ended() else f"has not listened within {LISTEN_S} s"
                raise ConfigError(f"the instance {word} (see its output above)")
            await asyncio.sleep(END_POLL_S)
        return self.listening.result()

    async def wait(self) -> None:
        """Wait until it has ended by itself."""
        while not self.has_ended():
            await asyncio.sleep(END_LOOK_S)

    async def end(self) -> None:
        """Kill it, and wait for its end; whoever else does so at the same time may be through first."""
        while not self.has_ended():
            self.kill()
            await asyncio.sleep(END_POLL_S)
        if self._poll is not None:
            with suppress(ChildProcessError):  # the first process of a container inherits orphans
                os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOHANG)


@dataclass(frozen=True)
class InstancePlace:
    """Place where a life listens, or soon will.

    - ``address``: as the pipeline and the other instances reach it.
    - ``process`` (None): its process where this host has it, which is killed once it is lost.
    - ``tls`` (None): certificates for its channel; its own listener has to have some of the same authority.
    - ``listen_s`` (seconds, 30): for it to listen; 0 for one that runs already.
    - ``trusted_network`` (False): the supply was told that only hosts which are trusted are on the network of a TCP
      address; else ``tls`` is needed, or ``ProcessConfig(trusted_network=True)``.
    """

    address: Address
    process: InstanceProcess | None = None
    tls: TLSConfig | None = None
    listen_s: float = LISTEN_S
    trusted_network: bool = False


class Supply(Protocol):
    """Source of instances. All is called on the event loop of the pipeline, and must not block it.

    The pipeline asks for a new life only after the end of the last one of that name, and asks again later if it had
    none: an error costs a pause and no request of another instance. What it is lent it connects to, watches and cuts
    off itself. A call that does not end within ten seconds of its cancel is left to itself (``guarded_supply``).
    """

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        """Begin a life; return where it listens, which may be elsewhere than that of the last.

        Raises an error of ``trinity.errors`` where none can be had now. It may be cancelled.
        """
        ...

    async def end(self, name: str, epoch: int) -> None:
        """Return once this life reaches no memory of the pipeline any more, however long that takes.

        The pipeline has cut its channel by then. It may never have begun, and may have ended by itself.
        """
        ...

    async def aclose(self) -> None:
        """End every life that it has begun, and give back what it holds. May be called twice.

        The end of a pipeline that was started; it waits for no longer than ``INSTANCE_STOP_S``.
        """
        ...


class AttachedSupply:
    """Instances that run already at fixed addresses, started by hand; whoever started them starts them again.

    - ``addresses``: by name. ``tls`` (None): for channels to them.

    Each serves one pipeline after another: it drops all of this one's work when its channel ends.
    """

    def __init__(self, addresses: Mapping[str, Address], tls: TLSConfig | None = None) -> None:
        self.addresses, self._tls = dict(addresses), tls

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        address = self.addresses.get(order.name)
        if address is None:
            raise ConfigError(f"instance {order.name} has no address: {', '.join(self.addresses) or 'none has one'}")
        return InstancePlace(address, tls=self._tls, listen_s=0.0)

    async def end(self, name: str, epoch: int) -> None:
        """Return at once: the end of its channel is its end, for this pipeline."""

    async def aclose(self) -> None:
        """Leave them to who started them."""


logger = logging.getLogger("trinity")
GIVE_UP_S = 10.0  # for a call of a supply to end after it was cancelled: it may tidy up
Answer = TypeVar("Answer")


class GuardedSupply:
    """A ``supply`` that raises exceptions alone, never a ``BaseException``, and ends soon after a cancel.

    A call that goes on for ``GIVE_UP_S`` after it was cancelled is logged and left to itself.
    """

    def __init__(self, supply: Supply) -> None:
        self._supply = supply

    async def begin(self, order: InstanceOrder) -> InstancePlace:
        """Begin a life. Raises ``ConfigError`` for an answer that is no place, and what the supply raises."""
        place: object = await _guard("begin", self._supply.begin(order))
        if not isinstance(place, InstancePlace):
            raise ConfigError(f"begin of the supply of instances returned {place!r:.80}, which is no InstancePlace")
        return place

    async def end(self, name: str, epoch: int) -> None:
        await _guard("end", self._supply.end(name, epoch))

    async def aclose(self) -> None:
        await _guard("aclose", self._supply.aclose())


async def _guard(what: str, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Await a call of a supply in a task of its own. Raises ``ConfigError`` where it raises no ``Exception``."""
    call = asyncio.get_running_loop().create_task(work)
    try:
        await asyncio.wait([call])
    except asyncio.CancelledError:
        await _give_up(what, call)
        raise
    if call.cancelled():
        raise ConfigError(f"{what} of the supply of instances was cancelled by itself, and not by the pipeline")
    error = call.exception()
    if error is not None and not isinstance(error, Exception):
        raise ConfigError(f"{what} of the supply of instances raised {describe_error(error)}") from error
    return call.result()


async def _give_up(what: str, call: asyncio.Task[Any]) -> None:
    """Cancel a call, and wait for its end, but not for ever."""
    call.cancel()
    call.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody asks any more
    await asyncio.wait([call], timeout=GIVE_UP_S)
    if not call.done():
        text = "%s of the supply of instances goes on %s s after it was cancelled, and is left to itself"
        logger.error(text, what, GIVE_UP_S)
