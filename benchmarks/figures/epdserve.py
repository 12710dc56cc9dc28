"""Directions of EPDServe's figures 5 and 10 and tables 1, 4 and 5, on rooflines of 8 A100.

Attainment is by TTFT and mean TPOT, as there. Online, every stage works on one request at a time, as the paper sets it
(appendix E.1), and vLLM prefills before it decodes. EPD is 5E2P1D and DistServe 7EP1D, their defaults in appendix A.3.
Its intra-request parallelism (``spread``) is in tables 1 and 4; the goodputs are with one encoder a request.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.figures.claims import (
    Claim,
    Scale,
    Shown,
    above,
    asked,
    goodput_of,
    listed,
    mean,
    mean_tpot,
    mean_ttft,
    replayed,
)
from benchmarks.paper_devices import paper_cluster
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.model_shape import get_model_shape
from trinity.planner.candidates import list_placements
from trinity.traces.trace import SLO, Trace

PHOTO = (4032, 3024)
MINICPM = "minicpm-v-2.6"
SLOS = {  # table 9, seconds
    (MINICPM, 2): SLO(1.40, 0.04),
    (MINICPM, 4): SLO(2.60, 0.04),
    (MINICPM, 6): SLO(3.90, 0.06),
    ("internvl2-8b", 2): SLO(1.20, 0.05),
    ("internvl2-8b", 4): SLO(2.40, 0.06),
}
OFFLINE = SLO(1e6, 1e6)
VLLM = BatchRules(policy="prefill_first", chunked=False)  # version 0.6.1
ONE_D = (
    "with one request at a time in each stage (appendix E.1), the only D limits 5E2P1D and 7EP1D alike, and what waits "
    "for it exceeds the TPOT bound, while all eight of 8EPD decode"
)
STEPS = (
    "the roofline's 20 ms of launches a step, for each pass, are shared by a batch; larger ones gain more than there"
)
ROWS = "at the best one's goodput random ones with few D are overloaded, and the wait for D falls into the first gap"
FIGURE_5 = (
    Claim("EPDServe figure 5", "5E2P1D has a higher goodput than 7EP1D in every case", "above DistServe", ONE_D),
    Claim("EPDServe figure 5", "5E2P1D has a higher goodput than 8EPD in every case", "above vLLM", ONE_D),
    Claim(
        "EPDServe figure 5", "5E2P1D's gain over both is no lower with 4 images than with 2", "baselines drop", ONE_D
    ),
)
FIGURE_10 = (
    Claim("EPDServe figure 10, left", "the best xEyP1D serves more offline than 7EP1D", "so"),
    Claim("EPDServe figure 10, left", "the best xEyP1D has more E than P", "5E2P is best"),
    Claim("EPDServe figure 10, middle", "5E2P1D's gain over 7EP1D is higher at 1 image than at 8", "at few images"),
    Claim("EPDServe figure 10, right", "from batches of 1 to 8, 5E2P1D changes by less than a quarter", "so", STEPS),
)
FRAMES = (8, 16, 32, 64)
TABLE_1 = (
    Claim("EPDServe table 1", "5E2P1D has the lowest mean TTFT at every length", "0.24 to 0.42 s"),
    Claim("EPDServe table 1", "its gain over 7EP1D grows from 8 to 64 frames", "43 % to 68 % less"),
)
IMAGES = (2, 4, 6, 8)
TABLE_4 = (
    Claim(
        "EPDServe table 4", "with one encoder a request the mean TTFT is higher at 2, 4, 6 and 8 images", "1.6 to 2.9x"
    ),
    Claim("EPDServe table 4", "the gain of several is higher at 6 images than at 2", "1.59x and 2.96x"),
)
TABLE_5 = (
    Claim("EPDServe table 5", "ten random configurations have a lower mean goodput than the best", "0.56 to 1.25"),
    Claim("EPDServe table 5", "at the best one's goodput, their mean TTFT is higher", "4.48 against 2.12 s"),
    Claim("EPDServe table 5", "their mean TPOT is no higher", "0.025 against 0.031 s", ROWS),
)


def a100() -> Cluster:
    return paper_cluster("A100", 8)


def photos(model: str, images: int, rate: float | None = 1.0, seed: int = 0) -> Callable[[int], Trace]:
    """Requests of 4032 x 3024 images, 22 tokens of text, 10 of output (section 4)."""
    return lambda count: asked(count, model=model, images=images, size=PHOTO, text=22, output=10, rate=rate, seed=seed)


# ---------------------------------------------------------------- figure 5


def figure_5(scale: Scale) -> Iterator[Shown]:
    """Two models, 2 and 4 images a request; InternVL2-26B is none of trinity's named shapes."""
    pairs = scale.few([each for each in SLOS if each[1] <= 4])
    yield from claims_5({(model, images): served(model, images, scale) for model, images in pairs})


