"""Source side of nixl: an agent whose pools peers read by themselves or have written to them."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from trinity.errors import TransportError, TransportUnavailable
from trinity.memory.devices import use_device
from trinity.transport.link import JOIN_S, stop_at_exit
from trinity.transport.nixl.agent import IDLE_POLL_S, TRANSFER_POLL_S, Region, make_agent
from trinity.transport.sealed_requests import RequestKey, SealedRequest

logger = logging.getLogger("trinity")


class PushRequest(msgspec.Struct, frozen=True):
    """Target to source: write a piece of each of ``units`` of ``pool`` side by side into ``stage``.

    The pool counts as units of ``unit_bytes``. A piece begins at byte ``offset`` of its unit and is as long as a block
    of ``stage``.
    """

    metadata: bytes
    pool: Region
    stage: Region
    offset: int
    units: list[int]
    unit_bytes: int


FAILED = "failed"  # reason of a write that has ended, or never began, for a fault and not as a refusal


class PushReply(msgspec.Struct, frozen=True):
    """Source to target: the write has completed, or the ``reason`` and ``text`` of a refusal or a failure."""

    reason: str = ""
    text: str = ""


class PushWriter:
    """Writes the blocks that peers request into their staging areas. Used only on the agent's thread."""

    def __init__(self, agent: Any, lent: dict[Region, Any], key: RequestKey) -> None:
        self._agent, self._regions, self._key = agent, lent, key
        self._known: set[str] = set()
        self.in_flight: list[tuple[Any, list[Any], str, SealedRequest]] = []

    def start_write(self, name: str, message: bytes) -> None:
        """Start the write that a peer requests, or send it a refusal; nothing to one that lacks the key.

        A peer that cannot be reached is dropped.
        """
        sealed = self._key.open(message)
        if sealed is None:
            return
        try:
            request = msgspec.msgpack.decode(sealed.body, type=PushRequest)
            if name not in self._known:
                self._agent.add_remote_agent(request.metadata)
                self._known.add(name)
            refusal = self._refusal(request)
            if refusal.reason:
                self._agent.send_notif(name, self._seal(sealed, refusal))
            else:
                self._write(name, request, sealed)
        except Exception as error:
            self._fail(name, sealed, error)

    def _refusal(self, request: PushRequest) -> PushReply:
        pool, length, unit_bytes = request.pool, request.stage.block_bytes, request.unit_bytes
        if pool not in self._regions:
            return PushReply("missing", "this source has no such pool")
        fits = (
            unit_bytes > 0
            and not pool.block_bytes % unit_bytes
            and request.offset >= 0
            and 0 < length <= unit_bytes - request.offset
            and len(request.units) <= request.stage.blocks
        )
        if not fits or any(not 0 <= unit < pool.in_units(unit_bytes).blocks for unit in request.units):
            return PushReply("incompatible", f"no such blocks among {pool.blocks} of {pool.block_bytes} bytes")
        return PushReply()

    def _seal(self, request: SealedRequest, reply: PushReply) -> bytes:
        return self._key.seal_reply(request, msgspec.msgpack.encode(reply))

    def _write(self, name: str, request: PushRequest, sealed: SealedRequest) -> None:
        """Start a write, of which the target gets a message once it has completed."""
        rows = request.pool.in_units(request.unit_bytes).rows(request.offset, request.stage.block_bytes)
        ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, request.pool.memory)
        theirs = self._agent.prep_xfer_dlist(
            name, request.stage.rows(0, request.stage.block_bytes), request.stage.memory
        )
        places = np.arange(len(request.units), dtype=np.int32)
        done, units = self._seal(sealed, PushReply()), np.array(request.units, np.int32)
        handle = self._agent.make_prepped_xfer("WRITE", ours, units, theirs, places, done)
        self.in_flight.append((handle, [ours, theirs], name, sealed))
        self._agent.transfer(handle)

    def poll(self) -> None:
        """Release writes that have completed; drop the peers of those that failed, and tell them."""
        for each in list(self.in_flight):
            handle, rows, name, sealed = each
            try:
                state = self._agent.check_xfer_state(handle)
                if state == "PROC":
                    continue
                if state != "DONE":
                    raise TransportError(f"a write to {name} ended as {state}", "nixl", name)
            except Exception as error:
                self._fail(name, sealed, error)
            if each in self.in_flight:
                self.in_flight.remove(each)
            self._release(handle, rows)

    def _fail(self, name: str, sealed: SealedRequest, error: Exception) -> None:
        """Tell a peer, if it can be told, that its write has failed, lest it wait until its deadline; and drop it."""
        logger.warning("nixl cannot write to %s: %r", name, error)
        with suppress(Exception):
            self._agent.send_notif(name, self._seal(sealed, PushReply(FAILED, f"{error!r:.200}")))
        self._known.discard(name)
        with suppress(Exception):
            self._agent.remove_remote_agent(name)

    def _release(self, handle: Any, rows: list[Any]) -> None:
        with suppress(Exception):
            self._agent.release_xfer_handle(handle)
        for each in rows:
            with suppress(Exception):
                each.release()

    def close(self) -> None:
        """Release every write, completed or not."""
        for handle, rows, *_ in self.in_flight:
            self._release(handle, rows)
        self.in_flight.clear()


class NixlSource:
    """Agent whose pools peers read. Its thread makes progress where the medium needs it, as TCP does, and writes.

    ``gpu``: ordinal of the GPU that holds the first pool, the thread's current device; None for none.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self._agent, self._gpu = make_agent(gpu), gpu
        self.name: str = self._agent.name
        self.key = RequestKey(self.name)
        self._regions: dict[Region, Any] = {}
        self.writing = 0  # transfers in flight
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trinity-nixl-source", daemon=True)
        self._thread.start()
        stop_at_exit(self, self._thread)

    def register(self, *regions: Region) -> bytes:
        """Register regions; return the agent's metadata, with which a peer reaches every region so far.

        Raises ``TransportUnavailable`` if the memory cannot be registered.
        """
        try:
            for region in regions:
                if region not in self._regions:
                    with use_device(region.gpu):
                        self._regions[region] = self._agent.register_memory(region.whole, region.memory)
            metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransportUnavailable(f"nixl cannot register a pool: {error!r}", "nixl") from error
        return metadata

    def withdraw(self, *regions: Region) -> None:
        """Register regions no more."""
        for region in regions:
            registered = self._regions.pop(region, None)
            if registered is not None:
                self._agent.deregister_memory(registered)

    def _run(self) -> None:
        with use_device(self._gpu):
            self._serve()

    def _serve(self) -> None:
        writer = PushWriter(self._agent, self._regions, self.key)
        while not self._closing.wait(TRANSFER_POLL_S if writer.in_flight else IDLE_POLL_S):
            self.writing = len(writer.in_flight)
            try:
                for name, messages in self._agent.get_new_notifs().items():
                    for message in messages:
                        writer.start_write(name, message)
                writer.poll()
            except Exception:
                logger.exception("the nixl agent %s could not answer its peers", self.name)
        writer.close()
        del writer
        for registered in self._regions.values():
            with suppress(Exception):
                self._agent.deregister_memory(registered)
        self._agent = None

    def stop(self) -> None:
        """Ask the thread to end; does not block."""
        self._closing.set()

    def join(self) -> None:
        """Block until the thread has ended, for at most ``JOIN_S`` seconds."""
        self._thread.join(JOIN_S)
