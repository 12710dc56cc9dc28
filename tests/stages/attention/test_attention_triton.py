"""The Triton kernels beside the dense oracle: on a GPU where there is one, else in Triton's interpreter on the CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are defined, at the imports below
pytest.importorskip("triton", reason="triton is not installed: pip install triton")

from support.attention_scenes import LAYER, LAYERS, Scene, Text, asks, texts
from support.language_stage import PROMPT, Solo, work
from trinity.stages.attention.gpu.triton import TritonAttention, count_stages, make_triton_rows, next_power_of_two
from trinity.stages.attention.gpu.varlen import make_varlen_rows
from trinity.stages.attention.interface import AttentionParams, PagedRows
from trinity.stages.attention.probe import find_fault
from trinity.stages.attention.torch_reference import TorchAttention
from trinity.stages.gpu import decode_graphs
from trinity.stages.gpu.cuda_graphs import GraphCache
from trinity.stages.gpu.decode_graphs import DecodeGraphs

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ONE, MANY = 1, 1000  # multiprocessors to keep busy: no split, as many as there can be


def on_device(rows: PagedRows) -> PagedRows:
    chunks = tuple(
        replace(chunk, table=chunk.table.to(DEVICE), groups=None if chunk.groups is None else chunk.groups.to(DEVICE))
        for chunk in rows.chunks
    )
    return PagedRows(rows.blocks.to(DEVICE), rows.offsets.to(DEVICE), rows.tables, rows.lengths, chunks)


class Placed:
    """A backend that is handed what tests on the CPU have, on the device."""

    def __init__(self, processors: int = ONE) -> None:
        self.inner = TritonAttention(processors)

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        there = cache.to(DEVICE)
        query, key, value = (part.to(DEVICE) for part in qkv)
        sinks = None if params.sinks is None else params.sinks.to(DEVICE)
        seen = self.inner.attend(on_device(rows), there, (query, key, value), replace(params, sinks=sinks))
        cache.copy_(there)
        return seen.cpu()


def no_bfloat16_here() -> None:
    if DEVICE.type == "cpu":
        pytest.skip("no GPU: Triton's interpreter multiplies bfloat16 as if it were integers")


def run(scene: Scene, params: AttentionParams, processors: int = ONE) -> Tensor:
    backend: Any = Placed(processors)
    return scene.run(backend, params)


EXAMPLES = 10 if DEVICE.type == "cpu" else 15  # the interpreter takes 30 ms a program, the compiler seconds a shape
SHAPES = [(kv, height, width) for kv in (1, 2, 4) for height in (4, 16, 5) for width in (8, 20, 1)]
FEW_SHAPES = [(1, 4, 20), (2, 16, 8), (4, 5, 1)]


@given(
    texts(most_rows=7),
    asks(),
    st.sampled_from(SHAPES if DEVICE.type == "cpu" else FEW_SHAPES),
    st.sampled_from([ONE, MANY]),
)
@settings(max_examples=EXAMPLES)
def test_equals_dense_attention(
    found: list[Text], params: AttentionParams, shape: tuple[int, int, int], processors: int
) -> None:
    kv, height, width = shape
    scene = Scene(found, (4, kv), width, height, seed=len(found))
    torch.testing.assert_close(run(scene, params, processors), scene.oracle(params), atol=2e-5, rtol=1e-4)


SINKS = torch.tensor([3.0, -1.0, 0.5, 2.0, 0.0, 1.0, -2.0])


@pytest.mark.parametrize(
    ("heads", "params"),
    [
        pytest.param((4, 4), AttentionParams(LAYER, 0.2), marks=pytest.mark.slow),
        pytest.param((7, 1), AttentionParams(LAYER, 0.2, window=70), marks=pytest.mark.slow),
        ((6, 2), AttentionParams(LAYER, 0.2, span=90)),
        pytest.param((7, 1), AttentionParams(LAYER, 0.2, sinks=SINKS), marks=pytest.mark.slow),
        ((4, 2), AttentionParams(LAYER, 0.2, window=70, softcap=3.0, sinks=SINKS[:4])),
    ],
    ids=["full", "window", "span", "sinks", "all"],
)
def test_texts_longer_than_what_is_looked_at_at_once(heads: tuple[int, int], params: AttentionParams) -> None:
    """Several tiles of keys, with 7 heads two of rows, and splits; some of the splits have nothing to see."""
    scene = Scene([Text(300, 1, True), Text(2, 1, True), Text(200, 19, False)], heads, 32, 16, seed=3)
    wanted = scene.run(TorchAttention(), params)
    for processors in (ONE, MANY):
        torch.testing.assert_close(run(scene, params, processors), wanted, atol=2e-5, rtol=1e-4)


def test_images_see_each_other_in_both_directions() -> None:
    groups = torch.full((90,), -1)
    groups[5:20], groups[60:89] = 0, 1
    for rows in (90, 40):
        scene = Scene([Text(90, rows, False, groups), Text(9, 9, False)], (4, 2), 16, 16, seed=4)
        for params in (AttentionParams(LAYER, 0.3), AttentionParams(LAYER, 0.3, window=33)):
            wanted = scene.run(TorchAttention(), params)
            torch.testing.assert_close(run(scene, params), wanted, atol=2e-5, rtol=1e-4)
    scene.texts[-1].groups = None
    assert (scene.run(TorchAttention(), params) - wanted).abs().max() > 0.01, "a control that must differ"


def test_writes_only_its_own_rows_of_its_own_layer() -> None:
    scene = Scene([Text(21, 1, True), Text(18, 9, False)], (18, 9), 8, 16, seed=0)
    before = scene.cache.clone()
    run(scene, AttentionParams(LAYER, 0.3))
    for text, table, keys, values in zip(scene.texts, scene.tables, scene.keys, scene.values, strict=True):
        for at in range(text.length - text.rows, text.length):
            before[table[at // 16], LAYER, 0, :, at % 16] = keys[at]
            before[table[at // 16], LAYER, 1, :, at % 16] = values[at]
    assert torch.equal(scene.cache, before)


def test_nothing_beyond_a_text_is_read() -> None:
    """NaN in other texts' blocks, and in the rest of its own last block, stays where it is."""
    scene = Scene([Text(5, 1, True), Text(60, 1, True), Text(40, 4, False)], (4, 2), 8, 16, seed=1)
    wanted = scene.oracle(AttentionParams(LAYER, 0.3))
    held = scene.cache.clone()
    scene.cache[:] = torch.nan
    for text, table in zip(scene.texts, scene.tables, strict=True):
        for at in range(text.length):
            scene.cache[table[at // 16], :, :, :, at % 16] = held[table[at // 16], :, :, :, at % 16]
    for processors in (ONE, MANY):
        torch.testing.assert_close(run(scene, AttentionParams(LAYER, 0.3), processors), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 0.05), (torch.float16, 0.01)])
