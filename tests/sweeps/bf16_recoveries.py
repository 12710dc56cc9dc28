"""Counts how often greedy tokens differ behind a recovery in bfloat16: ``python tests/sweeps/bf16_recoveries.py``.

One request at a time, so that no company rounds otherwise: left alone, once more, and with a life that ends after each
of some numbers of tokens, as a lost transfer would end it. Its next life prefills prompt and outputs. The same in
float32 is the control: there no token may differ.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from trinity import Request, Sampling
from trinity.core.messages import Failure, Finished
from trinity.pipeline import Pipeline

PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
LENGTH, CUTS = 64, (8, 16, 32, 48)
LOST = Failure("MigrationError", "its blocks were lost on their way", {"cause": "TransferTimeout"})


class Tally(NamedTuple):
    """Recoveries, those behind which a token differs, and the index of the first such token behind the cut, of each."""

    recoveries: int
    behind: tuple[int, ...]
    unsteady: int  # requests whose tokens differ without any recovery


def requests(count: int) -> list[Request]:
    greedy, length = Sampling(ignore_eos=True), LENGTH
    found = [Request(f"Story number {number} begins so", max_tokens=length, sampling=greedy) for number in range(count)]
    for number in range(count):
        photos = [PHOTOS[(number + each) % len(PHOTOS)] for each in range(1 + number % 2)]
        text = "<image>\n" * len(photos) + f"What is this, said {number} people?"
        found.append(Request(text, images=photos, max_tokens=length, sampling=greedy))
    return found


async def serve(pipe: Pipeline, asked: Request, cut: int = 0) -> tuple[list[int], int]:
    """Tokens of a request, whose first life ends after ``cut`` of them (0: none does), and what was recomputed."""
    async with pipe.stream(asked) as stream:
        async for _ in stream:
            if cut and stream.token_count >= cut:
                lost = Finished(request=asked.request_id, attempt=0, reason="error", failure=LOST, count=cut)
                pipe._frontend.post(lost)
                cut = 0
    return list(stream.output.token_ids), stream.output.recomputed_tokens


def fresh(asked: Request) -> Request:
    return Request(asked.prompt, images=asked.images, max_tokens=asked.max_tokens, sampling=asked.sampling)


async def measure(name: str, dtype: str, count: int, cuts: Sequence[int] = CUTS) -> Tally:
    recoveries, unsteady, behind = 0, 0, list[int]()
    settings: dict[str, Any] = {"dtype": dtype, "pools": {"image": 32, "kv": 256}, "prefix_cache": False}
    async with Pipeline(checkpoint(name), "EPD", **pipeline_options(settings)) as pipe:
        for asked in requests(count):
            alone, _ = await serve(pipe, fresh(asked))
            unsteady += (await serve(pipe, fresh(asked)))[0] != alone
            for cut in cuts:
                tokens, recomputed = await serve(pipe, fresh(asked), cut)
                assert recomputed >= cut, "it was not recovered"
                assert tokens[:cut] == alone[:cut], "what was out stays as it is"
                recoveries += 1
                different = [index for index, pair in enumerate(zip(tokens, alone, strict=True)) if pair[0] != pair[1]]
                behind += [different[0] - cut] if different else []
    return Tally(recoveries, tuple(behind), unsteady)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["llava", "qwen2_vl", "llama"])
    parser.add_argument("--requests", type=int, default=6, help="with and without images each")
    options = parser.parse_args()
    for name in options.models:
        for dtype in ("float32", "bfloat16"):
            found = asyncio.run(measure(name, dtype, options.requests))
            share = len(found.behind) / found.recoveries
            first = sorted(found.behind)[len(found.behind) // 2] if found.behind else "-"
            print(
                f"{name} {dtype}: of {found.recoveries} recoveries {len(found.behind)} ({share:.0%}) have another token"
                f" behind, the first one at the median {first} tokens on; without a recovery {found.unsteady}",
                flush=True,
            )


if __name__ == "__main__":
    main()
