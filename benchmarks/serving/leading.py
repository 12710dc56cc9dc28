"""Text before an image, prefilled while the image is encoded: what it gives the first token, and what it costs.

Two questions. At rest, one request at a time: the first token should come sooner by what is shorter, the prefill of
the text or the wait for features. Under load, at up to well over what the placement serves, mixed with requests of text
alone: nobody's first token may come later, and no goodput be lost. A paced emulation serves the first live: stages
sleep, all else is real. The cores in virtual time, with an H100's costs by roofline, are asked both.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity.core.failure_policy import NO_RECOVERY
from trinity.core.frontend import FrontendOptions
from trinity.core.messages import IMAGE, MediaSpan, Work
from trinity.core.routing.router import RoundRobin
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.simulation.cluster_model import SimulatedCluster
from trinity.simulation.simulator import Simulator
from trinity.simulation.workload import Job
from trinity.traces.trace import SLO

SHAPE = get_model_shape("qwen2-vl-7b")
IMAGE_TOKENS, IMAGES, TAIL, OUTPUTS = 1000, 2, 64, 100
TEXTS = (0, 256, 1024, 4096)
# live: a pass over the language model of 0.1 s, 1 ms a visual token's encoding, 0.5 ms a prompt token's prefill
PASS_S, ENCODE_S, PREFILL_S = 0.1, 0.001, 0.0005
BUDGETS = StepBudgets(token_budget=16384, image_budget=4096)
LIVE_PLACEMENT = "E+P+D"
BOUND = SLO(2.0, 0.05)
SHORT, SHARE = 300, 0.5  # tokens of a request of text alone, and the share of those
LEAD = 2048
DUAL = ("vision", "language")
LOADED: Mapping[str, tuple[str, tuple[str, ...], float]] = {  # placement, lanes and interference
    "4E1P2D": ("4E1P2D", ("joint",), 1.0),
    "2E1PD": ("2E1PD", ("joint",), 1.0),
    "EP+D, two lanes": ("EP+D", DUAL, 1.6),
    "3EPD, two lanes": ("3EPD", DUAL, 1.0),
}
RATES = (2.0, 8.0, 16.0, 24.0, 48.0)


class Pair(NamedTuple):
    """A figure without and with text that leads."""

    without: float
    with_: float


class Load(NamedTuple):
    """Mean TTFT (s) of requests with images and of those of text alone, goodput (share within the SLO), seconds."""

    images: Pair
    text: Pair
    goodput: Pair
    done: Pair


def due(text: int) -> Pair:
    """What the emulated costs say: the text's prefill is hidden behind the encoding, as far as that is as long."""
    encode, prefill = IMAGE_TOKENS * IMAGES * ENCODE_S, PASS_S + text * PREFILL_S
    rest = PASS_S + (IMAGE_TOKENS * IMAGES + TAIL) * PREFILL_S
    whole = encode + rest + text * PREFILL_S
    return Pair(whole, max(encode, prefill) + rest if text else whole)


# ---------------------------------------------------------------- live


async def serve(leading: bool, rounds: int, scale: float) -> dict[int, float]:
    """Median seconds to the first token by tokens of leading text, one request at a time."""
    cost = LinearCost(step_s=PASS_S * scale, prefill_s=PREFILL_S * scale, media_s=ENCODE_S * scale)
    model = EmulatedModel(shape=EmulatedShape.of(SHAPE), cost=cost, scale=2048)
    found: dict[int, list[float]] = {text: [] for text in TEXTS}
    rules = BatchRules(leading_text=leading)
    async with Pipeline(model, LIVE_PLACEMENT, rules=rules, budgets=BUDGETS) as pipe:
        for _ in range(rounds):
            for text in found:
                asked = EmulatedRequest(
                    leading_tokens=text,
                    text_tokens=text + TAIL,
                    image_tokens=(IMAGE_TOKENS,) * IMAGES,
                    max_tokens=1,
                )
                output = await pipe.complete(asked)
                assert output.ttft_s is not None
                found[text].append(output.ttft_s / scale)
                await pipe.wait_idle()
    return {text: median(each) for text, each in found.items()}


def live(rounds: int, scale: float) -> dict[int, Pair]:
    without, with_ = (asyncio.run(serve(leading, rounds, scale)) for leading in (False, True))
    return {text: Pair(without[text], with_[text]) for text in TEXTS}


# ---------------------------------------------------------------- simulated


class LeadingCluster(SimulatedCluster):
    """The simulator's cluster, for prompts whose first ``lead`` tokens stand before their images."""

    lead = 0

    def work(self, number: int) -> Work:
        job, spans = self.jobs[number], list[MediaSpan]()
        lead = self.lead if job.images else 0
        offset = lead
        for tokens, content in job.images:
            spans.append(MediaSpan(IMAGE, tokens, offset, tokens, content))
            offset += tokens
        own = (-1 - number,)  # no two requests begin alike
        prompt = own * lead + (0,) * (offset - lead) + own * (job.prompt - offset)
        return Work(request=str(number), prompt=prompt, media=tuple(spans), max_tokens=job.max_tokens)


def jobs(rate: float, count: int, lead: int, short: float) -> list[Job]:
    """Requests at random times, ``short`` of them of text alone."""
    draw, at, found = random.Random(1), 0.0, list[Job]()
    for number in range(count):
        at += draw.expovariate(rate)
        if draw.random() < short:
            found.append(Job(at, SHORT, (), OUTPUTS))
        else:
            images = tuple((IMAGE_TOKENS, f"{number}.{item}") for item in range(IMAGES))
            found.append(Job(at, lead + IMAGE_TOKENS * IMAGES + TAIL, images, OUTPUTS))
    return found


