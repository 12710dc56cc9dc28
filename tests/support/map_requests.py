"""Requests for ``pipe.map`` on emulated pipelines, with names in their order, and readers of its results."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import msgspec

from support.emulated_pipelines import MODEL
from trinity.emulation.model import EmulatedRequest


def asked(count: int, tokens: Iterable[int] = itertools.repeat(2)) -> list[EmulatedRequest]:
    sizes = list(itertools.islice(tokens, count))
    return [EmulatedRequest(text_tokens=10 + at, max_tokens=size, request_id=f"r{at}") for at, size in enumerate(sizes)]


TOO_LARGE = MODEL.shape.context + 1


def bad(name: str) -> EmulatedRequest:
    return EmulatedRequest(text_tokens=TOO_LARGE, request_id=name)


def copy(request: EmulatedRequest, prefix: str) -> EmulatedRequest:
    return msgspec.structs.replace(request, request_id=prefix + request.request_id)


async def note_ids(results: Any, found: list[str]) -> None:
    async for each in results:
        found.append(each.request_id)


async def collect(results: Any) -> list[Any]:
    return [each async for each in results]
