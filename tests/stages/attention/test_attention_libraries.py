"""flash-attn 3 and FlashInfer without a GPU: what they are called with, beside the oracle of the other backends.

Stand-ins have the parameters of the real releases, and compute what those promise. Where a library's source is
installed, its own parameters are read as well; where there is a GPU too, the probe tries it.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from support import attention_libraries as libraries
from support.attention_scenes import LAYER, LAYERS, Scene, Text
from trinity.errors import ConfigError
from trinity.stages.attention import backends, probe
from trinity.stages.attention.backends import BACKENDS, pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.attention.gpu.flash_infer import (
    PLAN_TURNS,
    FlashInferAttention,
    PageLists,
    PlanKind,
    PlannedWrapper,
)
from trinity.stages.attention.gpu.library import FlashAttention3
from trinity.stages.attention.gpu.triton import TritonAttention
from trinity.stages.attention.gpu.varlen import make_varlen_rows
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.probe import find_fault
from trinity.stages.block_tables import BlockTables
from trinity.stages.gpu.decode_state import make_static_rows

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
SINKS = torch.tensor([0.5, 1.0, -1.0, 2.0])
PARAMS = {
    "full": AttentionParams(LAYER, 0.3),
    "window": AttentionParams(LAYER, 0.3, window=7),
    "softcap": AttentionParams(LAYER, 0.3, softcap=2.0),
    "span": AttentionParams(LAYER, 0.3, span=9),
    "sinks": AttentionParams(LAYER, 0.3, sinks=SINKS),
}
MAKERS = {"flash3": FlashAttention3, "flashinfer": FlashInferAttention}


@pytest.fixture(autouse=True)
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Stand-ins for both libraries, and what is called."""
    for name, module in libraries.make_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    yield libraries.CALLED
    libraries.CALLED.clear()


def make(which: str) -> Any:
    return MAKERS[which](processors=1)


@pytest.mark.parametrize(
    ("which", "params"),
    [(which, params) for which in MAKERS for params in ("full", "window", "softcap")]
    + [("flash3", "span"), ("flashinfer", "sinks")],
)
def test_each_gives_what_the_oracle_gives(called: list[Any], which: str, params: str) -> None:
    texts = [Text(21, 1, True), Text(3, 1, True), Text(24, 5, False), Text(9, 9, False)]
    for heads in ((4, 2), (4, 1)) if params == "full" else ((4, 2),):
        scene, before = Scene(texts, heads, 8, 16, 0), len(called)
        found = scene.run(make(which), PARAMS[params])
        torch.testing.assert_close(found, scene.oracle(PARAMS[params]), atol=2e-5, rtol=1e-4)
        for _, given in called[before:]:
            pages = [given[each] for each in ("k_cache", "v_cache", "keys", "values") if each in given]
            assert all(each.untyped_storage().data_ptr() == scene.cache.data_ptr() for each in pages), "not copied"
    names = {name for name, _ in called}
    served = {"flash3": {"flash3"}, "flashinfer": {"prefill", "prefill run"}}[which]
    assert names == (set() if params in ("span", "sinks") else served)


def test_decodes_by_themselves_pass_the_probe(called: list[Any]) -> None:
    assert find_fault(make("flashinfer"), (LAYERS, 2, 2, 4, 8), torch.float32, CPU) is None
    assert {name for name, _ in called} == {"prefill", "prefill run", "decode", "decode run"}


class Careless(FlashAttention3):
    """Writes padding rows too: block -1 is the last one."""

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        cache[rows.blocks, layer, 0, :, rows.offsets] = key


@pytest.mark.parametrize("made", [FlashAttention3, Careless])
def test_the_probe_tries_padding_rows(made: type[FlashAttention3]) -> None:
    cache, row = torch.randn(11, LAYERS, 2, 2, 4, 8), [torch.randn(1, heads, 8) for heads in (4, 2, 2)]
    error = probe._error_of_padding(made(processors=1), cache, (row[0], row[1], row[2]))
    assert (error > 0) is (made is Careless)


def test_images_are_left_to_triton(called: list[Any]) -> None:
    groups = torch.full((20,), -1)
    groups[14:18] = 0
    scene, backend = Scene([Text(20, 8, False, groups)], (4, 2), 8, 16, seed=1), make("flash3")
    torch.testing.assert_close(scene.run(backend, PARAMS["full"]), scene.oracle(PARAMS["full"]), atol=2e-5, rtol=1e-4)
    assert called == []