def served(model: str, images: int, scale: Scale) -> dict[str, float]:
    """Goodput (requests/s) of EPD and both baselines, one request at a time in every stage."""
    budgets = batches(photo_tokens(model, images), 1, 1, 1)

    def rate(placement: str, rules: BatchRules | None = None) -> float:
        slo, made = SLOS[model, images], photos(model, images)
        options: dict[str, Any] = {"rule": "tpot", "budgets": budgets, "rules": rules}
        return goodput_of(model, placement, slo, made, cluster=a100(), scale=scale, **options)

    return {"5E2P1D": rate("5E2P1D"), "7EP1D": rate("7EP1D"), "8EPD": rate("8EPD", VLLM)}


def claims_5(found: Mapping[tuple[str, int], Mapping[str, float]]) -> Iterator[Shown]:
    """By goodput of EPD and both baselines, for each model and number of images."""
    ours = "; ".join(f"{model}, {images}: {listed(rates)}" for (model, images), rates in found.items())
    for claim, other in zip(FIGURE_5, ("7EP1D", "8EPD"), strict=False):
        yield Shown(claim, f"{ours} req/s", all(above(rates["5E2P1D"], rates[other]) for rates in found.values()))
    gains = {key: rates["5E2P1D"] / max(rates["7EP1D"], rates["8EPD"], 1e-9) for key, rates in found.items()}
    pairs = [(gains[model, 2], gains[model, 4]) for model, images in gains if images == 2 and (model, 4) in gains]
    said = ", ".join(f"{two:.2f} to {four:.2f}" for two, four in pairs)
    yield Shown(FIGURE_5[2], said, bool(pairs) and all(four >= two for two, four in pairs))


# ---------------------------------------------------------------- figure 10


def batches(visual: int, encode: int, prefill: int, decode: int) -> dict[str, StepBudgets]:
    """Budgets in requests of so many visual tokens a step, by roles."""
    encodes, prompts = encode * visual, prefill * (visual + 22)
    return {
        "E": StepBudgets(image_budget=encodes),
        "P": StepBudgets(token_budget=prompts),
        "EP": StepBudgets(token_budget=prompts, image_budget=encodes),
        "EPD": StepBudgets(token_budget=prompts, image_budget=encodes),
        "D": StepBudgets(token_budget=decode),
    }


def photo_tokens(model: str, images: int) -> int:
    return images * get_model_shape(model).visual_tokens(*PHOTO)


def offline(placement: str, images: int, encode: int, prefill: int, scale: Scale) -> float:
    """Requests a second of 1,000 that all wait from the start."""
    budgets = batches(photo_tokens(MINICPM, images), encode, prefill, 128)
    trace = photos(MINICPM, images, rate=None)(scale.requests(1000))
    replay = replayed(MINICPM, placement, OFFLINE, trace, cluster=a100(), budgets=budgets, max_waiting=10**9)
    return len(trace) / replay.duration_s


