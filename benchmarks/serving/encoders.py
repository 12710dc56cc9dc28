"""EPDServe's table 4, and one image of many tiles: the first token with one and with several encoders a request.

Its model is fitted to that table: a pass of 0.52 s, 0.413 s an image's encoding and 0.055 s its prefill. With k images
on n encoders the first token is due after 0.52 + ceil(k / n) * 0.413 + k * 0.055 seconds. A paced emulation serves it
live: stages sleep, all else is real. The simulator replays the cores, also under load, where encoders alone are the
limit. An image of ten tiles is the same with tiles in place of images, on one to six encoders. The predicates: each
gain is within 15 % of the formula's, live and simulated; under no load is the mean first token later than with one
encoder a request, nor the last request done more than 1 % later, nor is any image or tile encoded twice.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.pipeline import Pipeline
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

TOKENS = 64  # of an image: MiniCPM-V's
ENCODERS, PLACEMENT = 6, "6E1P1D"
PASS_S, ENCODE_S, PREFILL_S = 0.52, 0.413, 0.055
PAPER = {2: 1.59, 4: 2.42, 6: 2.96, 8: 2.45}
TILES = 10  # of the one image
WITHIN = 0.15
LOADS, BUSY_IMAGES = (0.3, 0.6, 0.9, 1.0, 1.2), 4
SHAPE = get_model_shape("minicpm-v-2.6")
COST = LinearCost(step_s=PASS_S, prefill_s=PREFILL_S / TOKENS, media_s=ENCODE_S / TOKENS)
ENCODING = LinearCost(step_s=0.02, prefill_s=0.005 / TOKENS, media_s=ENCODE_S / TOKENS)
BUDGETS = StepBudgets(token_budget=16384, image_budget=TOKENS)
WHOLE = StepBudgets(token_budget=16384, image_budget=TILES * TOKENS)  # the image of all tiles in a step


class Gain(NamedTuple):
    """Seconds to the first token with one encoder and with six."""

    one: float
    six: float

    @property
    def ratio(self) -> float:
        return self.one / self.six


class Load(NamedTuple):
    """One load with one encoder and with six: mean TTFT, time until all are done, encoders' time of work; seconds."""

    ttft: Gain
    done: Gain
    encoding: Gain


def formula(images: int) -> Gain:
    """What the fitted model says."""
    return Gain(due_s(images, 1), due_s(images, ENCODERS))


def due_s(images: int, encoders: int) -> float:
    """Seconds to the first token of so many images, or tiles, on so many encoders."""
    return PASS_S + images * PREFILL_S + math.ceil(images / encoders) * ENCODE_S


# ---------------------------------------------------------------- live


async def serve(
    encoders: int, spread: int, asked: Sequence[tuple[int, ...]], rounds: int, scale: float, budgets: StepBudgets
) -> list[float]:
    """Median seconds to the first token by visual tokens of a request's images, one request at a time.

    Steps take ``scale`` times as long.
    """
    cost = LinearCost(step_s=PASS_S * scale, prefill_s=COST.prefill_s * scale, media_s=COST.media_s * scale)
    model = EmulatedModel(shape=EmulatedShape.of(SHAPE), cost=cost, scale=2048)
    found: list[list[float]] = [[] for _ in asked]
    async with Pipeline(model, f"{encoders}E1P1D", spread=spread, budgets=budgets) as pipe:
        for _ in range(rounds):
            for images, times in zip(asked, found, strict=True):
                output = await pipe.complete(EmulatedRequest(image_tokens=images, max_tokens=1))
                assert output.ttft_s is not None
                times.append(output.ttft_s / scale)
                await pipe.wait_idle()
    return list(map(median, found))


def live(rounds: int, scale: float) -> dict[int, Gain]:
    """Requests of two to eight images with one encoder a request and with six, of six."""
    asked = [(TOKENS,) * images for images in PAPER]
    found = (asyncio.run(serve(ENCODERS, spread, asked, rounds, scale, BUDGETS)) for spread in (1, ENCODERS))
    return {images: Gain(*both) for images, both in zip(PAPER, zip(*found, strict=True), strict=True)}


def live_tiles(rounds: int, scale: float, most: int = ENCODERS) -> dict[int, float]:
    """One image of all tiles, by the number of encoders, which all share it."""
    asked = [(TILES * TOKENS,)]
    return {n: asyncio.run(serve(n, n, asked, rounds, scale, WHOLE))[0] for n in range(1, most + 1)}


