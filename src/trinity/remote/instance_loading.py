"""Loading of an instance in its process: at once, or in two parts, of which the second waits for the front end's word.

The first part is what a life may have while the one that it follows serves: weights if memory allows them twice, and
what its transports can start without a pool.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import NamedTuple

from trinity.connector import Connector
from trinity.errors import ConfigError, HandshakeError, TransportError
from trinity.memory.weight_digests import LoadedFiles, known_whole_digest
from trinity.remote.channel.channel import Channel
from trinity.remote.channel.wire import InstancePrepared, ProceedInstance, Setup, StillBusy, decode, encode
from trinity.remote.instance_setup import hold_instance_weights, identify_model, load_instance, prepare_transports
from trinity.runtime.host import LoadedInstance

logger = logging.getLogger("trinity")
BUSY_BEAT_S = 1.0  # while the model is loaded, or the core computes digests


class LoadedLife(NamedTuple):
    """An instance that has loaded; ``files``: of its checkpoint, ``weights``: their digest, "" if not known yet."""

    instance: LoadedInstance
    files: LoadedFiles
    weights: str


async def load_life(channel: Channel, setup: Setup, connector: Connector) -> LoadedLife:
    """Load an instance, and say meanwhile that it lives; with ``setup.waits`` in two parts.

    Raises what loading raises, and ``HandshakeError`` or ``PeerLost`` where the word does not come.
    """
    beating = asyncio.get_running_loop().create_task(_beat(channel))
    try:
        files = await asyncio.to_thread(identify_model, setup)
        held = await _prepare(channel, setup, connector) if setup.waits else None
        loaded = await asyncio.to_thread(load_instance, setup)
        del held  # the instance has them
        weights = "" if setup.paced else await asyncio.to_thread(known_whole_digest, Path(setup.model), files)
        if setup.serves is not None and setup.serves.weights and not weights:
            raise ConfigError(f"the files in {setup.model} were replaced while they were loaded; load them again")
    finally:
        beating.cancel()
    return LoadedLife(loaded, files, weights)


async def _prepare(channel: Channel, setup: Setup, connector: Connector) -> object | None:
    """Load the first part, and wait for the word; return what has to be held until the second part has it."""
    held = await asyncio.to_thread(hold_instance_weights, setup)
    if held is not None:  # else its device may have no room for what a transport starts there either
        await asyncio.to_thread(prepare_transports, connector, setup.roles)
    channel.send(encode(InstancePrepared(held is not None)))
    word = decode(await channel.receive())
    if not isinstance(word, ProceedInstance):
        raise HandshakeError(f"{setup.name} waits for the word to go on, and was sent {type(word).__name__}", "control")
    return held


async def _beat(channel: Channel) -> None:
    """Say that the instance lives while a thread of it loads, and while it waits."""
    while True:
        await asyncio.sleep(BUSY_BEAT_S)
        send_while_open(channel, encode(StillBusy()))


def send_while_open(channel: Channel, frame: bytes) -> None:
    """Send a frame unless the channel is closed, which its reader notices."""
    if not channel.closed:
        try:
            channel.send(frame)
        except TransportError as error:
            logger.warning("a control channel is closed, a message could not be sent: %s", error)
            channel.abort()
