"""The simulator, an emulated pipeline and the tests' cluster: the same core gets the same events in the same order."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from support.simulations import simulator
from support.virtual.cluster import Durations, VirtualCluster, make_settings, predict_steps
from trinity.core.messages import MediaSpan, PeerLoad, PeerUp, Sampled, Tick, Value, Work
from trinity.core.transfers import TransferPolicy
from trinity.costs.budgets import StepBudgets
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.interconnects import Interconnect
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.placement import Placement
from trinity.traces.trace import Trace, TraceImage, TraceRow

POOLS = {"image": 12, "kv": 400}
WHOLE = TransferPolicy(kv="off")
LIVENESS_S = 60.0
TOLD_ELSEWHERE = (PeerUp, PeerLoad, Tick)
TIMED = {"seconds", "record", "spans", "transfers", "deadline_s", "since"}  # fields that hold measured times
LINK = Interconnect(name="quick", bandwidth=1e15, fixed_s=1e-4)

# Times are far above what a busy machine adds, so that both orders hang on the cores alone. At a budget of 590 each
# prompt ends in a step of its own: two that end in one are pulled at once, and either may come first.
CASES = {
    "EPD": (LinearCost(step_s=0.1, encode_s=0.1), StepBudgets(token_budget=400, image_budget=576)),
    "1E1P1D": (
        LinearCost(prefill_s=0.4 / 600, encode_s=0.1, decode_s=0.02),
        StepBudgets(token_budget=590, image_budget=576),
    ),
}
Told = dict[str, list[Any]]


def plain(value: Any) -> Any:
    """What must be equal: all of a message but times, and of content its size."""
    if isinstance(value, Work):
        return value.request, len(value.prompt), plain(value.media), value.max_tokens
    if isinstance(value, (MediaSpan, Sampled)):
        return value.tokens if isinstance(value, MediaSpan) else "token"
    if isinstance(value, msgspec.Struct):
        shown = ((name, getattr(value, name)) for name in value.__struct_fields__ if name not in TIMED)
        sized = (
            (name, len(each) if name == "tokens" and each and type(each[0]) is int else each) for name, each in shown
        )
        return type(value).__name__, *((name, plain(each)) for name, each in sized)
    if isinstance(value, dict):
        return sorted((str(key), plain(each)) for key, each in value.items())
    return [plain(each) for each in value] if isinstance(value, (tuple, list)) else value


def record(core: Any) -> list[Any]:
    """Every event that the core is told from here on, with its answer."""
    handle, into = core.handle, list[Any]()

    def recorded(event: Value, now: float) -> list[Value]:
        commands: list[Value] = handle(event, now)
        if not isinstance(event, TOLD_ELSEWHERE):
            said = [each for each in commands if not isinstance(getattr(each, "message", None), TOLD_ELSEWHERE)]
            into.append((plain(event), plain(said)))
        return commands

    core.handle = recorded
    return into


def script(placement: str) -> list[TraceRow]:
    """All at once: a long text (chunked), two that share an image, one with another."""

    def row(text: int, out: int, *contents: str) -> TraceRow:
        images = [TraceImage(tokens=576, content=each) for each in contents]
        total = text + 576 * len(images)
        return TraceRow(timestamp=0, input_length=total, text_length=text, output_length=out, images=images)

    images = [row(24, 4, "cat"), row(24, 3, "cat"), row(24, 2, "dog")]
    return images if placement == "1E1P1D" else [row(600, 5), *images]


def simulated(placement: str, cost: LinearCost, budgets: StepBudgets) -> Told:
    size = Placement.parse(placement).size
    cluster = Cluster.of("H100", size, link=LINK, message_s=1e-4)
    made = simulator(size, cluster=cluster, cost=cost, budgets=budgets, transfers=WHOLE)
    run = made.prepare(Trace(script(placement)), placement)
    told: Told = {name: record(core) for name, core in run.cores.items()}
    run.run()
    return told


def virtual(placement: str, cost: LinearCost, budgets: StepBudgets) -> Told:
    size = Placement.parse(placement).size
    made = simulator(size, cost=cost, budgets=budgets, transfers=WHOLE)
    run = made.prepare(Trace(script(placement)), placement)
    rules = made.settings(placement)[0].rules
    cluster = VirtualCluster(
        make_settings(placement, POOLS, rules=rules, transfers=WHOLE, layers=32),
        durations=Durations(lambda *_: 1e-4, predict_steps(cost), lambda *_: 1e-4),
    )
    for number in range(len(run.jobs)):
        cluster.submit(run.work(number))
    told: Told = {name: record(core) for name, core in cluster.cores.items()}
    cluster.run()
    return told


async def live(placement: str, cost: LinearCost, budgets: StepBudgets) -> Told:
    model = EmulatedModel(shape=LLAVA_15_7B, cost=cost, scale=2048)
    requests = [EmulatedRequest.of(row, number) for number, row in enumerate(script(placement))]
    named = [msgspec.structs.replace(each, request_id=str(number)) for number, each in enumerate(requests)]
    async with (
        Pipeline(model, placement, cache=CacheConfig(pools=POOLS), budgets=budgets, transfers=WHOLE) as pipe,
        asyncio.timeout(LIVENESS_S),
    ):
        told: Told = {name: record(host.core) for name, host in pipe.hosts.items()}
        await asyncio.gather(*(pipe.complete(request) for request in named))
    return told


def slowed(cost: LinearCost, factor: float) -> LinearCost:
    times = {name: getattr(cost, name) * factor for name in cost.__struct_fields__ if name.endswith("_s")}
    return msgspec.structs.replace(cost, **times)


@pytest.mark.parametrize("placement", CASES)
def test_the_order_of_the_tests_cluster(placement: str) -> None:
    cost, budgets = CASES[placement]
    found = simulated(placement, cost, budgets)
    assert found == virtual(placement, cost, budgets)
    assert sum(len(each) for each in found.values()) >= 15
    assert found != simulated(placement, cost, StepBudgets(token_budget=100, image_budget=576)), (
        "the control: a smaller budget"
    )


@pytest.mark.parametrize("placement", CASES)
async def test_the_order_of_a_live_pipeline(placement: str) -> None:
    cost, budgets = CASES[placement]
    for factor in (1, 4, 16):  # where noise has disturbed the order, once more and slower
        wanted = simulated(placement, slowed(cost, factor), budgets)
        found = await live(placement, slowed(cost, factor), budgets)
        if found == wanted:
            break
    assert found == wanted


def test_the_comparison_sees_what_differs() -> None:
    cost, budgets = CASES["1E1P1D"]
    told = simulated("1E1P1D", cost, budgets)
    assert plain(Sampled(1)) == plain(Sampled(2))
    kinds = {event[0] for each in told.values() for event, _ in each}
    assert kinds == {"Submit", "Stepped", "Offer", "Ready", "Commit", "Pulled", "Release", "Forget"}
    assert told["E0"] != told["P0"]
