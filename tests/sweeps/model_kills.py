"""Kills, freezes and stops instances of a real model under load, by role and phase: every request is exact.

    python tests/sweeps/model_kills.py [--strikes 500] [--seed 0] [--schemes shm nixl ucx] [--recoveries 9]
                                       [--moves 0.3]

A tiny LLaVA in float32 serves in processes. Greedy tokens are compared with transformers' ``generate()``, sampled ones,
with penalties and log-probabilities, with the same request served undisturbed. Each strike draws a role and waits until
a request is there in the phase it drew: also amid a move, at the one that hands it on or at the one that is to have it.
Meanwhile readers ask after a share (``--moves``) of their tokens that their decode go on elsewhere. Instances switch to
all roles and back, too. The table counts strikes by role, phase and placement, the longest gap between
two tokens by kind, and the goodput in the seconds after a strike beside that in calm. ``--recoveries 0`` shows the same
without recovery: there typed errors are no failure of the sweep.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec

from support import paths
from support.checkpoint_files import checkpoint
from support.pipeline_options import pipeline_options
from sweeps.kills import AFTER_S as WATCH_S
from sweeps.kills import LAUNCHER_ALONE, launcher_of, lives, send
from trinity.core.failure_policy import FailurePolicy
from trinity.errors import ChangeRefused, ConfigError, MoveError, RequestError, TransportUnavailable
from trinity.pipeline import Pipeline
from trinity.pipeline.stream import Stream
from trinity.request import Output, Request, Sampling
from trinity.testing.oracle import Oracle

PLACEMENTS = ("E+P+D", "EP+D", "ED+P", "EPD", "1E1P2D", "2EPD", "1EP2D")
SCHEMES = ("shm", "nixl", "ucx")
KINDS = ("kill", "kill", "kill", "freeze", "stumble", "switch", "launcher killed", "launcher frozen")
STRIKES = {"launcher killed": signal.SIGKILL, "launcher frozen": signal.SIGSTOP}
PHASES = ("before its first token", "amid its tokens")
MOVES = ("hands a decode on", "is to have a decode")
PHOTOS = sorted(paths.PHOTOS.glob("*.jpg"))
AT_ONCE, PER_PIPELINE = 8, 10
SILENCE_S, STUMBLE_S, END_S, AFTER_S, MEET_S = 2.0, 1.0, 120.0, 5.0, 3.0


@cache
def asked() -> tuple[Request, ...]:
    """Requests of none to two images, greedy and sampled in turn."""
    made = []
    for number in range(16):
        images = [PHOTOS[(number + each) % len(PHOTOS)] for each in range(number % 3)]
        text = "<image> " * len(images) + f"Tell {number} things."
        drawn: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 0.4, "logprobs": 1}
        way = Sampling(ignore_eos=True, seed=number, **(drawn if number % 2 else {}))
        made.append(Request(text, images=images, max_tokens=20 + 23 * number % 180, sampling=way))
    return tuple(made)


@cache
def greedy_tokens() -> list[list[int]]:
    return Oracle(checkpoint("llava")).generate_all(asked()[::2])


@dataclass
class Tally:
    """Results of all strikes."""

    strikes: Counter[tuple[str, str, str, str, str]] = field(default_factory=Counter)
    gaps: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    served: list[tuple[float, int]] = field(default_factory=list)  # (time, tokens) of each whole one
    struck: list[float] = field(default_factory=list)
    whole: int = 0
    survived: int = 0
    tokens: int = 0  # compared
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    moves: Counter[str] = field(default_factory=Counter)  # by how they ended

    def note_whole(self, output: Output, kind: str) -> None:
        self.whole += 1
        self.served.append((time.monotonic(), len(output.token_ids)))
        self.tokens += len(output.token_ids)
        self.survived += output.lives > 1
        if output.lives > 1 or kind in LAUNCHER_ALONE:
            self.gaps[kind].append(max(output.ttft_s or 0.0, *output.itl_s))

    def goodput(self) -> str:
        """Tokens of whole requests each second, within ``AFTER_S`` of a strike and at all other times."""
        if not self.served or not self.struck:
            return "no strike was done"
        begin, end = self.served[0][0], self.served[-1][0]
        spans = join_spans([(each, min(each + AFTER_S, end)) for each in self.struck])
        near_s = sum(until - since for since, until in spans)
        near = sum(tokens for at, tokens in self.served if any(since <= at <= until for since, until in spans))
        far = sum(tokens for _, tokens in self.served) - near
        calm = f"{far / (end - begin - near_s):.0f} at all other times" if end - begin > near_s + 1 else "none calm"
        return f"tokens/s of whole requests: {near / max(near_s, 1e-9):.0f} within {AFTER_S:.0f} s of a strike, {calm}"

    def report(self) -> str:
        rows = []
        for axis, name in enumerate(("kind", "transport", "placement", "role", "phase")):
            counts: Counter[str] = Counter()
            for struck, number in self.strikes.items():
                counts[struck[axis]] += number
            rows.append(f"strikes by {name}: " + ", ".join(f"{each} {counts[each]}" for each in sorted(counts)))
        for kind, found in sorted(self.gaps.items()):
            rows.append(
                f"gap after a {kind}: median {sorted(found)[len(found) // 2]:.2f} s, longest {max(found):.2f} s"
            )
        rows.append("moves: " + ", ".join(f"{how} {number}" for how, number in sorted(self.moves.items())))
        rows.append(self.goodput())
        met = len({struck[2:] for struck in self.strikes})
        rows.append(f"{sum(self.strikes.values())} strikes, {met} of role x phase x placement; {self.whole} requests")
        rows[-1] += f" whole and exact, {self.survived} of them after losses; other ends: {dict(self.failed)}"
        rows[-1] += f"; {self.tokens} tokens compared"
        return "\n".join([*rows, *(f"WRONG: {each}" for each in self.wrong)])


def join_spans(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merge spans that overlap; they come in the order of their beginnings."""
    joined: list[tuple[float, float]] = []
    for since, until in spans:
        if joined and since <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(until, joined[-1][1]))
        elif until > since:
            joined.append((since, until))
    return joined


