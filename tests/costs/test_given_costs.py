"""Measured tables are checked where they enter: values, kinds of work, model, device and dtype."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from trinity import SLO, HybridPlanner
from trinity.costs.budgets import StepCost
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost, TableCost
from trinity.costs.model_shape import MODELS
from trinity.costs.step_cost import DEVICES, CostTables
from trinity.errors import ConfigError, TrinityWarning
from trinity.simulation.simulator import Simulator

QWEN = MODELS["qwen2-vl-7b"]
SECONDS: dict[str, dict[int, float]] = {
    "decodes": {1: 0.01, 64: 0.02},
    "prefill": {1: 0.01, 1024: 0.1},
    "media": {576: 0.1},
}
FULL = StepCost.from_samples(**SECONDS)


def tables(seconds: dict[str, dict[int, float]] = SECONDS, shape: str = "", **named: Any) -> CostTables:
    named = {"model": "m", "device": "a server's cores", "dtype": "bfloat16"} | named
    return CostTables(**{**_fields(CostTables.from_samples({1: seconds, 512: seconds}, **named)), "shape": shape})


def _fields(one: CostTables) -> dict[str, Any]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def planner(cost: Any, device: str = "H100") -> HybridPlanner:
    return HybridPlanner("qwen2-vl-7b", SLO(2.0, 0.1), instances=2, device=device, cost=cost)


def simulator(cost: Any) -> Simulator:
    return Simulator("qwen2-vl-7b", SLO(2.0, 0.1), cluster=Cluster.of("H100", 3), cost=cost)


@pytest.mark.parametrize("seconds", [0.0, -0.01, -math.inf])
@pytest.mark.parametrize("kind", SECONDS)
def test_a_time_that_is_not_above_0_is_named_by_its_entry(kind: str, seconds: float) -> None:
    with pytest.raises(ConfigError, match=rf"{kind}.*1|cost table '{kind}'"):
        tables(SECONDS | {kind: {1: seconds, 64: 0.2}})


@pytest.mark.parametrize("kind", SECONDS)
def test_the_file_and_the_entry_are_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.json"
    tables().save(path)
    content = json.loads(path.read_text())
    content["costs"][1][1][kind][0][1] = 0.0
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=rf"measured\.json .*costs\[1\]\.{kind}\[0\].*0\.0 s at context 512.*profile"):
        planner(path)


@pytest.mark.parametrize("context", [math.nan, math.inf, -1.0])
def test_contexts_are_finite(context: float) -> None:
    with pytest.raises(ConfigError, match="context"):
        CostTables(**_fields(tables()) | {"context": context})
    with pytest.raises(ConfigError, match="finite and in ascending order"):
        CostTables(**_fields(tables()) | {"costs": ((context, tables().costs[0][1]),)})


Step: Any = StepCost
Linear: Any = LinearCost
Table: Any = TableCost
WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    "a first context below 0": (lambda: of(costs=((-5, FULL), (10, FULL))), "in ascending order"),
    "an infinite first context": (lambda: of(costs=((-math.inf, FULL), (10, FULL))), "in ascending order"),
    "a context True": (lambda: of(costs=((True, FULL),)), "costs is a tuple"),
    "a mean context True": (lambda: of(context=True), "context is a number of at least 0, got True"),
    "an interference True": (lambda: of(interference=True), "interference is a number of at least 1, got True"),
    "a text for a cost": (lambda: of(costs=((1, "x"),)), "costs is a tuple"),
    "a context alone": (lambda: of(costs=((1,),)), "costs is a tuple"),
    "a number for costs": (lambda: of(costs=5), "costs is a tuple of .*, got 5"),
    "a number for a model": (lambda: of(model=5), "model is a text, got 5"),
    "a text for a context": (lambda: of(context="a"), "context is a number of at least 0, got 'a'"),
    "a count alone": (lambda: Step(decodes=((1,),)), "decodes is a tuple of"),
    "a number for a curve": (lambda: Step(decodes=5), "decodes is a tuple of .*, got 5: .*must ascend"),
    "a count True": (lambda: Step(decodes=((True, 0.1),)), "decodes is a tuple of"),
    "a count of half": (lambda: Step(decodes=((1.5, 0.1),)), "decodes is a tuple of"),
    "a text for a count": (lambda: Step(decodes=(("a", 0.1),)), "decodes is a tuple of"),
    "a huge count": (lambda: Step(decodes=((10**5000, -1.0),)), "decodes is a tuple of"),
    "huge seconds": (lambda: Step(decodes=((1, 10**5000),)), "decodes is a tuple of"),
    "a sample NaN": (lambda: Step.from_samples(decodes={1: math.nan, 2: 0.1}), "decodes is a mapping .*1: nan"),
    "a sample below 0": (lambda: Step.from_samples(media={1: -0.1}), "media is a mapping"),
    "an infinite sample": (lambda: Step.from_samples(media={1: math.inf}), "media is a mapping"),
    "a sample of no rows": (lambda: Step.from_samples(media={0: 1.0}), "media is a mapping"),
    "samples in a list": (lambda: Step.from_samples(decodes=[1]), "decodes is a mapping"),
    "a number for contexts": (lambda: sampled(5), "contexts is a mapping"),
    "an unknown kind": (lambda: sampled({1: {"decode": {1: 0.1}}}), "no keyword 'decode': did you mean 'decodes'"),
    "a context's sample NaN": (lambda: sampled({1: {"decodes": {1: math.nan}}}), "contexts is a mapping"),
    "a pass True": (lambda: Linear(step_s=True), "step_s is a number of at least 0, got True"),
    "a pass of text": (lambda: Linear(step_s="x"), "step_s is a number of at least 0, got 'x'"),
    "a pass below 0": (lambda: Linear(step_s=-1.0), "step_s is a number of at least 0, got -1.0"),
    "a number for a source": (lambda: Table(source=5), "source is a text, got 5"),
}  # fmt: skip


def of(**fields: Any) -> CostTables:
    return CostTables(**_fields(tables()) | fields)


def sampled(contexts: Any) -> CostTables:
    return CostTables.from_samples(contexts, model="m", device="d", dtype="x")


@pytest.mark.parametrize("name", WRONG)
def test_what_is_no_cost_is_refused_in_words(name: str) -> None:
    make, said = WRONG[name]
    with pytest.raises(ConfigError, match=said):
        make()


def test_curves_of_lists_and_of_other_numbers_become_plain() -> None:
    """numpy's, for example."""
    given: Any = [[np.int64(1), np.float32(0.5)]]
    assert StepCost(decodes=given) == StepCost(decodes=((1, 0.5),))
    assert hash(StepCost(decodes=given)) == hash(StepCost(decodes=((1, 0.5),)))


