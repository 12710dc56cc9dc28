"""How much two lanes slow each other down: measured, kept to by budgets, told to simulators."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from trinity.costs.budgets import (
    BudgetCache,
    StepBudgets,
    StepCost,
    predict_budgets,
    search_budget,
)
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.model_shape import get_model_shape
from trinity.costs.step_cost import CostTables, Roofline, get_device, interference_of
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import ConfigError, TrinityWarning
from trinity.instance import Instance, name_instances
from trinity.memory.cache_config import CacheConfig
from trinity.preprocess.processor import RequestProcessor
from trinity.runtime.host import LoadedInstance
from trinity.runtime.loader import ServingConfig, load_instances
from trinity.runtime.profiler import Probe, predict_emulated_budgets, profile_budgets, profile_tables
from trinity.runtime.profiler_lanes import LaneThreads, measure_interference
from trinity.simulation.simulator import Simulator
from trinity.traces.trace import SLO

DUAL = ("vision", "language")
SLOWLY = 0.001


class Machine:
    """Steps of two lanes: a step that sees the other lane at work says that it took longer, by so much."""

    def __init__(self, slower: dict[str, float]) -> None:
        self.slower = slower
        self.at_work: set[str] = set()
        self.changed = threading.Condition()
        self.steps = 0

    def step(self, lane: str) -> Callable[[], float]:
        def run() -> float:
            with self.changed:
                self.at_work.add(lane)
                self.steps += 1
                beside = self.changed.wait_for(lambda: len(self.at_work) > 1, timeout=SLOWLY)
                self.at_work.discard(lane)
            return self.slower[lane] if beside else 1.0

        return run


def always(seconds: float) -> Callable[[], float]:
    return lambda: seconds


@pytest.mark.parametrize("letter", ["P", "D"])
def test_it_is_the_ratio_of_steps_beside_the_other_lane_and_alone(letter: str) -> None:
    """The busy lane answers when it is told to stop; steps in between saw it at work."""
    busy = threading.Event()

    def own() -> float:
        return 3.0 if busy.is_set() else 2.0

    def other() -> float:
        busy.set()
        threading.Event().wait(SLOWLY)
        busy.clear()
        return 1.0

    found = measure_interference(other, {letter: own}, rounds=9)
    assert found in (1.0, 1.5), "a median over what was seen, of which the machine decides how much met"


def test_lanes_that_do_not_meet_are_not_slower() -> None:
    assert measure_interference(always(0.5), {"P": always(0.2), "D": always(0.1)}) == 1.0


def test_the_lane_that_suffers_most_decides() -> None:
    machine = Machine({"vision": 1.25, "language": 1.75})
    machine.changed = threading.Condition()
    seen = measure_interference(machine.step("vision"), {"D": machine.step("language")})
    assert 1.0 <= seen <= 1.75
    assert machine.steps > 2 * 2 * 3 * 2, "both lanes were run alone and beside each other"


def test_what_goes_wrong_beside_is_told() -> None:
    calls = 0

    def breaks() -> float:
        nonlocal calls
        calls += 1
        raise RuntimeError("the encoder broke")

    with pytest.raises(RuntimeError, match="the encoder broke"):
        measure_interference(breaks, {"D": always(1.0)})
    assert calls
    assert not [each for each in threading.enumerate() if each.name == "trinity-probe-busy"]


# ---------------------------------------------------------------- budgets


def test_the_limit_is_kept_beside_the_other_lane() -> None:
    def measure(count: int) -> float:
        return (32 + count) / 64  # exact in binary

    found = search_budget(measure, 4.0, knee=1.0, interference=2.0)
    assert (found.budget, found.seconds, found.feasible) == (96, 4.0, True)
    assert found.samples[96] == 2.0, "samples are alone: the other lane is not in tables of costs"
    assert search_budget(measure, 4.0, knee=1.0).budget == 224


def test_a_step_that_fits_alone_only_is_infeasible() -> None:
    with pytest.warns(TrinityWarning, match=r"take 1.2 s, above the bound of 1 s"):
        found = search_budget(lambda n: 0.8 * n, 1.0, interference=1.5)
    assert (found.budget, found.feasible) == (1, False)
    assert found.samples == {1: pytest.approx(0.8)}


@pytest.mark.parametrize("wrong", [0.5, float("inf"), float("nan")])
def test_nothing_gets_faster_beside_another_lane(wrong: float) -> None:
    with pytest.raises(ConfigError, match="interference is at least 1"):
        search_budget(lambda n: n * 0.01, 1.0, interference=wrong)
    with pytest.raises(ConfigError, match="interference is a number of at least 1"):
        tables(wrong)


def test_both_budgets_of_a_cost_model_shrink_and_its_table_stays() -> None:
    cost = LinearCost(step_s=0.01, prefill_s=1e-4, encode_s=0.01, media_s=1e-5)
    alone = predict_budgets(cost.seconds, "EPD", 0.25, 576)
    beside = predict_budgets(cost.seconds, "EPD", 0.25, 576, interference=1.5)
    assert beside.token_budget < alone.token_budget
    assert beside.image_budget < alone.image_budget
    assert (alone.interference, beside.interference) == (1.0, 1.5)
    assert alone.cost is not None
    assert beside.cost is not None
    count = beside.token_budget
    assert 1.5 * cost.seconds(0, count, 0) <= 0.25
    assert beside.cost.seconds(0, count, 0) == pytest.approx(cost.seconds(0, count, 0))


@pytest.mark.parametrize(("lanes", "factor"), [(("joint",), 1.0), (DUAL, 1.6)])
def test_a_paced_instance_with_two_lanes_keeps_its_limit_beside(lanes: tuple[str, ...], factor: float) -> None:
    paced = EmulatedModel(
        shape=LLAVA_15_7B, cost=LinearCost(step_s=0.01, prefill_s=1e-4, encode_s=0.01, media_s=1e-5), interference=1.6
    )
    instance: Any = type("Loaded", (), {"spec": Instance("EPD", lanes=lanes)})()
    found = predict_emulated_budgets(paced, instance, 0.25)
    assert found.interference == factor
    assert factor * paced.cost.seconds(0, found.token_budget, 0) <= 0.25


# ---------------------------------------------------------------- tables and simulators


def tables(factor: float, name: str = "cpu x 1") -> CostTables:
    cost = StepCost.from_samples(decodes={1: 0.01, 64: 0.2}, prefill={1: 0.05, 1024: 0.25}, media={576: 0.1, 2304: 0.4})
    return CostTables(model="m", device=name, dtype="float32", source="test", costs=((1, cost),), interference=factor)


def test_tables_keep_it_on_disk(tmp_path: Path) -> None:
    tables(1.37).save(tmp_path / "t.json")
    assert CostTables.load(tmp_path / "t.json").interference == 1.37
    text = (tmp_path / "t.json").read_text().replace('"interference": 1.37', '"context": 512')
    (tmp_path / "old.json").write_text(text)
    assert CostTables.load(tmp_path / "old.json").interference == 1.0, "tables from before know of none"


def test_the_largest_measured_holds_and_1_where_none_was() -> None:
    shape = get_model_shape("llava-1.5-7b")
    assert interference_of(None) == 1.0
    assert interference_of(Roofline(model=shape, device=get_device("H100"))) == 1.0
    assert interference_of({"a": tables(1.2), "b": tables(1.4), "c": LinearCost()}) == 1.4


def simulator(**options: Any) -> Simulator:
    return Simulator("llava-1.5-7b", SLO(2.0, 0.25), cluster=Cluster.of("H100", 1), **options)


def test_a_simulator_takes_it_from_measured_costs() -> None:
    assert simulator(cost=tables(1.5)).interference == 1.5
    assert simulator(cost=tables(1.5), interference=1.1).interference == 1.1, "what is said holds"
    assert simulator().interference == 1.0


def test_budgets_of_a_simulated_instance_hold_jointly() -> None:
    def tokens(lanes: tuple[str, ...]) -> int:
        (settings,) = simulator(cost=tables(1.5), lanes=lanes).settings("1EPD")
        return settings.rules.token_budget

    assert tokens(DUAL) < tokens(("joint",))
    assert 1.5 * tables(1.5).seconds(0, tokens(DUAL), 0) <= 0.25


# ---------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def processor() -> Iterator[RequestProcessor]:
    made = RequestProcessor(checkpoint("llava"))
    yield made
    made.close()


def loaded(processor: RequestProcessor, roles: str, **asked: Any) -> LoadedInstance:
    deployment = ServingConfig(
        checkpoint("llava"),
        dtype="float32",
        cache=CacheConfig(image_block_size=64, pools={"image": 8, "kv": 16}),
    )
    return load_instances(deployment, name_instances([Instance(roles, **asked)]), processor)[0]


@pytest.mark.parametrize("roles", ["EP", "ED", "EPD"])
def test_profiles_of_two_lanes_measure_it(
    roles: str, processor: RequestProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = loaded(processor, roles, lanes=DUAL)
    measured = profile_budgets(instance, processor, 5.0, BudgetCache(tmp_path))
    assert 1.0 <= measured.interference < 50
    monkeypatch.setattr(Probe, "interference", lambda probe: 3.0)
    slowed = profile_budgets(instance, processor, 4.0, BudgetCache(tmp_path))
    assert slowed.interference == 3.0
    assert profile_budgets(instance, processor, 4.0, BudgetCache(tmp_path)) == slowed, "cached with it"
    few: dict[str, Any] = {"contexts": (1,), "rows": (1,), "tokens": (1,), "images": (1,), "repeats": 1}
    assert profile_tables([instance], processor, **few).interference == 3.0


@pytest.mark.parametrize(("roles", "lanes"), [("EPD", ("joint",)), ("PD", DUAL), ("E", DUAL)])
def test_one_lane_has_no_interference(
    roles: str, lanes: tuple[str, ...], processor: RequestProcessor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Probe, "interference", lambda probe: pytest.fail("measured"))
    instance = loaded(processor, roles, lanes=lanes)
    assert profile_budgets(instance, processor, 5.0, BudgetCache(tmp_path)).interference == 1.0


def test_budgets_of_other_lanes_or_cores_are_not_taken(processor: RequestProcessor, tmp_path: Path) -> None:
    cache = BudgetCache(tmp_path)
    found: dict[int, StepBudgets] = {}
    core = min(os.sched_getaffinity(0))
    ways: tuple[dict[str, Any], ...] = ({}, {"lanes": DUAL}, {"lanes": DUAL, "cores": (core,)})
    for number, asked in enumerate(ways):
        found[number] = profile_budgets(loaded(processor, "EP", **asked), processor, 5.0, cache)
        assert len(list(cache.folder.glob("*.json"))) == number + 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this platform has no thread affinity")
def test_steps_are_measured_on_the_cores_of_their_lane() -> None:
    before = os.sched_getaffinity(0)
    core = max(before)
    threads = LaneThreads(DUAL, (core,), 1, None)
    try:
        seen = {
            letter: threads.run(letter, lambda stream: (threading.current_thread(), os.sched_getaffinity(0)))
            for letter in "EPD"
        }
    finally:
        threads.close()
    assert all(cores == {core} for _, cores in seen.values())
    assert seen["P"][0] is seen["D"][0] is not seen["E"][0]
    assert os.sched_getaffinity(0) == before