class Traffic:
    """Requests that are asked without a pause, ``AT_ONCE`` at a time, each held against what is right."""

    def __init__(
        self, pipe: Pipeline, alone: Sequence[Output], draw: random.Random, tally: Tally, moves: float
    ) -> None:
        self.pipe, self.alone, self.draw, self.tally, self.moves = pipe, alone, draw, tally, moves
        self._moving: set[asyncio.Task[None]] = set()
        self.kind, self.ending, self._times = "", False, count()
        self._readers = [asyncio.ensure_future(self._ask()) for _ in range(AT_ONCE)]

    async def _ask(self) -> None:
        while not self.ending:
            number = self.draw.randrange(len(asked()))
            request = msgspec.structs.replace(
                asked()[number], request_id=f"{number} for the {next(self._times)}th time"
            )
            stream = self.pipe.stream(request)
            try:
                async with asyncio.timeout(END_S), stream as tokens:
                    async for _ in tokens:
                        if self.draw.random() < self.moves:
                            self._begin_move(stream)
                output = stream.output
                self.tally.note_whole(output, self.kind)
                self._compare(output, self.alone[number], whole=True)
            except TimeoutError:
                self.tally.wrong.append(f"no end within {END_S} s: {request}")
            except RequestError as error:
                self.tally.failed[f"{type(error).__name__}: {str(error)[:120]}"] += 1
                if stream.done:
                    self._compare(stream.output, self.alone[number], whole=False)
                await asyncio.sleep(0.02)

    def _begin_move(self, stream: Stream) -> None:
        """Have it go on at another instance that decodes; how that ends is counted."""
        others = [name for name in self.pipe.processes if "D" in roles_of(name) and name != stream.place]
        if others:
            task = asyncio.ensure_future(self._move(stream, self.draw.choice(others)))
            self._moving.add(task)
            task.add_done_callback(self._moving.discard)

    async def _move(self, stream: Stream, to: str) -> None:
        try:
            await stream.move(to)
            self.tally.moves["moved"] += 1
        except MoveError as error:
            self.tally.moves[error.reason] += 1

    def _compare(self, output: Output, right: Output, *, whole: bool) -> None:
        if output.token_ids != right.token_ids[: None if whole else len(output.token_ids)]:
            self.tally.wrong.append(f"other tokens after {output.former_lives}: {output.token_ids}")
        if whole and output.text != right.text:
            self.tally.wrong.append(f"another text: {output.text!r}, and not {right.text!r}")

    async def end(self) -> None:
        self.ending = True
        await asyncio.gather(*self._readers)
        await asyncio.gather(*self._moving)


def roles_of(name: str) -> str:
    """Letters of the stages that an instance has by its name, and has again after each switch."""
    return name.rstrip("0123456789")


async def serve_undisturbed() -> list[Output]:
    """Serve each request in one process; greedy ones are held against ``generate()``."""
    async with Pipeline(checkpoint("llava"), "EPD", dtype="float32") as pipe:
        outputs = [await pipe.complete(each) for each in asked()]
    assert [each.token_ids for each in outputs[::2]] == greedy_tokens()
    return outputs


def find_phase(pipe: Pipeline, name: str) -> str:
    """Phase of the requests that are at this instance, as far as the front end knows."""
    entries = pipe._frontend.core.entries.values()
    there = [each for each in entries if each.route and each.route[-1] == name]
    found = {PHASES[each.delivered > 0] for each in there}
    found |= {MOVES[0] for each in there if each.moving} | {MOVES[1] for each in entries if each.moving == name}
    return " and ".join(sorted(found)) or "nothing there"