def test_half_precision_is_close_to_float32(dtype: torch.dtype, error: float) -> None:
    if dtype == torch.bfloat16:
        no_bfloat16_here()
    scene = Scene([Text(33, 1, True), Text(90, 5, False)], (4, 2), 16, 16, seed=2)
    exact = scene.oracle(params := AttentionParams(LAYER, 0.25))
    scene.cache = scene.cache.to(dtype)
    for tensors in (scene.keys, scene.values, scene.queries):
        tensors[:] = [tensor.to(dtype) for tensor in tensors]
    for processors in (ONE, MANY):
        seen = run(scene, params, processors)
        assert seen.dtype == dtype
        torch.testing.assert_close(seen.float(), exact, atol=error, rtol=error)


def test_padding_is_written_nowhere_and_comes_out_as_zeros() -> None:
    """What a CUDA graph of a larger batch adds: rows without a block, sequences without a position."""
    scene = Scene([Text(20, 1, True)], (4, 2), 8, 16, seed=5)
    wanted = scene.oracle(params := AttentionParams(LAYER, 0.3))
    real = scene.rows()
    padded = PagedRows(
        blocks=torch.cat((real.blocks, torch.tensor([-1, -1]))),
        offsets=torch.cat((real.offsets, torch.zeros(2, dtype=torch.long))),
        tables=[*real.tables, *np.zeros((2, 1), dtype=np.int64)],
        lengths=np.concatenate((real.lengths, np.zeros(2, dtype=np.int64))),
    )
    cache, before = scene.cache.to(DEVICE), scene.cache.clone()
    parts = (scene.queries[0], scene.keys[0][-1:], scene.values[0][-1:])
    query, key, value = (part.repeat(3, 1, 1).to(DEVICE) for part in parts)
    for processors in (ONE, MANY):
        seen = TritonAttention(processors).attend(on_device(padded), cache, (query, key, value), params).cpu()
        torch.testing.assert_close(seen[:1], wanted, atol=2e-5, rtol=1e-4)
        assert torch.equal(seen[1:], torch.zeros_like(seen[1:]))
    block = int(scene.tables[0][1])
    before[block, LAYER, :, :, 3] = cache[block, LAYER, :, :, 3].cpu()
    assert torch.equal(cache.cpu(), before)


def test_rows_that_lie_apart_in_memory() -> None:
    """Heads before rows, as transformers hands them on; and a last axis that is no row at all."""
    scene = Scene([Text(9, 1, True), Text(40, 7, False)], (4, 2), 8, 16, seed=6)
    params = AttentionParams(LAYER, 0.3)
    wanted = scene.oracle(params)

    class Apart:
        def attend(
            self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
        ) -> Tensor:
            query, key, value = qkv
            apart = query.transpose(0, 1).contiguous().transpose(0, 1), key.transpose(1, 2).contiguous().transpose(1, 2)
            wide = torch.cat((value, value), -1)[..., : value.shape[-1]]
            return Placed().attend(rows, cache, (*apart, wide), params)

    backend: Any = Apart()
    torch.testing.assert_close(scene.run(backend, params), wanted, atol=2e-5, rtol=1e-4)


