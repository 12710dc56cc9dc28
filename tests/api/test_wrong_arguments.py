"""Public constructors and methods called with wrong types and values: a typed error, never a traceback."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import typing
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import trinity
from trinity.core.routing.router import RoundRobin
from trinity.costs.budgets import StepCost
from trinity.costs.cluster import Cluster
from trinity.costs.emulated_cost import LinearCost
from trinity.costs.step_cost import DEVICES, CostTables
from trinity.emulation.model import LLAVA_15_7B, EmulatedModel
from trinity.errors import ConfigError, TrinityError
from trinity.placement import Group
from trinity.planner.plan import Candidate
from trinity.planner.search_space import Space
from trinity.simulation.role_switches import PlacementChange
from trinity.simulation.simulator import Simulator
from trinity.timeline import Slice
from trinity.traces.trace import Trace, TraceAudio, TraceImage, TraceRow, TraceVideo

SOUND: dict[Any, dict[str, Any]] = {  # arguments that each constructor takes
    trinity.BatchRules: {},
    trinity.Buddy: {"listen": "unix:/run/a-buddy"},
    trinity.CacheConfig: {},
    trinity.Connector: {},
    trinity.Device: {"name": "x", "flops": 1e12, "bandwidth": 1e12, "memory": 1e10},
    trinity.HybridPlanner: {"model": "qwen2-vl-7b", "slo": trinity.SLO(1.0, 0.1), "instances": 2},
    trinity.Instance: {"roles": "EPD"},
    trinity.LiveView: {"pipe": trinity.Pipeline(EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost()))},
    trinity.MediaLimits: {},
    trinity.Metrics: {},
    trinity.Placement: {"groups": (Group(1, "EPD"),)},
    trinity.ProcessConfig: {},
    trinity.SLO: {"ttft": 1.0, "tbt": 0.1},
    trinity.SearchConfig: {},
    trinity.StepBudgets: {},
    trinity.TLSConfig: {"certificate": "one.pem", "key": "one.key", "authority": "all.pem"},
    trinity.Timeline: {},
    trinity.Trace: {},
    trinity.TransferPolicy: {},
    trinity.FailurePolicy: {},
    Cluster: {"devices": (DEVICES["H100"],)},
    CostTables: {"model": "m", "device": "d", "dtype": "float16", "source": "s", "costs": ((1, StepCost()),)},
    EmulatedModel: {"shape": LLAVA_15_7B, "cost": LinearCost()},
    Group: {"count": 1, "roles": "EPD"},
    LinearCost: {},
    PlacementChange: {"placement": "EPD", "at_s": 1.0, "change_s": 0.5, "drain_s": 3.0},
    Simulator: {"model": "qwen2-vl-7b", "slo": trinity.SLO(1.0, 0.1), "cluster": Cluster.of("H100", 2)},
    Space: {},
    StepCost: {},
    TraceAudio: {},
    TraceImage: {},
    TraceVideo: {},
    TraceRow: {"timestamp": 0.0, "input_length": 5, "output_length": 2},
}
PIPELINE: dict[str, Any] = {"model": EmulatedModel(shape=LLAVA_15_7B, cost=LinearCost())}
SMALL = trinity.CacheConfig(pools={"image": 4, "kv": 16})
NEARLY = ["cuda", "cuda:7", "torch.float16", "E", "1E1P", "least_loaded", 0.5, ["a"], (), {"kv": "inproc"}]


class Hostile:
    """An object whose every answer is an error."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name) if not name.startswith("__class") else AttributeError(name)

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not comparable")

    __hash__ = None  # type: ignore[assignment]


NUMBERS = [-1, 0, 1, 1.5, 2**63, 10**400, -(2**70), float("nan"), float("inf"), True, np.float64("nan"), np.int64(-3)]
THINGS = [None, "", "x", "\ud800", "EPD", b"x", [], {}, {"kv": "x"}, [None], object(), int, print, torch.zeros(3)]
WRONG = st.one_of(st.sampled_from(NUMBERS), st.sampled_from(THINGS), st.builds(Hostile), st.text(), st.integers())


