"""Emulation: eight instances in processes of their own serve a hundred requests with stages that wait, not compute.

python examples/emulation.py [PLACEMENT]         2E3P3D unless you say otherwise

Cores, processes, sockets, leases and blocks are real; blocks have the shape of LLaVA-1.5-7B's and fewer bytes. Costs
are those of a tiny model on a CPU: put your own in, and the times mean something.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Sequence

from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.memory.cache_config import CacheConfig
from trinity.metrics import percentile
from trinity.pipeline import Pipeline
from trinity.request import Output
from trinity.timeline import Timeline

TINY = LinearCost(
    step_s=3.0e-3,
    decode_s=1.3e-4,
    prefill_s=9.0e-6,
    encode_s=8.4e-3,
    media_s=2.0e-6,
    source="fitted to trinity's profile of its tiny LLaVA checkpoint on one CPU thread",
)
REQUESTS, PER_SECOND = 100, 40.0


def requests(seed: int = 0) -> list[EmulatedRequest]:
    """None to two images, a question, an answer."""
    draw = random.Random(seed)
    return [
        EmulatedRequest(
            text_tokens=draw.randint(10, 200),
            image_tokens=(576,) * draw.choice((0, 1, 1, 2)),
            max_tokens=draw.randint(8, 48),
            request_id=f"question {number}",
        )
        for number in range(REQUESTS)
    ]


async def serve(pipe: Pipeline, asked: Sequence[EmulatedRequest], per_second: float) -> list[Output]:
    """Requests arrive one after another, whether or not those before are done."""
    going = []
    for request in asked:
        going.append(asyncio.ensure_future(pipe.complete(request)))
        await asyncio.sleep(1 / per_second)
    return list(await asyncio.gather(*going))


def table(outputs: Sequence[Output]) -> str:
    """TTFT and TPOT in ms by number of images."""
    lines = ["images  requests   TTFT p50    p95   TPOT p50    p95   (ms, emulated)"]
    for images in range(3):
        chosen = [
            output for output in outputs if output.media_tokens == 576 * images and output.ttft_s and output.itl_s
        ]
        first, each = (sorted(values) for values in zip(*((o.ttft_s, o.tpot_s) for o in chosen), strict=True))
        cells = [1e3 * percentile(values, share) for values in (first, each) for share in (50, 95)]
        lines.append("{:6}{:10}{:11.1f}{:7.1f}{:11.1f}{:7.1f}".format(images, len(chosen), *cells))
    return "\n".join(lines)


def lateness(timeline: Timeline) -> str:
    """By how much stages waited too long: what this machine adds to the cost model's times."""
    late = sorted(arguments["late us"] for _, _, _, _, arguments in timeline.rows() if "late us" in arguments)
    median, most = (percentile(late, share) for share in (50, 95))
    return f"{len(late)} steps ended {median:.0f} us late at the median, {most:.0f} us at the 95th percentile"


async def main(placement: str = "2E3P3D", per_second: float = PER_SECOND) -> list[Output]:
    model = EmulatedModel(shape=LLAVA_15_7B, cost=TINY, scale=1024)
    async with Pipeline(
        model, placement, hosting="process", cache=CacheConfig(pools={"image": 64, "kv": 2048})
    ) as pipe:
        print(f"{placement}: {model}")
        outputs = await serve(pipe, requests(), per_second)
        print(table(outputs), pipe.metrics, sep="\n\n")
    print("\n" + lateness(pipe.timeline))
    return outputs


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "2E3P3D"))
