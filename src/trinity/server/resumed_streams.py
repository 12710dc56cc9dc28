"""Streams of a server that died, which their clients read on at its buddy, and the numbers by which they can.

A stream of one answer numbers its events by the index of their token (``id:``), where its pipeline has a buddy. A
client that lost its server asks the buddy's for the rest by GET, at the same path with the answer's id behind it. It
gives the ``Last-Event-ID`` that it has, as browsers do (WHATWG HTML, 9.2), or ``starting_after``, as OpenAI's API has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from trinity.pipeline import Pipeline
from trinity.request import Request
from trinity.server.connection import Exchange
from trinity.server.error_table import ApiError
from trinity.server.fields import ParsedCall
from trinity.server.reply_loop import MOST_DESCRIBED, NUMBERED, Reply, add_numbered, check_output, take_pieces

LONGEST_INDEX = 12  # digits


class SkippingReply(Reply, Protocol):
    """A reply whose client has had a part of it already."""

    def skip(self, index: int, characters: int) -> None: ...


async def resume_stream(pipe: Pipeline, exchange: Exchange, make_reply: Callable[[ParsedCall], SkippingReply]) -> None:
    """Send the rest of a stream behind the token that its client has. Raises ``ResumeError`` and ``ApiError``."""
    name = exchange.path_parameters["name"]
    if not name.startswith(NUMBERED):
        raise ApiError(404, "resume_unknown", f"{name[:100]!r} is no stream of this server", "id")
    after = read_index(exchange)
    async with exchange.until_gone():
        async with pipe.resume(name, after) as stream:
            reply = make_reply(ParsedCall(requests=(Request("", request_id=name),), stream=True))
            tokens = await stream.next_tokens()
            await exchange.start_events()
            while tokens:
                for some in take_pieces(tokens, MOST_DESCRIBED):
                    await exchange.send_events(add_numbered(reply, 0, some))
                    if len(some) < len(tokens):
                        await asyncio.sleep(0)  # others' turn
                tokens = await stream.next_tokens()
        output = check_output(stream)
        reply.skip(0, stream.left_out)
        await exchange.send_events(reply.end(0, output) + reply.close([output]), last=True)


def read_index(exchange: Exchange) -> int:
    """Read the index of the last token that a client has; -1 for none. Raises ``ApiError`` for what is none."""
    given = exchange.headers.get(b"last-event-id", b"") or exchange.find_query("starting_after")
    if not given:
        return -1
    if not given.isdigit() or len(given) > LONGEST_INDEX:
        text = "starting_after and Last-Event-ID are the id of the last event that was read, a whole number"
        raise ApiError(400, "invalid_request", text, "starting_after")
    return int(given)
