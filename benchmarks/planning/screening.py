"""Loss by screening: 20 small questions, answered by the screening engine with a few replays on the cores, and by a
search of every placement on the cores. A setting without a stand-in is searched on the cores on both sides: to measure
one, give it a row with that stand-in first.

python -m benchmarks.planning.screening [--settings depth=2 kv=layer ...] [--cases 20]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

import msgspec

from benchmarks.paper_devices import ENGINE
from trinity import traces
from trinity.core.transfers import TransferPolicy
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.errors import TraceTooShort
from trinity.planner.candidates import Deployment
from trinity.planner.confirmation import confirm
from trinity.planner.hardware import Hardware, cluster_of
from trinity.planner.problem import GoodputCriterion, PlanningProblem
from trinity.planner.search import BoundedCandidate, SearchResult, search_to_end
from trinity.planner.trials import Trials
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

CASES, REQUESTS = 20, 150
SETTINGS: Mapping[str, dict[str, Any]] = {
    "routing=least_loaded": {"routing": "least_loaded"},
    "routing=prefix_hits": {"routing": "prefix_hits"},
    "routing=random": {"routing": "random"},
    "depth=2": {"depth": 2},
    "kv=layer": {"transfers": TransferPolicy(kv="layer")},
    "kv=grouped": {"transfers": TransferPolicy(kv="grouped")},
    "spread=4": {"spread": 4},
}
HEAVY_ENCODER = LinearCost(step_s=0.02, prefill_s=2e-5, media_s=0.05 / 64, decode_s=1e-4)
MODELS = ("llava-1.5-7b", "qwen2-vl-7b", "minicpm-v-2.6", "internvl2-8b")
SLOS = (SLO(0.5, 0.06), SLO(0.5, 0.08), SLO(0.7, 0.1), SLO(1.0, 0.06), SLO(1.0, 0.1))


class Small(NamedTuple):
    """One of the cases: what is planned, for whom."""

    number: int
    model: str
    devices: Any
    slo: SLO
    trace: Trace
    cost: LinearCost | None = None  # of every device; None: its roofline


class Lost(NamedTuple):
    """The chosen placement, the best one on the cores, and both goodputs there; CPU seconds of the plan.

    ``gap``: of the cores to the screening engine, for the one that this had first.
    """

    number: int
    chosen: str
    best: str
    reached: float
    possible: float
    gap: float
    core_runs: int
    cpu_s: float

    @property
    def share(self) -> float:
        return 1 - self.reached / self.possible if self.possible else 0.0


def question(number: int) -> Small:
    """Drawn from its number: models, SLOs, 3 or 4 devices of one kind or two, real and synthetic traffic, half of it
    with contents that repeat."""
    draw = random.Random(f"screening {number}")
    name = draw.choice(MODELS)
    count = draw.choice((3, 3, 3, 4))
    devices: Any = {"H100": count - 1, "A100": 1} if draw.random() < 0.2 else {draw.choice(("H100", "A100")): count}
    trace = _real(draw) if draw.random() < 0.5 else _synthetic(draw, get_model_shape(name).image_tokens)
    return Small(number, name, devices, draw.choice(SLOS), _repeating(draw, trace) if number % 2 else trace)


def shared_question(number: int) -> Small:
    """Drawn from its number, of encoders that weigh much: 2 to 8 images, of which each takes 50 ms to encode."""
    draw, at, rows = random.Random(f"shared {number}"), 0.0, []
    count, most = draw.choice((4, 5, 6)), draw.choice((4, 8))
    for place in range(REQUESTS):
        at += draw.expovariate(10) * 1000
        images = [TraceImage(tokens=64, content=f"{place}.{item}") for item in range(draw.randint(2, most))]
        text, output = draw.randint(20, 80), draw.randint(1, 24)
        length = text + 64 * len(images)
        rows.append(TraceRow(timestamp=at, input_length=length, text_length=text, output_length=output, images=images))
    slo = SLO(draw.choice((0.35, 0.5, 0.7, 1.0)), 0.1)
    return Small(number, "minicpm-v-2.6", {"H100": count}, slo, Trace(rows), HEAVY_ENCODER)


def _real(draw: random.Random) -> Trace:
    """A stretch of the shipped hour, with at most 24 tokens an output: the cores replay it 40 times a placement."""
    rows = list(traces.read_shipped("servegen-image-1h"))
    at = draw.randrange(len(rows) - REQUESTS)
    return Trace(
        TraceRow(
            timestamp=row.timestamp - rows[at].timestamp,
            input_length=row.input_length,
            text_length=row.text_length,
            output_length=min(24, row.output_length),
            images=row.images,
        )
        for row in rows[at : at + REQUESTS]
        if sum(image.tokens or 0 for image in row.images or ()) + (row.text_length or 0) < 3_000
    )


def _synthetic(draw: random.Random, tokens: int) -> Trace:
    dataset = draw.choice(("TextVQA", "VizWiz", "POPE"))
    seed = draw.randrange(1000)
    return traces.synthesise(dataset, REQUESTS, visual_tokens=lambda width, height: tokens, rate=10, seed=seed)


def _repeating(draw: random.Random, trace: Trace) -> Trace:
    """The same requests, whose images are some of forty and whose prompts begin alike."""
    return Trace(_shared(draw, row) for row in trace)


def _shared(draw: random.Random, row: TraceRow) -> TraceRow:
    topic = min(draw.randrange(12), draw.randrange(12))
    return TraceRow(
        timestamp=row.timestamp,
        input_length=row.input_length,
        text_length=row.text_length,
        output_length=row.output_length,
        images=[msgspec.structs.replace(image, content=f"{image.tokens} {topic}") for image in row.images],
        hash_ids=[topic],
    )


def case_of(asked: Small, setting: str) -> PlanningProblem:
    """A planner's, which may call a goodput what lasts one TTFT bound."""
    cluster = cluster_of(asked.devices, None, engine=ENGINE)
    hardware = Hardware(get_model_shape(asked.model), cluster, asked.cost, {}, SETTINGS[setting])
    return PlanningProblem(
        hardware, asked.trace, GoodputCriterion(asked.slo, least_requests=100, least_ttfts=1.0), None
    )