async def strike(pipe: Pipeline, kind: str, role: str, phase: str, draw: random.Random) -> str:
    """Strike an instance of this role once a request is there in this phase; return what was there."""
    name = draw.choice([each for each in pipe.processes if role in roles_of(each)])
    until = time.monotonic() + MEET_S
    while phase not in find_phase(pipe, name) and time.monotonic() < until:
        await asyncio.sleep(0)
    met = find_phase(pipe, name)
    if kind == "switch":
        await switch_and_back(pipe, name)
        return met
    launcher = launcher_of(pipe)
    if kind in LAUNCHER_ALONE:
        send(launcher._process.pid if launcher is not None else 0, STRIKES[kind])
        return met
    victim = pipe.processes[name].process
    send(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if kind == "stumble":
        await asyncio.sleep(STUMBLE_S)
        send(victim, signal.SIGCONT)
    return met


async def switch_and_back(pipe: Pipeline, name: str) -> None:
    """Have an instance take all roles, and then its own again."""
    for roles in ("EPD" if roles_of(name) != "EPD" else "PD", roles_of(name)):
        try:
            await pipe.switch(name, roles)
        except (ChangeRefused, ConfigError) as error:  # an instance is away, or nobody else has the stage
            print(f"  no switch: {error}")
            return


async def recover(pipe: Pipeline, before: dict[str, int], kind: str) -> None:
    """Wait until the loss was noticed, and every instance is up."""
    while kind not in ("stumble", "switch", *LAUNCHER_ALONE) and lives(pipe) == before:
        await asyncio.sleep(0.01)
    while {health.state for health in pipe.health.values()} != {"up"}:
        await asyncio.sleep(0.01)


async def strike_one_pipeline(
    scheme: str, strikes: int, recoveries: int, moves: float, alone: Sequence[Output], draw: random.Random, tally: Tally
) -> None:
    placement = draw.choice(PLACEMENTS)
    policy = FailurePolicy(recoveries=recoveries) if recoveries else FailurePolicy(recoveries=0, wait_s=0)
    options = pipeline_options({"silence_s": SILENCE_S, "connector": scheme, "failures": policy, "dtype": "float32"})
    async with Pipeline(checkpoint("llava"), placement, hosting="process", **options) as pipe:
        traffic = Traffic(pipe, alone, draw, tally, moves)
        for _ in range(strikes):
            await asyncio.sleep(draw.uniform(0.2, 1.5))
            traffic.kind, role, phase = draw.choice(KINDS), draw.choice("EPD"), draw.choice(PHASES)
            if moves and sum("D" in roles_of(each) for each in pipe.processes) > 1 and draw.random() < 0.5:
                role, phase = "D", draw.choice(MOVES)
            before, began = lives(pipe), time.monotonic()
            met = await strike(pipe, traffic.kind, role, phase, draw)
            tally.struck.append(time.monotonic())
            tally.strikes[traffic.kind, scheme, placement, role, met] += 1
            try:
                async with asyncio.timeout(END_S):
                    await recover(pipe, before, traffic.kind)
            except TimeoutError:
                tally.wrong.append(f"{traffic.kind} on {scheme}, {placement}: not recovered, {pipe.health}")
                break
            if traffic.kind in LAUNCHER_ALONE:
                await asyncio.sleep(WATCH_S)
                if lives(pipe) != before:
                    tally.wrong.append(f"{traffic.kind} on {scheme}, {placement}: an instance was lost, {pipe.health}")
            took = time.monotonic() - began
            print(f"  {sum(tally.strikes.values())} {scheme} {placement} {traffic.kind} {role}, {met}: {took:.2f} s")
        await traffic.end()


async def sweep(strikes: int, seed: int, schemes: Sequence[str], recoveries: int, moves: float = 0.3) -> Tally:
    """Do so many strikes over the transports that are there, in turn."""
    draw, tally = random.Random(seed), Tally()
    alone, usable = await serve_undisturbed(), list(schemes)
    while usable and sum(tally.strikes.values()) < strikes and not tally.wrong:
        for scheme in list(usable):
            left = min(PER_PIPELINE, strikes - sum(tally.strikes.values()))
            try:
                await strike_one_pipeline(scheme, left, recoveries, moves, alone, draw, tally)
            except (TransportUnavailable, ConfigError) as error:
                print(f"{scheme} is not to be had here: {error}")
                usable.remove(scheme)
            if tally.wrong:
                break
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--strikes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    parser.add_argument("--recoveries", type=int, default=9)
    parser.add_argument("--moves", type=float, default=0.3, help="share of the tokens behind which a decode is to move")
    given = parser.parse_args(argv)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    logger = logging.getLogger("trinity")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        tally = asyncio.run(sweep(given.strikes, given.seed, given.schemes, given.recoveries, given.moves))
    finally:
        logger.setLevel(level)  # a test runs this in its own process
    print(tally.report())
    return 1 if tally.wrong or (given.recoveries and tally.failed) or not tally.strikes else 0


if __name__ == "__main__":
    raise SystemExit(main())
