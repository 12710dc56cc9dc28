"""Decodes that move: the pause that a reader sees, stop and copy, beside the pull of the KV."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import MAX_FOREIGN_SHARE, ForeignLoad, Setting, disturbed
from trinity.core.transfers import TransferPolicy
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.errors import MoveError, TransportUnavailable
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervisor import kept_launcher
from trinity.request import Output, Request

WAYS = (("threads", "inproc"), ("processes", "shm"), ("processes", "nixl"), ("processes", "ucx"))
LENGTHS = (256, 1024, 2048)
STEP_S = 0.02
COST = LinearCost(step_s=STEP_S, decode_s=0.0, prefill_s=1e-5, encode_s=0.0, media_s=0.0, source="given by hand")
STOP = TransferPolicy(precopy="off")
SCALE = 8.0  # of the emulation's KV blocks
BESIDE_S = 0.01  # the aim: what a move takes beside its pull
EVERY = 5  # tokens from one move to the next
MOVES = 20


@dataclass
class Moved:
    """One decode that was moved to and fro: when its tokens came, behind which of them it was to move, what moved."""

    times: list[float] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    output: Output | None = None
    foreign: float = 0.0

    @property
    def gaps(self) -> list[float]:
        return [after - before for before, after in zip(self.times, self.times[1:], strict=False)]

    @property
    def step_s(self) -> float:
        """Seconds from one token to the next where nothing moves."""
        near = {at + more for at in self.asked for more in range(3)}
        return median(gap for at, gap in enumerate(self.gaps) if at not in near)

    @property
    def pauses_s(self) -> list[float]:
        """What the largest of the two gaps behind each question has more: the step that runs ends first."""
        return [max(self.gaps[at : at + 3]) - self.step_s for at in self.asked if at + 3 <= len(self.gaps)]

    @property
    def pulls(self) -> list[dict[str, Any]]:
        """Records of what was pulled from one decode instance by the other."""
        assert self.output is not None
        return [each for each in self.output.transfers if each["kind"] == "kv" and each["source"].startswith("D")]


async def to_and_fro(pipe: Pipeline, request: Request, moves: int) -> Moved:
    """Serve a request, and have it go to the other decode instance behind each fifth token."""
    found, clock = Moved(), asyncio.get_running_loop().time
    async with pipe.stream(request) as tokens:
        async for token in tokens:
            found.times.append(clock())
            if token.index and token.index % EVERY == 0 and len(found.asked) < moves:
                found.asked.append(token.index)
                other = "D1" if tokens.place == "D0" else "D0"
                asyncio.get_running_loop().create_task(_ask(tokens.move(other), found))
    found.output = tokens.output
    return found


async def _ask(move: Any, found: Moved) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        await move
        found.answers_s.append(clock() - began)
    except MoveError:  # counted by what is missing
        pass


async def measure_one(hosting: Any, connector: str, tokens: int, moves: int) -> Moved:
    """Move one request of so many tokens, all else idle: KV of LLaVA-1.5-7B's shape and an eighth of its bytes."""
    model = EmulatedModel(shape=LLAVA_15_7B, cost=COST, scale=SCALE)
    pools = {"image": 2, "kv": 2 * (tokens // 16) + 24}
    kept: dict[str, Any] = {
        "hosting": hosting,
        "connector": connector,
        "cache": CacheConfig(pools=pools),
        "transfers": STOP,
    }
    async with Pipeline(model, "EP+2D", prefix_cache=False, **kept) as pipe:
        asked = EmulatedRequest(text_tokens=tokens, max_tokens=EVERY * (moves + 2))
        await to_and_fro(pipe, EmulatedRequest(text_tokens=tokens, max_tokens=4 * EVERY), 2)  # touches all pools
        with ForeignLoad() as load:
            found = await to_and_fro(pipe, asked, moves)
    found.foreign = load.share
    return found


Found = dict[tuple[str, str, int], Moved]


async def measure(setting: Setting) -> tuple[Found, list[str]]:
    """Measure each way at each length. Returns what was found, and which transports are not installed."""
    found: Found = {}
    missing: list[str] = []
    lengths, moves = ((64,), 2) if setting.quick else (LENGTHS, MOVES)
    async with kept_launcher():
        for where, connector in WAYS[:2] if setting.quick else WAYS:
            for tokens in lengths:
                try:
                    hosting = "process" if where == "processes" else "thread"
                    found[where, connector, tokens] = await measure_one(hosting, connector, tokens, moves)
                except TransportUnavailable as error:
                    missing.append(f"{connector}: {error}")
                    break
    return found, missing


def run(setting: Setting) -> Result:
    """Measure moves in threads and between processes, over each transport, at three lengths."""
    return result(*asyncio.run(measure(setting)))


METHOD = (
    "One request decodes alone, and is moved to and fro between two decode instances behind each fifth token. "
    f"Emulated: a step waits {STEP_S * 1e3:.0f} ms, while cores, sockets and blocks are real; KV has LLaVA-1.5-7B's "
    "shape and an eighth of its bytes, 64 KiB a token. The pause is what the gap between two tokens has more than "
    "others; the pull is the transport's time of it; the rest are messages between three event loops and, over nixl "
    "and ucx, digests of the blocks, at the source and again at the target. Medians and largest of "
    f"{MOVES} moves, stop and copy: nothing is copied while the request decodes."
)
HEADER = (
    "hosting",
    "transport",
    "tokens",
    "MB",
    "moves",
    "pause ms",
    "largest",
    "pull ms",
    "digests ms",
    "beside the pull",
    "asked to there",
)


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def beside_s(moved: Moved) -> float:
    """Seconds of the median pause that are no pull."""
    return median(moved.pauses_s) - median(each["seconds"] for each in moved.pulls)


def row(where: str, connector: str, tokens: int, moved: Moved) -> list[str]:
    pulls = [each["seconds"] for each in moved.pulls]
    digests = [each.get("digest_s") or 0.0 for each in moved.pulls]
    size = median(each["bytes"] for each in moved.pulls) / 1e6
    pauses = [
        ms(median(moved.pauses_s)),
        ms(max(moved.pauses_s)),
        ms(median(pulls)),
        ms(median(digests)),
        ms(beside_s(moved)),
    ]
    counts = [str(tokens), f"{size:.0f}", str(len(moved.pulls))]
    return [where, connector, *counts, *pauses, ms(median(moved.answers_s))]


def result(found: Found, missing: list[str]) -> Result:
    loud = [" ".join(map(str, key)) for key, moved in found.items() if moved.foreign > MAX_FOREIGN_SHARE]
    return Result(
        name="moves",
        title="Decodes that move",
        method=METHOD,
        tables=[Table("Pause of a move", HEADER, [row(*key, moved) for key, moved in found.items()])],
        aims=[_aim(*key, moved) for key, moved in found.items() if key[1] in ("inproc", "shm")],
        notes=[*disturbed(loud), *missing],
        values={
            " ".join(map(str, key)): {
                "pauses_s": moved.pauses_s,
                "answers_s": moved.answers_s,
                "pulls": moved.pulls,
                "step_s": moved.step_s,
                "foreign_load": moved.foreign,
            }
            for key, moved in found.items()
        },
    )


def _aim(where: str, connector: str, tokens: int, moved: Moved) -> Aim:
    beside = beside_s(moved)
    what = f"pause of a move beside its pull, {tokens} tokens over {connector}"
    return Aim(what, f"<= {BESIDE_S * 1e3:.0f} ms", f"{ms(beside)} ms", beside <= BESIDE_S)
