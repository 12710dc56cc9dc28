"""CPU time of the front end's process: a request of one token, a further token, and the choice of an instance.

    python benchmarks/serving/frontend_cost.py [--turns 5] [--profile]

Tokens: paced instances in processes of their own serve the same requests at two lengths of output, and only this
process is measured. Readers take token by token (``async for``), all that wait (``next_tokens``) or the whole
(``complete``). Choices: a ``FrontendCore`` alone takes requests with 8, 64 and 256 instances, between reports of these.
All are medians of turns.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import random
import sys
import time
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

from trinity.core.frontend import FrontendCore
from trinity.core.messages import Finished, MediaSpan, PeerLoad, PeerUp, Submit, Work
from trinity.core.routing import routing_policy
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.pipeline import Pipeline

LENGTHS = (1, 65)  # tokens of an output
SIZES = (8, 64, 256)  # instances
POLICIES = ("round_robin", "random", "least_loaded", "prefix_hits")
READERS = ("async for", "next_tokens", "complete")
CACHED, CHANGED = 512, 32  # keys that an instance reports of each kind, and those that are others each time
PROMPT, KV_BLOCK, IMAGE_TOKENS = 900, 16, 576
COST = LinearCost(step_s=0.02, decode_s=0.0, prefill_s=0.0, encode_s=0.001, media_s=0.0, source="none: no work")


# ---------------------------------------------------------------- tokens


async def read(pipe: Pipeline, reader: str, tokens: int) -> None:
    """One request, by one of ``READERS``."""
    asked = EmulatedRequest(text_tokens=20, max_tokens=tokens)
    if reader == "complete":
        await pipe.complete(asked)
        return
    async with pipe.stream(asked) as stream:
        if reader == "async for":
            async for _ in stream:
                pass
        else:
            while await stream.next_tokens():
                pass


async def serve(pipe: Pipeline, reader: str, tokens: int, count: int, at_once: int) -> float:
    """CPU seconds of this process for ``count`` requests."""
    turn = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with turn:
            await read(pipe, reader, tokens)

    began = time.process_time()
    await asyncio.gather(*(one() for _ in range(count)))
    return time.process_time() - began


async def measure_tokens(
    instances: int, count: int, at_once: int, turns: int, profile: cProfile.Profile | None = None
) -> dict[str, tuple[float, float]]:
    """Seconds of a request of one token, and of a further token, by reader."""
    model = EmulatedModel(shape=LLAVA_15_7B, cost=COST, scale=4096)
    found: dict[str, list[tuple[float, float]]] = {reader: [] for reader in READERS}
    async with Pipeline(model, f"{instances}EPD", hosting="process", max_waiting=count + at_once) as pipe:
        for reader in READERS:
            await serve(pipe, reader, 2, at_once, at_once)
        for _ in range(turns):
            for reader in READERS:
                short = await serve(pipe, reader, LENGTHS[0], count, at_once)
                if profile is not None:
                    profile.enable()
                long = await serve(pipe, reader, LENGTHS[1], count, at_once)
                if profile is not None:
                    profile.disable()
                found[reader].append((short / count, (long - short) / count / (LENGTHS[1] - LENGTHS[0])))
    return {reader: (median(a for a, _ in each), median(b for _, b in each)) for reader, each in found.items()}


# ---------------------------------------------------------------- choices


def make_core(policy: str, instances: int, hosts: int) -> FrontendCore:
    """A front end that knows so many instances, a quarter of them encoders, by report."""
    core = FrontendCore(routing_policy(policy), max_waiting=1 << 20)
    for number in range(instances):
        roles = "E" if number % 4 == 3 else "PD"
        host = f"host{number % hosts}" if hosts else ""
        core.handle(PeerUp(f"{roles}{number}", roles, pools={"image": 64, "kv": 4096}, host=host), 0.0)
    return core


class Reports:
    """Reports of instances, in which some of the cached keys are others than in the one before."""

    def __init__(self, core: FrontendCore, draw: random.Random) -> None:
        self._draw, self._peers = draw, list(core.router.peers.values())
        self._keys = {peer.name: [draw.randbytes(8) for _ in range(CACHED)] for peer in self._peers}

    def draw(self) -> PeerLoad:
        draw, peer = self._draw, self._draw.choice(self._peers)
        keys = self._keys[peer.name]
        for _ in range(CHANGED):
            keys[draw.randrange(CACHED)] = draw.randbytes(8)
        return PeerLoad(
            peer.name,
            free={"kv": draw.randrange(4096)},
            predicted_s={letter: draw.random() for letter in peer.roles},
            unit_s=dict.fromkeys(peer.roles, 1e-5),
            cached=dict.fromkeys(("kv", "image"), b"".join(keys)),
        )


def draw_work(draw: random.Random, number: int, media: bool) -> Work:
    prompt = tuple(draw.choices(range(32_000), k=PROMPT))
    spans = (MediaSpan("image", IMAGE_TOKENS, 0, IMAGE_TOKENS, f"photo {draw.randrange(1000)}"),) if media else ()
    return Work(request=f"r{number}", prompt=prompt, media=spans, max_tokens=64)


def measure_choice(policy: str, instances: int, count: int, media: bool = False, hosts: int = 0) -> tuple[float, float]:
    """Seconds of a submit, and of a submit with the report of an instance before it."""
    draw = random.Random(instances)
    core = make_core(policy, instances, hosts)
    reports = Reports(core, draw)
    for _ in range(4 * instances):
        core.handle(reports.draw(), 0.0)
    works = [draw_work(draw, number, media) for number in range(count)]
    drawn = [reports.draw() for _ in range(count)]
    core.handle(Submit(draw_work(draw, -1, media)), 0.0)  # the first one reads every report
    alone = _spend(core, works[: count // 2], None)
    return alone, _spend(core, works[count // 2 :], drawn)


def _spend(core: FrontendCore, works: list[Work], reports: list[PeerLoad] | None) -> float:
    spent = 0.0
    for at, work in enumerate(works):
        began = time.process_time()
        if reports is not None:
            core.handle(reports[at], 0.0)
        core.handle(Submit(work), 0.0)
        spent += time.process_time() - began
        life = core.entries[work.request].work.request
        core.handle(Finished(request=life, attempt=0, reason="cancelled"), 0.0)
    return spent / len(works)


def print_choices(count: int, turns: int) -> None:
    for policy in POLICIES:
        for media, hosts in ((False, 0), (True, 0), (False, 4)):
            row = []
            for size in SIZES:
                found = [measure_choice(policy, size, count, media, hosts) for _ in range(turns)]
                row.append(f"{size}: {_us(found, 0)} ({_us(found, 1)})")
            what = f"{policy}{' with an image' * media}{f', {hosts} hosts' * bool(hosts)}"
            print(f"{what}, us of a submit (with a report) by instances: {', '.join(row)}", flush=True)


def _us(found: list[tuple[float, float]], at: int) -> str:
    return f"{median(each[at] for each in found) * 1e6:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--at-once", type=int, default=128)
    parser.add_argument("--instances", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--choices", type=int, default=400)
    parser.add_argument("--only", choices=["tokens", "choices"])
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    if given.only != "tokens":
        print_choices(given.choices, given.turns)
    if given.only != "choices":
        profile = cProfile.Profile() if given.profile else None
        found = asyncio.run(measure_tokens(given.instances, given.requests, given.at_once, given.turns, profile))
        for reader, (request_s, token_s) in found.items():
            print(f"{reader}: {request_s * 1e6:.0f} us a request of one token, {token_s * 1e6:.1f} us a further token")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
