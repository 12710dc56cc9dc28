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
from trinity.remote.supervision.process_config import kept_launcher
from trinity.request import Output, Request

WAYS = (("threads", "inproc"), ("processes", "shm"), ("processes", "nixl"), ("processes", "ucx"))
LENGTHS = (256, 1024, 2048)
STEP_S = 0.02
COST = LinearCost(step_s=STEP_S, decode_s=0.0, prefill_s=1e-5, encode_s=0.0, media_s=0.0, source="given by hand")
STOP, AHEAD = TransferPolicy(precopy="off"), TransferPolicy(precopy="on")
SCALE = 8.0  # of the emulation's KV blocks
BESIDE_S = 0.01  # the aim: what a move takes beside its pull
EVERY = 5  # tokens from one move to the next
MOVES = 20
REQUESTS = 8  # each moved once, where full blocks go ahead
LESS = 0.5  # the aim for their pause, to that of stop and copy


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


@dataclass
class Ahead:
    """Requests that were moved once each while their full blocks went ahead: pauses, and what each answer took."""

    pauses_s: list[float] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    foreign: float = 0.0


async def once(pipe: Pipeline, request: Request, found: Ahead) -> None:
    """Serve a request and move it behind its fifth token. Its pause is what its largest gap since has more."""
    asked, times, clock = Moved(), list[float](), asyncio.get_running_loop().time
    until = 0
    async with pipe.stream(request) as tokens:
        async for token in tokens:
            times.append(clock())
            if token.index == EVERY:
                other = "D1" if tokens.place == "D0" else "D0"
                task = asyncio.get_running_loop().create_task(_ask(tokens.move(other), asked))
            until = until or (len(times) + 2 if asked.answers_s else 0)
        await task
    gaps = Moved(times).gaps
    if until and until <= len(gaps):  # else it ended first
        found.pauses_s.append(max(gaps[EVERY:until]) - median(gaps))
        found.answers_s += asked.answers_s


async def measure_ahead(hosting: Any, connector: str, tokens: int, requests: int) -> Ahead:
    """Move requests of so many tokens, one after another, none of which finds anything of another one's."""
    found = Ahead()
    async with open_pipeline(hosting, connector, tokens, AHEAD) as pipe:
        await once(pipe, EmulatedRequest(text_tokens=tokens, max_tokens=60), Ahead())
        with ForeignLoad() as load:
            for _ in range(requests):
                await once(pipe, EmulatedRequest(text_tokens=tokens, max_tokens=60), found)
    found.foreign = load.share
    return found


async def _ask(move: Any, found: Moved) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        await move
        found.answers_s.append(clock() - began)
    except MoveError:  # counted by what is missing
        pass


