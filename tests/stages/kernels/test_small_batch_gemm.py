"""Products of few rows with packed weights, against oneDNN's and exact ones."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.kernels import linear, small_batch_gemm
from trinity.stages.kernels.linear import PackedLinear, _address, pack_weight, pack_weights, run_onednn
from trinity.stages.kernels.small_batch_gemm import MOST_GEMM_ROWS, SmallBatchGemm

DTYPES = [each for each in (torch.float32, torch.bfloat16) if small_batch_gemm.has_gemm_kernel(each)]
if not DTYPES:
    pytest.skip(f"no kernel for few rows on this processor: {native.describe()}", allow_module_level=True)

sizes = st.tuples(st.integers(1, 6), st.integers(1, 12), st.integers(1, MOST_GEMM_ROWS), st.booleans())


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def laid(weight: Tensor) -> Tensor:
    """As the kernels read it, whatever oneDNN does."""
    together, pair = small_batch_gemm._block_sizes(weight.dtype)[0], 4 // weight.element_size()
    return weight.view(-1, together, weight.shape[1] // pair, pair).transpose(1, 2).contiguous()


def check(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    exact = nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    near = 1e-5 if rows.dtype == torch.float32 else 8e-3
    assert found.dtype == rows.dtype
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=near * float(exact.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@given(sizes)
def test_equals_the_exact_product(dtype: torch.dtype, size: tuple[int, int, int, bool]) -> None:
    """Every number of rows; inputs and outputs that fill the kernels' pieces, and that do not."""
    down, across, count, biased = size
    multiples = small_batch_gemm._block_sizes(dtype)
    outputs, inputs = down * multiples[0], across * max(multiples[1], 10)
    weight = drawn(outputs, inputs, dtype=dtype)
    bias = drawn(outputs, dtype=dtype, seed=1) if biased else None
    rows, packed = drawn(count, inputs, dtype=dtype, seed=2), laid(weight)
    check(SmallBatchGemm(packed.data_ptr(), bias, weight.shape, dtype)(rows), rows, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_outputs(dtype: torch.dtype, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    weight, rows = drawn(2048, 768, dtype=dtype), drawn(3, 2, 768, dtype=dtype, seed=1)
    packed = laid(weight)
    found = SmallBatchGemm(packed.data_ptr(), None, weight.shape, dtype)(rows)
    assert found.shape == (3, 2, 2048)
    check(found, rows, weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_number_that_is_none_is_hidden(dtype: torch.dtype) -> None:
    """A stage finds NaN and infinity in logits."""
    weight, rows = drawn(64, 64, dtype=dtype), drawn(3, 64, dtype=dtype, seed=1)
    rows[1, 5], rows[2, 7] = float("nan"), float("inf")
    packed = laid(weight)
    found = SmallBatchGemm(packed.data_ptr(), None, weight.shape, dtype)(rows)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


# ---------------------------------------------------------------- what oneDNN has packed


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_lies_otherwise_is_not_read(dtype: torch.dtype) -> None:
    weight = drawn(128, 64, dtype=dtype)
    packed = laid(weight)
    assert small_batch_gemm.matches_layout(weight, packed.data_ptr(), packed.nbytes)
    assert not small_batch_gemm.matches_layout(weight, weight.data_ptr(), weight.nbytes), "plain"
    assert not small_batch_gemm.matches_layout(weight, packed.data_ptr(), packed.nbytes + 64), "padded"
    packed.view(-1)[77] += 1
    assert not small_batch_gemm.matches_layout(weight, packed.data_ptr(), packed.nbytes)
    assert not small_batch_gemm.matches_layout(
        drawn(100, 64, dtype=dtype), packed.data_ptr(), 100 * 64 * dtype.itemsize
    )


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_packing_faster", lambda dtype: True)
    monkeypatch.setattr(linear, "_is_gemm_faster", lambda dtype: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_layers_use_it_for_few_rows(bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = nn.Linear(768, 256, bias=bias, dtype=dtype).requires_grad_(False)
    plain = copy.deepcopy(layer)
    pack_weights(nn.Sequential(layer))
    if layer.gemm is None:
        pytest.skip("oneDNN packs in another order on this processor")
    asked: list[int] = []

    def counted(rows: Tensor, weight: Tensor, given_bias: Tensor | None) -> Tensor:
        asked.append(len(rows))
        return run_onednn(rows, weight, given_bias)

    monkeypatch.setattr(linear, "run_onednn", counted)
    for count in (1, 8, MOST_GEMM_ROWS, MOST_GEMM_ROWS + 1):
        rows = drawn(count, 768, dtype=dtype)
        check(layer(rows), rows, plain.weight, plain.bias)
    gaps = drawn(4, 1536, dtype=dtype)[:, ::2]
    check(layer(gaps), gaps, plain.weight, plain.bias)
    assert asked == [MOST_GEMM_ROWS + 1, 4]
    with pytest.raises(RuntimeError):
        layer(drawn(2, 384, dtype=dtype))


@pytest.mark.usefixtures("always")
def test_bfloat16_is_onednns_to_the_bit() -> None:
    if torch.bfloat16 not in DTYPES:
        pytest.skip("no AMX on this processor")
    layer: Any = nn.Linear(768, 2048, dtype=torch.bfloat16).requires_grad_(False)
    pack_weights(nn.Sequential(layer))
    for count in (1, 7, 16, 17, MOST_GEMM_ROWS):
        rows = drawn(count, 768, dtype=torch.bfloat16)
        assert torch.equal(layer(rows), run_onednn(rows, layer.packed, layer.bias))


@pytest.mark.usefixtures("always")
def test_layers_that_it_cannot_serve_keep_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    odd, mixed, other = (nn.Linear(64, outputs).requires_grad_(False) for outputs in (40, 128, 128))
    mixed.bias = nn.Parameter(torch.ones(256)[::2], requires_grad=False)
    monkeypatch.setattr(linear, "_packs_readably", lambda shape, dtype: shape[0] == 128)
    pack_weights(nn.ModuleList([odd, mixed]))
    assert [each.gemm for each in (odd, mixed)] == [None, None]
    monkeypatch.setattr(native, "extension", None)
    pack_weights(nn.Sequential(other))
    assert isinstance(other, PackedLinear)
    assert other.gemm is None


@pytest.mark.parametrize("faster", [True, False])
def test_it_is_used_where_it_is_faster(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = [0.0]

    def taking(seconds: float) -> Any:
        def run(*given: Any) -> None:
            spent[0] += seconds

        return run

    monkeypatch.setattr(linear, "time", SimpleNamespace(thread_time=lambda: spent[0]))
    monkeypatch.setattr(SmallBatchGemm, "__call__", taking(1.0 if faster else 2.0))
    monkeypatch.setattr(linear, "run_onednn", taking(1.5))
    linear._is_gemm_faster.cache_clear()
    assert linear._is_gemm_faster(torch.float32) is faster
    linear._is_gemm_faster.cache_clear()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", [{"rows": 33}, {"inputs": 0}, {"outputs": 33}, {"rows": -1}])
def test_numbers_that_do_not_fit_are_refused(dtype: torch.dtype, wrong: dict[str, int]) -> None:
    memory = torch.zeros(64 * 64, dtype=dtype)
    size = {"rows": 1, "inputs": 64, "outputs": 64} | wrong
    place = (memory.data_ptr(), 64)
    with pytest.raises(ValueError, match="few_rows_of"):
        native.extension.few_rows(place, place, memory.data_ptr(), 0, **size, bf16=dtype == torch.bfloat16, threads=1)


def test_the_place_is_that_of_the_packed_copy() -> None:
    packed = pack_weight(drawn(64, 64, dtype=torch.float32))
    address, size = _address(packed)
    assert address
    assert size >= 64 * 64 * 4
