"""EPDServe's table 6: outputs become ten times as long, and three of five encoders switch to decode, or do not.

100 requests of one 4K image at three a second; ten ask for 50 tokens, the others for 500. 5E1P2D serves them, and
becomes 2E1P5D by ``Pipeline.apply``, or stays. The model is fitted to the paper: encoding and prefill to its table 4, a
decode step alone to the least TPOT of its table 5, and a further row of a step to the TPOT that table 6 has *without* a
switch. What a switch gains is fitted to nothing. A paced emulation serves it live, in processes: stages sleep, all else
is real. The simulator replays it, by the cores that switch live.

The predicates: live and simulated, mean latency and TPOT are shorter with the switch by the paper's factors, within
15 %; the first token takes at most 1.5 times as long; each request has all its tokens, the right ones.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from statistics import mean
from typing import NamedTuple

from benchmarks.report import Aim, Result, Table
from benchmarks.setting import Setting
from trinity.core.role_changes import Switch
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.emulation.content import expected_tokens
from trinity.emulation.model import EmulatedModel, EmulatedRequest, EmulatedShape
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.request import Output
from trinity.simulation.role_switches import PlacementChange
from trinity.simulation.simulator import Replay, Simulator
from trinity.traces.trace import SLO, Trace, TraceImage, TraceRow

BEFORE, AFTER = "5E1P2D", "2E1P5D"
RATE, REQUESTS, SHORT = 3.0, 100, 10  # requests a second, requests, those of the short outputs
SHORT_OUTPUT, LONG_OUTPUT = 50, 500
IMAGE, TEXT = 64, 22  # tokens of an image and of the text
ENCODE_S, PREFILL_S, STEP_S = 0.413, 0.055, 0.025
ROW_S = 0.0032  # of a further row of a decode step: so that 5E1P2D, simulated, has the paper's TPOT without a switch
REACTION_S = 2.0  # from the first long request on, until the change is asked for
DELAYS = (0.0, REACTION_S, 5.0, 10.0, 20.0)
WITHIN, MOST_TTFT = 0.15, 1.5
SHAPE = get_model_shape("minicpm-v-2.6")
BUDGETS = StepBudgets(token_budget=16384, image_budget=IMAGE)
POOLS = {"image": 64, "kv": 4096}
BLOCK = 16


class Latencies(NamedTuple):
    """Mean seconds of all requests: whole, to the first token, and a further token."""

    latency: float
    ttft: float
    tpot: float

    def over(self, other: Latencies) -> Latencies:
        return Latencies(*(one / two for one, two in zip(self, other, strict=True)))


class Served(NamedTuple):
    """Latencies, requests without all their tokens or with wrong ones, and the seconds of each switch."""

    latencies: Latencies
    lost: int
    switches: list[tuple[str, float, float, float]]  # name, drain, migration, onload


PAPER = {True: Latencies(28.01, 1.42, 0.05), False: Latencies(61.10, 1.33, 0.12)}


def cost(scale: float = 1.0) -> LinearCost:
    """Seconds of a step, ``scale`` times as long."""
    return LinearCost(
        step_s=STEP_S * scale,
        decode_s=ROW_S * scale,
        prefill_s=PREFILL_S / (IMAGE + TEXT) * scale,
        media_s=ENCODE_S / IMAGE * scale,
    )


def arrivals(count: int) -> list[tuple[float, int]]:
    """Seconds and output tokens of each request: a Poisson process, as the paper's online experiments have it."""
    draw, at, found = random.Random(0), 0.0, []
    for number in range(count):
        at += draw.expovariate(RATE)
        found.append((at, SHORT_OUTPUT if number < SHORT else LONG_OUTPUT))
    return found


def shift(asked: Sequence[tuple[float, int]]) -> float:
    """Seconds at which the first long request comes."""
    return next(at for at, output in asked if output == LONG_OUTPUT)


# ---------------------------------------------------------------- simulated


def trace(asked: Sequence[tuple[float, int]]) -> Trace:
    return Trace(
        TraceRow(
            timestamp=1000 * at,
            input_length=IMAGE + TEXT,
            text_length=TEXT,
            output_length=output,
            images=[TraceImage(tokens=IMAGE, content=str(number))],
        )
        for number, (at, output) in enumerate(asked)
    )


