"""Kills and freezes instances and launchers under load, singly and in pairs, over each transport: how long each takes.

``make kills`` runs it. Stages are emulated, so that an instance loads in no time, and every token can be told; cores,
processes, channels, transports and blocks are real. A strike went well if all that were asked end within ``END_S``,
whole ones exactly, others with a typed error and an exact beginning, and if every instance is up and serves again.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.emulated_pipelines import MODEL, POOLS, right
from trinity.core.failure_policy import FailurePolicy
from trinity.emulation.model import EmulatedRequest
from trinity.errors import ConfigError, RequestError, TransportUnavailable, TrinityError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.remote.supervision import supervisor_core
from trinity.remote.supervision.fork_client import Launcher
from trinity.remote.supervision.process_config import ProcessConfig
from trinity.remote.supervision.supervisor_messages import InstanceHealth
from trinity.request import Output

SCHEMES = ("shm", "nixl", "ucx", "auto")
PLACEMENTS = ("1E1P1D", "1E2P1D", "2EP1D", "1EP2D", "E+P+D")
KINDS = (
    "kill",
    "freeze",
    "stumble",
    "two killed",
    "two killed apart",
    "killed and frozen",
    "launcher killed",
    "launcher killed twice",
    "launcher frozen",
    "launcher killed and one",
    "launcher frozen and one",
)
LAUNCHER_ALONE = ("launcher killed", "launcher killed twice", "launcher frozen")  # which no request may notice
MANY = FailurePolicy(recoveries=9)  # a strike may be two, and each instance is struck again soon
SILENCE_S, STUMBLE_S, END_S, RECOVERY_S = 2.0, 1.0, 90.0, 5.0
AFTER_S = 1.0  # for what a struck launcher might take with it to be noticed
AT_ONCE = 12
PER_PIPELINE = 10


@dataclass
class Tally:
    """Results of all strikes: the longest recovery of each kind, and what went wrong."""

    recoveries: dict[str, list[float]] = field(default_factory=dict)
    slow: list[str] = field(default_factory=list)
    whole: int = 0
    survived: int = 0
    longest_gap_s: float = 0.0  # between two tokens of one that survived a loss
    tokens: int = 0  # compared
    beside_launchers: int = 0  # requests that ended while only the launcher was struck
    launcher_gap_s: float = 0.0  # longest between two tokens of such
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def note_whole(self, output: Output, kind: str) -> None:
        self.whole += 1
        self.tokens += len(output.token_ids)
        if kind in LAUNCHER_ALONE:
            self.beside_launchers += 1
            self.launcher_gap_s = max(self.launcher_gap_s, *output.itl_s, 0.0)
        if output.lives > 1:
            self.survived += 1
            self.longest_gap_s = max(self.longest_gap_s, output.ttft_s or 0.0, *output.itl_s)

    @property
    def strikes(self) -> int:
        return sum(map(len, self.recoveries.values()))

    def report(self) -> str:
        rows = [f"{'seconds without loading':30} {'times':>6} {'median':>9} {'longest':>10}"]
        for kind, found in sorted(self.recoveries.items()):
            rows.append(f"{kind:30} {len(found):6} {sorted(found)[len(found) // 2]:9.2f} {max(found):10.2f}")
        survived = f"{self.survived} of them after losses, with gaps of up to {self.longest_gap_s:.1f} s"
        rows.append(f"{self.strikes} strikes; {self.whole} requests whole, {survived}; {dict(self.failed)}")
        beside = f"{self.beside_launchers} ended while only the launcher was struck"
        rows.append(f"{self.tokens} tokens compared; {beside}, with gaps of up to {self.launcher_gap_s:.1f} s")
        return "\n".join([*rows, *(f"WRONG: {each}" for each in self.wrong)])


class LoadingClock:
    """Seconds that each instance has spent being started, from what ``on_change`` tells."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._spent: dict[str, float] = {}

    def note(self, health: InstanceHealth) -> None:
        since = self._since.pop(health.name, None)
        if since is not None and health.state == "up":
            self._spent[health.name] = self._spent.get(health.name, 0.0) + time.monotonic() - since
        if health.state == "starting":
            self._since[health.name] = time.monotonic()

    def longest(self) -> float:
        """Return the most seconds of any instance, and count from zero again."""
        most = max(self._spent.values(), default=0.0)
        self._spent.clear()
        return most


