"""CPU time of the front end's process: a request of one token, a further token, and the choice of an instance.

    python benchmarks/serving/frontend_cost.py [--only tokens|frames|choices] [--turns 5] [--profile]

Tokens: paced instances in processes of their own serve the same requests at two lengths of output, and only this
process is measured. Readers take token by token (``async for``), all that wait (``next_tokens``) or the whole
(``complete``). Frames: the same, but the front end alone is run, in one process, with frames of an instance one after
another: what a further token costs where nothing else empties the caches, and where 64 MiB are read between two frames,
as other processes do. Choices: a ``FrontendCore`` alone takes requests with 8, 64 and 256 instances, between reports of
these. All are medians of turns.
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

from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import FrontendCore, FrontendOptions
from trinity.core.messages import (
    Emit,
    Finished,
    MediaSpan,
    PeerLoad,
    PeerUp,
    ResolvedSampling,
    Sampled,
    Submit,
    Value,
    Work,
)
from trinity.core.routing.router import routing_policy
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.emulation.processor import EmulatedTokenizer
from trinity.pipeline import Pipeline
from trinity.pipeline.stream import Stream
from trinity.preprocess.processor import ProcessedRequest
from trinity.preprocess.text.detokenizer import TextStream
from trinity.remote.channel.wire import decode, encode
from trinity.request import Request

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


# ---------------------------------------------------------------- frames


class FrameBench:
    """The front end of so many requests that decode, whose frames are made here."""

    def __init__(self, requests: int, instances: int) -> None:
        self.host = Pipeline(EmulatedModel(shape=LLAVA_15_7B, cost=COST), "EPD", max_waiting=requests + 1)._frontend
        self.host.loop, self.host.opened = asyncio.get_running_loop(), "running"
        self.sent: dict[str, list[str]] = {}
        self.host.send_to_peer = self._note  # type: ignore[assignment, method-assign]
        for number in range(instances):
            self.host.core.handle(PeerUp(f"EPD{number}", "EPD", pools={"image": 64, "kv": 1 << 20}), 0.0)
        self.streams = [self._open(f"r{number}") for number in range(requests)]

    def _note(self, name: str, message: Value) -> None:
        if isinstance(message, Submit):
            self.sent.setdefault(name, []).append(message.work.request)

    def _open(self, name: str) -> Stream:
        stream = self.host.streams[name] = Stream(self.host, Request("x", request_id=name))
        stream._entered = True
        work = Work(request=name, prompt=(1, 2, 3), max_tokens=4096, sampling=ResolvedSampling())
        stream.begin(ProcessedRequest(work, clipped=False), lambda stop: TextStream(EmulatedTokenizer(), stop))
        self.host.post(Submit(work))
        return stream

    def frames(self, step: int) -> list[bytes]:
        """What the instances send for a step: one frame each."""
        made = []
        for rows in map(tuple, self.sent.values()):
            chosen = tuple(Sampled(40 + (7 * step + row) % 50) for row in range(len(rows)))
            made.append(encode(Emit(rows, (0,) * len(rows), (step,) * len(rows), chosen)))
        return made

    async def take(self, frame: bytes) -> float:
        """CPU seconds of a frame, until its readers wait again."""
        began = time.thread_time()
        message = decode(frame)
        self.host.post(message)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return time.thread_time() - began


async def measure_frames(reader: str, cold: bool, at_once: int, instances: int, steps: int = 90) -> float:
    """Seconds of a further token; ``cold``: with 64 MiB read between two frames."""
    bench, others = FrameBench(at_once, instances), bytes(64 << 20)

    async def read(stream: Stream) -> None:
        if reader == "complete":
            await stream.collect()
        elif reader == "next_tokens":
            while await stream.next_tokens():
                pass
        else:
            async for _ in stream:
                pass

    readers = [asyncio.ensure_future(read(stream)) for stream in bench.streams]
    await asyncio.sleep(0)
    spent = []
    for step in range(steps):
        for frame in bench.frames(step):
            if cold:
                sum(others[::64])
            spent.append(await bench.take(frame))
    for each in readers:
        each.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    return median(spent[len(spent) // 10 :]) * instances / at_once


def print_frames(at_once: int, instances: int, turns: int) -> None:
    for reader in READERS:
        for cold in (False, True):
            found = [asyncio.run(measure_frames(reader, cold, at_once, instances)) for _ in range(turns)]
            where = "with other memory read between frames" if cold else "one frame after another"
            print(f"{reader}, {where}: {median(found) * 1e6:.1f} us a further token", flush=True)


# ---------------------------------------------------------------- choices


def make_core(policy: str, instances: int, hosts: int) -> FrontendCore:
    """A front end that knows so many instances, a quarter of them encoders, by report."""
    core = FrontendCore(routing_policy(policy), FrontendOptions(max_waiting=1 << 20, failures=NO_RECOVERY))
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
    parser.add_argument("--only", choices=["tokens", "frames", "choices"])
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    if given.only in (None, "choices"):
        print_choices(given.choices, given.turns)
    if given.only in (None, "frames"):
        print_frames(given.at_once, given.instances, given.turns)
    if given.only in (None, "tokens"):
        profile = cProfile.Profile() if given.profile else None
        found = asyncio.run(measure_tokens(given.instances, given.requests, given.at_once, given.turns, profile))
        for reader, (request_s, token_s) in found.items():
            print(f"{reader}: {request_s * 1e6:.0f} us a request of one token, {token_s * 1e6:.1f} us a further token")
        if profile is not None:
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
