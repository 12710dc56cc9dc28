"""EPDServe's table 1: the mean first token of videos of 8 to 64 frames, live (paced) and simulated, beside the paper's.

MiniCPM-V 2.6, of which a frame has 64 tokens, on 8 devices, a request a second, no decoding; vLLM is 8EPD, DistServe
7EP1D and EPD 6E1P1D, whose six encoders share the frames of a request. The paper says neither the placement of EPD in
this table nor what steps take: a pass and a frame (encoding and prefill) are fitted to vLLM's row; EPD's own pass (its
stages hand over), how a frame's time is shared and the number of encoders to EPD's rows of 8 and 64 frames. Predicted
are DistServe's row and EPD's other two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from statistics import mean

from benchmarks.report import Aim, Result, Table
from benchmarks.serving.open_loop import VLLM, Served, System, by_roles, lost, mean_ttft, poisson, serve, simulate
from benchmarks.setting import Setting
from trinity.costs.budgets import StepBudgets
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.traces.trace import Trace, TraceRow, TraceVideo

SHAPE = get_model_shape("minicpm-v-2.6")
FRAME, TEXT = 64, 22  # tokens
FRAMES = (8, 16, 32, 64)
PASS_S, EPD_PASS_S, ENCODE_S, PREFILL_S = 0.03, 0.125, 0.0455, 0.0015
RATE, WITHIN = 1.0, 0.15
PAPER = {
    "vLLM": (0.42, 0.82, 1.59, 3.11),
    "DistServe": (0.42, 0.81, 1.54, 3.08),
    "EPD": (0.24, 0.30, 0.49, 1.00),
}
Means = Mapping[str, Mapping[int, float]]  # seconds by system and frames


def cost(pass_s: float) -> LinearCost:
    return LinearCost(step_s=pass_s, prefill_s=PREFILL_S / FRAME, media_s=ENCODE_S / FRAME)


SYSTEMS = {
    "vLLM": System("8EPD", cost(PASS_S), rules=VLLM),
    "DistServe": System("7EP1D", cost(PASS_S)),
    "EPD": System("6E1P1D", cost(EPD_PASS_S), spread=6),
}


def videos(frames: int, requests: int, seed: int) -> Trace:
    def row(at: float) -> TraceRow:
        video = TraceVideo(frames=frames, tokens=frames * FRAME)
        return TraceRow(timestamp=at, input_length=0, text_length=TEXT, output_length=1, videos=[video])

    return poisson(RATE, requests, row, seed)


def limits(frames: int) -> dict[str, StepBudgets]:
    return by_roles(FRAME, frames * FRAME + TEXT)


def simulated(requests: int, seeds: int) -> Means:
    """Mean over so many traces of each length."""
    return {
        name: {
            frames: mean(
                mean_ttft(simulate(SHAPE, system, videos(frames, requests, seed), limits(frames)))
                for seed in range(seeds)
            )
            for frames in FRAMES
        }
        for name, system in SYSTEMS.items()
    }


def live(requests: int, scale: float) -> dict[str, dict[int, list[Served]]]:
    return {
        name: {
            frames: asyncio.run(serve(SHAPE, system, videos(frames, requests, 0), limits(frames), scale))
            for frames in FRAMES
        }
        for name, system in SYSTEMS.items()
    }


def run(setting: Setting) -> Result:
    requests, scale, seeds, most = (4, 0.05, 1, 20) if setting.quick else (25, 1.0, 3, 100)
    served = live(requests, scale)
    return result(served, simulated(requests, 1), simulated(most, seeds), requests, scale)


def result(
    served: Mapping[str, Mapping[int, list[Served]]], alike: Means, usual: Means, requests: int, scale: float
) -> Result:
    """``alike``: simulated means of the requests that were served; ``usual``: of as many as the paper has."""
    means = {name: {frames: mean_ttft(each) for frames, each in found.items()} for name, found in served.items()}
    wrong = sum(lost(each) for found in served.values() for each in found.values())
    return Result(
        name="video",
        title="Videos of 8 to 64 frames, on three systems",
        method=_method(requests, scale),
        tables=[
            Table("Mean first token, s", HEADER, list(rows(means, alike, usual))),
            Table("EPD's first token sooner than vLLM's", GAINS, list(gain_rows(means, usual))),
        ],
        aims=[
            *paper_aims(usual),
            *live_aims(means, alike),
            Aim("requests lost, live", "0", str(wrong), wrong == 0),
        ],
        values={"live": _plain(means), "alike": _plain(alike), "simulated": _plain(usual)},
    )


HEADER = ("system and frames", "live", "simulated, the same requests", "simulated, 100 requests", "paper")
GAINS = ("frames", "live", "simulated", "paper")


def rows(live: Means, alike: Means, usual: Means) -> Iterator[list[str]]:
    for name, paper in PAPER.items():
        for frames, theirs in zip(FRAMES, paper, strict=True):
            found = (live[name][frames], alike[name][frames], usual[name][frames], theirs)
            yield [f"{name}, {frames}", *(f"{each:.2f}" for each in found)]


def gain_rows(live: Means, usual: Means) -> Iterator[list[str]]:
    for at, frames in enumerate(FRAMES):
        paper = PAPER["vLLM"][at] / PAPER["EPD"][at]
        ours = [each["vLLM"][frames] / each["EPD"][frames] for each in (live, usual)]
        yield [str(frames), *(f"{each:.2f}x" for each in (*ours, paper))]


def paper_aims(usual: Means) -> Iterator[Aim]:
    for name, paper in PAPER.items():
        off = [usual[name][frames] / theirs - 1 for frames, theirs in zip(FRAMES, paper, strict=True)]
        worst = max(off, key=abs)
        yield Aim(
            f"first tokens of {name}, simulated", f"paper's within {WITHIN:.0%}", f"{worst:+.1%}", abs(worst) <= WITHIN
        )


def live_aims(live: Means, alike: Means) -> Iterator[Aim]:
    for name, found in live.items():
        worst = max((found[frames] / alike[name][frames] - 1 for frames in FRAMES), key=abs)
        yield Aim(
            f"first tokens of {name}, live", f"simulated within {WITHIN:.0%}", f"{worst:+.1%}", abs(worst) <= WITHIN
        )


def _plain(means: Means) -> dict[str, dict[str, float]]:
    return {name: {str(frames): each for frames, each in found.items()} for name, found in means.items()}


def _method(requests: int, scale: float) -> str:
    return (
        f"EPDServe's table 1: videos at {RATE:g} request a second, MiniCPM-V 2.6, {FRAME} tokens a frame, first tokens "
        "alone; vLLM is 8EPD, DistServe 7EP1D, EPD 6E1P1D with `spread=6`. The paper names neither EPD's placement "
        f"here nor what steps take: {PASS_S:g} s a pass and {(ENCODE_S + PREFILL_S) * 1e3:g} ms a frame are fitted to "
        f"vLLM's row; that {PREFILL_S * 1e3:g} ms of them are prefill, {EPD_PASS_S:g} s a pass of EPD, whose stages "
        "hand over, and the number of its encoders to EPD's 8 and 64 frames. DistServe's row and EPD's 16 and 32 "
        f"frames are fitted to nothing. Live: a paced emulation of {requests} requests of each kind in {scale:g} "
        "of the time, in which stages sleep and all else is real. Simulated: the cores in virtual time, the mean of "
        "three times 100 requests."
    )