def test_flash3_reads_the_static_rows_of_a_graph(called: list[Any]) -> None:
    """Tables and lengths lie on the device; a padding row is written nowhere, and gives zeros."""
    scene = Scene([Text(20, 1, True), Text(5, 1, True)], (4, 2), 8, 16, seed=2)
    rows, params = scene.rows(), PARAMS["full"]
    tables = torch.zeros((3, 4), dtype=torch.int32)
    tables[:2, :2] = torch.from_numpy(BlockTables.join(rows.tables).take(np.arange(2)))
    blocks, offsets = torch.cat((rows.blocks, torch.tensor([-1]))), torch.cat((rows.offsets, torch.tensor([0])))
    static = make_static_rows(blocks, offsets, tables, torch.tensor([*rows.lengths, 0]), 16)
    parts = (scene.queries, [each[-1:] for each in scene.keys], [each[-1:] for each in scene.values])
    query, key, value = (torch.cat((*part, part[0])) for part in parts)
    backend = make("flash3")
    assert backend.supports_graphs
    assert backend.reads_chunks
    before = scene.cache[-1].clone()
    seen = backend.attend(static, scene.cache, (query, key, value), params)
    torch.testing.assert_close(seen[:2], scene.oracle(params), atol=2e-5, rtol=1e-4)
    assert not seen[2].any()
    assert torch.equal(scene.cache[-1], before)


def test_a_batch_is_planned_once_for_each_kind_of_layer(called: list[Any]) -> None:
    scene, backend = Scene([Text(21, 1, True), Text(40, 11, False)], (4, 2), 8, 16, seed=3), make("flashinfer")
    rows = scene.rows()
    fresh = [slice(text.length - text.rows, None) for text in scene.texts]
    keys, values = (scene._cut(part, fresh) for part in (scene.keys, scene.values))
    query, key, value = (torch.cat(part) for part in (scene.queries, keys, values))
    for layer in range(LAYERS):
        for window in (None, 7):
            backend.attend(rows, scene.cache, (query, key, value), AttentionParams(layer, 0.3, window=window))
    plans = [given["window_left"] for name, given in called if name == "prefill"]
    assert plans == [-1, 6], "a window of 7 sees 6 positions before its own"
    assert sum(name == "prefill run" for name, _ in called) == 2 * LAYERS


def test_groups_of_query_heads_decide_on_tensor_cores(called: list[Any]) -> None:
    for heads, kv_heads in ((2, 2), (6, 2), (8, 2), (14, 2)):
        scene = Scene([Text(9, 1, True)], (heads, kv_heads), 8, 16, seed=4)
        found = scene.run(make("flashinfer"), PARAMS["full"])
        torch.testing.assert_close(found, scene.oracle(PARAMS["full"]), atol=2e-5, rtol=1e-4)
    wrapper = PlannedWrapper(PlanKind(True, 6, torch.float32, 0.3, None, None), 2, torch.zeros(8, dtype=torch.uint8))
    assert wrapper.wrapper.use_tensor_cores is False


class Event:
    """Counts what is waited for."""

    log: list[str]

    def record(self) -> None:
        self.log.append("record")

    def synchronize(self) -> None:
        self.log.append("wait")


def test_a_plan_waits_until_the_last_one_of_its_wrapper_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory of a plan is written over by the next one: three wrappers take turns, then one waits."""
    monkeypatch.setattr(Event, "log", [], raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    numbers = torch.tensor([0, 1], dtype=torch.int32)
    lists = PageLists(numbers, numbers, numbers[:1], numbers[1:])
    there: Any = SimpleNamespace(shape=(9, 2, 2, 2, 16, 8), dtype=torch.float32, is_cuda=True, device=CPU)
    kind, backend = PlanKind(True, 4, torch.float32, 0.3, None, None), FlashInferAttention()
    turns = []
    for _ in range(PLAN_TURNS + 2):
        turns.append(backend._take_turn(kind, there))
        turns[-1].plan(lists, kind, there)
    assert len({id(each) for each in turns}) == PLAN_TURNS
    assert turns[PLAN_TURNS] is turns[0], "the one that has waited longest"
    assert Event.log == ["record"] * PLAN_TURNS + ["wait", "record"] * 2


def test_images_to_come_are_compiled_for_before_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library serves a model's layers until a chunk with an image comes, which Triton reads."""
    asked: list[int] = []
    monkeypatch.setattr(TritonAttention, "warm_up", lambda self, *_: asked.append(len(self._kinds)))
    backend = make("flash3")
    scene = Scene([Text(20, 1, True)], (4, 2), 8, 16, seed=5)
    scene.run(backend, PARAMS["window"])
    backend.warm_up(scene.cache, chunks=True, groups=False)
    backend.warm_up(scene.cache, chunks=True, groups=True)
    assert asked == [0, 1]


# ---------------------------------------------------------------- where they can run


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """As if torch saw a GPU, whose capability a test may change, and everything were installed."""
    found = {"capability": (9, 0)}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: found["capability"])
    monkeypatch.setattr(backends, "find_spec", lambda name: object())
    monkeypatch.setattr(probe, "find_fault", lambda *given: None)
    return found


def kind(dtype: torch.dtype = torch.bfloat16, width: int = 64) -> CacheKind:
    return CacheKind((2, 2, 2, 16, width), dtype, CUDA)