def figure_10(scale: Scale) -> Iterator[Shown]:
    """MiniCPM-V 2.6 (the paper names no model), one 4K image, ten tokens; EPD in batches of 8, DistServe of 1."""
    ratios = {name: offline(name, 1, 8, 8, scale) for name in (f"{e}E{7 - e}P1D" for e in range(1, 7))}
    together = offline("7EP1D", 1, 1, 1, scale)
    gains = {n: offline("5E2P1D", n, 8, 8, scale) / offline("7EP1D", n, 1, 1, scale) for n in (1, 2, 4, 8)}
    sizes = {n: offline("5E2P1D", 1, n, n, scale) for n in (1, 2, 4, 8)}
    yield from claims_10(ratios, together, gains, sizes)


def claims_10(
    ratios: Mapping[str, float], together: float, gains: Mapping[int, float], sizes: Mapping[int, float]
) -> Iterator[Shown]:
    """``ratios``: requests/s by placement; ``together``: of 7EP1D; ``gains`` by images, ``sizes`` by batch."""
    best = max(ratios, key=ratios.__getitem__)
    yield Shown(FIGURE_10[0], f"{listed(ratios)}; 7EP1D {together:.3g} req/s", ratios[best] > together)
    yield Shown(FIGURE_10[1], f"{best} is best", int(best[0]) > int(best[2]))
    yield Shown(FIGURE_10[2], listed({f"{n}:": gain for n, gain in gains.items()}, ".2f"), gains[1] > gains[8])
    change = max(sizes.values()) / min(sizes.values()) - 1
    yield Shown(FIGURE_10[3], f"by {change:.0%}", change < 0.25)


# ---------------------------------------------------------------- tables 1 and 5


def table_1(scale: Scale) -> Iterator[Shown]:
    """Videos as frames of 64 tokens, one request a second, 100 requests."""
    found: dict[int, dict[str, float]] = {}
    for frames in FRAMES:
        trace = asked(scale.requests(100), model=MINICPM, images=frames, size=(448, 448), text=22, output=10, rate=1.0)
        options: dict[str, Any] = {"cluster": a100(), "budgets": batches(frames * 64, 1, 1, 1)}
        found[frames] = {
            placement: mean_ttft(replayed(MINICPM, placement, SLO(3.1, 0.025), trace, **options | own).outcomes)
            for placement, own in (("5E2P1D", {"spread": 5}), ("7EP1D", {}), ("8EPD", {"rules": VLLM}))
        }
    yield from claims_1(found)


def claims_1(found: Mapping[int, Mapping[str, float]]) -> Iterator[Shown]:
    """By mean TTFT (s) of each placement, for each number of frames."""
    ours = "; ".join(f"{frames}: {listed(each)}" for frames, each in found.items())
    least = all(each["5E2P1D"] < min(each["7EP1D"], each["8EPD"]) for each in found.values())
    yield Shown(TABLE_1[0], f"{ours} s", least)
    gains = [1 - found[frames]["5E2P1D"] / found[frames]["7EP1D"] for frames in (FRAMES[0], FRAMES[-1])]
    yield Shown(TABLE_1[1], f"{gains[0]:.0%} to {gains[1]:.0%} less", gains[1] > gains[0])


def table_4(scale: Scale) -> Iterator[Shown]:
    """The requests of section 4.2's first tokens: 4K images, one in four seconds, 100 requests."""
    found: dict[int, tuple[float, float]] = {}
    for images in IMAGES:
        trace = photos(MINICPM, images, 0.25)(scale.requests(100))
        options: dict[str, Any] = {"cluster": a100(), "budgets": batches(photo_tokens(MINICPM, images), 1, 1, 1)}
        one, five = (
            mean_ttft(replayed(MINICPM, "5E2P1D", OFFLINE, trace, **options, spread=spread).outcomes)
            for spread in (1, 5)
        )
        found[images] = one, five
    yield from claims_4(found)