def open_pipeline(hosting: Any, connector: str, tokens: int, transfers: TransferPolicy) -> Pipeline:
    """Make a pipeline of two decode instances; it caches prefixes where full blocks go ahead."""
    model = EmulatedModel(shape=LLAVA_15_7B, cost=COST, scale=SCALE)
    cache = CacheConfig(pools={"image": 2, "kv": 2 * (tokens // 16) + 24})
    named: dict[str, Any] = {"hosting": hosting, "connector": connector, "cache": cache, "transfers": transfers}
    return Pipeline(model, "EP+2D", prefix_cache=transfers is AHEAD, **named)


async def measure_one(hosting: Any, connector: str, tokens: int, moves: int) -> Moved:
    """Move one request of so many tokens, all else idle: KV of LLaVA-1.5-7B's shape and an eighth of its bytes."""
    async with open_pipeline(hosting, connector, tokens, STOP) as pipe:
        asked = EmulatedRequest(text_tokens=tokens, max_tokens=EVERY * (moves + 2))
        await to_and_fro(pipe, EmulatedRequest(text_tokens=tokens, max_tokens=4 * EVERY), 2)  # touches all pools
        with ForeignLoad() as load:
            found = await to_and_fro(pipe, asked, moves)
    found.foreign = load.share
    return found


Key = tuple[str, str, int]
Found = dict[Key, Moved]


async def measure(setting: Setting) -> tuple[Found, list[str], dict[Key, Ahead]]:
    """Measure each way at each length. Returns what was found, and which transports are not installed."""
    found: Found = {}
    ahead: dict[Key, Ahead] = {}
    missing: list[str] = []
    lengths, moves = ((64,), 2) if setting.quick else (LENGTHS, MOVES)
    async with kept_launcher():
        for where, connector in WAYS[:2] if setting.quick else WAYS:
            for tokens in lengths:
                try:
                    hosting = "process" if where == "processes" else "thread"
                    found[where, connector, tokens] = await measure_one(hosting, connector, tokens, moves)
                    if tokens > LENGTHS[0] or setting.quick:
                        asked = 2 if setting.quick else REQUESTS
                        ahead[where, connector, tokens] = await measure_ahead(hosting, connector, tokens, asked)
                except TransportUnavailable as error:
                    missing.append(f"{connector}: {error}")
                    break
    return found, missing, ahead


def run(setting: Setting) -> Result:
    """Measure moves in threads and between processes, over each transport, at three lengths."""
    return result(*asyncio.run(measure(setting)))


METHOD = (
    "One request decodes alone, and is moved to and fro between two decode instances behind each fifth token. "
    f"Emulated: a step waits {STEP_S * 1e3:.0f} ms, while cores, sockets and blocks are real; KV has LLaVA-1.5-7B's "
    "shape and an eighth of its bytes, 64 KiB a token. The pause is what the gap between two tokens has more than "
    "others; the pull is the transport's time of it; the rest are messages between three event loops and, over nixl "
    "and ucx, digests of the blocks, at the source and again at the target. Medians and largest of "
    f"{MOVES} moves, stop and copy: nothing is copied while the request decodes. Full blocks ahead: "
    f'{REQUESTS} requests that share nothing, each moved once (``TransferPolicy(precopy="on")``).'
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


AHEAD_HEADER = (
    "hosting",
    "transport",
    "tokens",
    "moves",
    "pause ms",
    "largest",
    "stop and copy",
    "share",
    "asked to there",
)


def ahead_row(where: str, connector: str, tokens: int, ahead: Ahead, stop: Moved) -> list[str]:
    pause, beside = median(ahead.pauses_s), median(stop.pauses_s)
    pauses = [ms(pause), ms(max(ahead.pauses_s)), ms(beside), f"{pause / beside:.0%}"]
    return [where, connector, str(tokens), str(len(ahead.pauses_s)), *pauses, ms(median(ahead.answers_s))]


def _ahead_aim(where: str, connector: str, tokens: int, ahead: Ahead, stop: Moved) -> Aim:
    share = median(ahead.pauses_s) / median(stop.pauses_s)
    what = f"pause with full blocks ahead to that of stop and copy, {tokens} tokens over {connector}"
    return Aim(what, f"<= {LESS:.0%}", f"{share:.0%}", share <= LESS)


def result(found: Found, missing: list[str], ahead: dict[Key, Ahead]) -> Result:
    both = {key: (each, found[key]) for key, each in ahead.items() if each.pauses_s}
    loud = [" ".join(map(str, key)) for key, moved in found.items() if moved.foreign > MAX_FOREIGN_SHARE]
    return Result(
        name="moves",
        title="Decodes that move",
        method=METHOD,
        tables=[
            Table("Pause of a move", HEADER, [row(*key, moved) for key, moved in found.items()]),
            Table("Full blocks ahead", AHEAD_HEADER, [ahead_row(*key, *pair) for key, pair in both.items()]),
        ],
        aims=[
            *(_aim(*key, moved) for key, moved in found.items() if key[1] in ("inproc", "shm")),
            *(_ahead_aim(*key, *pair) for key, pair in both.items() if key[1] in ("nixl", "ucx")),
        ],
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
