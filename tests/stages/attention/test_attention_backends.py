"""Attention backends by name: what auto takes, and why a named one cannot run."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch

from support.checkpoint_files import checkpoint
from trinity import Instance
from trinity.connector import Connector
from trinity.errors import ConfigError, UnknownName
from trinity.memory import native
from trinity.memory.cache_config import CacheConfig
from trinity.remote.channel.wire import Setup, decode, encode
from trinity.remote.instance_setup import load_instance
from trinity.remote.supervision.process_config import make_setup
from trinity.runtime.host import LoadedInstance
from trinity.runtime.loader import ServingConfig, load_instances
from trinity.stages.attention import backends
from trinity.stages.attention.backends import BACKENDS, BackendSpec, make_backend, pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.attention.native import NativeAttention
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.language import LanguageStage

SHAPE = (2, 2, 2, 16, 8)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def kind(dtype: torch.dtype = torch.float32, device: torch.device = CPU) -> CacheKind:
    return CacheKind(SHAPE, dtype, device)


class Extension:
    API = native.API

    def instructions(self) -> str:
        return "test"

    def PagedAttention(self) -> None: ...


@pytest.fixture(params=[True, False])
def built(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(native, "extension", Extension() if request.param else None)
    return bool(request.param)


def test_auto_takes_the_kernel_where_it_can_run_and_torch_elsewhere(built: bool) -> None:
    assert pick_backend("auto", kind()) == ("native" if built else "torch")
    assert pick_backend("auto", kind(torch.bfloat16)) == ("native" if built else "torch")
    for other in (kind(torch.float16), kind(torch.float64), kind(device=CUDA)):
        assert pick_backend("auto", other) in BACKENDS
        assert pick_backend("auto", other) != "native"
        assert pick_backend("torch", other) == "torch"


def test_a_backend_that_cannot_run_says_why(built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = {"holds torch.float16": kind(torch.float16), "cache is on cuda:0": kind(device=CUDA)}
    for why, asked in reasons.items():
        with pytest.raises(
            ConfigError, match=rf"attention='native' cannot run here: .*{why}.*'auto' takes a backend that can"
        ):
            pick_backend("native", asked)
    if not built:
        with pytest.raises(ConfigError, match="numpy and torch"):
            pick_backend("native", kind())
    monkeypatch.delattr(Extension, "PagedAttention")
    if built:
        with pytest.raises(ConfigError, match="built without it: install trinity again"):
            pick_backend("native", kind())


def test_auto_takes_the_first_that_can(monkeypatch: pytest.MonkeyPatch) -> None:
    first = BackendSpec(
        lambda asked: "not on a CPU" if asked.device.type == "cpu" else None, lambda asked: TorchAttention()
    )
    monkeypatch.setattr(backends, "BACKENDS", {"fast": first, "torch": BACKENDS["torch"]})
    assert (pick_backend("auto", kind()), pick_backend("auto", kind(device=CUDA))) == ("torch", "fast")
    with pytest.raises(ConfigError, match="attention='fast' cannot run here: not on a CPU"):
        make_backend("fast", SHAPE, torch.float32, CPU)


def test_each_choice_is_a_backend_of_its_own(built: bool) -> None:
    one, other = (make_backend("auto", SHAPE, torch.float32, CPU) for _ in range(2))
    assert one is not other
    assert isinstance(one, NativeAttention) is built
    assert not isinstance(make_backend("torch", SHAPE, torch.float32, CPU), NativeAttention)


def test_an_unknown_name_is_refused_when_it_is_written() -> None:
    with pytest.raises(UnknownName, match=r"unknown attention backend 'flesh'; known: auto, .*native, .*torch"):
        Instance("PD", attention="flesh")


def _backend(loaded: LoadedInstance) -> Any:
    (stage,) = (stage for stage in loaded.stages if isinstance(stage, LanguageStage))
    return stage._backend


def test_an_instance_runs_what_it_names() -> None:
    deployment = ServingConfig(checkpoint("llava"), dtype="float32", cache=CacheConfig(pools={"image": 1, "kv": 4}))
    named, auto = load_instances(deployment, [Instance("EPD", attention="torch"), Instance("PD")], None)
    assert type(_backend(named)) is TorchAttention
    assert type(_backend(auto)) is (NativeAttention if pick_backend("auto", kind()) == "native" else TorchAttention)
    with pytest.raises(ConfigError, match=r"attention='native' cannot run here: .*float64"):
        load_instances(
            ServingConfig(checkpoint("llava"), dtype="float64", cache=CacheConfig(pools={"kv": 4})),
            [Instance("D", attention="native")],
            None,
        )


def test_it_travels_to_an_instance_in_a_process() -> None:
    deployment = ServingConfig(checkpoint("llava"), dtype="float32", cache=CacheConfig(pools={"kv": 4}))
    setup = make_setup(Instance("D", "D0", attention="torch"), deployment, Connector("shm"), "round_robin")
    there = decode(encode(setup))
    assert isinstance(there, Setup)
    assert type(_backend(load_instance(there))) is TorchAttention
    with pytest.raises(UnknownName, match="flesh"):
        load_instance(msgspec.structs.replace(there, instance={**there.instance, "attention": "flesh"}))
