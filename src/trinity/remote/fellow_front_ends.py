"""Fellow front ends: those that serve their own requests on an instance beside the one that has set it up.

One that attaches says its name, is described the instance, and sends what a front end sends of requests, and nothing
else: the first front end alone introduces peers, restarts and stops instances. As the channel of a fellow ends, the
core ends what it owned (``trinity.core.instance.front_ends``). When the first one leaves or dies, an instance that
outlives it goes on for the fellows, until the last one has gone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from trinity.core.messages import FRONTEND, Cancel, Forget, Move, PeerDown, PeerLoad, Submit, Value
from trinity.core.values import FrontendUp
from trinity.errors import HandshakeError, TransportError
from trinity.remote.channel.channel import Channel
from trinity.remote.channel.request_faults import decode_or_end, encode_all
from trinity.remote.channel.wire import Attach, InstanceFailure, InstanceInfo, WeightsDigest, encode

if TYPE_CHECKING:
    from trinity.runtime.host import InstanceHost

logger = logging.getLogger("trinity")
SENT_BY_FELLOWS = (Submit, Cancel, Forget, Move)
REPORT_BACKLOG = 1 << 20  # bytes that a front end has not read, beyond which it is spared load reports
START_FIRST = "start the pipeline that sets it up first, then attach"


class Fellows:
    """Front ends of an instance beside the first one. All is called on the loop's thread.

    - ``address``: the instance's, for errors. ``channels``: of those that are attached, by name.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self.channels: dict[str, Channel] = {}
        self._left = asyncio.Event()
        self._served: tuple[InstanceHost, InstanceInfo, str] | None = None

    def open(self, host: InstanceHost, info: InstanceInfo, config: str) -> None:
        """Let front ends attach: the instance has met its peers. ``config``: digest of the model's config.json."""
        self._served = (host, info, config)

    def note_weights(self, found: WeightsDigest) -> None:
        """Tell those that are attached, and those that will be, what the instance has found of its weights."""
        if self._served is not None:
            host, info, config = self._served
            hello = msgspec.structs.replace(info.hello, weights=found.digest)
            self._served = (host, msgspec.structs.replace(info, hello=hello), config)
            self.send_to_all([found], info.up.name)

    async def attach(self, channel: Channel, said: Attach) -> None:
        """Serve one more front end until its channel ends, or tell it why not.

        Raises ``HandshakeError`` for messages that are not a fellow's to send.
        """
        if self._served is None:
            return await refuse(channel, f"the instance at {self.address} does not serve yet: {START_FIRST}", "idle")
        host, info, config = self._served
        if said.config and config and said.config != config:
            text = f"the instance at {self.address} serves another checkpoint: its config.json is {config}"
            return await refuse(channel, f"{text}, and yours is {said.config}", "model")
        if said.name in self.channels:
            return await refuse(channel, f"{said.name} is attached to the instance at {self.address}", "busy")
        self.channels[said.name] = channel
        channel.send(encode(info))
        host.post(FrontendUp(said.name))
        try:
            await self._follow(channel, said.name, host, info.up.name)
        finally:
            channel.abort()
            del self.channels[said.name]
            host.post(PeerDown(said.name, "its control channel ended"))
            self._left.set()

    async def _follow(self, channel: Channel, name: str, host: InstanceHost, own: str) -> None:
        async for frame in channel:
            message = decode_or_end(frame, own, lambda ended: self.send(name, ended, own))
            if message is not None:
                host.post(_check(message, name))

    async def outlive_first(self, channel: Channel) -> None:
        """Go on without the first front end, as long as there are fellows. Nobody supervises meanwhile."""
        if self._served is None or not self.channels:
            return
        host, info, _ = self._served
        logger.warning("%s goes on for other front ends: the one that set it up has gone", info.up.name)
        channel.abort()
        host.post(PeerDown(FRONTEND, "its control channel ended"))
        while self.channels:
            self._left.clear()
            await self._left.wait()

    def close(self) -> None:
        """Drop all channels: the instance ends."""
        self._served = None
        for channel in self.channels.values():
            channel.abort()

    def send(self, name: str, messages: list[Value], own: str) -> None:
        """Send messages of the instance ``own`` to a fellow, if it is still there."""
        channel = self.channels.get(name)
        if channel is None or channel.closed:
            return
        if channel.backlog > REPORT_BACKLOG:
            messages = [message for message in messages if not isinstance(message, PeerLoad)]
        try:
            for frame in encode_all(messages, own):
                channel.send(frame)
        except TransportError as error:
            logger.warning("%s drops the control channel of %s: %s", own, name, error)
            channel.abort()

    def send_to_all(self, messages: list[Value], own: str) -> None:
        """Send to each: of a request that is not its own a front end says that it may be forgotten, as it is."""
        for name in list(self.channels):
            self.send(name, messages, own)


def _check(message: Value, name: str) -> Value:
    owner = message.work.owner if isinstance(message, Submit) else name
    if not isinstance(message, SENT_BY_FELLOWS) or owner != name:
        raise HandshakeError(f"{name} sent a {type(message).__name__} that is not its to send", "control")
    return message


async def refuse(channel: Channel, text: str, reason: str) -> None:
    """Tell a front end that it cannot attach, and why."""
    channel.send(encode(InstanceFailure("OfferRefused", text, reason)))
    await channel.aclose()
