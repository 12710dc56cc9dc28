"""Keywords of a pipeline for all of its instances: which there are, what they reach, and what is refused."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields
from typing import Any

import msgspec
import pytest

from support.checkpoint_files import checkpoint
from support.plans import BEST, plan
from trinity.config_classes import unpack_config
from trinity.connector import Connector
from trinity.core.scheduler import BatchRules
from trinity.costs.budgets import StepBudgets
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import ConfigError
from trinity.instance import Instance, InstanceOptions
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.pipeline.deploy import make_instances
from trinity.placement import Placement
from trinity.preprocess.processor import RequestProcessor
from trinity.remote.instance_setup import read_instance
from trinity.remote.supervision.process_config import make_setup
from trinity.runtime import loader
from trinity.runtime.loader import ServingConfig, ServingOptions, load_instances
from trinity.traces.trace import SLO

QUICK = EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost(step_s=1e-4), scale=4096)
POOLS = {"image": 8, "kv": 64}
ALL: dict[str, Any] = {
    "lanes": ("vision", "language"),
    "threads": 2,
    "prefix_cache": False,
    "image_cache": False,
    "reservation": "optimistic",
    "attention": "torch",
    "depth": 2,
    "pack": False,
    "token_budget": 640,
    "image_budget": 3,
}
SETTINGS = {"tokens": 9, "mixed_tokens": 7, "images": 5, "reservation": "full", "depth": 1}
PLAN = plan(best=msgspec.structs.replace(BEST, placement="1EPD1PD", settings=SETTINGS))


def test_each_keyword_is_one_of_an_instance() -> None:
    assert {each.name for each in fields(Instance)} >= {each.name for each in fields(InstanceOptions)} >= ALL.keys()


@pytest.mark.parametrize("placement", ["1EPD1PD", Placement.parse("1EPD1PD"), PLAN])
def test_they_reach_every_instance(placement: Any) -> None:
    for instance in Pipeline(QUICK, placement, **ALL).instances:
        expected = {**ALL, "lanes": ("vision", "language") if "E" in instance.roles else ("joint",)}
        assert {name: getattr(instance, name) for name in ALL} == expected


def test_what_is_not_said_is_the_plans_and_else_the_instances_own() -> None:
    epd, pd = make_instances(PLAN, {})
    assert (epd.token_budget, epd.image_budget, pd.token_budget, pd.image_budget) == (7, 5, 7, None)
    assert make_instances("EPD", {}) == [Instance("EPD", "EPD0")]
    unsaid = plan(best=msgspec.structs.replace(BEST, placement="1PD", settings={}))
    assert [each.depth for each in make_instances(unsaid, {}) + make_instances(unsaid, {"depth": 2})] == [1, 2]
    (limited, _) = make_instances(PLAN, {}, limited=True)
    assert (limited.token_budget, limited.image_budget) == (None, None)


def test_a_keyword_that_is_none_is_refused_with_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match=r"Pipeline\(\) has no keyword 'depht': did you mean 'depth'\? it takes model, "
    ):
        Pipeline(QUICK, "EPD", depht=2)  # type: ignore[call-arg]


def test_instances_that_have_their_own_are_not_told_in_silence() -> None:
    with pytest.raises(ConfigError, match="give depth, token_budget to each Instance instead"):
        Pipeline(QUICK, [Instance("EPD")], depth=2, token_budget=9)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"depth": 3}, "depth is 1 or 2 steps"),
        ({"token_budget": 0}, "token_budget is a whole number of at least 1 or None, got 0"),
        ({"image_budget": -2}, "image_budget is"),
        ({"token_budget": 1.5}, "token_budget is a whole number"),
        ({"reservation": "some"}, "unknown reservation"),
        ({"attention": "flesh"}, "unknown attention"),
    ],
)
def test_what_cannot_be_is_refused_by_name(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Pipeline(QUICK, "EPD", **wrong)


def test_limits_of_a_batch_are_said_once() -> None:
    with pytest.raises(ConfigError, match="token_budget=9 and rules= both limit a batch"):
        Instance("PD", token_budget=9, rules=BatchRules(token_budget=8))


@pytest.mark.parametrize(
    ("limits", "expected"),
    [({}, (100, 576)), ({"token_budget": 50}, (50, 576)), ({"image_budget": 4}, (100, 4 * 576))],
)
@pytest.mark.parametrize("slo", [None, SLO(ttft=10, tbt=10)])
def test_the_instances_own_limits_go_before_the_pipelines(
    limits: dict[str, Any], expected: tuple[int, int], slo: SLO | None
) -> None:
    deployment = ServingConfig(
        QUICK, slo=slo, budgets=StepBudgets(token_budget=100, image_budget=576), cache=CacheConfig(pools=POOLS)
    )
    (loaded,) = load_instances(deployment, [Instance("EPD", "EPD0", **limits)], None)
    assert (loaded.settings.rules.token_budget, loaded.settings.rules.image_budget) == expected


def test_an_image_of_a_checkpoint_has_as_many_rows_as_its_processor_says() -> None:
    deployment = ServingConfig(
        checkpoint("llava"),
        dtype="float32",
        cache=CacheConfig(image_block_size=64, pools=POOLS),
    )
    with closing(RequestProcessor(checkpoint("llava"))) as processor:
        rows = processor.dummy_inputs()[0].tokens
        (loaded,) = load_instances(deployment, [Instance("E", "E0", image_budget=3)], processor)
    assert loaded.settings.rules.image_budget == 3 * rows > 3


def test_of_a_model_of_text_alone_an_image_is_nothing() -> None:
    deployment = ServingConfig(checkpoint("llama"), dtype="float32", cache=CacheConfig(pools=POOLS))
    with closing(RequestProcessor(checkpoint("llama"))) as processor:
        (loaded,) = load_instances(deployment, [Instance("PD", "PD0", token_budget=7, image_budget=3)], processor)
    assert (loaded.settings.rules.token_budget, loaded.settings.rules.image_budget) == (7, 3)


def test_a_process_is_told_of_both() -> None:
    deployment = ServingConfig(QUICK, cache=CacheConfig(pools=POOLS))
    setup = make_setup(
        Instance("EPD", "EPD0", token_budget=7, image_budget=3), deployment, Connector("shm"), "round_robin"
    )
    there = read_instance(setup)
    assert (there.token_budget, there.image_budget) == (7, 3)


@pytest.mark.parametrize(("device", "steps"), [("cpu", 1), ("cuda:0", 2)])
def test_as_many_steps_are_in_flight_as_the_device_takes(device: str, steps: int) -> None:
    """The pipeline's device is the instance's where it has none, here and in a process of its own."""
    config = ServingConfig(QUICK, device=device, cache=CacheConfig(pools=POOLS))
    assert loader._complete_spec(config, Instance("EPD"), []).steps_in_flight == steps
    setup = make_setup(Instance("EPD", "EPD0"), config, Connector("shm"), "round_robin")
    there = unpack_config(ServingOptions, setup.serving)
    assert (
        loader._complete_spec(ServingConfig(QUICK, device=there.device), read_instance(setup), []).steps_in_flight
        == steps
    )
    (loaded,) = load_instances(config, [Instance("EPD", "EPD0", device="cpu", depth=steps)], None)
    assert loaded.settings.depth == steps
