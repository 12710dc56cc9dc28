"""The kernels of csrc/attention/ against dense attention and torch: for this processor, and for any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from support.attention_scenes import LAYER, Scene, Text, asks, texts
from trinity.errors import ConfigError
from trinity.memory import native
from trinity.stages.attention.backends import pick_backend
from trinity.stages.attention.choice import CacheKind
from trinity.stages.attention.interface import AttentionParams, ChunkRows, PagedRows
from trinity.stages.attention.native import LONG_CHUNK, MANY_ROW_KERNELS, NativeAttention, has_many_rows
from trinity.stages.attention.torch_reference import TorchAttention

KIND = CacheKind((1, 2, 1, 16, 8), torch.float32, torch.device("cpu"))
if not hasattr(native.extension, "PagedAttention"):
    pytest.skip(f"no attention in the extension: {native.describe()}", allow_module_level=True)

PLAIN = AttentionParams(LAYER, 0.3)
WIDE = 64  # of a width that AVX-512 is for; 20 and 7 are not


KERNELS = ("best", "many", "avx512", "avx2", "portable")


@pytest.fixture(params=KERNELS)
def backend(request: pytest.FixtureRequest) -> NativeAttention:
    return NativeAttention(request.param)


def check(scene: Scene, backend: NativeAttention, params: AttentionParams) -> None:
    torch.testing.assert_close(scene.run(backend, params), scene.oracle(params), atol=5e-5, rtol=1e-4)


def halved(scene: Scene) -> Scene:
    scene.cache = scene.cache.bfloat16()
    for tensors in (scene.keys, scene.values, scene.queries):
        tensors[:] = [tensor.bfloat16() for tensor in tensors]
    return scene


sizes = st.tuples(
    st.sampled_from([1, 2, 4]),  # kv heads of 4
    st.sampled_from([7, 8, 20, 32, WIDE, 96]),  # head_dim
    st.sampled_from([1, 4, 5, 16, 24, 32]),  # block rows
    st.sampled_from(KERNELS),
)


@given(texts(), asks(), sizes)
def test_equals_dense_attention(found: list[Text], params: AttentionParams, size: tuple[int, int, int, str]) -> None:
    kv, width, height, kernel = size
    check(Scene(found, (4, kv), width, height, seed=len(found)), NativeAttention(kernel), params)


@given(texts(), asks(), sizes)
@example([Text(40, 1, True)], PLAIN, (1, WIDE, 16, "best"))
def test_bfloat16_is_as_close_to_exact_as_torch_is(
    found: list[Text], params: AttentionParams, size: tuple[int, int, int, str]
) -> None:
    kv, width, height, kernel = size
    scene = halved(Scene(found, (4, kv), width, height, seed=len(found)))
    sinks = None if params.sinks is None else params.sinks.bfloat16()
    exact = scene.oracle(replace(params, sinks=sinks))
    ours = (scene.run(NativeAttention(kernel), params).float() - exact).abs().max()
    assert ours < 0.02 * max(1.0, float(exact.abs().max()))


@pytest.mark.parametrize("heads", [(1, 1), (3, 1), (5, 1), (8, 2), (16, 1), (6, 6)])
@pytest.mark.parametrize("width", [WIDE, 128, 20])
def test_every_number_of_heads_that_share_keys(backend: NativeAttention, heads: tuple[int, int], width: int) -> None:
    found = [Text(37, 1, True), Text(70, 1, True), Text(50, 33, False), Text(1, 1, False)]
    check(Scene(found, heads, width, 16, seed=3), backend, PLAIN)
    scene = halved(Scene(found, heads, width, 16, seed=3))
    torch.testing.assert_close(scene.run(backend, PLAIN).float(), scene.oracle(PLAIN), atol=0.03, rtol=0.03)


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 48, 49])
def test_lengths_around_the_borders_of_blocks(backend: NativeAttention, length: int) -> None:
    for rows in {1, length, max(1, length - 16)}:
        check(Scene([Text(length, rows, False)], (4, 2), WIDE, 16, seed=length), backend, PLAIN)
    check(Scene([Text(length, 1, True)] * 2, (4, 2), WIDE, 16, seed=length), backend, replace(PLAIN, window=16))


def test_threads_share_a_batch(backend: NativeAttention) -> None:
    """Few rows: heads apart; many: rows apart. What one thread makes is what three make, to the last bit."""
    before = torch.get_num_threads()
    for found in ([Text(300, 1, True)], [Text(30 + i, 1, True) for i in range(12)], [Text(200, 90, False)]):
        scene = Scene(found, (8, 4), WIDE, 16, seed=1)
        made = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            made.append(scene.run(backend, PLAIN))
        torch.set_num_threads(before)
        assert torch.equal(*made)


def test_a_batch_without_rows(backend: NativeAttention) -> None:
    none = torch.empty(0, dtype=torch.int64)
    rows = PagedRows(none, none, np.empty((0, 0), np.int64), np.empty(0, np.int64))
    qkv = (torch.empty(0, 4, WIDE), torch.empty(0, 2, WIDE), torch.empty(0, 2, WIDE))
    assert backend.attend(rows, torch.zeros(2, 2, 2, 2, 16, WIDE), qkv, PLAIN).shape == (0, 4, WIDE)


def test_writes_only_its_own_rows_of_its_own_layer(backend: NativeAttention) -> None:
    scene = Scene([Text(21, 1, True), Text(18, 9, False)], (4, 2), WIDE, 16, seed=0)
    before = scene.cache.clone()
    torch_scene = Scene([Text(21, 1, True), Text(18, 9, False)], (4, 2), WIDE, 16, seed=0)
    scene.run(backend, PLAIN)
    torch_scene.run(TorchAttention(), PLAIN)
    assert torch.equal(scene.cache, torch_scene.cache)
    assert (scene.cache != before).any(-1).sum() == 10 * 2 * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_of_others_are_never_read(backend: NativeAttention, dtype: torch.dtype) -> None:
    """NaN in another's blocks, and in what is stale of the own ones, never arrives; in what is read it does."""
    found = [Text(5, 1, True), Text(60, 1, True), Text(40, 4, False), Text(19, 19, False)]
    scene = Scene(found, (4, 2), WIDE, 16, seed=1)
    scene = halved(scene) if dtype is torch.bfloat16 else scene
    scene.cache[scene.order[-3:]] = torch.nan
    for text, table in zip(scene.texts, scene.tables, strict=True):
        last, used = table[-1], (text.length - 1) % 16 + 1
        scene.cache[last, :, :, :, used:] = torch.nan
    ends = np.cumsum([text.rows for text in scene.texts]).tolist()
    clean = scene.run(backend, PLAIN)
    assert clean.isfinite().all()
    for table, text, end in zip(scene.tables, scene.texts, ends, strict=True):
        kept = scene.cache[table].clone()
        scene.cache[table] = torch.nan
        seen = scene.run(backend, PLAIN)
        scene.cache[table] = kept
        own = torch.zeros(len(seen), dtype=torch.bool)
        own[end - text.rows : end] = True
        assert torch.equal(seen[~own], clean[~own])
        assert seen[own].isnan().any() == (text.rows < text.length)


