"""The last events of an instance, kept for the note of a crash, hold no pixels."""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from support.checkpoint_files import checkpoint
from support.running_instances import PHOTOS
from trinity.core.messages import Submit
from trinity.pipeline import Pipeline
from trinity.request import Request


def count_bytes(value: Any) -> int:
    """Bytes of all tensors within ``value``."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, msgspec.Struct):
        return sum(count_bytes(getattr(value, name)) for name in value.__struct_fields__)
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return sum(map(count_bytes, inner)) + sum(
        map(count_bytes, vars(value).values() if hasattr(value, "__dict__") else ())
    )


async def test_pixels_go_with_their_request() -> None:
    async with Pipeline(checkpoint("llava"), "1E1P1D", dtype="float32") as pipe:
        await pipe.complete(Request("<image>\nWhat?", images=PHOTOS[:1], max_tokens=2))
        await pipe.wait_idle()
        kept = [event for host in pipe.hosts.values() for event in host.events]
    assert any(isinstance(event, Submit) for event in kept)
    assert count_bytes(kept) == 0