def simulate(asked: Sequence[tuple[float, int]], delay_s: float | None, change_s: float = 0.7) -> Served:
    """Replay with a change so long after the shift, or with none (None)."""
    simulator = Simulator(SHAPE, SLO(3.0, 1.0), cluster=Cluster.of("A100", 8), cost=cost(), budgets=BUDGETS)
    at_s = shift(asked) + (delay_s or 0.0)
    changes = [] if delay_s is None else [PlacementChange(placement=AFTER, at_s=at_s, change_s=change_s)]
    return describe(simulator.replay(trace(asked), BEFORE, changes=changes), asked)


def describe(found: Replay, asked: Sequence[tuple[float, int]]) -> Served:
    outcomes = [each for each in found.outcomes if each.ttft_s is not None]
    lost = sum(
        each.finish_reason != "length" or 1 + len(each.itl_s) != output
        for each, (_, output) in zip(found.outcomes, asked, strict=True)
    )
    parts = [([each.ttft_s or 0.0, *each.itl_s]) for each in outcomes]
    switches = [(each.name, each.drain_s, 0.0, each.change_s) for each in found.switches]
    return Served(means(parts), lost, switches)


def means(parts: Sequence[Sequence[float]]) -> Latencies:
    """Of the seconds to each token of each request."""
    return Latencies(
        mean(sum(each) for each in parts),
        mean(each[0] for each in parts),
        mean(mean(each[1:]) for each in parts if len(each) > 1),
    )


# ---------------------------------------------------------------- live


async def serve(asked: Sequence[tuple[float, int]], switches: bool, scale: float) -> Served:
    """Serve in processes, with the change after ``REACTION_S`` or without; all takes ``scale`` times as long."""
    model = EmulatedModel(shape=EmulatedShape.of(SHAPE), cost=cost(scale), scale=2048)
    requests = [make_request(number, output) for number, (_, output) in enumerate(asked)]
    async with Pipeline(model, BEFORE, hosting="process", budgets=BUDGETS, cache=CacheConfig(pools=POOLS)) as pipe:
        loop = asyncio.get_running_loop()
        began = loop.time() + 0.1

        async def ask(request: EmulatedRequest, at: float) -> Output:
            await asyncio.sleep(began + at * scale - loop.time())
            return await pipe.complete(request)

        serving = [asyncio.create_task(ask(*each)) for each in zip(requests, (at for at, _ in asked), strict=True)]
        done: list[Switch] = []
        if switches:
            await asyncio.sleep(began + (shift(asked) + REACTION_S) * scale - loop.time())
            done = await pipe.apply(AFTER)
        outputs = await asyncio.gather(*serving, return_exceptions=True)
        lost = await asyncio.to_thread(count_wrong, pipe, requests, outputs, model)
    parts = [[each / scale for each in (out.ttft_s or 0.0, *out.itl_s)] for out in outputs if isinstance(out, Output)]
    return Served(means(parts), lost, [(each.name, each.drain_s, each.migration_s, each.onload_s) for each in done])


def make_request(number: int, output: int) -> EmulatedRequest:
    return EmulatedRequest(text_tokens=TEXT, image_tokens=(IMAGE,), contents=(f"{number}",), max_tokens=output)


def count_wrong(
    pipe: Pipeline,
    requests: Sequence[EmulatedRequest],
    outputs: Sequence[Output | BaseException],
    model: EmulatedModel,
) -> int:
    """Count those without their tokens: each token is a function of all that is in the blocks of its request."""
    wrong = 0
    for request, output in zip(requests, outputs, strict=True):
        due = expected_tokens(pipe.processor.process(request).work, BLOCK, model.shape.vocabulary)
        wrong += not (isinstance(output, Output) and output.token_ids == due)
    return wrong


# ---------------------------------------------------------------- the result


def run(setting: Setting) -> Result:
    """Two replays in real time, of a minute and a half and one minute."""
    asked = arrivals(REQUESTS)
    live_asked, scale = (asked[: SHORT + 8], 0.1) if setting.quick else (asked, 1.0)
    live = {switches: asyncio.run(serve(live_asked, switches, scale)) for switches in (False, True)}
    simulated = {delay: simulate(asked, delay) for delay in (None, *DELAYS)}
    return result(live, simulated)


