"""Reads a stream whose decode is asked after each token to go to another instance."""

from __future__ import annotations

from collections.abc import Sequence

from trinity.errors import MoveError
from trinity.pipeline import Pipeline
from trinity.pipeline.stream import Stream
from trinity.request import Output, Request


async def read_moving(stream: Stream, names: Sequence[str]) -> tuple[Output, int]:
    """Read all of it; after each token it is to go to the next of these instances. Returns how often it did."""
    moved = 0
    async with stream as tokens:
        async for _ in tokens:
            at = names.index(stream.place) if stream.place in names else 0
            try:
                await stream.move(names[(at + 1) % len(names)])
                moved += 1
            except MoveError:
                pass
    return stream.output, moved


async def reason_of(pipe: Pipeline, request: Request, to: str) -> str:
    """Say why a request cannot move there behind its first token."""
    async with pipe.stream(request) as tokens:
        await anext(aiter(tokens))
        try:
            await tokens.move(to)
        except MoveError as error:
            return error.reason
    return ""