def parameters(kind: Any) -> list[str]:
    if issubclass(kind, msgspec.Struct):
        return list(kind.__struct_fields__)
    found = inspect.signature(kind).parameters.values()
    return [each.name for each in found if each.kind is not each.VAR_KEYWORD]


# ---------------------------------------------------------------- methods

FEW = trinity.Trace({"timestamp": 1000.0 * each, "input_length": 5, "output_length": 2} for each in range(3))
CANDIDATE = Candidate(placement="EPD", method="EPD")
PLAN: dict[str, Any] = {"model": "m", "objective": "goodput", "strategy": "auto", "rule": "p90", "devices": ("H100",)}
VALUES = [  # one of each public class that has methods
    *(kind(**SOUND[kind]) for kind in (Cluster, Group, Simulator, TraceRow, trinity.Device, trinity.HybridPlanner)),
    *(kind(**SOUND[kind]) for kind in (trinity.Metrics, trinity.SLO, trinity.Timeline)),
    FEW,
    CANDIDATE,
    trinity.Placement.parse("EP+D"),
    trinity.Plan(
        **PLAN,
        slo=trinity.SLO(1.0, 0.1),
        best=CANDIDATE,
        candidates=(CANDIDATE,),
        paper=None,
        trace=FEW.statistics(),
    ),
]
GIVEN: dict[str, Any] = {  # what their methods take, by the parameter's name
    "args": {"source": "P0"},
    "changes": [PlacementChange(placement="EPD", at_s=1.0)],
    "count": 1,
    "duration_s": 1.0,
    "end_s": 2.0,
    "engine": "eager",
    "error": ValueError(),
    "factor": 2.0,
    "encode_only": False,
    "groups": [Group(1, "EPD")],
    "instance": "E0",
    "lane": "joint",
    "link": "nvlink",
    "message_s": 0.1,
    "multimodal": True,
    "name": "step",
    "network": "nvlink",
    "on_error": "skip",
    "one": 0,
    "other": 1,
    "output": trinity.Output(request_id="x"),
    "path": "written",
    "per_host": 1,
    "present": "EP+D",
    "place": 0,
    "placement": "EP+D",
    "rate": None,
    "record": False,
    "roles": "EP",
    "row": VALUES[3],
    "rule": "p90",
    "seed": 1,
    "served": VALUES[3],
    "share": 0.5,
    "shared": True,
    "slices": [Slice("E0", "joint", "step", 0.0, 1.0, {})],
    "slo": trinity.SLO(1.0, 0.1),
    "start_s": 0.0,
    "text": "EPD",
    "tick_s": 1.0,
    "timestamp": 5.0,
    "trace": FEW,
    "what": ("H100",),
}
OF_PYTHON = {"count", "index"}  # a sequence's: they compare its items with anything


def call_parameters(call: Callable[..., object]) -> list[str]:
    return list(inspect.signature(call).parameters)


def methods(value: object) -> list[Callable[..., object]]:
    found = [getattr(value, name) for name in dir(type(value)) if name[0] != "_" and name not in OF_PYTHON]
    return [each for each in found if inspect.isroutine(each) and call_parameters(each)]


CALLS = [(call, name) for value in VALUES for call in methods(value) for name in call_parameters(call)]


