"""EPDServe's table 7: requests of 24 audio clips, live (paced) and simulated, beside the paper's attainment.

ultravox-v0.3 on 4 devices; vLLM is 4EPD, DistServe 3EP1D, EPD 2E1P1D, whose two encoders share a request's clips. TTFT
within 2 s and a mean gap within 25 ms; ten tokens of output, as in the paper's other online experiments. The paper says
neither how long clips and outputs are nor what steps take: encoding and prefill of a request are fitted to vLLM's
column together, a decode step to DistServe's, and how the first two share their time to EPD's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from itertools import pairwise
from statistics import mean

from benchmarks.report import Aim, Result, Table
from benchmarks.serving.open_loop import VLLM, Served, System, attainment, by_roles, lost, poisson, serve, simulate
from benchmarks.setting import Setting
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.traces.trace import SLO, Trace, TraceAudio, TraceRow

SHAPE = get_model_shape("ultravox-v0.3")
CLIPS, SECONDS, TEXT, OUTPUT = 24, 5.0, 22, 10
CLIP = SHAPE.clip_tokens(TraceAudio(seconds=SECONDS))
PROMPT = CLIPS * CLIP + TEXT
ENCODE_S, PREFILL_S, STEP_S = 0.040, 0.43, 0.0235
BOUNDS, WITHIN = SLO(2.0, 0.025), 0.15
RATES = (0.10, 0.25, 0.50, 1.00, 1.10, 1.15)
LIVE_RATE = 1.0
PAPER = {
    "vLLM": (0.99, 1.00, 0.99, 0.91, 0.87, 0.87),
    "DistServe": (0.99, 0.94, 0.89, 0.72, 0.69, 0.68),
    "EPD": (0.99, 0.99, 1.00, 0.96, 0.93, 0.93),
}
GOODPUT = {"vLLM": 1.01, "DistServe": 0.45, "EPD": 1.16}
COST = LinearCost(step_s=STEP_S, prefill_s=(PREFILL_S - STEP_S) / PROMPT, media_s=ENCODE_S / CLIP)
SYSTEMS = {
    "vLLM": System("4EPD", COST, rules=VLLM),
    "DistServe": System("3EP1D", COST),
    "EPD": System("2E1P1D", COST, spread=2),
}
BUDGETS = by_roles(CLIPS * CLIP, PROMPT)
Shares = Mapping[str, Mapping[float, float]]  # by system and rate


def clips(rate: float, requests: int, seed: int) -> Trace:
    def row(at: float) -> TraceRow:
        audio = [TraceAudio(seconds=SECONDS)] * CLIPS
        return TraceRow(timestamp=at, input_length=0, text_length=TEXT, output_length=OUTPUT, audio=audio)

    return poisson(rate, requests, row, seed)


def simulated(rates: tuple[float, ...], requests: int, seeds: int) -> Shares:
    """Mean over so many traces of each rate."""
    return {
        name: {
            rate: mean(
                attainment(simulate(SHAPE, system, clips(rate, requests, seed), BUDGETS), BOUNDS)
                for seed in range(seeds)
            )
            for rate in rates
        }
        for name, system in SYSTEMS.items()
    }


def goodput(shares: Mapping[float, float]) -> float:
    """Highest rate with nine requests in ten in time, between those that were tried; the last one where all are."""
    known = sorted(shares.items())
    for (low, more), (high, fewer) in pairwise(known):
        if fewer < 0.9 <= more:
            return low + (high - low) * (more - 0.9) / (more - fewer)
    return known[-1][0] if known[-1][1] >= 0.9 else 0.0


def run(setting: Setting) -> Result:
    requests, scale, seeds, rates = (3, 0.1, 1, (0.5, 1.0)) if setting.quick else (30, 3.0, 5, RATES)
    most = 20 if setting.quick else 100
    trace = clips(LIVE_RATE, requests, 0)
    served = {name: asyncio.run(serve(SHAPE, system, trace, BUDGETS, scale)) for name, system in SYSTEMS.items()}
    alike = {name: attainment(simulate(SHAPE, system, trace, BUDGETS), BOUNDS) for name, system in SYSTEMS.items()}
    return result(served, alike, simulated(rates, most, seeds), seeds, scale)


def result(
    served: Mapping[str, list[Served]], alike: Mapping[str, float], usual: Shares, seeds: int, scale: float
) -> Result:
    """``alike``: simulated attainment of the requests that were served; ``usual``: of as many as the paper has."""
    live = {name: attainment(each, BOUNDS) for name, each in served.items()}
    wrong = sum(map(lost, served.values()))
    return Result(
        name="audio",
        title="Requests of 24 audio clips, on three systems",
        method=_method(len(next(iter(served.values()))), seeds, scale),
        tables=[
            Table("Requests in time, simulated (paper)", ("requests/s", *PAPER), list(rows(usual))),
            Table(f"The same at {LIVE_RATE:g} a second, live", LIVE, list(live_rows(live, alike))),
        ],
        aims=[
            *paper_aims(usual),
            *live_aims(live, alike),
            Aim("requests lost, live", "0", str(wrong), wrong == 0),
        ],
        values={
            "live": live,
            "alike": dict(alike),
            "simulated": {n: {str(r): s for r, s in e.items()} for n, e in usual.items()},
        },
    )


LIVE = ("system", "live", "simulated, the same requests", "paper")


def rows(usual: Shares) -> Iterator[list[str]]:
    for rate in usual["EPD"]:
        at = RATES.index(rate)
        yield [f"{rate:g}", *(f"{usual[name][rate]:.2f} ({PAPER[name][at]:.2f})" for name in PAPER)]
    yield ["goodput", *(f"{goodput(usual[name]):.2f} ({GOODPUT[name]:.2f})" for name in PAPER)]


def live_rows(live: Mapping[str, float], alike: Mapping[str, float]) -> Iterator[list[str]]:
    for name, paper in PAPER.items():
        yield [name, *(f"{each:.2f}" for each in (live[name], alike[name], paper[RATES.index(LIVE_RATE)]))]


def paper_aims(usual: Shares) -> Iterator[Aim]:
    for name, found in usual.items():
        worst = max((share / PAPER[name][RATES.index(rate)] - 1 for rate, share in found.items()), key=abs)
        yield Aim(
            f"requests in time of {name}, simulated",
            f"paper's within {WITHIN:.0%}",
            f"{worst:+.1%}",
            abs(worst) <= WITHIN,
        )
    for name, found in usual.items():
        off = goodput(found) / GOODPUT[name] - 1
        yield Aim(f"goodput of {name}, simulated", f"paper's within {WITHIN:.0%}", f"{off:+.1%}", abs(off) <= WITHIN)


def live_aims(live: Mapping[str, float], alike: Mapping[str, float]) -> Iterator[Aim]:
    for name, share in live.items():
        off = share / alike[name] - 1 if alike[name] else 0.0
        yield Aim(
            f"requests in time of {name}, live", f"simulated within {WITHIN:.0%}", f"{off:+.1%}", abs(off) <= WITHIN
        )


def _method(requests: int, seeds: int, scale: float) -> str:
    return (
        f"EPDServe's table 7: requests of {CLIPS} audio clips and {OUTPUT} tokens, ultravox-v0.3, first token within "
        f"{BOUNDS.ttft:g} s and {BOUNDS.tbt * 1e3:g} ms a further one on average; vLLM is 4EPD, DistServe 3EP1D, EPD "
        "2E1P1D with `spread=2`; a stage works on one request at a time. The paper says neither how long clips and "
        f"outputs are nor what steps take: {ENCODE_S * 1e3:g} ms a clip's encoding and {PREFILL_S:g} s a request's "
        f"prefill are fitted to vLLM's column together, {STEP_S * 1e3:g} ms a decode step to DistServe's, and how the "
        f"first two share their time to EPD's. Simulated: the cores in virtual time, the mean of {seeds} times 100 "
        f"requests. Live: a paced emulation of {requests} requests in {scale:g} times the time, in which stages sleep "
        "and all else is real."
    )