HEADER = ("", "latency s", "TTFT s", "TPOT s", "latency", "TTFT", "TPOT", "requests lost")


def result(live: dict[bool, Served], simulated: dict[float | None, Served]) -> Result:
    model = {False: simulated[None], True: simulated[REACTION_S]}
    took = [[name, *(f"{each:.2f}" for each in parts)] for name, *parts in live[True].switches]
    late = [[f"{delay:g}", *ratios(simulated[None], simulated[delay])] for delay in DELAYS]
    return Result(
        name="long_outputs",
        title="Outputs that become ten times as long, with and without a switch of roles",
        method=_method(),
        tables=[
            Table("Mean of all requests; times as long without a switch", HEADER, list(rows(live, model))),
            Table("Simulated: times as long without a switch, by seconds until it is asked for", LATE, late),
            Table("Live: seconds of each switch", ("instance", "drain", "migration", "onload"), took),
        ],
        aims=[*gain_aims("live", live), *gain_aims("simulated", model)],
        values={
            "live": {str(switches): list(each.latencies) for switches, each in live.items()},
            "simulated": {str(delay): list(each.latencies) for delay, each in simulated.items()},
            "switches": [list(each) for each in live[True].switches],
            "lost": {"live": [each.lost for each in live.values()], "simulated": [e.lost for e in simulated.values()]},
        },
    )


LATE = ("asked for after", "latency", "TTFT", "TPOT")


def ratios(without: Served, switched: Served) -> list[str]:
    return [f"{each:.2f}x" for each in without.latencies.over(switched.latencies)]


def rows(live: dict[bool, Served], simulated: dict[bool, Served]) -> Iterator[list[str]]:
    paper = {switches: Served(each, 0, []) for switches, each in PAPER.items()}
    for name, found in (("live", live), ("simulated", simulated), ("paper", paper)):
        for switches in (False, True):
            latency, ttft, tpot = found[switches].latencies
            shown = [f"{latency:.2f}", f"{ttft:.2f}", f"{tpot:.3f}"]
            gains = ratios(found[False], found[True]) if switches else ["", "", ""]
            lost = "" if name == "paper" else str(found[switches].lost)
            yield [f"{name}, {'switched' if switches else 'stays'}", *shown, *gains, lost]


def gain_aims(name: str, found: dict[bool, Served]) -> Iterator[Aim]:
    gain = found[False].latencies.over(found[True].latencies)
    paper = PAPER[False].over(PAPER[True])
    for what, ours, theirs in (("latency", gain.latency, paper.latency), ("TPOT", gain.tpot, paper.tpot)):
        met = abs(ours / theirs - 1) <= WITHIN
        yield Aim(f"{what} without a switch, {name}", f"{theirs:.1f}x within {WITHIN:.0%}", f"{ours:.2f}x", met)
    later = 1 / gain.ttft
    yield Aim(f"first token with the switch, {name}", f"at most {MOST_TTFT:g}x", f"{later:.2f}x", later <= MOST_TTFT)
    lost = sum(each.lost for each in found.values())
    yield Aim(f"requests lost or with a wrong token, {name}", "0", str(lost), lost == 0)


def _method() -> str:
    return (
        f"EPDServe's table 6: {REQUESTS} requests of one image at {RATE:g} a second, the first {SHORT} of "
        f"{SHORT_OUTPUT} tokens and the others of {LONG_OUTPUT}, on {BEFORE}, which becomes {AFTER} (asked for "
        f"{REACTION_S:g} s after the first long one came) or stays. {ENCODE_S:g} s an image's encoding and "
        f"{PREFILL_S:g} s its prefill are fitted to table 4, {STEP_S * 1e3:g} ms a decode step to table 5, and "
        f"{ROW_S * 1e3:g} ms a further row of a step to table 6's TPOT without a switch; the gain is fitted to "
        "nothing. Live: a paced emulation in processes, in which stages sleep and all else is real. Simulated: the "
        "cores in virtual time, 0.7 s a switch beside its drain, as the paper says."
    )