@pytest.fixture(autouse=True, scope="module")
def _elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Some methods write where they are told."""
    with contextlib.chdir(tmp_path_factory.mktemp("written")):
        yield


def _call(call: Callable[..., object], given: dict[str, Any]) -> None:
    listed = given.pop("what", ())
    with contextlib.suppress(TrinityError):
        call(*listed, **given)


def _sound(call: Callable[..., object]) -> dict[str, Any]:
    return {name: GIVEN[name] for name in call_parameters(call)}


@pytest.mark.parametrize(("call", "name"), CALLS, ids=[f"{call.__qualname__}.{name}" for call, name in CALLS])
def test_a_method_refuses_a_foreign_object(call: Callable[..., object], name: str) -> None:
    for wrong in (object(), Hostile(), 5, "\ud800", 10**400):
        _call(call, {**_sound(call), name: [wrong] if name == "what" else wrong})


@given(st.data())
def test_methods_with_wrong_values(data: st.DataObject) -> None:
    call, name = data.draw(st.sampled_from(CALLS))
    wrong = data.draw(WRONG)
    _call(call, {**_sound(call), name: (wrong,) if name == "what" else wrong})


@given(st.data())
def test_methods_with_several_wrong_values(data: st.DataObject) -> None:
    call = data.draw(st.sampled_from([call for call, _ in CALLS]))
    given = {name: data.draw(WRONG) for name in call_parameters(call)}
    _call(call, {**given, "what": (given["what"],)} if "what" in given else given)


WRONG_ARGUMENT: list[tuple[Any, dict[str, Any], str]] = [
    (FEW.scale, {"factor": "a"}, "factor is a number"),
    (FEW.head, {"count": "two"}, "count is a whole number"),
    (TraceRow, {**SOUND[TraceRow], "spans": 5}, "spans are seconds by name"),
    (TraceRow, {**SOUND[TraceRow], "spans": {"decode": "long"}}, "spans is a finite number"),
    (trinity.Placement.parse, {"text": 7}, "text is a text"),
    (trinity.SLO(1.0, 0.1).is_met, {"served": "x"}, "served is a ServedRequest"),
]


@pytest.mark.parametrize(("call", "arguments", "said"), WRONG_ARGUMENT)
def test_the_argument_is_named(call: Callable[..., object], arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(TrinityError, match=said):
        call(**arguments)


# ---------------------------------------------------------------- constructors


CASES = [(kind, name) for kind in SOUND for name in parameters(kind)]


@pytest.mark.parametrize("kind", SOUND, ids=lambda kind: kind.__name__)
def test_the_sound_arguments_are_taken(kind: Any) -> None:
    assert kind(**SOUND[kind]) is not None


@pytest.mark.parametrize(("kind", "name"), CASES, ids=[f"{kind.__name__}.{name}" for kind, name in CASES])
def test_a_foreign_object_is_refused_by_name(kind: Any, name: str) -> None:
    """No argument takes just anything, but for the rows of a trace, which may be of any iterable."""
    with pytest.raises(TrinityError, match=name):
        kind(**{**SOUND[kind], name: object()})
    with pytest.raises(TrinityError):
        kind(**{**SOUND[kind], name: Hostile()})


@given(st.data())
def test_wrong_values_raise_typed_errors(data: st.DataObject) -> None:
    kind, name = data.draw(st.sampled_from(CASES))
    _build(kind, {**SOUND[kind], name: data.draw(WRONG)})


@given(st.data())
def test_several_wrong_values_at_once(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(list(SOUND)))
    _build(kind, {name: data.draw(WRONG) for name in parameters(kind)})


def _build(kind: Callable[..., object], arguments: dict[str, Any]) -> None:
    with contextlib.suppress(TrinityError):
        kind(**arguments)


@pytest.mark.parametrize("name", [each for each in parameters(trinity.Pipeline) if each != "self"])
def test_a_pipeline_refuses_a_foreign_object_in_each_argument(name: str) -> None:
    for wrong in (object(), Hostile(), 10**400, "\ud800"):
        with pytest.raises(ConfigError):
            trinity.Pipeline(**{**PIPELINE, name: wrong})


PIPELINE_ARGUMENTS = [*parameters(trinity.Pipeline), *parameters(trinity.Instance)]


@given(st.data())
def test_a_pipeline_with_wrong_values(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(PIPELINE_ARGUMENTS))
    _build(trinity.Pipeline, {**PIPELINE, name: data.draw(WRONG)})


# ---------------------------------------------------------------- what a pipeline finds wrong at its start


@given(st.data())
@settings(max_examples=60)
def test_a_start_with_wrong_values(data: st.DataObject) -> None:
    """What a constructor lets pass, a start serves with or refuses by an error of trinity's."""
    name = data.draw(st.sampled_from(PIPELINE_ARGUMENTS))
    wrong = data.draw(st.one_of(WRONG, st.sampled_from(NEARLY)))

    async def start() -> None:
        with contextlib.suppress(TrinityError):
            pipe = trinity.Pipeline(**{**PIPELINE, "cache": SMALL, name: wrong})
            try:
                await pipe.start()
            finally:
                await pipe.aclose()

    asyncio.run(start())


