"""Contract of every supply of instances, as the function ``check_supply``, without a test framework.

Call it from your own tests: ``asyncio.run(check_supply(MySupply))``. It raises ``AssertionError``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress

from trinity.core.messages import FRONTEND
from trinity.errors import HandshakeError, PeerLost, TransportError
from trinity.remote.channel.channel import SHORTEST_SECRET, Channel, connect
from trinity.remote.channel.wire import Hello, encode
from trinity.remote.supervision.supply import InstanceOrder, InstancePlace, Supply

TRY_AGAIN_S = 0.02
GONE_S = 10.0  # for what a closed supply has begun to be gone, which takes milliseconds
INSTANCE_NAMES = ("P0", "D0")
OpenSupply = Callable[[], AbstractAsyncContextManager[Supply]]


class Tried:
    """A supply that is being checked, and the orders for it."""

    def __init__(self, supply: Supply, secret: bytes, timeout_s: float, ends: bool) -> None:
        self.supply, self.secret, self.timeout_s, self.ends = supply, secret, timeout_s, ends

    def order(self, name: str, epoch: int = 0) -> InstanceOrder:
        return InstanceOrder(name, epoch, name.rstrip("0123456789"), self.secret)

    async def begin(self, name: str, epoch: int = 0) -> InstancePlace:
        return await self.supply.begin(self.order(name, epoch))

    async def reach(self, place: InstancePlace, secret: bytes | None = None) -> Channel:
        """Connect to an instance as a front end does, once it listens."""
        until = time.monotonic() + self.timeout_s / 2
        while True:
            try:
                return await connect(place.address, secret or self.secret, encode(Hello(FRONTEND)), tls=place.tls)
            except HandshakeError:
                raise
            except TransportError:
                gone = place.process is not None and place.process.has_ended()
                text = f"nobody listens at {place.address}, where an instance was said to be"
                assert not gone, text
                assert time.monotonic() < until, text
                await asyncio.sleep(TRY_AGAIN_S)

    async def serves(self, place: InstancePlace) -> None:
        await (await self.reach(place)).aclose()

    async def is_gone(self, place: InstancePlace) -> bool:
        """Tell if nobody listens at a place any more, nor runs there, where that can be known."""
        try:
            channel = await connect(place.address, self.secret, encode(Hello(FRONTEND)), tls=place.tls)
        except PeerLost:
            return place.process is None or place.process.has_ended()
        except TransportError:  # somebody answered
            return False
        channel.abort()
        return False


SupplyCheck = Callable[[Tried], Awaitable[None]]


async def check_supply(open_supply: OpenSupply, *, secret: bytes, timeout_s: float = 60.0, ends: bool = True) -> None:
    """Check a supply against the contract of ``Supply``, with instances named P0 and D0.

    open_supply: makes an asynchronous context of a new one. secret: that of instances which run already; any other of
    at least 32 bytes will do. timeout_s (seconds, 60): of each check. ends (True): its instances end with their lives;
    False for those that were started by hand and serve the next pipeline. Raises ``AssertionError`` naming what broke.
    """
    assert len(secret) >= SHORTEST_SECRET, f"a secret has at least {SHORTEST_SECRET} bytes"
    for check in SUPPLY_CHECKS:
        try:
            async with asyncio.timeout(timeout_s), open_supply() as supply:
                try:
                    await check(Tried(supply, secret, timeout_s, ends))
                finally:
                    await supply.aclose()
                    await supply.aclose()  # closing twice must be harmless
        except TimeoutError as error:
            raise AssertionError(f"{check.__name__}: no answer within {timeout_s} s") from error


async def each_name_has_a_place_of_its_own(tried: Tried) -> None:
    places = await asyncio.gather(*map(tried.begin, INSTANCE_NAMES))
    assert len({str(place.address) for place in places}) == len(INSTANCE_NAMES), (
        "two instances were said to be at one address"
    )
    for place in places:
        await tried.serves(place)


async def only_who_has_the_secret_is_heard(tried: Tried) -> None:
    place = await tried.begin("P0")
    await tried.serves(place)
    try:
        channel = await tried.reach(place, bytes(each ^ 1 for each in tried.secret))
    except TransportError:
        return
    channel.abort()
    raise AssertionError("an instance spoke with somebody who does not hold the secret of its order")


async def a_life_that_has_ended_is_gone(tried: Tried) -> None:
    """Check that nothing of a life is there when ``end`` returns, and that ending it twice does no harm."""
    place = await tried.begin("D0")
    channel = await tried.reach(place)
    channel.abort()  # as the pipeline does before
    await tried.supply.end("D0", 0)
    assert not tried.ends or await tried.is_gone(place), "end() returned while the instance was there"
    await tried.supply.end("D0", 0)


async def it_begins_again(tried: Tried) -> None:
    """Check life after life of one name: each has an address, perhaps another one, at which it serves."""
    for epoch in range(3):
        place = await tried.begin("D0", epoch)
        await tried.serves(place)
        await tried.supply.end("D0", epoch)


async def the_end_of_one_leaves_the_other(tried: Tried) -> None:
    kept, ended = [await tried.begin(name) for name in INSTANCE_NAMES]
    await tried.serves(ended)
    await tried.supply.end("D0", 0)
    await tried.serves(kept)


async def what_never_began_ends_at_once(tried: Tried) -> None:
    await tried.supply.end("P0", 7)
    await tried.supply.end("nobody", 0)


async def a_begin_that_is_given_up_leaves_nothing(tried: Tried) -> None:
    """Check that a name can begin again after a begin was cancelled at any moment, and its life ended."""
    for epoch, turns in enumerate((0, 1, 2, 5)):
        beginning = asyncio.ensure_future(tried.begin("P0", epoch))
        for _ in range(turns):
            await asyncio.sleep(0)
        beginning.cancel()
        with suppress(asyncio.CancelledError):
            await beginning
        await tried.supply.end("P0", epoch)
    await tried.serves(await tried.begin("P0", 4))


async def what_it_began_ends_with_it(tried: Tried) -> None:
    places = await asyncio.gather(*map(tried.begin, INSTANCE_NAMES))
    await tried.supply.aclose()
    until = time.monotonic() + GONE_S
    for place in places:
        while tried.ends and not await tried.is_gone(place):
            assert time.monotonic() < until, "an instance that it began was there after aclose()"
            await asyncio.sleep(TRY_AGAIN_S)


SUPPLY_CHECKS: tuple[SupplyCheck, ...] = (
    each_name_has_a_place_of_its_own,
    only_who_has_the_secret_is_heard,
    a_life_that_has_ended_is_gone,
    it_begins_again,
    the_end_of_one_leaves_the_other,
    what_never_began_ends_at_once,
    a_begin_that_is_given_up_leaves_nothing,
    what_it_began_ends_with_it,
)