class Traffic:
    """Requests that are asked without a pause, ``AT_ONCE`` at a time, each held against what it must give."""

    def __init__(self, pipe: Pipeline, draw: random.Random, tally: Tally) -> None:
        self.pipe, self.draw, self.tally = pipe, draw, tally
        self.ending, self.kind = False, ""
        self._readers = [asyncio.ensure_future(self._ask()) for _ in range(AT_ONCE)]

    def request(self) -> EmulatedRequest:
        images = (576,) * self.draw.choice((0, 1, 1, 2))
        text, tokens = self.draw.randrange(10, 300), self.draw.randrange(1, 40)
        return EmulatedRequest(text_tokens=text, image_tokens=images, max_tokens=tokens)

    async def _ask(self) -> None:
        while not self.ending:
            request = self.request()
            stream = self.pipe.stream(request)
            try:
                async with asyncio.timeout(END_S):
                    async with stream as tokens:
                        output = await tokens.collect()
                self.tally.note_whole(output, self.kind)
                if output.token_ids != right(request):
                    self.tally.wrong.append(f"other tokens: {output}")
            except TimeoutError:
                self.tally.wrong.append(f"no end within {END_S} s: {request}")
            except RequestError as error:
                self.tally.failed[type(error).__name__] += 1
                got = stream.output.token_ids if stream.done else []
                if got != right(request)[: len(got)]:
                    self.tally.wrong.append(f"another beginning: {stream.output}")
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        self.ending = True
        await asyncio.gather(*self._readers)


