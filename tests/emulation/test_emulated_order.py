"""An emulated pipeline and the virtual cluster: the same core gets the same events in the same order."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from support.virtual.cluster import Durations, VirtualCluster, make_settings, predict_steps
from trinity.core.messages import Offer, PeerUp, Value, Work
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.content import expected_tokens
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel, EmulatedRequest
from trinity.emulation.processor import EmulatedProcessor
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline

MODEL = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(), scale=2048)
WHOLE = TransferPolicy(kv="off")  # the cluster tells of layers at times of its own
POOLS = {"image": 12, "kv": 400}
LIVENESS_S = 60.0
TIMED = {"seconds", "record", "spans", "transfers", "deadline_s"}  # fields that hold measured times
ELSEWHERE = ("PeerUp", "PeerLoad", "Tick", "Beat")


def plain(value: Value) -> tuple[Any, ...] | None:
    """An event or command without its times; None for what has no place in a script."""
    if type(value).__name__ in ELSEWHERE:
        return None
    fields = {name: getattr(value, name) for name in value.__struct_fields__ if name not in TIMED}
    if isinstance(fields.get("message"), Value):
        fields["message"] = plain(fields["message"])
        if fields["message"] is None:
            return None
    ordered = {name: sorted(field.items()) if isinstance(field, dict) else field for name, field in fields.items()}
    return type(value).__name__, *sorted((name, repr(field)) for name, field in ordered.items())


# Times are far above what a busy machine adds, so that both orders hang on the cores alone. At a budget of 590 each
# prompt ends in a step of its own: two that end in one are pulled at once, and either may come first.
CASES = {
    "EPD": (LinearCost(step_s=0.1, encode_s=0.1), BatchRules(token_budget=400, image_budget=576)),
    "1E1P1D": (
        LinearCost(prefill_s=0.4 / 600, encode_s=0.1, decode_s=0.02),
        BatchRules(token_budget=590, image_budget=576),
    ),
}
Told = dict[str, list[Any]]


def script(placement: str) -> list[EmulatedRequest]:
    """All at once: a long text (chunked), two that share an image, one with another."""
    text = [EmulatedRequest(text_tokens=600, max_tokens=5, request_id="d")]
    images = [
        EmulatedRequest(text_tokens=24, image_tokens=(576,), contents=("cat",), max_tokens=4, request_id="a"),
        EmulatedRequest(text_tokens=24, image_tokens=(576,), contents=("cat",), max_tokens=3, request_id="b", text="t"),
        EmulatedRequest(text_tokens=24, image_tokens=(576,), contents=("dog",), max_tokens=2, request_id="c"),
    ]
    return images if placement == "1E1P1D" else [*text, *images]


def slowed(cost: LinearCost, factor: float) -> LinearCost:
    times = {name: getattr(cost, name) * factor for name in cost.__struct_fields__ if name.endswith("_s")}
    return msgspec.structs.replace(cost, **times)


def virtual(placement: str, cost: LinearCost, rules: BatchRules, works: list[Work]) -> Told:
    tokens = {work.request: expected_tokens(work, 16, MODEL.shape.vocabulary) for work in works}
    cluster = VirtualCluster(
        make_settings(placement, POOLS, rules=rules, transfers=WHOLE),
        durations=Durations(lambda *_: 1e-4, predict_steps(cost), lambda *_: 1e-4),
        sample=lambda work, index: tokens[work.request][index],
    )
    for work in works:
        cluster.submit(work)
    told: Told = {name: record(core) for name, core in cluster.cores.items()}
    cluster.run()
    return told


async def live(placement: str, cost: LinearCost, rules: BatchRules) -> Told:
    model = msgspec.structs.replace(MODEL, cost=cost)
    async with (
        Pipeline(model, placement, cache=CacheConfig(pools=POOLS), rules=rules, transfers=WHOLE) as pipe,
        asyncio.timeout(LIVENESS_S),
    ):
        told: Told = {name: record(host.core) for name, host in pipe.hosts.items()}
        await asyncio.gather(*(pipe.complete(request) for request in script(placement)))
    return told


@pytest.mark.parametrize("placement", CASES)
async def test_events_come_in_the_order_of_the_virtual_cluster(placement: str) -> None:
    cost, rules = CASES[placement]
    works = [EmulatedProcessor(MODEL).process(request).work for request in script(placement)]
    for factor in (1, 4, 16):  # where noise has disturbed the order, again and slower
        wanted = virtual(placement, slowed(cost, factor), rules, works)
        found = await live(placement, slowed(cost, factor), rules)
        if found == wanted:
            break
    assert found == wanted
    assert sum(len(each) for each in found.values()) >= 15
    other = virtual(placement, cost, BatchRules(token_budget=100, image_budget=576), works)
    assert other != wanted, "the control: a smaller budget gives another order"


def record(core: Any) -> list[Any]:
    """Every event that the core is told from here on, with its answer."""
    handle, into = core.handle, list[Any]()

    def recorded(event: Value, now: float) -> list[Value]:
        commands: list[Value] = handle(event, now)
        if plain(event) is not None:
            into.append((plain(event), [said for said in map(plain, commands) if said is not None]))
        return commands

    core.handle = recorded
    return into


def test_the_comparison_sees_what_differs() -> None:
    assert plain(PeerUp("a", "E")) is None
    work = EmulatedProcessor(MODEL).process(script("EPD")[0]).work
    offers = [Offer(id=name, kind="kv", source="P0", work=work, parts=()) for name in ("a", "b")]
    assert plain(offers[0]) != plain(offers[1])