def test_waves_of_tiles() -> None:
    """One tile a decode; a chunk's rows in tiles of 128 packed rows, 18 tokens of 7 query heads each."""
    scene = Scene([Text(9, 1, True), Text(300, 1, True), Text(40, 37, False), Text(20, 18, False)], (7, 1), 8, 16, 7)
    rows = scene.rows()
    decodes, chunks = make_triton_rows(make_varlen_rows(rows, torch.device("cpu")), rows, 7).waves
    assert (decodes.tiles.tolist(), decodes.first, decodes.rows, decodes.longest) == ([[0, 1], [0, 0]], 0, 2, 300)
    assert chunks.packed == 128
    assert chunks.tiles.tolist() == [[2, 3, 3, 3], [0, 0, 18, 36]]
    assert (chunks.first, chunks.rows, chunks.longest) == (2, 55, 40)
    assert [next_power_of_two(number) for number in (1, 2, 3, 16, 17)] == [1, 2, 4, 16, 32]


def test_splits_keep_the_processors_busy() -> None:
    scene = Scene([Text(300, 1, True)], (4, 2), 8, 16, seed=8)
    rows = scene.rows()
    (wave,) = make_triton_rows(make_varlen_rows(rows, torch.device("cpu")), rows, 2).waves
    found = [TritonAttention(processors)._splits(wave, scene.cache) for processors in (1, 2, 4, 132)]
    assert found == [1, 2, 4, 5], "two programs for each of 2 heads; no more than there are tiles of keys"


def test_stages_are_as_many_as_shared_memory_holds() -> None:
    """KiB of a multiprocessor for one program: 227 of an H100, 163 of an A100, 99 of an L40S."""
    sizes = {
        "decode": (16, 64, 256),
        "prefill": (128, 64, 256),
        "wide prefill": (128, 32, 512),
        "float32": (128, 32, 1024),
    }
    found = {name: [count_stages(*size, kib << 10) for kib in (227, 163, 99)] for name, size in sizes.items()}
    assert found == {"decode": [3, 3, 2], "prefill": [3, 3, 2], "wide prefill": [3, 3, 2], "float32": [2, 2, 2]}


def test_what_is_compiled_before_serving_touches_nothing() -> None:
    """Every kind of kernel is launched, over nothing: the cache does not change."""
    scene = Scene([Text(20, 1, True)], (4, 2), 8, 16, seed=9)
    backend, cache = TritonAttention(ONE), scene.cache.to(DEVICE)
    parts = (scene.queries[0], scene.keys[0][-1:], scene.values[0][-1:])
    query, key, value = (part.to(DEVICE) for part in parts)
    for params in (
        AttentionParams(LAYER, 0.3),
        AttentionParams(LAYER, 0.3, window=7, sinks=torch.zeros(4, device=DEVICE)),
    ):
        backend.attend(on_device(scene.rows()), cache, (query, key, value), params)
    before = cache.clone()
    backend.warm_up(cache, chunks=True, groups=True)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_probe_accepts_it(dtype: torch.dtype) -> None:
    if dtype == torch.bfloat16:
        no_bfloat16_here()
    assert find_fault(TritonAttention(MANY), (LAYERS, 2, 2, 16, 20), dtype, DEVICE) is None


class Again:
    """A recorder that runs the call again at each replay: kernels of the interpreter cannot be taped."""

    def has_room(self) -> bool:
        return True

    def record(
        self, run: Callable[[], Sequence[Tensor]], restore: Callable[[], None]
    ) -> tuple[Callable[[], None], Sequence[Tensor]]:
        restore()
        outputs = run()

        def replay() -> None:
            for old, new in zip(outputs, run(), strict=True):
                old.copy_(new)

        return replay, outputs


@pytest.mark.skipif(
    DEVICE.type == "cuda", reason="the stages of this test are on the CPU; tests/e2e/test_on_gpu.py has a GPU's"
)
def test_a_stage_prefills_and_decodes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests in a padded batch of four rows; the same logits as with torch."""
    monkeypatch.setattr(decode_graphs, "BATCH_SIZES", (4,))
    monkeypatch.setattr(
        decode_graphs, "MOST_TABLE_BYTES", 4 * 4 * 2
    )  # splits of wider tables take the interpreter long
    plain, ours = Solo(), Solo(backend=TritonAttention(MANY))
    ours.stage._graphs = DecodeGraphs(
        ours.model, ours.pool.memory.tensor, TritonAttention(MANY), GraphCache(Again(), DEVICE)
    )
    asked = [work("a", PROMPT[:5], 8), work("b", PROMPT[5:22], 8)]
    for solo in (plain, ours):
        for each in asked:
            solo.open(each)
            solo.fill(each)
        for _ in range(2):
            solo.step(decodes=("a", "b"))
    assert len(ours.seen) == 6
    assert all((ours.seen[at] - plain.seen[at]).abs().max() < 1e-4 for at in plain.seen)