class Replayed(NamedTuple):
    """One replay: TTFTs (s) of requests with images and of text alone, the share within the SLO, and seconds."""

    images: list[float]
    text: list[float]
    goodput: float
    done: float


def replay(way: str, asked: Sequence[Job], lead: int, leading: bool) -> Replayed:
    placement, lanes, interference = LOADED[way]
    cluster, rules = Cluster.of("H100", Placement.parse(placement).size), BatchRules(leading_text=leading)
    simulator = Simulator(SHAPE, BOUND, cluster=cluster, rules=rules, lanes=lanes, interference=interference)
    settings = simulator.settings(placement, shared=True)
    run = LeadingCluster(
        settings,
        asked,
        cluster=simulator.cluster,
        costs=[simulator.cost_of(place) for place in range(len(settings))],
        model=SHAPE,
        routing=RoundRobin,
        frontend=FrontendOptions(max_waiting=4096, failures=NO_RECOVERY),
        interference=interference,
        shared=True,
        record=False,
    )
    run.lead = lead
    run.run()
    return _read(run, asked)


def _read(run: SimulatedCluster, asked: Sequence[Job]) -> Replayed:
    images, text, good = list[float](), list[float](), 0
    for job, times in zip(asked, run.times.values(), strict=True):
        ttft = times[0] - job.at
        (images if job.images else text).append(ttft)
        gaps = [after - before for before, after in pairwise(times)]
        good += ttft <= BOUND.ttft and max(gaps, default=0.0) <= BOUND.tbt
    return Replayed(images, text, good / len(asked), run.ended - asked[0].at)


def loaded(way: str, rate: float, count: int) -> Load:
    asked = jobs(rate, count, LEAD, SHARE)
    a, b = (replay(way, asked, LEAD, leading) for leading in (False, True))
    ttft = Pair(mean(a.images), mean(b.images)), Pair(mean(a.text), mean(b.text))
    return Load(*ttft, Pair(a.goodput, b.goodput), Pair(a.done, b.done))


# ---------------------------------------------------------------- the result


def run(setting: Setting) -> Result:
    rounds, scale, count = (1, 0.1, 40) if setting.quick else (3, 1.0, 300)
    rates = RATES[::2] if setting.quick else RATES
    loads = {(way, rate): loaded(way, rate, count) for way in LOADED for rate in rates}
    return result(live(rounds, scale), loads, rounds)


def result(served: Mapping[int, Pair], loads: Mapping[tuple[str, float], Load], rounds: int) -> Result:
    return Result(
        name="leading",
        title="Text that stands before an image",
        method=(
            f"Requests of {IMAGES} images of {IMAGE_TOKENS} visual tokens with text before them. Live: a paced "
            f"emulation of {LIVE_PLACEMENT} in which stages sleep and all else is real, one request at a time, the "
            f"median of {rounds}; a pass over the language model takes {PASS_S:g} s, {1000 * ENCODE_S:g} ms a visual "
            f"token's encoding and {1000 * PREFILL_S:g} ms a token's prefill. Under load: the cores in virtual time, "
            f"{SHAPE.name} on H100 by roofline, {LEAD} tokens of text that no two requests share, half of the requests "
            f"of text alone ({SHORT} tokens), at random times; goodput is the share within {BOUND.ttft:g} s and "
            f"{BOUND.tbt:g} s."
        ),
        tables=[
            Table("First token, s, at rest", AT_REST, list(rest_rows(served))),
            Table("Under load, without and with `leading_text`", UNDER, list(load_rows(loads))),
        ],
        aims=[*rest_aims(served), *load_aims(loads)],
        values={
            "live": {str(text): list(pair) for text, pair in served.items()},
            "loads": {f"{way} at {rate:g}": [list(each) for each in found] for (way, rate), found in loads.items()},
        },
    )


AT_REST = ("tokens of text", "without", "with", "sooner", "due without", "due with")
UNDER = (
    *("placement", "requests/s", "mean TTFT with images s, without", "with", "of text alone s, without", "with"),
    *("goodput, without", "with", "all done s, without", "with"),
)
WITHIN = 0.1


def rest_rows(served: Mapping[int, Pair]) -> Iterator[list[str]]:
    for text, pair in served.items():
        sooner = f"{pair.without - pair.with_:.2f}"
        yield [str(text), f"{pair.without:.2f}", f"{pair.with_:.2f}", sooner, *(f"{each:.2f}" for each in due(text))]


def load_rows(loads: Mapping[tuple[str, float], Load]) -> Iterator[list[str]]:
    for (way, rate), found in loads.items():
        yield [way, f"{rate:g}", *(f"{each:.3f}" for pair in found for each in pair)]


def rest_aims(served: Mapping[int, Pair]) -> Iterator[Aim]:
    off = max((pair.with_ / due(text).with_ - 1 for text, pair in served.items()), key=abs)
    yield Aim("first token at rest, with it", f"within {WITHIN:.0%} of what is due", f"{off:+.1%}", abs(off) <= WITHIN)


def load_aims(loads: Mapping[tuple[str, float], Load]) -> Iterator[Aim]:
    for name, pairs in (
        ("requests with images", [found.images for found in loads.values()]),
        ("requests of text alone", [found.text for found in loads.values()]),
    ):
        worst = max(pair.with_ / pair.without for pair in pairs)
        best = min(pair.with_ / pair.without for pair in pairs)
        said = f"{1 - best:.0%} sooner at best, {worst - 1:+.1%} at worst"
        yield Aim(f"mean first token of {name} under each load", "at most 1 % later", said, worst <= 1.01)
    lost = max(found.goodput.without - found.goodput.with_ for found in loads.values())
    yield Aim("goodput under each load", "none lost", f"{lost:+.3f} of all requests at most", lost <= 0.0)