def test_what_they_cannot_serve_is_said(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in MAKERS:
        assert pick_backend(name, kind()) == name
        for dtype in (torch.float32, torch.float8_e4m3fn):
            with pytest.raises(ConfigError, match=f"cache holds {dtype}"):
                pick_backend(name, kind(dtype))
        with pytest.raises(ConfigError, match=f"attention='{name}' cannot run here: .*, and these have 20"):
            pick_backend(name, kind(width=20))
    gpu["capability"] = (12, 0)
    with pytest.raises(ConfigError, match=r"no kernels for GPUs of compute capability 12\.0"):
        pick_backend("flash3", kind())
    assert pick_backend("flashinfer", kind()) == "flashinfer"
    gpu["capability"] = (7, 5)
    with pytest.raises(ConfigError, match=r"no kernels for GPUs of compute capability 7\.5"):
        pick_backend("flashinfer", kind())
    gpu["capability"] = (9, 0)
    for lacking, why in {
        "flash_attn_interface": ("flash3", "flash-attn 3 .* is not installed"),
        "flashinfer": ("flashinfer", "flashinfer-python is not installed"),
        "triton": ("flash3", "triton is not installed"),
    }.items():
        monkeypatch.setattr(backends, "find_spec", lambda name, lacking=lacking: None if name == lacking else object())
        with pytest.raises(ConfigError, match=why[1]):
            pick_backend(why[0], kind())


def test_auto_does_not_wait_for_a_compiler(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashInfer without its compiled kernels is for those who ask for it by name."""
    line = [name for name in BACKENDS if name in ("flashinfer", "torch")]
    monkeypatch.setattr(backends, "BACKENDS", {name: BACKENDS[name] for name in line})
    assert pick_backend("auto", kind()) == "flashinfer"
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "flashinfer_jit_cache" else object())
    assert pick_backend("auto", kind()) == "torch"
    assert pick_backend("flashinfer", kind()) == "flashinfer"


# ---------------------------------------------------------------- the real sources, where they are installed


def installed(package: str, file: str = "") -> ast.Module:
    """Source of a file of an installed library; nothing of it is run."""
    stub = sys.modules.pop(package, None)
    try:
        found = find_spec(package)
    finally:
        if stub is not None:
            sys.modules[package] = stub
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed here")
    path = Path(found.origin).parent / file if file else Path(found.origin)
    return ast.parse(path.read_text(encoding="utf-8"))


def parameters(tree: ast.Module, name: str, owner: str = "") -> list[str]:
    """Parameters of a function, or of a method of the class ``owner``; overloads aside."""
    body: Any = tree.body
    if owner:
        (body,) = (node.body for node in body if isinstance(node, ast.ClassDef) and node.name == owner)
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name][-1]
    if found.args.kwarg is not None and name == "plan":  # 0.7 passes it on
        return parameters(tree, "_plan_impl", owner)
    return [each.arg for each in (*found.args.args, *found.args.kwonlyargs)]


def check_names(stand_in: Any, real: list[str], positional: int) -> None:
    """What is given by position has its place, and every name that the stand-in takes from trinity is there."""
    own = libraries.list_parameters(stand_in)
    assert own[:positional] == real[:positional]
    used = {"cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q", "softmax_scale", "causal", "window_size"}
    used |= {"softcap", "sm_scale", "window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "use_tensor_cores"}
    missing = (used & set(own)) - set(real)
    assert not missing, f"this release has no {missing}"


def test_the_installed_flash3_has_these_parameters() -> None:
    name = "flash_attn_with_kvcache"
    check_names(libraries.flash_attn_with_kvcache, parameters(installed("flash_attn_interface"), name), 3)


@pytest.mark.parametrize(("file", "places"), [("prefill.py", 9), ("decode.py", 8)])
def test_the_installed_flashinfer_has_these_parameters(file: str, places: int) -> None:
    tree = installed("flashinfer", file)
    word = file.removesuffix(".py").capitalize()
    stand_in = getattr(libraries, f"Batch{word}WithPagedKVCacheWrapper")
    check_names(stand_in.__init__, parameters(tree, "__init__", stand_in.__name__), 3)
    check_names(stand_in.plan, parameters(tree, "plan", stand_in.__name__), places)
    assert parameters(tree, "run", stand_in.__name__)[:3] == ["self", "q", "paged_kv_cache"]


def test_varlen_rows_of_a_recorded_step_are_not_made_anew(called: list[Any]) -> None:
    scene = Scene([Text(21, 1, True)], (4, 2), 8, 16, seed=6)
    rows = scene.rows()
    rows.memo["varlen"] = varlen = make_varlen_rows(rows, CPU)
    make("flash3").read(rows, scene.cache, scene.queries[0], PARAMS["full"])
    ((_, given),) = called
    assert torch.equal(given["page_table"], varlen.tables.int())
