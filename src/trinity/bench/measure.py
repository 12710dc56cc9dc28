"""Measurements on servers: bursts per CPU second, sweeps of batching, exactness, open-loop trials."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from statistics import mean, median
from typing import Any

import msgspec
from msgspec.structs import replace

from trinity.bench.client import replay_to_server
from trinity.bench.load import RequestMaker, draw_stretch, make_requests
from trinity.bench.machine import MAX_FOREIGN_SHARE, LoadMeter
from trinity.bench.search import Goal, Trial, score_trial
from trinity.bench.servers import BenchRequest, BenchServer, EngineSpec, Server, ServerAnswer, is_installed
from trinity.errors import ConfigError, PeerLost
from trinity.traces.trace import Trace

ServerFactory = Callable[[EngineSpec, Path], Server]
TrialFunction = Callable[[BenchServer], Awaitable[float]]
SWEEP_SEED = 1 << 16


class Burst(msgspec.Struct, frozen=True, kw_only=True):
    """Result of requests sent at once: the engine's CPU seconds, wall seconds, and the share that others took."""

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


async def run_burst(server: BenchServer, requests: Sequence[BenchRequest]) -> Burst:
    """Send all requests at once and wait. Raises ``PeerLost`` where one fails or has too few tokens."""
    with LoadMeter(server.sessions) as load:
        answers = [server.ask(each) for each in requests]
        for answer in answers:
            await answer.done.wait()
    for answer, request in zip(answers, requests, strict=True):
        _check(server, answer, request)
    return Burst(requests=len(requests), cpu_s=max(load.cpu_s, 1e-3), wall_s=load.wall_s, foreign=load.foreign)


def _check(server: BenchServer, answer: ServerAnswer, request: BenchRequest) -> None:
    if answer.end != "length" or len(answer.tokens) != request.tokens:
        ended = f"ended with {answer.end!r} after {len(answer.tokens)} of {request.tokens} tokens"
        raise PeerLost(f"a request to {server.engine.name} {ended}", "bench")


class SweepPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Result of one setting of an engine (tokens a step, options) on a burst; ``problem`` says why it did not run.

    ``attained`` is the share of a short trial's requests that met the SLO, mean of the goals; None without a trial.
    """

    tokens: int
    options: dict[str, Any] = {}
    per_cpu_s: float = 0.0
    per_s: float = 0.0
    attained: float | None = None
    problem: str = ""


def sweep_settings(engine: EngineSpec, tokens: Sequence[int]) -> list[EngineSpec]:
    """Make one spec of the engine for every number of tokens a step."""
    return [replace(engine, tokens=each) for each in tokens]


async def sweep(
    engines: Sequence[EngineSpec],
    checkpoint: Path,
    requests: Sequence[BenchRequest],
    start: ServerFactory = Server,
    trial: TrialFunction | None = None,
) -> list[SweepPoint]:
    """Run one burst under every setting of an engine, each after a warm-up request; a single setting is not run.

    ``trial`` follows each burst and returns the share in time, see ``make_trial``.
    """
    found: list[SweepPoint] = []
    for each in engines if len(engines) > 1 else ():
        one = SweepPoint(tokens=each.tokens, options=each.options)
        try:
            async with start(each, checkpoint) as server:
                await run_burst(server, requests[:1])
                seen = await run_burst(server, requests)
                share = await trial(server) if trial else None
            found.append(replace(one, per_cpu_s=seen.per_cpu_s, per_s=seen.per_s, attained=share))
        except (ConfigError, PeerLost) as error:
            found.append(replace(one, problem=str(error)))
    return found


def best_setting(swept: Sequence[SweepPoint], wall: bool = False) -> SweepPoint:
    """Choose the setting that attains most; of equals the one with most requests per CPU or wall second.

    Raises ``ConfigError`` where none ran.
    """
    ran = [each for each in swept if not each.problem]
    if not ran:
        raise ConfigError(f"no setting of the sweep ran: {'; '.join(each.problem for each in swept)}")
    return max(ran, key=lambda each: (each.attained or 0.0, each.per_s if wall else each.per_cpu_s))


async def answer_tokens(
    engine: EngineSpec, checkpoint: Path, requests: Sequence[BenchRequest], start: ServerFactory = Server
) -> list[list[int]]:
    """Return an engine's output tokens for each request, in float32."""
    async with start(replace(engine, dtype="float32"), checkpoint) as server:
        answers = [server.ask(each) for each in requests]
        for answer in answers:
            await answer.done.wait()
    return [answer.tokens for answer in answers]


