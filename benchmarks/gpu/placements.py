"""Served on one GPU under every placement, with instances in threads and in processes, one and two steps deep."""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

from PIL import Image

from benchmarks.gpu.serving import Load
from trinity.pipeline import Pipeline
from trinity.remote.supervision.process_config import kept_launcher
from trinity.request import Output, Request, Sampling

PLACEMENTS = ("EPD", "E+PD", "EP+D", "ED+P", "1E1P1D")


@dataclass(frozen=True)
class PlacedRun:
    """One way to serve: a placement, where its instances run, and how many steps are in flight on a lane."""

    placement: str
    hosting: Literal["thread", "process"]
    depth: int

    @property
    def name(self) -> str:
        return f"{self.placement}, {'threads' if self.hosting == 'thread' else 'processes'}, depth {self.depth}"


def list_runs(depths: tuple[int, ...] = (2, 1)) -> list[PlacedRun]:
    """List the ways, the most telling first: a call may end before the last."""
    return [
        PlacedRun(placement, hosting, depth)
        for depth in depths
        for hosting in ("thread", "process")
        for placement in PLACEMENTS
        if hosting == "thread" or placement != "EPD" or depth == depths[0]
    ]


def image_request(load: Load, seed: int) -> Request:
    """Make a request with an image that no other has."""
    colour = ((seed * 37) % 256, (seed * 91) % 256, (seed * 53) % 256)
    image = Image.new("RGB", (336, 336), colour)
    text = "USER: <image>\n" + "word " * load.prompt + "ASSISTANT:"
    return Request(text, images=[image], max_tokens=load.outputs, sampling=Sampling(ignore_eos=True))


async def serve_placed(model: Path, device: str, dtype: str, run: PlacedRun, load: Load, rounds: int) -> dict[str, Any]:
    """Serve bursts of equal requests with pools by default; the first burst compiles and records.

    Returns requests a second of each round, medians and 95th percentiles of TTFT and TBT of the last, seconds from the
    constructor to the first burst, and a digest of all tokens, equal where placements are.
    """
    options: dict[str, Any] = {"hosting": run.hosting, "depth": run.depth, "device": device, "dtype": dtype}
    async with AsyncExitStack() as stack:
        if run.hosting == "process":
            await stack.enter_async_context(kept_launcher())
        started = time.perf_counter()
        pipe = Pipeline(model, run.placement, prefix_cache=False, image_cache=False, **options)
        await stack.enter_async_context(pipe)
        ready = time.perf_counter() - started
        rates: list[float] = []
        outputs: list[Output] = []
        for turn in range(rounds + 1):
            burst = [image_request(load, 1000 * (turn == 0) + number) for number in range(load.requests)]
            started = time.perf_counter()
            outputs = await asyncio.gather(*map(pipe.complete, burst))
            rates.append(load.requests / (time.perf_counter() - started))
    asked = {"requests": load.requests, "outputs": load.outputs}
    return {"requests_per_s": rates[1:], "ready_s": ready, **asked, **describe_outputs(outputs)}


def describe_outputs(outputs: list[Output]) -> dict[str, Any]:
    """Describe latencies, transfers and tokens of a burst."""
    first = [each.ttft_s for each in outputs if each.ttft_s is not None]
    gaps = [gap for each in outputs for gap in each.itl_s]
    moves = [record for each in outputs for record in each.transfers]
    tokens = repr([each.token_ids for each in outputs]).encode()
    return {
        "ttft_s": {"p50": median(first), "p95": percentile(first, 0.95)},
        "tbt_s": {"p50": median(gaps), "p95": percentile(gaps, 0.95)} if gaps else {},
        "transfers": len(moves),
        "moved_bytes": sum(int(record.get("bytes", 0)) for record in moves),
        "tokens": hashlib.sha256(tokens).hexdigest()[:16],
        "output_tokens": sum(len(each.token_ids) for each in outputs),
    }


def percentile(values: list[float], share: float) -> float:
    """Return the value that ``share`` of the values do not exceed."""
    return sorted(values)[round(share * (len(values) - 1))]