def on_cores(case: PlanningProblem) -> Trials:
    """Trials of the whole trace with the true settings."""

    def serve_of(deployment: Deployment) -> Any:
        return case.hardware.simulator(deployment, case.asked.slo, backend="python").serve(deployment.placement)

    return case.make_trials(case.trace, serve_of)


def lost(asked: Small, setting: str) -> Lost:
    """Plan by screening, and list the alternatives."""
    case, names = case_of(asked, setting), case_of(asked, setting).hardware.names
    entries = case.bound_deployments(names)
    before = time.process_time()
    found = case.search("race", entries)
    confirmation = confirm(case, found)
    took = time.process_time() - before
    ahead = [each.found for each in confirmation.confirmed] or found
    chosen, first, cores = ahead[0].entry, found[0], on_cores(case)
    reached = search_to_end(cores, chosen)
    best = best_of(cores, reached, entries)
    alike = chosen.deployment == first.entry.deployment
    really = reached.rate if alike else search_to_end(cores, first.entry).rate
    return Lost(
        number=asked.number,
        chosen=str(chosen.deployment),
        best=str(best.entry.deployment),
        reached=reached.rate,
        possible=best.rate,
        gap=really / first.rate - 1 if first.rate else 0.0,
        core_runs=confirmation.runs,
        cpu_s=took,
    )


def best_of(cores: Trials, chosen: SearchResult, entries: Sequence[BoundedCandidate]) -> SearchResult:
    """Of every placement: each is asked for the next rate above the best so far, and searched where it holds that."""
    best = chosen
    for entry in entries:
        step = cores.first_steps(entry.guess)[-1] if best.step is None else best.step + 1
        if entry.deployment != chosen.entry.deployment and cores.holds(entry.deployment, step):
            best = max(best, search_to_end(cores, entry), key=lambda each: each.rate)
    return best


def measure(setting: str, cases: int) -> list[Lost]:
    """Of the first so many cases that have an answer; each is told as it is known."""
    known: list[Lost] = []
    asked = shared_question if "spread" in SETTINGS[setting] else question
    number = 0
    while len(known) < cases:
        number += 1
        try:
            one = lost(asked(number), setting)
        except TraceTooShort:
            continue
        known.append(one)
        print(json.dumps({"setting": setting, **one._asdict(), "lost": one.share}), flush=True)
    return known


def summary(setting: str, known: Sequence[Lost]) -> str:
    shares, gaps = [each.share for each in known], sorted(each.gap for each in known)
    some, runs = sum(each > 0 for each in shares), fmean(each.core_runs for each in known)
    return (
        f"{setting}: lost at most {max(shares):.1%}, {fmean(shares):.2%} on average, anything in {some} of "
        f"{len(known)} cases; the first one's gap {gaps[0]:+.1%} to {gaps[-1]:+.1%}, median {median(gaps):+.1%}; "
        f"{runs:.1f} replays on the cores"
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--settings", nargs="+", choices=tuple(SETTINGS), default=tuple(SETTINGS))
    parser.add_argument("--cases", type=int, default=CASES)
    asked = parser.parse_args(arguments)
    said = [summary(setting, measure(setting, asked.cases)) for setting in asked.settings]
    print("\n".join(said))


if __name__ == "__main__":
    main()
