"""Several outputs of one request: its copies, and their serving behind one prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from trinity.errors import ConfigError
from trinity.errors.arguments import show
from trinity.pipeline.stream import Stream
from trinity.request import Output, Request, check_request
from trinity.runtime.shielded_wait import wait_shielded

MOST_COPIES = 128
_SEEDS = 1 << 64  # as many as there are


def copy_request(request: Request, n: int) -> list[Request]:
    """List ``n`` requests for as many outputs of one: itself, then copies with names and seeds of their own.

    The i-th copy, from 1, is named "id.i"; where the request has a seed, it has that plus i, the largest one's
    successor being 0. Raises ``ConfigError`` unless n is 1 to 128, ``RequestError`` if the request is not plain.
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MOST_COPIES:
        raise ConfigError(f"n is a whole number of 1 to {MOST_COPIES}, got {show(n)}")
    request = check_request(request)
    return [request, *(_copy(request, index) for index in range(1, n))]


def _copy(request: Request, index: int) -> Request:
    sampling, seed = request.sampling, request.sampling.seed
    if seed is not None:
        later = seed + index
        sampling = msgspec.structs.replace(sampling, seed=later if later < _SEEDS else later - _SEEDS)
    return msgspec.structs.replace(request, request_id=f"{request.request_id}.{index}", sampling=sampling)


async def serve_copies(open_stream: Callable[[Request], Stream], request: Request, n: int) -> list[Output]:
    """Serve ``n`` copies of a request. The first error ends all, and is raised; so does a cancellation.

    The others follow once the first has a token: the prefix cache then has the prompt's KV, the image cache its images.
    """
    first, *others = copy_request(request, n)
    async with open_stream(first) as leading:
        await leading.wait_first()
        if leading.done or not others:
            await leading.collect()  # raises its error: the others would have the same
        served = [
            asyncio.ensure_future(each) for each in (leading.collect(), *(_collect(open_stream(one)) for one in others))
        ]
        try:
            return list(await asyncio.gather(*served))
        finally:
            for each in served:
                each.cancel()
            await wait_shielded(asyncio.gather(*served, return_exceptions=True))


async def _collect(stream: Stream) -> Output:
    async with stream as tokens:
        return await tokens.collect()