# ---------------------------------------------------------------- simulated


def row(seconds: float, images: int, name: str, tiles: int = 1) -> TraceRow:
    shown = [TraceImage(tokens=tiles * TOKENS, content=f"{name}.{item}") for item in range(images)]
    length = 2 + images * tiles * TOKENS
    return TraceRow(timestamp=1000 * seconds, input_length=length, text_length=2, output_length=1, images=shown)


def crowd(load: float, requests: int, images: int, tiles: int) -> Trace:
    """Requests at random times, ``load`` times as many as the encoders can do."""
    draw, at, rows = random.Random(0), 0.0, []
    for number in range(requests):
        at += draw.expovariate(load * ENCODERS / (images * tiles * ENCODE_S))
        rows.append(row(at, images, str(number), tiles))
    return Trace(rows)


def replay(trace: Trace, spread: int, cost: LinearCost, budgets: StepBudgets, encoders: int = ENCODERS) -> Replay:
    cluster = Cluster.of("A100", encoders + 2)
    simulator = Simulator(SHAPE, SLO(3.0, 1.0), cluster=cluster, cost=cost, spread=spread, budgets=budgets)
    return simulator.replay(trace, f"{encoders}E1P1D")


def ttft(found: Replay) -> float:
    return mean(outcome.ttft_s for outcome in found.outcomes if outcome.ttft_s is not None)


def simulated(images: int) -> Gain:
    trace = Trace([row(30.0 * number, images, str(number)) for number in range(8)])
    return Gain(*(ttft(replay(trace, spread, COST, BUDGETS)) for spread in (1, ENCODERS)))


def simulated_tiles() -> dict[int, float]:
    """One image of all tiles, by the number of encoders, which all share it."""
    trace = Trace([row(30.0 * number, 1, str(number), TILES) for number in range(8)])
    return {n: ttft(replay(trace, n, COST, WHOLE, n)) for n in range(1, ENCODERS + 1)}


def loaded(load: float, requests: int, images: int = BUSY_IMAGES, tiles: int = 1) -> Load:
    trace, budgets = crowd(load, requests, images, tiles), BUDGETS if tiles == 1 else WHOLE
    found = [replay(trace, spread, ENCODING, budgets) for spread in (1, ENCODERS)]
    encoding = Gain(*(sum(each.busy_s[f"E{number}"]["E"] for number in range(ENCODERS)) for each in found))
    return Load(Gain(*map(ttft, found)), Gain(*(each.duration_s for each in found)), encoding)


# ---------------------------------------------------------------- the result


def run(setting: Setting) -> Result:
    rounds, scale, requests, most = (1, 0.1, 40, 2) if setting.quick else (5, 1.0, 400, ENCODERS)
    at_rest = {images: (formula(images), simulated(images)) for images in PAPER}
    tiles = Tiles(live_tiles(rounds, scale, most), simulated_tiles())
    loads = [{load: loaded(load, requests, *many) for load in LOADS} for many in ((BUSY_IMAGES, 1), (1, TILES))]
    return result(live(rounds, scale), at_rest, tiles, loads[0], loads[1], rounds)


class Tiles(NamedTuple):
    """Seconds to the first token of an image of all tiles, by the number of encoders."""

    live: Mapping[int, float]
    simulated: Mapping[int, float]