def test_every_public_class_that_takes_arguments_is_here() -> None:
    """Requests are checked where they are submitted (test_plain_requests.py); results are made by trinity alone."""
    requests, results = (
        {"Clip", "Media", "Request", "Sampling", "Structured"},
        {"Features", "Goodput", "LoadedStage", "Output", "Plan", "Stream", "Token"},
    )
    public = {name: getattr(trinity, name) for name in trinity.__all__}
    made = {
        name for name, each in public.items() if isinstance(each, type) and not getattr(each, "_is_protocol", False)
    }
    errors = {name for name in made if issubclass(public[name], TrinityError)}
    pipelines = {"Pipeline", "SyncPipeline"}  # which takes the other's
    elsewhere = {"RaySupply"}  # it needs ray: test_ray_supply.py
    assert made - errors - requests - results - pipelines - elsewhere == {kind.__name__ for kind in SOUND} & made


# ---------------------------------------------------------------- what to do about it

WHAT_TO_DO: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    (
        trinity.Pipeline,
        {**PIPELINE, "placement": ["E", "PD"]},
        r"placement is .* make one with Instance\(roles=\.\.\.\)",
    ),
    (trinity.Pipeline, {**PIPELINE, "slo": (2, 0.1)}, r"slo is an SLO .* make one with SLO\(ttft=\.\.\., tbt=\.\.\.\)"),
    (trinity.Pipeline, {**PIPELINE, "routing": RoundRobin}, r"routing is .* give an object of the class, RoundRobin\("),
    (
        trinity.Pipeline,
        {**PIPELINE, "rules": trinity.BatchRules},
        r"rules is .* give an object of the class, BatchRules\(",
    ),
    (
        trinity.Pipeline,
        {"model": torch.nn.Linear(1, 1)},
        r"model is .* a checkpoint's directory or hub name; .*save_pretrained",
    ),
    (trinity.Pipeline, {**PIPELINE, "device": "gpu"}, r'device is .* got \'gpu\': give "cpu", "cuda" or "cuda:1"'),
    (trinity.Pipeline, {**PIPELINE, "device": 0}, r'device is .* got 0: give "cpu"'),
    (
        trinity.Pipeline,
        {**PIPELINE, "dtype": torch.bfloat16},
        r'dtype is .* got torch.bfloat16: give "auto", "bfloat16"',
    ),
    (trinity.Pipeline, {**PIPELINE, "dtype": "int8"}, r'dtype is .* got \'int8\': give "auto"'),
    (trinity.Instance, {"roles": "EPD", "device": "cuda:x"}, r'device is .* got \'cuda:x\': give "cpu"'),
    (trinity.Instance, {"roles": "EPD", "name": "../../tmp/up"}, r"name is .*: give up to 40 letters, digits"),
    (trinity.Instance, {"roles": "EPD", "name": "n" * 41}, r"name is .*: give up to 40 letters, digits"),
    (trinity.HybridPlanner, {**SOUND[trinity.HybridPlanner], "search": "race"}, r"make one with SearchConfig\(\)"),
]


