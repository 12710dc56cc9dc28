"""A setting is declared once: one class has its type, default, bounds and help text, and everything else takes that."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import typing
from collections.abc import Iterator
from typing import Any

import pytest

import trinity
from support.paths import ROOT
from trinity.config_classes import help_texts, pack_config, takes, unpack_config
from trinity.core.instance.settings import Settings
from trinity.instance import Instance
from trinity.pipeline.config import PipelineConfig
from trinity.preprocess.processor import ProcessorConfig, RequestProcessor
from trinity.runtime.loader import ServingConfig
from trinity.simulation.simulator import Simulator, SimulatorConfig

TAKEN: dict[Any, type] = {
    trinity.Pipeline: PipelineConfig,
    Simulator: SimulatorConfig,
    RequestProcessor: ProcessorConfig,
}
CONFIGS = [PipelineConfig, Instance, SimulatorConfig, ProcessorConfig, ServingConfig, Settings]
IDENTITY = {"model", "name", "roles", "address"}  # what is served, and who serves it: every message names them
HOMONYMS = {  # fields of other classes with the name of a setting and a default, and why they are not that setting
    "BatchRules.image_budget": "visual tokens; an instance's is in images, and goes before it",
    "BatchRules.token_budget": "of the scheduler; an instance's goes before it",
    "BudgetKey.cores": "part of the key of what was measured",
    "BudgetKey.lanes": "part of the key of what was measured",
    "Candidate.spread": "the goodput of several draws",
    "Commit.transfers": "a report of transfers",
    "EngineSpec.dtype": "of any engine that a benchmark runs",
    "EngineSpec.placement": "of any engine that a benchmark runs",
    "EngineSpec.threads": "of any engine that a benchmark runs",
    "Finished.transfers": "a report of transfers",
    "HostRules.processor": "a function of a sampler",
    "HostedInstance.cores": "the form of a file of hosts",
    "HostedInstance.device": "the form of a file of hosts",
    "HostedInstance.memory_bytes": "the form of a file of hosts",
    "HostedInstance.pools": "the form of a file of hosts",
    "HostedInstance.threads": "the form of a file of hosts",
    "Instance.device": "one instance's, before the pipeline's",
    "Instance.rules": "one instance's, before the pipeline's",
    "LiveInstance.pools": "the blocks that an instance has",
    "LoadedProcessor.transparency": "what a processor was loaded with",
    "MediaLimits.processes": "a count of processes",
    "Member.failures": "a count of failures",
    "OpenRequest.rules": "rules of sampling",
    "Output.transfers": "a report of transfers",
    "PeerUp.pools": "the blocks that an instance has",
    "ProcessorConfig.threads": "of preprocessing",
    "Recipe.processor": "a class of transformers",
    "RequestProcessor.lanes": "what prepares requests",
    "RequestState.transfers": "a count of transfers",
    "RouteConfig.verify": "of one kind of block, on the wire",
    "RunningRoles.may": "roles of a simulated instance",
    "Settings.rules": "what the host made of it",
    "Settings.transfers": "what the host made of it",
    "SimulatorConfig.budgets": "by roles as well",
    "StageSetup.attention": "what a stage is made with",
    "StageSetup.observe": "what a stage is made with",
    "StepBudgets.image_budget": "what a search found",
    "StepBudgets.token_budget": "what a search found",
    "StrategyResult.cores": "what the cores replayed",
}


def settings() -> set[str]:
    return {each.name for kind in (PipelineConfig, Instance) for each in dataclasses.fields(kind)} - IDENTITY


def declarations() -> Iterator[tuple[str, str, bool]]:
    """Class, field and if it has a default, of every annotated field of the package with the name of a setting."""
    known = settings()
    for path in sorted((ROOT / "src" / "trinity").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in (each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)):
            for each in node.body:
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id in known:
                    yield node.name, each.target.id, each.value is not None


def declaring(config: type, name: str) -> list[type]:
    return [kind for kind in config.__mro__ if name in vars(kind).get("__annotations__", {})]


@pytest.mark.parametrize("config", CONFIGS)
def test_one_class_of_a_configuration_declares_each_setting(config: type) -> None:
    assert {name: len(declaring(config, name)) for name in typing.get_type_hints(config)} == dict.fromkeys(
        typing.get_type_hints(config), 1
    )


def test_no_other_class_has_a_default_of_a_setting() -> None:
    homes = {
        (declaring(config, name)[0].__name__, name)
        for config in CONFIGS[:2]
        for name in settings()
        if declaring(config, name)
    }
    found = {f"{kind}.{name}" for kind, name, default in declarations() if default and (kind, name) not in homes}
    own = {f"{kind.__name__}.{name}" for kind in (Instance,) for name in ("device", "rules")}
    assert found | own == set(HOMONYMS)


@pytest.mark.parametrize("config", CONFIGS[:-1])  # whose fields users give
def test_each_setting_has_a_help_text_with_its_default(config: type) -> None:
    texts = help_texts(config)
    for each in dataclasses.fields(config):
        assert each.name in texts, f"{config.__name__}.{each.name} has no bullet in the docstring of its class"
        if each.default is None:
            assert "None" in texts[each.name], each.name
        elif isinstance(each.default, bool | int | float | str) and each.name not in WORDED:
            assert shown(each.default) in texts[each.name], each.name


def shown(default: object) -> str:
    return f'("{default}")' if isinstance(default, str) else f"{default})"


WORDED = {"max_waiting_bytes"}  # 1 GiB


@pytest.mark.parametrize(("made", "config"), TAKEN.items())
def test_what_takes_settings_has_the_signature_and_the_texts_of_their_class(made: Any, config: type) -> None:
    assert inspect.signature(made).parameters == inspect.signature(config).parameters
    assert all(text in (made.__doc__ or "") for text in help_texts(config).values())


def test_a_setting_of_a_new_field_is_a_keyword_reaches_the_instance_and_travels() -> None:
    """As whoever adds one would: a field in one class."""

    @dataclasses.dataclass(frozen=True)
    class Grown(Instance):
        newest: int = dataclasses.field(default=3, kw_only=True)

    class Takes:
        @takes(Grown)
        def __init__(self, config: Grown, given: typing.AbstractSet[str]) -> None:
            self.config, self.given = config, given

    made = Takes("PD", newest=4)
    assert made.config.newest == 4
    assert made.given == {"roles", "newest"}
    assert unpack_config(Grown, pack_config(made.config)) == made.config
    with pytest.raises(trinity.ConfigError, match=r"has no keyword 'newst': did you mean 'newest'"):
        Takes("PD", newst=4)  # type: ignore[call-arg]
