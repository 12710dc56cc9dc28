"""The source's side of nixl: pools that peers read by themselves, or have written to them."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np

from trinity.errors import TransportError, TransportUnavailable
from trinity.transport.link import JOIN_S, stop_at_exit
from trinity.transport.nixl.agent import FLYING_S, POLL_S, Region, make_agent

logger = logging.getLogger("trinity")


class PushAsk(msgspec.Struct, frozen=True):
    """Target to source: write this piece of these blocks of ``pool`` side by side into ``stage``."""

    metadata: bytes
    number: int
    pool: Region
    stage: Region
    offset: int
    blocks: list[int]


class Pushed(msgspec.Struct, frozen=True):
    """Source to target: it is written, or why it is not."""

    number: int
    reason: str = ""
    text: str = ""


class Pushes:
    """The source's side: writes what peers ask for. Used on its agent's thread."""

    def __init__(self, agent: Any, lent: dict[Region, Any]) -> None:
        self._agent, self._lent = agent, lent
        self._known: set[str] = set()
        self.flying: list[tuple[Any, list[Any], str]] = []

    def asked(self, name: str, message: bytes) -> None:
        """Begin to write, or say why not."""
        try:
            ask = msgspec.msgpack.decode(message, type=PushAsk)
            if name not in self._known:
                self._agent.add_remote_agent(ask.metadata)
                self._known.add(name)
            refusal = self._refusal(ask)
            if refusal.reason:
                self._agent.send_notif(name, msgspec.msgpack.encode(refusal))
            else:
                self._write(name, ask)
        except Exception as error:
            self._forget(name, error)

    def _refusal(self, ask: PushAsk) -> Pushed:
        pool, length = ask.pool, ask.stage.block_bytes
        if pool not in self._lent:
            return Pushed(ask.number, "missing", "no such pool is lent here")
        fits = ask.offset >= 0 and 0 < length <= pool.block_bytes - ask.offset and len(ask.blocks) <= ask.stage.blocks
        if not fits or any(not 0 <= block < pool.blocks for block in ask.blocks):
            return Pushed(ask.number, "incompatible", f"no such blocks among {pool.blocks} of {pool.block_bytes} bytes")
        return Pushed(ask.number)

    def _write(self, name: str, ask: PushAsk) -> None:
        rows = ask.pool.rows(ask.offset, ask.stage.block_bytes)
        ours = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", rows, ask.pool.memory)
        theirs = self._agent.prep_xfer_dlist(name, ask.stage.rows(0, ask.stage.block_bytes), ask.stage.memory)
        places = np.arange(len(ask.blocks), dtype=np.int32)
        done = msgspec.msgpack.encode(Pushed(ask.number))
        handle = self._agent.make_prepped_xfer("WRITE", ours, np.array(ask.blocks, np.int32), theirs, places, done)
        self.flying.append((handle, [ours, theirs], name))
        self._agent.transfer(handle)

    def look(self) -> None:
        for each in list(self.flying):
            handle, rows, name = each
            try:
                state = self._agent.check_xfer_state(handle)
                if state == "PROC":
                    continue
                if state != "DONE":
                    raise TransportError(f"a write to {name} ended as {state}", "nixl", name)
            except Exception as error:
                self._forget(name, error)
            if each in self.flying:
                self.flying.remove(each)
            self._release(handle, rows)

    def _forget(self, name: str, error: Exception) -> None:
        logger.warning("nixl cannot write to %s: %r", name, error)
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
        for handle, rows, _ in self.flying:
            self._release(handle, rows)
        self.flying.clear()


class Lender:
    """The agent whose pools peers read. Its thread answers where the medium needs that, as TCP does, and writes."""

    def __init__(self, first: Region) -> None:
        self._agent = make_agent(first)
        self.name: str = self._agent.name
        self._regions: dict[Region, Any] = {}
        self.writing = 0  # transfers on their way
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trinity-nixl-lender", daemon=True)
        self._thread.start()
        stop_at_exit(self, self._thread)

    def lend(self, *regions: Region) -> bytes:
        """Register a pool; the agent's metadata, which tell a peer of every pool so far."""
        try:
            for region in regions:
                if region not in self._regions:
                    self._regions[region] = self._agent.register_memory(region.whole, region.memory)
            metadata: bytes = self._agent.get_agent_metadata()
        except Exception as error:
            raise TransportUnavailable(f"nixl cannot register a pool: {error!r}", "nixl") from error
        return metadata

    def _run(self) -> None:
        pushes = Pushes(self._agent, self._regions)
        while not self._closing.wait(FLYING_S if pushes.flying else POLL_S):
            self.writing = len(pushes.flying)
            try:
                for name, messages in self._agent.get_new_notifs().items():
                    for message in messages:
                        pushes.asked(name, message)
                pushes.look()
            except Exception:
                logger.exception("the nixl agent %s could not answer its peers", self.name)
        pushes.close()
        del pushes
        for registered in self._regions.values():
            with suppress(Exception):
                self._agent.deregister_memory(registered)
        self._agent = None

    def stop(self) -> None:
        self._closing.set()

    def join(self) -> None:
        self._thread.join(JOIN_S)