def result(
    served: Mapping[int, Gain],
    at_rest: Mapping[int, tuple[Gain, Gain]],
    tiles: Tiles,
    loads: Mapping[float, Load],
    tile_loads: Mapping[float, Load],
    rounds: int,
) -> Result:
    return Result(
        name="encoders",
        title="Several encoders for one request",
        method=(
            f"EPDServe's table 4 on {PLACEMENT}: a pass of {PASS_S:g} s, {ENCODE_S:g} s an image's encoding and "
            f"{PREFILL_S:g} s its prefill, fitted to that table. Then one image of {TILES} tiles, each of which takes "
            f"what an image does, on one to six encoders. Live: a paced emulation in which stages sleep and all else "
            f"is real, one request at a time, the median of {rounds}. Simulated: the cores in virtual time. Under "
            f"load: requests of {BUSY_IMAGES} images, or of one image of {TILES} tiles, at random times, in turn, with "
            "light prefills, so that encoders are the limit; 1 is as many as they can do."
        ),
        tables=[
            Table("First token, s, and how much sooner with `spread=6`", AT_REST, list(rest_rows(served, at_rest))),
            Table(f"First token of one image of {TILES} tiles, s, which all encoders share", SHARED, tile_rows(tiles)),
            Table("Under load, with one encoder a request and with `spread=6`", UNDER, list(load_rows(loads))),
            Table(f"The same for one image of {TILES} tiles", UNDER, list(load_rows(tile_loads))),
        ],
        aims=[
            *rest_aims(served, at_rest),
            *tile_aims(tiles),
            *load_aims(loads, "images"),
            *load_aims(tile_loads, "tiles"),
        ],
        values={
            "live": {str(images): list(gain) for images, gain in served.items()},
            "simulated": {str(images): list(gain) for images, (_, gain) in at_rest.items()},
            "tiles": {name: {str(n): seconds for n, seconds in each.items()} for name, each in tiles._asdict().items()},
            "loads": {str(load): [list(each) for each in found] for load, found in loads.items()},
            "tile_loads": {str(load): [list(each) for each in found] for load, found in tile_loads.items()},
        },
    )


SHARED = ("encoders", "live", "simulated", "formula", "live, sooner", "simulated", "formula")
AT_REST = ("images", "live, one", "six", "sooner", "simulated", "formula", "paper")
UNDER = ("load", "mean TTFT s, one", "six", "all done s, one", "six", "encoders' work s, one", "six")


def rest_rows(served: Mapping[int, Gain], at_rest: Mapping[int, tuple[Gain, Gain]]) -> Iterator[list[str]]:
    for images, gain in served.items():
        ratios = [gain.ratio, at_rest[images][1].ratio, at_rest[images][0].ratio, PAPER[images]]
        yield [str(images), f"{gain.one:.2f}", f"{gain.six:.2f}", *(f"{each:.2f}x" for each in ratios)]


def tile_rows(tiles: Tiles) -> list[list[str]]:
    rows = []
    for n in tiles.live:
        due = {each: due_s(TILES, each) for each in (1, n)}
        times = [tiles.live[n], tiles.simulated[n], due[n]]
        ratios = [tiles.live[1] / tiles.live[n], tiles.simulated[1] / tiles.simulated[n], due[1] / due[n]]
        rows.append([str(n), *(f"{each:.2f}" for each in times), *(f"{each:.2f}x" for each in ratios)])
    return rows


def load_rows(loads: Mapping[float, Load]) -> Iterator[list[str]]:
    for load, found in loads.items():
        yield [f"{load:g}", *(f"{seconds:.2f}" for gain in found for seconds in gain)]


def rest_aims(served: Mapping[int, Gain], at_rest: Mapping[int, tuple[Gain, Gain]]) -> Iterator[Aim]:
    for name, gains in (("live", served), ("simulated", {images: each for images, (_, each) in at_rest.items()})):
        off = {images: gains[images].ratio / formula(images).ratio - 1 for images in gains}
        worst = max(off.values(), key=abs)
        yield Aim(f"gains of the first token, {name}", f"within {WITHIN:.0%}", f"{worst:+.1%}", abs(worst) <= WITHIN)


def tile_aims(tiles: Tiles) -> Iterator[Aim]:
    for name, found in tiles._asdict().items():
        off = [found[1] / found[n] / (due_s(TILES, 1) / due_s(TILES, n)) - 1 for n in found]
        worst = max(off, key=abs)
        yield Aim(
            f"gains for one image of tiles, {name}", f"within {WITHIN:.0%}", f"{worst:+.1%}", abs(worst) <= WITHIN
        )


def load_aims(loads: Mapping[float, Load], what: str) -> Iterator[Aim]:
    sooner = min(found.ttft.ratio for found in loads.values())
    longer = max(found.done.six / found.done.one - 1 for found in loads.values())
    twice = max(found.encoding.six / found.encoding.one - 1 for found in loads.values())
    yield Aim(f"mean first token under each load, {what}", "no later", f"{sooner:.2f}x sooner at least", sooner >= 1)
    yield Aim(f"last request done under each load, {what}", "at most 1 % later", f"{longer:+.1%}", longer <= 0.01)
    yield Aim(f"{what} encoded twice", "none", f"{twice:+.1%} of the work", abs(twice) < 1e-9)