async def count_exact(
    engines: Sequence[EngineSpec], checkpoint: Path, requests: Sequence[BenchRequest], start: ServerFactory = Server
) -> dict[str, int]:
    """Count by engine the requests whose tokens equal those of ``generate()``, in float32, all sent at once."""
    right = await answer_tokens(EngineSpec(kind="generate"), checkpoint, requests, start)
    found = {}
    for engine in engines:
        given = await answer_tokens(engine, checkpoint, requests, start)
        found[engine.name] = sum(bool(a) and a == b for a, b in zip(given, right, strict=True))
    return found


@asynccontextmanager
async def start_servers(
    engines: Sequence[EngineSpec], checkpoint: Path, start: ServerFactory = Server
) -> AsyncIterator[dict[str, Server]]:
    """Start all servers at once, by name. Idle ones take no CPU time; if one does, it counts as others' load."""
    async with AsyncExitStack() as stack:
        yield {each.name: await stack.enter_async_context(start(each, checkpoint)) for each in engines}


async def run_rounds(
    servers: dict[str, Server], requests: Sequence[BenchRequest], count: int
) -> dict[str, list[Burst]]:
    """Run bursts in turn, A B A B, after one each that does not count."""
    found: dict[str, list[Burst]] = {name: [] for name in servers}
    for turn in range(count + 1):
        for name, server in servers.items():
            seen = await run_burst(server, requests)
            if turn:
                found[name].append(seen)
    return found


def select_undisturbed(bursts: Sequence[Burst]) -> tuple[list[Burst], bool]:
    """Select undisturbed bursts and True, or all of them and False where every one was disturbed."""
    quiet = [each for each in bursts if each.foreign <= MAX_FOREIGN_SHARE]
    return (quiet, True) if quiet else (list(bursts), False)


def compare_rounds(ours: Sequence[Burst], theirs: Sequence[Burst]) -> tuple[float, float, float]:
    """Compare requests per CPU second round by round, ours over theirs: median, lowest, highest."""
    each = sorted(a.per_cpu_s / b.per_cpu_s for a, b in zip(ours, theirs, strict=True))
    return median(each), each[0], each[-1]


async def run_trial(
    server: BenchServer, trace: Trace, make: RequestMaker, goals: Sequence[Goal], rate: float, seed: int, requests: int
) -> Trial:
    """Run one stretch of the trace at one rate. All requests are made before the first is sent."""
    offered = draw_stretch(trace, requests, seed).scale(rate=rate)
    asked = await make_requests(make, offered)
    gc.collect()
    with LoadMeter(server.sessions) as load:
        served = await replay_to_server(server, offered, asked)
    seen = {"cpu_s": load.cpu_s, "wall_s": load.wall_s, "foreign": load.foreign}
    return score_trial(server.engine.name, rate, seed, served, goals, **seen)


def make_trial(trace: Trace, make: RequestMaker, goals: Sequence[Goal], rate: float, requests: int) -> TrialFunction:
    """Make a short trial for ``sweep``, of a stretch that no seed of the measurement draws."""

    async def attain(server: BenchServer) -> float:
        seen = await run_trial(server, trace, make, goals, rate, SWEEP_SEED, requests)
        return mean(seen.attainment.values())

    return attain


def split_installed(kinds: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split engines into those installed and those not."""
    there = [each for each in kinds if is_installed(each)]
    return there, [each for each in kinds if each not in there]