def send(process: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        if process:
            os.kill(process, number)


def launcher_of(pipe: Pipeline) -> Launcher | None:
    assert pipe._served.supervisor is not None
    known = pipe._served.supervisor.forks.opening
    return known.result()[0] if known is not None and known.done() and not known.exception() else None


async def strike(pipe: Pipeline, kind: str, draw: random.Random) -> None:
    """Do one of ``KINDS`` to instances or the launcher that are drawn."""
    processes = [member.process for member in pipe.processes.values()]
    one, two = draw.sample(processes, 2)
    launcher = launcher_of(pipe)
    if kind.startswith("launcher"):
        if launcher is not None:
            send(launcher._process.pid, signal.SIGSTOP if "frozen" in kind else signal.SIGKILL)
        if kind.endswith("twice"):
            await asyncio.sleep(draw.uniform(0.0, 0.3))
            launcher = launcher_of(pipe)
            send(launcher._process.pid if launcher is not None else 0, signal.SIGKILL)
        if kind.endswith("one"):
            send(one, signal.SIGKILL)
    elif kind == "stumble":
        send(one, signal.SIGSTOP)
        await asyncio.sleep(STUMBLE_S)
        send(one, signal.SIGCONT)
    else:
        send(one, signal.SIGSTOP if kind == "freeze" else signal.SIGKILL)
        if kind == "two killed apart":
            await asyncio.sleep(draw.uniform(0.0, 0.6))
            two = draw.choice([member.process for member in pipe.processes.values()])
        if kind.startswith("two"):
            send(two, signal.SIGKILL)
        elif kind == "killed and frozen":
            send(two, signal.SIGSTOP)


def lives(pipe: Pipeline) -> dict[str, int]:
    return {name: health.epoch for name, health in pipe.health.items()}


async def recover(pipe: Pipeline, before: dict[str, int], struck: bool) -> None:
    """Wait until the loss has been noticed, every instance is up, and a request with an image is served."""
    while struck and lives(pipe) == before:
        await asyncio.sleep(0.01)
    while {health.state for health in pipe.health.values()} != {"up"}:
        await asyncio.sleep(0.01)
    while True:
        with suppress(TrinityError):
            await pipe.complete(EmulatedRequest(text_tokens=20, image_tokens=(576,), max_tokens=3))
            return
        await asyncio.sleep(0.01)


async def strike_one_pipeline(scheme: str, kinds: Sequence[str], draw: random.Random, tally: Tally) -> None:
    """Serve under load while each of these kinds of strikes is done in turn."""
    placement = draw.choice(PLACEMENTS)
    loading = LoadingClock()
    terms = ProcessConfig(silence_s=SILENCE_S, on_change=loading.note)
    options = {"connector": scheme, "cache": CacheConfig(pools=POOLS), "processes": terms, "failures": MANY}
    async with Pipeline(MODEL, placement, hosting="process", **options) as pipe:  # type: ignore[arg-type]
        traffic = Traffic(pipe, draw, tally)
        for kind in kinds:
            await asyncio.sleep(draw.uniform(0.1, 0.5))
            loading.longest()
            before, began = lives(pipe), time.monotonic()
            traffic.kind = kind
            await strike(pipe, kind, draw)
            try:
                async with asyncio.timeout(END_S):
                    await recover(pipe, before, kind not in ("stumble", *LAUNCHER_ALONE))
            except TimeoutError:
                tally.wrong.append(f"{kind} on {scheme}, {placement}: not recovered, {pipe.health}")
                break
            if kind in LAUNCHER_ALONE:
                await asyncio.sleep(AFTER_S)
                if lives(pipe) != before:
                    tally.wrong.append(f"{kind} on {scheme}, {placement}: an instance was lost, {pipe.health}")
            traffic.kind = ""
            took, loaded = time.monotonic() - began, loading.longest()
            tally.recoveries.setdefault(f"{scheme}: {kind}", []).append(took - loaded)
            print(
                f"  {tally.strikes} {scheme} {placement} {kind}: {took:.2f} s, {loaded:.2f} s of it loading", flush=True
            )
            if took - loaded > RECOVERY_S:
                tally.slow.append(f"{kind} on {scheme}, {placement}: {took:.2f} s, {loaded:.2f} s of it loading")
        await traffic.end()
        began = time.monotonic()
    if time.monotonic() - began > END_S:
        tally.wrong.append("closing took too long")


async def sweep(strikes: int, seed: int, schemes: Sequence[str]) -> Tally:
    """Do so many strikes over the transports that are there, in turn."""
    draw, tally = random.Random(seed), Tally()
    usable = list(schemes)
    while tally.strikes < strikes and usable and not tally.wrong:
        for scheme in list(usable):
            kinds = draw.sample(KINDS, k=len(KINDS))[: max(1, min(PER_PIPELINE, strikes - tally.strikes))]
            try:
                await strike_one_pipeline(scheme, kinds, draw, tally)
            except (TransportUnavailable, ConfigError) as error:
                print(f"{scheme} is not to be had here: {error}", flush=True)
                usable.remove(scheme)
            if tally.strikes >= strikes or tally.wrong:
                break
    return tally


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--strikes", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--schemes", nargs="*", default=SCHEMES)
    asked = parser.parse_args(argv)
    logger = logging.getLogger("trinity")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with patch.object(supervisor_core, "LONGEST_BACKOFF_S", 1.0):  # else who is struck often is left out for long
            tally = asyncio.run(sweep(asked.strikes, asked.seed, asked.schemes))
    finally:
        logger.setLevel(level)  # a test runs this in its own process
    print(tally.report())
    print(f"recoveries over {RECOVERY_S} s without loading: {'; '.join(tally.slow) or 'none'}")
    return 1 if tally.wrong or tally.slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