def test_what_is_not_finite_shows(backend: NativeAttention) -> None:
    for part in (0, 1):
        scene = Scene([Text(40, 1, True)], (4, 2), WIDE, 16, seed=2)
        scene.cache[scene.tables[0][1], LAYER, part, 0, 3, 5] = torch.nan
        seen = scene.run(backend, PLAIN)[0].isnan().any(-1)
        assert seen.tolist() == [True, True, False, False], "the heads that share the key-value head"


def test_very_large_scores_do_not_overflow(backend: NativeAttention) -> None:
    scene = Scene([Text(50, 1, True), Text(50, 20, False)], (4, 2), WIDE, 16, seed=4)
    check(scene, backend, replace(PLAIN, scale=0.3))
    seen = scene.run(backend, replace(PLAIN, scale=400.0))
    assert seen.isfinite().all()
    assert torch.allclose(seen, scene.run(TorchAttention(), replace(PLAIN, scale=400.0)), atol=1e-3)


@pytest.mark.parametrize("step", [0.2, -0.2, 0.6, 5.0])
@pytest.mark.parametrize("sinks", [None, torch.tensor([-2.0, 0.0, 9.0, 40.0])])
def test_scores_that_rise_from_block_to_block(
    backend: NativeAttention, step: float, sinks: torch.Tensor | None
) -> None:
    """By less than the kernel lets a maximum be out of date, by more, and by so much that nothing is left of before."""
    scene = Scene([Text(70, 1, True), Text(45, 6, False)], (4, 2), WIDE, 16, seed=8)
    for query, keys in zip(scene.queries, scene.keys, strict=True):
        query[:], keys[..., 0] = query / 10, torch.arange(len(keys))[:, None] * step
        query[..., 0] = 1
    scene._fill_past()
    check(scene, backend, AttentionParams(LAYER, 1.0, sinks=sinks))


