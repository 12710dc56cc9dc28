"""What is done with servers: bursts by the CPU second, sweeps of their batching, exactness, trials in open loop."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from msgspec.structs import replace

from trinity.bench.client import replayed
from trinity.bench.load import Make, drawn, made
from trinity.bench.machine import FOREIGN, Load
from trinity.bench.search import Goal, Trial, trial
from trinity.bench.servers import Answer, Asked, Engine, Peer, Server, installed
from trinity.errors import ConfigError, PeerLost
from trinity.traces.trace import Trace

Starter = Callable[[Engine, Path], Server]
Tried = Callable[[Peer], Awaitable[float]]
SWEEP_SEED = 1 << 16


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Requests asked for at once: CPU seconds of the engine's processes, wall seconds, what others took."""

    requests: int
    cpu_s: float
    wall_s: float
    foreign: float

    @property
    def per_cpu_s(self) -> float:
        return self.requests / self.cpu_s

    @property
    def per_s(self) -> float:
        return self.requests / self.wall_s


async def burst(server: Peer, requests: Sequence[Asked]) -> Burst:
    """Raises ``PeerLost`` where a request fails or has too few tokens."""
    with Load(server.sessions) as load:
        answers = [server.ask(each) for each in requests]
        for answer in answers:
            await answer.done.wait()
    for answer, request in zip(answers, requests, strict=True):
        _check(server, answer, request)
    return Burst(requests=len(requests), cpu_s=max(load.cpu_s, 1e-3), wall_s=load.wall_s, foreign=load.foreign)


def _check(server: Peer, answer: Answer, request: Asked) -> None:
    if answer.end != "length" or len(answer.tokens) != request.tokens:
        ended = f"ended with {answer.end!r} after {len(answer.tokens)} of {request.tokens} tokens"
        raise PeerLost(f"a request to {server.engine.name} {ended}", "bench")


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of an engine, tokens a step and options, tried on a burst; ``problem`` says why it did not run.

    ``attained``: the share of a short trial's requests that were in time, mean of the goals; None without a trial.
    """

    tokens: int
    options: dict[str, Any] = {}
    per_cpu_s: float = 0.0
    per_s: float = 0.0
    attained: float | None = None
    problem: str = ""


def settings(engine: Engine, tokens: Sequence[int]) -> list[Engine]:
    """The engine with every number of tokens a step."""
    return [replace(engine, tokens=each) for each in tokens]


async def sweep(
    engines: Sequence[Engine],
    checkpoint: Path,
    requests: Sequence[Asked],
    start: Starter = Server,
    tried: Tried | None = None,
) -> list[Swept]:
    """The same burst under every setting of an engine, each after one request to warm up; nothing for only one.

    ``tried``: a trial that follows each burst, as ``attaining`` makes it.
    """
    found: list[Swept] = []
    for each in engines if len(engines) > 1 else ():
        one = Swept(tokens=each.tokens, options=each.options)
        try:
            async with start(each, checkpoint) as server:
                await burst(server, requests[:1])
                seen = await burst(server, requests)
                share = await tried(server) if tried else None
            found.append(replace(one, per_cpu_s=seen.per_cpu_s, per_s=seen.per_s, attained=share))
        except (ConfigError, PeerLost) as error:
            found.append(replace(one, problem=str(error)))
    return found


def best(swept: Sequence[Swept], wall: bool = False) -> Swept:
    """The setting that attains most, and does most by CPU or wall time where that is equal.

    Raises ``ConfigError`` where none ran.
    """
    ran = [each for each in swept if not each.problem]
    if not ran:
        raise ConfigError(f"no setting of the sweep ran: {'; '.join(each.problem for each in swept)}")
    return max(ran, key=lambda each: (each.attained or 0.0, each.per_s if wall else each.per_cpu_s))


async def tokens_of(
    engine: Engine, checkpoint: Path, requests: Sequence[Asked], start: Starter = Server
) -> list[list[int]]:
    """What an engine answers, in float32."""
    async with start(replace(engine, dtype="float32"), checkpoint) as server:
        answers = [server.ask(each) for each in requests]
        for answer in answers:
            await answer.done.wait()
    return [answer.tokens for answer in answers]


async def exactness(
    engines: Sequence[Engine], checkpoint: Path, requests: Sequence[Asked], start: Starter = Server
) -> dict[str, int]:
    """By engine: how many of the requests have, in float32 and all asked at once, the tokens of ``generate()``."""
    right = await tokens_of(Engine(kind="generate"), checkpoint, requests, start)
    found = {}
    for engine in engines:
        given = await tokens_of(engine, checkpoint, requests, start)
        found[engine.name] = sum(bool(a) and a == b for a, b in zip(given, right, strict=True))
    return found


@asynccontextmanager
async def started(
    engines: Sequence[Engine], checkpoint: Path, start: Starter = Server
) -> AsyncIterator[dict[str, Server]]:
    """All of them up at once, by name. Those that wait take no CPU time; if one does, it counts as others' load."""
    async with AsyncExitStack() as stack:
        yield {each.name: await stack.enter_async_context(start(each, checkpoint)) for each in engines}


async def rounds(servers: dict[str, Server], requests: Sequence[Asked], count: int) -> dict[str, list[Burst]]:
    """Bursts in turn, A B A B, after one each that does not count."""
    found: dict[str, list[Burst]] = {name: [] for name in servers}
    for turn in range(count + 1):
        for name, server in servers.items():
            seen = await burst(server, requests)
            if turn:
                found[name].append(seen)
    return found


def calm(bursts: Sequence[Burst]) -> tuple[list[Burst], bool]:
    """Those that others left alone, or all where there is none, and whether they do."""
    quiet = [each for each in bursts if each.foreign <= FOREIGN]
    return (quiet, True) if quiet else (list(bursts), False)


def paired(ours: Sequence[Burst], theirs: Sequence[Burst]) -> tuple[float, float, float]:
    """Requests per CPU second, ours over theirs, round by round: median, lowest, highest."""
    each = sorted(a.per_cpu_s / b.per_cpu_s for a, b in zip(ours, theirs, strict=True))
    return median(each), each[0], each[-1]


async def trial_of(
    server: Peer, trace: Trace, make: Make, goals: Sequence[Goal], rate: float, seed: int, requests: int
) -> Trial:
    """One stretch of the trace at one rate. Requests are made before the first is sent."""
    offered = drawn(trace, requests, seed).scale(rate=rate)
    asked = await made(make, offered)
    gc.collect()
    with Load(server.sessions) as load:
        served = await replayed(server, offered, asked)
    seen = {"cpu_s": load.cpu_s, "wall_s": load.wall_s, "foreign": load.foreign}
    return trial(server.engine.name, rate, seed, served, goals, **seen)


def attaining(trace: Trace, make: Make, goals: Sequence[Goal], rate: float, requests: int) -> Tried:
    """A short trial for ``sweep``, of a stretch of the trace that no seed of ``range`` draws."""

    async def tried(server: Peer) -> float:
        seen = await trial_of(server, trace, make, goals, rate, SWEEP_SEED, requests)
        return mean(seen.attainment.values())

    return tried


def ready(kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of these engines: those installed, those not."""
    there = [each for each in kinds if installed(each)]
    return there, [each for each in kinds if each not in there]
