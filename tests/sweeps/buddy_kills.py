"""Kills programs that serve a real model, again and again: their readers go on with the buddy, exactly.

    make buddies, or: python tests/sweeps/buddy_kills.py [--kills 100] [--seed 0]

A tiny LLaVA in float32 runs on two instances (EP+D). One pipeline serves there all the time, with a reader of its own
who must notice nothing: each of its requests is exact in its first life. Beside it programs come, one after the other,
attach, serve requests, and are killed with SIGKILL once their readers have so many tokens as was drawn. Each reader
comes back to the buddy with its id and its last index. Greedy tokens are those of transformers' ``generate()``, sampled
ones, with penalties, those of the same request undisturbed; texts are compared too.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from support import paths
from support.buddy_programs import LIVENESS_S, come_back, listening, make_pipeline
from support.checkpoint_files import checkpoint
from trinity.errors import ResumeError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.buddy import Buddy
from trinity.request import Output, Request, Sampling
from trinity.testing.oracle import Oracle

ROLES, OWN_READERS, AT_ONCE, PAUSE_S = ("EP", "D"), 1, 4, 0.3
PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
POOLS = CacheConfig(pools={"image": 64, "kv": 2000})
PRELOADED = ["torch", "transformers", "trinity.pipeline", "trinity.preprocess.loader", "sweeps.buddy_kills"]


@cache
def asked() -> tuple[Request, ...]:
    """Requests of none to two images, greedy and sampled in turn; an image as a path, as bytes or as an array."""
    made = []
    for number in range(12):
        photos = [PHOTOS[(number + each) % len(PHOTOS)] for each in range(number % 3)]
        images = [
            photo.read_bytes() if number % 4 == 1 else open_image(photo) if number % 4 == 2 else photo
            for photo in photos
        ]
        drawn: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.4}
        way = Sampling(ignore_eos=True, seed=number, **(drawn if number % 2 else {}))
        text = "<image> " * len(images) + f"Tell {number} things."
        made.append(
            Request(text, images=images, max_tokens=30 + 29 * number % 150, sampling=way, request_id=f"r{number}")
        )
    return tuple(made)


def open_image(path: Path) -> Any:
    """An object of this process, of which its buddy gets the pixels."""
    from PIL import Image

    return Image.open(path).convert("RGB")


@cache
def greedy_tokens() -> list[list[int]]:
    return Oracle(checkpoint("llava")).generate_all(asked()[::2])


async def serve_undisturbed() -> list[Output]:
    """Serve each request in one process; greedy ones are held against ``generate()``."""
    async with Pipeline(checkpoint("llava"), "EPD", dtype="float32", cache=POOLS) as pipe:
        outputs = [await pipe.complete(each) for each in asked()]
    assert [each.token_ids for each in outputs[::2]] == greedy_tokens()
    return outputs


def serve_model(addresses: list[str], **terms: Any) -> Pipeline:
    return make_pipeline(checkpoint("llava"), ROLES, addresses, dtype="float32", cache=POOLS, **terms)


# ---------------------------------------------------------------- programs that are killed


def run_victim(addresses: list[str], buddy: str, numbers: Sequence[int], said: Connection) -> None:
    """Serve in a process of its own; each token is said once its reader has it."""
    asyncio.run(_serve(addresses, buddy, numbers, said))


async def _serve(addresses: list[str], buddy: str, numbers: Sequence[int], said: Connection) -> None:
    async with serve_model(addresses, attach=True, buddy=Buddy(buddy)) as pipe:
        async with asyncio.timeout(LIVENESS_S):
            while not pipe.has_buddy:
                await asyncio.sleep(0.01)
        await asyncio.gather(*(_read(pipe, asked()[number], said) for number in numbers))
        said.send_bytes(b"null")
        await asyncio.sleep(LIVENESS_S)


async def _read(pipe: Pipeline, request: Request, said: Connection) -> None:
    async with pipe.stream(request) as tokens:
        async for token in tokens:
            said.send_bytes(json.dumps([request.request_id, token.index, token.id, token.text]).encode())


@dataclass
class Struck:
    """What the readers of a killed program have; ``ended``: it had served all of them."""

    heard: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    ended: bool = False

    def take(self, message: bytes) -> None:
        said = json.loads(message)
        self.ended = said is None
        if said is not None:
            name, index, token, text = said
            assert index == len(self.heard[name])
            self.heard[name].append((token, text))


async def strike(addresses: list[str], buddy: str, numbers: Sequence[int], tokens: int) -> Struck:
    """Begin a program, and kill it once its readers have so many tokens, or all."""
    forks = multiprocessing.get_context("forkserver")
    hears, said = forks.Pipe(duplex=False)
    process = forks.Process(target=run_victim, args=(addresses, buddy, numbers, said), daemon=True)
    struck = Struck()
    await asyncio.to_thread(process.start)
    said.close()
    try:
        async with asyncio.timeout(LIVENESS_S):
            while sum(map(len, struck.heard.values())) < tokens and not struck.ended:
                struck.take(await asyncio.to_thread(hears.recv_bytes))
        process.kill()
        while True:
            struck.take(await asyncio.to_thread(hears.recv_bytes))
    except EOFError:  # also amid a message, which no reader has
        return struck
    finally:
        process.kill()
        await asyncio.to_thread(process.join)
        hears.close()


# ---------------------------------------------------------------- readers


@dataclass
class Tally:
    """Results of all kills."""

    kills: int = 0
    amid: int = 0  # before all was served
    resumed: Counter[str] = field(default_factory=Counter)  # readers, by what they had
    refused: Counter[str] = field(default_factory=Counter)
    own: int = 0
    back_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def report(self) -> str:
        slow = sorted(self.back_s)
        others = self.refused.total() - self.refused["unknown"]
        back = f"all tokens there {slow[len(slow) // 2]:.2f} s after the kill in the median, {slow[-1]:.2f} s at most"
        rows = [
            f"{self.kills} kills, {self.amid} of them amid requests",
            f"readers who came back, by the tokens that they had: {dict(self.resumed)}; {back}",
            f"had no token, and were unknown: {self.refused['unknown']}; other refusals: {others}",
            f"{self.own} requests of the buddy's own readers, exact and in their first life",
        ]
        return "\n".join([*rows, *(f"WRONG: {each}" for each in self.wrong)])


class OwnReaders:
    """Readers of the pipeline that lives, who must notice nothing."""

    def __init__(self, pipe: Pipeline, alone: Sequence[Output], tally: Tally, draw: random.Random) -> None:
        self.ending, self._times = False, count()
        self._tasks = [asyncio.ensure_future(self._ask(pipe, alone, tally, draw)) for _ in range(OWN_READERS)]

    async def _ask(self, pipe: Pipeline, alone: Sequence[Output], tally: Tally, draw: random.Random) -> None:
        while not self.ending:
            number = draw.randrange(len(asked()))
            request = msgspec.structs.replace(asked()[number], request_id=f"own {next(self._times)}")
            output = await pipe.complete(request)
            tally.own += 1
            if (output.token_ids, output.lives) != (alone[number].token_ids, 1):
                tally.wrong.append(f"a reader of the buddy: {output.lives} lives, {output.token_ids}")
            await asyncio.sleep(PAUSE_S)  # the programs need the processor, too

    async def end(self) -> None:
        self.ending = True
        await asyncio.gather(*self._tasks)


async def resume_all(
    pipe: Pipeline, struck: Struck, numbers: Sequence[int], alone: Sequence[Output], tally: Tally
) -> None:
    """Have all readers of a killed program come back, and compare what each has then."""
    began = time.monotonic()
    for number in numbers:
        had, right = struck.heard.get(f"r{number}", []), alone[number]
        try:
            tokens, text = await come_back(pipe, f"r{number}", had)
        except ResumeError as error:
            tally.refused[error.reason] += 1
            whole = error.reason == "beyond" and len(had) == len(right.token_ids)
            if (had and not whole) or error.reason not in ("unknown", "beyond"):
                tally.wrong.append(f"r{number} had {len(had)} tokens: {error}")
            continue
        tally.resumed["no token" if not had else "some" if len(had) < len(right.token_ids) else "all"] += 1
        if (tokens, text) != (right.token_ids, right.text):
            tally.wrong.append(f"r{number} had {len(had)} tokens, and then {tokens}, not {right.token_ids}")
    tally.back_s.append(time.monotonic() - began)


async def sweep(kills: int, seed: int, folder: Path) -> Tally:
    alone, tally, draw = await serve_undisturbed(), Tally(), random.Random(seed)
    most = sum(len(each.token_ids) for each in alone)
    with listening(len(ROLES), OMP_NUM_THREADS="1") as addresses:
        async with serve_model(addresses, buddy=Buddy(listen=f"unix:{folder}/buddy")) as pipe:
            own = OwnReaders(pipe, alone, tally, draw)
            while tally.kills < kills and not tally.wrong:
                numbers = draw.sample(range(len(asked())), AT_ONCE)
                tokens = draw.randrange(1, max(2, most * AT_ONCE // len(asked())))
                struck = await strike(addresses, pipe.journal_address, numbers, tokens)
                tally.kills += 1
                tally.amid += not struck.ended
                await resume_all(pipe, struck, numbers, alone, tally)
                print(f"  {tally.kills}: killed after {sum(map(len, struck.heard.values()))} tokens", flush=True)
            await own.end()
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory() as folder:
        tally = asyncio.run(sweep(given.kills, given.seed, Path(folder)))
    print(tally.report())
    return bool(tally.wrong)


if __name__ == "__main__":
    raise SystemExit(main())
