"""Each ordered pair of roles, switched live under load between processes: seconds of each part of a switch.

A tiny LLaVA in float32, two instances of each role, and clients that ask one request after another all the time: text,
an image, two images. Two instances go through all six pairs of roles. What is measured is what EPDServe (3.2.4) calls
offload (until the instance is empty: its decodes move away, its encodes end), migration (its former life has ended and
the next one has pools) and onload (it has met the others); and the preparation before, in which it serves and its next
life loads beside it. The predicates: beside the drain each switch takes less than
0.7 s, as EPDServe says of its own; no request is lost; the tokens of each are those of transformers' generate().
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity.core.role_changes import Switch
from trinity.errors import RequestError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Request, Sampling

WAYS = ("shm", "nixl")
PLACEMENT = "2E2P2D"
ROUTE = (("E1", "PEDE"), ("P1", "DP"))  # six switches: every ordered pair, from E1 and P1 on
PAIRS = ("E>P", "P>E", "E>D", "D>E", "P>D", "D>P")
CLIENTS, LENGTH = 6, 120
POOLS = {"image": 24, "kv": 512}
PAPER_S = 0.7
BETWEEN_S = 0.3  # from one switch to the next: the load spreads over what there is


class Load:
    """Clients of a pipeline, and what became of their requests: ``served``, ``wrong``, ``lost`` and ``recovered``."""

    def __init__(self, pipe: Pipeline, photos: Sequence[Path], wanted: Sequence[list[int]]) -> None:
        self._pipe, self._photos, self._wanted = pipe, photos, wanted
        self.served = self.wrong = self.lost = self.recovered = 0
        self._going = True

    async def ask(self, client: int) -> None:
        """Ask one request after another."""
        number = client
        while self._going:
            place = number % len(self._wanted)
            number += 1
            try:
                output = await self._pipe.complete(requests(self._photos)[place])  # a new one: ids are used once
            except RequestError:
                self.lost += 1
                await asyncio.sleep(0)  # one that is refused at once must not hold up the loop
                continue
            self.served += 1
            self.wrong += output.token_ids != self._wanted[place]
            self.recovered += output.lives > 1

    def stop(self) -> None:
        """Have each client end with its present request."""
        self._going = False


class Measured(NamedTuple):
    """What one pipeline's switches took, and what became of its requests."""

    way: str
    switches: list[Switch]
    served: int
    wrong: int
    lost: int
    recovered: int


def requests(photos: Sequence[Path]) -> list[Request]:
    plain = Sampling(ignore_eos=True)
    return [
        Request("<image>\nWhat is this?", images=photos[:1], max_tokens=LENGTH, sampling=plain),
        Request("Only text, and no picture", max_tokens=LENGTH, sampling=plain),
        Request("<image> and <image>?", images=photos[1:3], max_tokens=LENGTH, sampling=plain),
    ]


async def measure(model: Path, way: str, rounds: int, photos: Sequence[Path], wanted: Sequence[list[int]]) -> Measured:
    """Serve while each pair is switched, ``rounds`` times over."""
    done: list[Switch] = []
    cache = CacheConfig(pools=POOLS)
    async with Pipeline(model, PLACEMENT, dtype="float32", hosting="process", connector=way, cache=cache) as pipe:
        load = Load(pipe, photos, wanted)
        clients = [asyncio.create_task(load.ask(number)) for number in range(CLIENTS)]
        try:
            for _ in range(rounds):
                for name, route in ROUTE:
                    for roles in route:
                        await asyncio.sleep(BETWEEN_S)
                        done.append(await pipe.switch(name, roles))
        finally:
            load.stop()
            with suppress(RequestError):
                await asyncio.gather(*clients)
    return Measured(way, done, load.served, load.wrong, load.lost, load.recovered)


def run(setting: Setting) -> Result:
    """All pairs over each transport, three times over."""
    from trinity.testing.oracle import Oracle

    model, rounds = setting.checkpoint("llava"), 1 if setting.quick else 3
    wanted = Oracle(model).generate_all(requests(setting.photos))
    ways = WAYS[:1] if setting.quick else WAYS
    return result([asyncio.run(measure(model, way, rounds, setting.photos, wanted)) for way in ways])


# ---------------------------------------------------------------- the result


class Parts(NamedTuple):
    """Median seconds of a pair's switches; ``most``: of the longest one beside preparation and drain."""

    prepare: float
    drain: float
    migration: float
    onload: float
    beside: float
    most: float


HEADER = (
    "transport",
    "switch",
    "preparation s",
    "drain s",
    "migration s",
    "onload s",
    "beside the drain s",
    "the longest s",
)


def result(found: Sequence[Measured]) -> Result:
    parts = {(each.way, pair): summed(each.switches, pair) for each in found for pair in PAIRS}
    rows = [[way, pair, *(f"{seconds:.2f}" for seconds in part)] for (way, pair), part in parts.items()]
    return Result(
        name="switches",
        title="Every pair of roles, switched live under load",
        method=(
            f"A tiny LLaVA in float32, {PLACEMENT} in processes, {CLIENTS} clients that always have a request of "
            f"{LENGTH} tokens. One instance after another goes through each ordered pair of roles. Median of each "
            "pair's switches; all seconds are wall time. While its next life is prepared, an instance serves."
        ),
        tables=[Table("Parts of a switch", HEADER, rows)],
        aims=list(aims(found, parts)),
        notes=[
            f"Over {each.way} {each.served} requests were served meanwhile, {each.recovered} of them in a second life "
            f"or a later one; {sum(switch.emptied for switch in each.switches)} of {len(each.switches)} switches found "
            "their instance empty within the drain."
            for each in found
        ],
        values={
            each.way: {
                "switches": [
                    [f"{s.former}>{s.roles}", s.drain_s, s.migration_s, s.onload_s, s.emptied, s.prepare_s]
                    for s in each.switches
                ],
                "served": each.served,
                "wrong": each.wrong,
                "lost": each.lost,
                "recovered": each.recovered,
            }
            for each in found
        },
    )


def summed(switches: Sequence[Switch], pair: str) -> Parts:
    """Of the switches from one role to another."""
    of_pair = [each for each in switches if f"{each.former}>{each.roles}" == pair]
    values = [(each.prepare_s, each.drain_s, each.migration_s, each.onload_s, each.change_s) for each in of_pair]
    prepare, drain, migration, onload, beside = (median(part) for part in zip(*values, strict=True))
    return Parts(prepare, drain, migration, onload, beside, max(each.change_s for each in of_pair))


def aims(found: Sequence[Measured], parts: dict[tuple[str, str], Parts]) -> Iterator[Aim]:
    for each in found:
        longest = max((parts[each.way, pair].beside, pair) for pair in PAIRS)
        said = f"{longest[0]:.2f} s at most ({longest[1]})"
        yield Aim(f"each pair beside its drain, {each.way}", f"below {PAPER_S:g} s", said, longest[0] < PAPER_S)
    lost = sum(each.lost for each in found)
    yield Aim("requests lost", "0", f"{lost} of {sum(each.served for each in found) + lost}", lost == 0)
    wrong = sum(each.wrong for each in found)
    yield Aim("requests with other tokens than generate()", "0", str(wrong), wrong == 0)