@pytest.mark.parametrize("width", [32, WIDE, 96, 20])
def test_bfloat16_is_rounded_as_torch_rounds(backend: NativeAttention, width: int) -> None:
    """The mean of two values, half of which lie between two numbers of bfloat16: to the even one."""
    scene = halved(Scene([Text(2, 1, True), Text(2, 2, False)], (4, 2), width, 16, seed=9))
    for query, values in zip(scene.queries, scene.values, strict=True):
        query[:] = 0
        values[0] = values[0].abs() + 0.5
        values[1] = (values[0].view(torch.int16) + 1).view(torch.bfloat16)
    scene.values[0][:, 0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf])
    scene._fill_past()
    wanted = torch.cat([(values.float().mean(0)).bfloat16()[None] for values in scene.values])
    seen = scene.run(backend, PLAIN)[[0, 2]]
    torch.testing.assert_close(seen, wanted.repeat_interleave(2, 1), atol=0, rtol=0, equal_nan=True)


def test_groups_that_are_no_runs_are_left_to_torch(backend: NativeAttention) -> None:
    groups = torch.tensor([0, 1, 0, 1, -1, 2, 2])
    check(Scene([Text(7, 7, False, groups), Text(9, 1, True)], (4, 2), WIDE, 16, seed=5), backend, PLAIN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_chunks_in_bfloat16_are_left_to_torch_where_there_is_no_kernel_of_many_rows(
    backend: NativeAttention, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = []
    ours = has_many_rows(WIDE) and backend._kernel in MANY_ROW_KERNELS
    left = [LONG_CHUNK] if dtype is torch.bfloat16 and not ours else []

    def chunk(self: object, rows: PagedRows, one: ChunkRows, *given: Any) -> torch.Tensor:
        chunks.append(one.length)
        return plain(self, rows, one, *given)

    plain: Any = TorchAttention._chunk
    monkeypatch.setattr(TorchAttention, "_chunk", chunk)
    found = [Text(80, 1, True), Text(90, LONG_CHUNK, False), Text(60, LONG_CHUNK - 1, False)]
    scene = Scene(found, (4, 2), WIDE, 16, seed=7)
    scene = halved(scene) if dtype is torch.bfloat16 else scene
    torch.testing.assert_close(scene.run(backend, PLAIN).float(), scene.oracle(PLAIN), atol=0.03, rtol=0.03)
    assert chunks == left


def test_keys_and_values_may_lie_anyhow(backend: NativeAttention) -> None:
    scene = Scene([Text(33, 1, True), Text(20, 6, False)], (4, 2), WIDE, 16, seed=6)
    wanted = scene.oracle(PLAIN)
    for tensors in (scene.keys, scene.values, scene.queries):
        tensors[:] = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    torch.testing.assert_close(scene.run(backend, PLAIN), wanted, atol=5e-5, rtol=1e-4)


def _plan(**changed: object) -> object:
    def numbers(*values: int) -> np.ndarray:
        return np.array(values, np.int64)

    given = {"shape": numbers(4, 2, 2, 16, 8), "bf16": False, "blocks": numbers(1, 2), "offsets": numbers(0, 1)}
    given |= {"tables": numbers(1, 2, 3), "requests": np.array([[0, 1, 0, 1], [1, 1, 1, 2]], np.int64)}
    return native.extension.PagedAttention(**(given | changed))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"blocks": np.array([1, 4])}, "block 4 of a cache of 4"),
        ({"tables": np.array([1, 2, -1])}, "block -1"),
        ({"offsets": np.array([0, 16])}, "offset 16"),
        ({"offsets": np.array([0])}, "as many offsets"),
        ({"requests": np.array([[0, 3, 0, 1]])}, "rows are not in the batch"),
        ({"requests": np.array([[0, 1, 2, 2]])}, "table is not in the tables"),
        ({"shape": np.array([4, 2, 2, 16])}, "a cache is"),
        ({"shape": np.array([4, 2, 0, 16, 8])}, "without"),
    ],
)
def test_nothing_out_of_range_is_touched(changed: dict[str, np.ndarray], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        _plan(**changed)


def test_a_layer_or_a_range_beyond_the_cache_is_refused() -> None:
    plan, rows = _plan(), torch.zeros(2, 4, 8)
    place = (rows.data_ptr(), 32, 8)
    ranges = (np.array([0, 0]), np.array([1, 17]))
    cache = torch.zeros(4, 2, 2, 2, 16, 8)

    def attend(layer: int = 0, heads: int = 4, seen: tuple[np.ndarray, np.ndarray] = ranges) -> None:
        given = (cache.data_ptr(), layer, place, place, heads, *seen, 1.0, 0.0, 0, 1, "best")
        plan.attend(*given)  # type: ignore[attr-defined]

    attend()
    for wrong, why in (
        ({"layer": 2}, "layer 2"),
        ({"heads": 3}, "multiple"),
        ({"seen": (np.array([0, 0]), np.array([1, 33]))}, "row 1 sees nothing, or more"),
        ({"seen": (np.array([1, 0]), np.array([1, 1]))}, "row 0 sees nothing"),
        ({"seen": (np.array([0]), np.array([1]))}, "one range for each row"),
    ):
        with pytest.raises(ValueError, match=why):
            attend(**wrong)  # type: ignore[arg-type]


def test_it_is_the_default_on_a_cpu() -> None:
    assert pick_backend("auto", KIND) == "native"
    with pytest.raises(ConfigError, match="float16"):
        pick_backend("native", replace(KIND, dtype=torch.float16))


@pytest.mark.skipif(native.extension.instructions() != "avx512", reason="this processor has no AVX-512")
def test_which_widths_have_instructions_of_their_own() -> None:
    asked = native.extension.attention_instructions
    assert [asked(False, width) for width in (32, 64, 128, 512)] == ["avx512"] * 4
    assert [asked(False, width) for width in (16, 80)] == ["avx2"] * 2
    assert [asked(False, width) for width in (7, 544)] == ["portable"] * 2
    assert asked(True, 544) == "portable"


@pytest.mark.skipif(native.extension.instructions() != "avx2", reason="this processor has no AVX2, or more than that")
def test_which_widths_avx2_serves() -> None:
    asked = native.extension.attention_instructions
    assert [asked(bf16, width) for bf16 in (True, False) for width in (16, 64, 80, 512)] == ["avx2"] * 8
    assert [asked(bf16, width) for bf16 in (True, False) for width in (7, 20, 528)] == ["portable"] * 6
    assert [has_many_rows(width) for width in (7, 20, 64, 512, 528)] == [True] * 4 + [False]