@pytest.mark.parametrize(("call", "arguments", "said"), WHAT_TO_DO)
def test_a_wrong_value_is_told_what_to_give(call: Callable[..., object], arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call(**arguments)


def test_numbers_of_numpy_and_torch_become_plain_ones() -> None:
    rules = trinity.BatchRules(
        token_budget=typing.cast(int, np.int64(7)), image_budget=typing.cast(int, torch.tensor(3))
    )
    assert [type(each) for each in (rules.token_budget, rules.image_budget)] == [int, int]
    assert type(trinity.TransferPolicy(lease_s=np.float32(2)).lease_s) is float  # type: ignore[arg-type]


IN_BULK = (TraceRow, TraceImage, TraceVideo, TraceAudio)  # a microsecond each counts: these are msgspec's own
MADE = [kind for kind in SOUND if isinstance(kind, type) and kind not in IN_BULK]
OF_REQUESTS: list[Any] = [trinity.Request, trinity.Sampling, trinity.Structured, trinity.Media, trinity.Clip]


@pytest.mark.parametrize("kind", [*MADE, *OF_REQUESTS])
def test_an_unknown_keyword_is_named_with_the_nearest(kind: Any) -> None:
    """msgspec said "Unexpected keyword argument", and Python "got an unexpected keyword argument"."""
    error = trinity.RequestError if kind in OF_REQUESTS else ConfigError
    signature = inspect.signature(kind).parameters
    known = [each.name for each in signature.values() if each.kind is not each.VAR_KEYWORD]
    given = SOUND.get(kind, {})
    for name in known:
        if name not in given:
            wrong = f"{name}e"
            with pytest.raises(error, match=rf"\(\) has no keyword '{wrong}': did you mean '\w+'\? it takes "):
                kind(**given, **{wrong: 1})
    with pytest.raises(error, match="has no keyword") as raised:
        kind(**given, **{"x" * 100_000: 1})
    assert len(str(raised.value)) < 2_000


def test_a_missing_argument_is_named() -> None:
    with pytest.raises(ConfigError, match=r"SLO\(\): .*'tbt'; it takes ttft, tbt"):
        trinity.SLO(1.0)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"Instance\(\): .*'roles'; it takes roles, "):
        trinity.Instance()  # type: ignore[call-arg]
    with pytest.raises(trinity.RequestError, match=r"Media\(\): .*; it takes kind, source"):
        trinity.Media("image", 1, 2)  # type: ignore[call-arg]


FORGOTTEN: list[tuple[Callable[[], object], str]] = [
    (
        lambda: trinity.HybridPlanner("llava-1.5-7b", backend="python"),  # type: ignore[call-arg]
        r"HybridPlanner\(\): missing a required argument: 'slo'; it takes model, slo, ",
    ),
    (
        lambda: trinity.Pipeline(threads=2),  # type: ignore[call-arg]
        r"Pipeline\(\): missing a required argument: 'model'; it takes model, placement, ",
    ),
    (
        lambda: trinity.Pipeline("m", "EPD", "thread", threads=2),  # type: ignore[call-arg, arg-type, misc]
        r"Pipeline\(\): too many positional arguments; it takes model, placement, ",
    ),
    (
        lambda: trinity.Instance("E", "E0", {"image": 4}),  # type: ignore[misc]
        r"Instance\(\): too many positional arguments; it takes roles, name, ",
    ),
    (
        lambda: trinity.Pipeline(threds=2),  # type: ignore[call-arg]
        r"Pipeline\(\) has no keyword 'threds': did you mean 'threads'\? it takes model, placement, ",
    ),
    (
        lambda: Trace.load("file", om_error="skip"),  # type: ignore[call-arg]
        r"Trace.load\(\) has no keyword 'om_error': did you mean 'on_error'\? it takes path, on_error",
    ),
]


@pytest.mark.parametrize(("call", "said"), FORGOTTEN)
def test_what_is_wrong_with_a_call_is_said_and_not_its_sound_keywords(call: Callable[[], object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        call()


def test_a_secret_is_not_shown_where_it_is_too_short() -> None:
    with pytest.raises(ConfigError, match="7 characters") as raised:
        trinity.ProcessConfig(secret="hunter2")
    assert "hunter2" not in str(raised.value)
