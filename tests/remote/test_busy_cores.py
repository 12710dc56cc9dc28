"""An instance whose core computes digests for longer than the longest silence lives; one whose core hangs does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from support.emulated_pipelines import MODEL, POOLS, right
from support.pipeline_options import pipeline_options
from support.running_instances import LIVENESS_S
from trinity.core.failure_policy import NO_RECOVERY
from trinity.emulation.model import EmulatedRequest
from trinity.errors import RequestError
from trinity.pipeline import Pipeline
from trinity.remote.supervision import fork_client
from trinity.remote.supervision.fork_client import Launcher

SILENCE_S = 2.0
SLOW = """
import time
import trinity.connector
from trinity.memory import digests
from trinity.remote import fork_server
real, blocks = digests.hashlib.blake2b, []
class Slow:
    def blake2b(*given, **named):
        blocks.append(1)
        time.sleep({seconds})
        return real(*given, **named)
digests.hashlib = Slow
trinity.connector.leaves_host = lambda transport: True  # as over a network: digests are keyed
trinity.connector.INLINE_KEYED_BYTES = 0  # as for large blocks: who pulls compares on a thread of its own
fork_server.main()
"""
ASKED = EmulatedRequest(text_tokens=1000, max_tokens=3)  # 63 blocks of KV


@asynccontextmanager
async def digests_take(seconds: float) -> AsyncIterator[None]:
    launcher = type("SlowLauncher", (Launcher,), {"program": ("-c", SLOW.format(seconds=seconds))})(torch=False)
    fork_client._kept.append(launcher)
    try:
        yield
    finally:
        fork_client._kept.remove(launcher)
        await asyncio.to_thread(launcher.close)


def pipeline() -> Pipeline:
    options = pipeline_options({"pools": POOLS, "silence_s": SILENCE_S, "verify": "always"})
    return Pipeline(MODEL, "EP+D", hosting="process", failures=NO_RECOVERY, **options)


async def test_a_core_that_computes_digests_is_not_silent() -> None:
    """At 19bbccc a healthy instance was killed: 1.95 GiB of blocks take more than two seconds."""
    async with digests_take(2.5 * SILENCE_S / 63), asyncio.timeout(LIVENESS_S), pipeline() as pipe:
        assert (await pipe.complete(ASKED)).token_ids == right(ASKED)
        assert [health.epoch for health in pipe.health.values()] == [0, 0]


async def test_a_core_that_hangs_in_a_digest_is_killed() -> None:
    async with digests_take(1000.0), asyncio.timeout(LIVENESS_S), pipeline() as pipe:
        with pytest.raises(RequestError):
            await pipe.complete(ASKED)
        assert "said nothing for" in " ".join(health.why for health in pipe.health.values())
