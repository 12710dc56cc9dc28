"""Routes of the live page: the page itself, its stream of snapshots, and a plan on demand."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

import msgspec

from trinity.errors import ConfigError, Overloaded
from trinity.pipeline.live_feed import LiveFeed
from trinity.pipeline.live_page import live_policy, read_live_page
from trinity.pipeline.live_plan import LivePlanner
from trinity.pipeline.pipeline import Pipeline
from trinity.server.connection import Exchange
from trinity.server.error_table import ApiError
from trinity.server.protocol import encode_json

MOST_VIEWERS = 64
LONGEST_TTFT_S, LONGEST_TBT_S = 120.0, 10.0  # of an SLO to plan for: a trace is made ten TTFT bounds long
_HEADERS = {
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}


class _PlanQuery(msgspec.Struct):
    ttft: float
    tbt: float


class LiveRoutes:
    """The live page of one server.

    The page has no data and needs no key; its stream and its plans need one where the server has keys.

    - ``pipe``: the pipeline that it shows.
    - ``drained``: tells if the server takes no more requests and has ended all that it had.
    """

    def __init__(self, pipe: Pipeline, drained: Callable[[], bool]) -> None:
        self._drained = drained
        self.feed, self._planner = LiveFeed(pipe), LivePlanner(pipe)

    async def show_page(self, exchange: Exchange) -> None:
        """Send the page."""
        policy = f"{live_policy()}; frame-ancestors 'none'"
        headers = {**_HEADERS, "content-security-policy": policy}
        await exchange.reply(200, read_live_page().encode(), headers, "text/html; charset=utf-8")

    async def send_snapshots(self, exchange: Exchange) -> None:
        """Send snapshots as events until the viewer leaves, the pipeline is closed or the server has drained."""
        if self.feed.viewers >= MOST_VIEWERS:
            text = f"{MOST_VIEWERS} viewers look at this server already; try again later"
            raise ApiError(503, "too_many_viewers", text, headers={"retry-after": "10"})
        async with exchange.until_gone():
            await exchange.start_events()
            async with aclosing(self.feed.follow()) as snapshots:
                async for snapshot in snapshots:
                    await exchange.send_events(b"data: " + snapshot + b"\n\n")
                    if self._drained():
                        break
            await exchange.send_events(b"", last=True)

    async def send_plan(self, exchange: Exchange) -> None:
        """Answer with a ``LivePlan`` for the SLO of the body, ``{"ttft": 2.0, "tbt": 0.1}``, in seconds."""
        try:
            query = msgspec.convert(await exchange.read_json(dict), _PlanQuery)
            if not (query.ttft <= LONGEST_TTFT_S and query.tbt <= LONGEST_TBT_S):
                raise ConfigError(f"an SLO of at most {LONGEST_TTFT_S:g} s and {LONGEST_TBT_S:g} s can be planned for")
            async with exchange.until_gone():
                found = await self._planner.plan(query.ttft, query.tbt)
                await exchange.reply(200, encode_json(found))
        except Overloaded as error:
            raise ApiError(429, "planning", str(error), headers={"retry-after": "5"}) from None
        except (ConfigError, msgspec.ValidationError) as error:
            raise ApiError(400, "no_plan", str(error)) from None


LiveRoute = tuple[str, str, Callable[[Exchange], Awaitable[None]], bool]


def list_live_routes(pipe: Pipeline, drained: Callable[[], bool]) -> list[LiveRoute]:
    """List path, method, handler, and whether it needs no key."""
    routes = LiveRoutes(pipe, drained)
    return [
        ("/live", "GET", routes.show_page, True),
        ("/live/events", "GET", routes.send_snapshots, False),
        ("/live/plan", "POST", routes.send_plan, False),
    ]