@pytest.mark.parametrize("kind", SECONDS)
def test_a_kind_of_work_that_is_missing_is_no_work_for_nothing(kind: str) -> None:
    found = {name: seconds for name, seconds in SECONDS.items() if name != kind}
    with pytest.raises(ConfigError, match=rf"cost has no {kind} seconds, .*pipe.profile"):
        planner(tables(found))
    with pytest.raises(ConfigError, match=rf"cost\['H100'\] has no {kind} seconds"):
        planner({"H100": tables(found)})


def test_tables_of_another_model_are_refused() -> None:
    planner(tables(model=QWEN.name))
    planner(tables(model="a1b2", shape=QWEN.outline))
    with pytest.raises(ConfigError, match=r"measured on model 'llava-1\.5-7b', not on 'qwen2-vl-7b'"):
        planner(tables(model="llava-1.5-7b"))
    with pytest.raises(
        ConfigError, match=r"measured on model 'a1b2' \('language 32 layers of 4096, encoder .*profile this"
    ):
        planner(tables(model="a1b2", shape=MODELS["llava-1.5-7b"].outline))


def test_tables_of_another_known_device_are_refused() -> None:
    planner(tables(device="NVIDIA H100 80GB HBM3"))
    planner(tables(device="NVIDIA A100-SXM4-80GB"), "A100")
    planner(tables(device="NVIDIA GeForce RTX 4090"), "RTX 4090")
    planner(tables(device="cpu x86_64 x 2"))  # a plan says that only the memory is an H100's
    with pytest.raises(ConfigError, match="measured on device 'NVIDIA L40S', not on 'H100': give device='L40S'"):
        planner(tables(device="NVIDIA L40S"))
    with pytest.raises(ConfigError, match=r"cost\['H100'\] was measured on device 'NVIDIA L40S'"):
        planner({"H100": tables(device="NVIDIA L40S")})


def test_tables_of_another_dtype_warn() -> None:
    planner(tables(dtype="torch.float16"))
    with pytest.warns(TrinityWarning, match=r"measured in torch.float32, and the plan is of 2 bytes a number"):
        planner(tables(dtype="torch.float32"))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"model": "llava-1.5-7b"}, "measured on model"),
        ({"shape": MODELS["llava-1.5-7b"].outline}, "measured on model"),
        ({"device": "NVIDIA L40S"}, "measured on device"),
    ],
)
def test_a_simulator_refuses_what_a_planner_does(other: dict[str, Any], said: str) -> None:
    simulator(tables()).check("1E1P1D")
    for cost in (tables(**other), {"H100": tables(**other)}):
        with pytest.raises(ConfigError, match=said):
            simulator(cost)


@pytest.mark.parametrize("kind", SECONDS)
def test_a_simulator_needs_the_seconds_of_what_it_places(kind: str) -> None:
    lacking = simulator(tables({name: seconds for name, seconds in SECONDS.items() if name != kind}))
    with pytest.raises(ConfigError, match=rf"cost has no {kind} seconds, .*pipe\.profile"):
        lacking.check("1E1P1D")


def test_tables_of_one_instance_simulate_that_one() -> None:
    cost = {
        name: tables({kind: SECONDS[kind]}) for name, kind in zip("EPD", ("media", "prefill", "decodes"), strict=True)
    }
    devices = tuple(msgspec.structs.replace(DEVICES["H100"], name=name) for name in cost)
    made = Simulator("qwen2-vl-7b", SLO(2.0, 0.1), cluster=Cluster(devices=devices), cost=cost)
    made.check("1E1P1D")
    with pytest.raises(ConfigError, match=r"cost\['P'\] has no decodes seconds, and stages PD of 'qwen2-vl-7b' need"):
        made.check("1E2PD")