def claims_4(found: Mapping[int, tuple[float, float]]) -> Iterator[Shown]:
    """By mean TTFT (s) with one and with five encoders a request, for each number of images."""
    ours = "; ".join(f"{images}: {one:.2f} and {five:.2f} s" for images, (one, five) in found.items())
    yield Shown(TABLE_4[0], ours, all(one > five for one, five in found.values()))
    gains = {images: one / five for images, (one, five) in found.items()}
    said = ", ".join(f"{images}: {gain:.2f}x" for images, gain in gains.items())
    yield Shown(TABLE_4[1], said, gains[6] > gains[2])


class Served(NamedTuple):
    goodput: float
    ttft: float
    tpot: float


def table_5(scale: Scale) -> Iterator[Shown]:
    """Six 4K images a request, E+P+D on 8 devices; the optimiser's own 6E1P1D in batches of 2, 1, 128 is tried too."""
    drawn = random_configurations(10, seed=0)
    searched = [(str(each), in_sixes(2, 1, 128)) for each in list_placements(8, ["E+P+D"])]
    goodputs = [six(*each, scale) for each in scale.few(searched)]
    best = max(goodputs)
    placement, budgets = searched[goodputs.index(best)]
    chosen = Served(best, *latencies(placement, budgets, best, scale))
    others = [Served(six(*each, scale), *latencies(*each, best, scale)) for each in drawn]
    yield from claims_5_table(f"{placement} in batches of 2, 1, 128", chosen, others)


def in_sixes(encode: int, prefill: int, decode: int) -> dict[str, StepBudgets]:
    return batches(photo_tokens(MINICPM, 6), encode, prefill, decode)


def random_configurations(count: int, seed: int) -> list[tuple[str, dict[str, StepBudgets]]]:
    """Uniform among the ratios, and batches of 1 to 8 requests for E and P, 1 to 128 for D (appendix E.4)."""
    noise = random.Random(seed)
    ratios = [str(each) for each in list_placements(8, ["E+P+D"])]
    sizes = (1, 2, 4, 8)
    return [
        (noise.choice(ratios), in_sixes(noise.choice(sizes), noise.choice(sizes), noise.choice((1, 8, 32, 128))))
        for _ in range(count)
    ]


def six(placement: str, budgets: Mapping[str, StepBudgets], scale: Scale) -> float:
    slo, made = SLOS[MINICPM, 6], photos(MINICPM, 6)
    return goodput_of(MINICPM, placement, slo, made, cluster=a100(), scale=scale, rule="tpot", budgets=budgets)


def latencies(placement: str, budgets: Mapping[str, StepBudgets], rate: float, scale: Scale) -> tuple[float, float]:
    """Mean TTFT and TPOT in seconds, of 100 requests at a rate (100 as there)."""
    trace = photos(MINICPM, 6, rate=rate or 1.0)(scale.requests(100))
    outcomes = replayed(MINICPM, placement, SLOS[MINICPM, 6], trace, cluster=a100(), budgets=budgets).outcomes
    return mean_ttft(outcomes), mean_tpot(outcomes)


def claims_5_table(name: str, best: Served, others: Sequence[Served]) -> Iterator[Shown]:
    """The best configuration, and the random ones."""
    goodput, ttft, tpot = (mean([each[place] for each in others]) for place in range(3))
    yield Shown(TABLE_5[0], f"{goodput:.3g} against {best.goodput:.3g} req/s ({name})", above(best.goodput, goodput))
    yield Shown(TABLE_5[1], f"{ttft:.3g} against {best.ttft:.3g} s", ttft > best.ttft)
    yield Shown(TABLE_5[2], f"{tpot:.3g} against {best.tpot:.3g} s", tpot <= best.tpot)


FIGURES: Sequence[Callable[[Scale], Iterator[Shown]]] = (figure_5, figure_10, table_1, table_4, table_5)
