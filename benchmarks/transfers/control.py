"""Cost of control between processes: a hop, a migration end to end, and migrations' share of a request."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting, prompt_of
from trinity.core.messages import Release
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.memory.cache_config import CacheConfig
from trinity.metrics import percentile
from trinity.pipeline import Pipeline
from trinity.remote.channel.channel import Address, Channel, connect
from trinity.remote.channel.listener import listen
from trinity.remote.channel.wire import Hello, decode, encode
from trinity.request import Output, Request, Sampling

SECRET = b"a benchmark has no secrets to hide"
HOP_AIM_S, SHARE_AIM = 150e-6, 0.01
QUICKLY = LinearCost(step_s=1e-3, decode_s=0.0, prefill_s=0.0, encode_s=1e-3, media_s=0.0, source="none: no work")
SIZES = {"tiny": 4096.0, "LLaVA-1.5-7B": 1.0}  # by what bytes are divided
TEXT_TOKENS, IMAGE_TOKENS = 24, 576
MIGRATIONS = {"E to P": "ep_migration", "P to D": "pd_migration"}


async def echo(address: str) -> None:
    """The other process: each message decoded, and encoded again."""
    ended = asyncio.Event()

    async def serve(channel: Channel) -> None:
        async for frame in channel:
            channel.send(encode(decode(frame)))
        ended.set()

    async with listen(Address.parse(address), SECRET, encode(Hello("echo")), serve):
        await ended.wait()


async def hops(rounds: int) -> list[float]:
    """Seconds of one way between two processes: half of a round trip, with the messages made and read."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix:{folder}/channel"
        process = subprocess.Popen([sys.executable, __file__, address])
        try:
            channel = await reached(Address.parse(address))
            message, found = Release("offer-1", "pulled"), []
            for _ in range(rounds):
                began = time.perf_counter()
                channel.send(encode(message))
                decode(await channel.receive())
                found.append((time.perf_counter() - began) / 2)
            await channel.aclose()
        finally:
            await asyncio.to_thread(process.wait, 60)
    return sorted(found[rounds // 10 :])


async def reached(address: Address) -> Channel:
    while True:
        with suppress(Exception):
            return await connect(address, SECRET, encode(Hello("bench")))
        await asyncio.sleep(0.05)


async def paced(scale: float, connector: str, repeats: int) -> dict[str, list[float]]:
    """Seconds of each migration, alone on the machine, of the image and the KV cache of one request at a time."""
    model = EmulatedModel(shape=LLAVA_15_7B, cost=QUICKLY, scale=scale)
    settings: dict[str, Any] = {"hosting": "process", "connector": connector, "prefix_cache": False}
    pools = {"image": 4, "kv": 96}
    found: dict[str, list[float]] = {name: [] for name in MIGRATIONS}
    async with Pipeline(model, "E+P+D", cache=CacheConfig(pools=pools), image_cache=False, **settings) as pipe:
        for _ in range(repeats + 2):
            request = EmulatedRequest(text_tokens=TEXT_TOKENS, image_tokens=(IMAGE_TOKENS,), max_tokens=4)
            output = await pipe.complete(request)
            for name, span in MIGRATIONS.items():
                found[name].append(output.spans[span])
    return {name: sorted(values[2:]) for name, values in found.items()}  # the first attach and touch


async def shares(setting: Setting, repeats: int) -> list[float]:
    """Migrations' share of the latency of a request of 64 tokens."""
    from trinity.preprocess.processor import RequestProcessor

    model = setting.pick("llava-110m", "llava")
    tokenizer = (await asyncio.to_thread(RequestProcessor, model)).tokenizer
    found = []
    settings: dict[str, Any] = {"dtype": "float32", "hosting": "process", "prefix_cache": False, "image_cache": False}
    async with Pipeline(model, "E+P+D", cache=CacheConfig(pools={"image": 4, "kv": 128}), **settings) as pipe:
        for index in range(repeats + 1):
            request = Request(
                "<image>" + prompt_of(tokenizer, 32, index),
                images=[setting.photos[index % len(setting.photos)]],
                max_tokens=64,
                sampling=Sampling(ignore_eos=True),
            )
            found.append(share(await pipe.complete(request)))
    return sorted(found[1:])


def share(output: Output) -> float:
    return sum(output.spans[span] for span in MIGRATIONS.values()) / output.latency_s


def run(setting: Setting) -> Result:
    rounds, repeats = (200, 3) if setting.quick else (4000, 30)
    result = Result(
        "control",
        "Control between processes",
        "Wall times, one request at a time. Migrations are those of paced instances (stages that wait a millisecond; "
        "blocks, sockets, leases are real): from the offer until the blocks have arrived, control included.",
    )
    setting.settle()
    one_way = asyncio.run(hops(rounds))
    rows = [["a hop of control", "", *_micros(one_way)]]
    result.values["hop_s"] = {"p50": percentile(one_way, 50), "p95": percentile(one_way, 95)}
    for size, scale in SIZES.items():
        for name, seconds in asyncio.run(paced(scale, "shm", repeats)).items():
            rows.append([f"migration {name}, {size}", "shm", *_micros(seconds)])
            result.values[f"{name} {size}"] = {"p50": percentile(seconds, 50), "p95": percentile(seconds, 95)}
    result.tables.append(Table("Microseconds", ("what", "transport", "p50", "p95"), rows))
    part = percentile(asyncio.run(shares(setting, 2 if setting.quick else 10)), 50)
    result.values["share"] = part
    hop = percentile(one_way, 50)
    result.aims.append(Aim("a hop of control", "<= 150 us", f"{hop * 1e6:.0f} us", hop <= HOP_AIM_S))
    what = "migrations' share of a request of 64 tokens, 110 M parameters"
    result.aims.append(Aim(what, "< 1 %", f"{part:.2%}", None if setting.quick else part < SHARE_AIM))
    return result


def _micros(seconds: list[float]) -> list[str]:
    return [f"{percentile(seconds, q) * 1e6:.0f}" for q in (50, 95)]


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asyncio.run(echo(sys.argv[1]))
