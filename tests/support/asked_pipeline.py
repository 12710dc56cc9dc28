"""What such a program does: it keeps requests of a pipeline in flight, and says what came of them.

Of each line of stdin it makes one line of JSON: what has ended since the last. "up": first wait until every instance is
up and answers have come after that. "on": at once. It ends when stdin does. Of an emulated model it compares tokens
itself, and says ``RIGHT`` in place of right ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections import Counter
from typing import Any

import trinity
from support.emulated_pipelines import MODEL, right
from trinity.emulation.model import EmulatedRequest
from trinity.errors import TrinityError

RIGHT = (1,)
TOKENS, IN_FLIGHT = 24, 3
POOLS = {"image": 16, "kv": 256}
LIVENESS_S = 240.0
PAUSE_S = 0.05  # after a refusal


class Loaded:
    """Requests one after another, several at a time; what they ended with since it was last told."""

    def __init__(self, pipe: trinity.Pipeline, photo: str) -> None:
        self.pipe, self.photo = pipe, photo
        self.answers, self.errors = Counter[tuple[int, ...]](), Counter[str]()
        self.ways = set[tuple[str, str, str, str]]()

    async def keep_asking(self, number: int) -> None:
        greedy = trinity.Sampling(ignore_eos=True)
        while True:
            number += IN_FLIGHT
            salt = str(number)  # else features and prompts would be cached, and nothing moved
            image: dict[str, Any] = {"image_tokens": (576,), "contents": (salt,)}
            asked: trinity.Request = EmulatedRequest(text_tokens=18, max_tokens=TOKENS, **image)
            if self.photo:
                asked = trinity.Request(
                    "<image>\nWhat is this?", images=[self.photo], max_tokens=TOKENS, sampling=greedy, cache_salt=salt
                )
            try:
                output = await self.pipe.complete(asked)
            except TrinityError as error:
                self.errors[type(error).__name__] += 1
                await asyncio.sleep(PAUSE_S)
            else:
                is_right = isinstance(asked, EmulatedRequest) and output.token_ids == right(asked)
                self.answers[RIGHT if is_right else tuple(output.token_ids)] += 1
                pulled = [each for each in output.transfers if each["outcome"] == "pulled"]
                self.ways |= {(each["kind"], each["source"], each["target"], each["scheme"]) for each in pulled}

    async def until_up(self) -> None:
        async with asyncio.timeout(LIVENESS_S):
            while {health.state for health in self.pipe.health.values()} != {"up"}:
                await asyncio.sleep(0.05)
            served = self.answers.total()
            while self.answers.total() < served + 2 * IN_FLIGHT:
                await asyncio.sleep(0.05)

    def tell(self, problem: str, said: list[str]) -> None:
        told = {
            "problem": problem,
            "answers": [[list(tokens), count] for tokens, count in self.answers.items()],
            "errors": dict(self.errors),
            "ways": sorted(self.ways),
            "health": {name: [health.state, health.epoch, health.why] for name, health in self.pipe.health.items()},
            "said": said,
        }
        print(json.dumps(told), flush=True)
        self.answers.clear()
        self.errors.clear()
        self.ways.clear()


class Listening(logging.Handler):
    """Keeps what trinity logs."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


async def serve(model: str, photo: str, placement: Any, processes: trinity.ProcessConfig) -> None:
    """Serve a checkpoint in float32 on instances elsewhere, or "emulated", until stdin ends."""
    listening = Listening()
    logging.getLogger("trinity").addHandler(listening)
    logging.getLogger("trinity").setLevel(logging.INFO)
    medium = trinity.Connector("auto", options={"trusted_network": True})
    given: dict[str, Any] = {"hosting": "process", "connector": medium, "processes": processes, "dtype": "float32"}
    if model == "emulated":
        photo, given = "", {**given, "dtype": "auto"}
    served: Any = model if photo else MODEL
    async with trinity.Pipeline(served, placement, cache=trinity.CacheConfig(pools=POOLS), **given) as pipe:
        loaded = Loaded(pipe, photo)
        asking = [asyncio.ensure_future(loaded.keep_asking(number)) for number in range(IN_FLIGHT)]
        try:
            while word := await asyncio.to_thread(sys.stdin.readline):
                problem = ""
                try:
                    if word.strip() == "up":
                        await loaded.until_up()
                except TimeoutError:
                    problem = "it did not come back"
                loaded.tell(problem, listening.said)
                listening.said.clear()
        finally:
            for each in asking:
                each.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
