"""Products with plain weights by the extension, against exact ones, and the layers that use them."""

from __future__ import annotations

import copy
import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.kernels import linear, native_linear
from trinity.stages.kernels.linear import PackedLinear, pack_weights, use_onednn
from trinity.stages.kernels.native_linear import NativeLinear, multiply, run_linear, use_native_products

DTYPES = (torch.float32, torch.bfloat16)
if not all(map(native_linear.has_native_product, DTYPES)):
    pytest.skip(f"no products with plain weights on this processor: {native.describe()}", allow_module_level=True)

LANES, MOST_FEW, PANEL_ROWS, PANEL_DEPTH = 16, 64, 300, 256  # where csrc/linear/*_avx2.* begin another piece


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(found: Tensor, rows: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """bfloat16 to the rounding of the exact result; sums of float32 leave that one unit at most."""
    exact = nn.functional.linear(rows.double(), weight.double(), None if bias is None else bias.double())
    near = 1e-5 if rows.dtype == torch.float32 else 2**-8
    assert found.dtype == rows.dtype
    torch.testing.assert_close(found.double(), exact, rtol=near, atol=1e-5 * float(exact.abs().max()))


counts = st.integers(1, MOST_FEW + 8) | st.sampled_from([PANEL_ROWS - 1, PANEL_ROWS + 1, 2 * PANEL_ROWS + 5])
widths = st.integers(1, 70) | st.sampled_from([PANEL_DEPTH - 1, PANEL_DEPTH, PANEL_DEPTH + 17, 3 * PANEL_DEPTH])


@given(counts, widths, st.integers(1, 50), st.sampled_from(DTYPES), st.booleans())
def test_equals_the_exact_product(rows: int, inputs: int, outputs: int, dtype: torch.dtype, biased: bool) -> None:
    given_rows, weight = drawn(rows, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype, seed=1)
    bias = drawn(outputs, dtype=dtype, seed=2) if biased else None
    check(multiply(given_rows, weight, bias), given_rows, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 5, 20, 70])
def test_more_outputs_than_are_summed_together(dtype: torch.dtype, count: int) -> None:
    rows, weight = drawn(count, 40, dtype=dtype), drawn(4133, 40, dtype=dtype, seed=1)
    check(multiply(rows, weight, None), rows, weight, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 6, 31, 100])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_share_outputs(dtype: torch.dtype, count: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, weight = drawn(2, count, 768, dtype=dtype), drawn(2050, 768, dtype=dtype, seed=1)
    alone = multiply(rows, weight, None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = multiply(rows, weight, None)
    assert found.shape == (2, count, 2050)
    check(found, rows, weight, None)
    assert torch.allclose(found.float(), alone.float(), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [3, 20, 40, 70])
def test_no_number_that_is_none_is_hidden(dtype: torch.dtype, count: int) -> None:
    rows, weight = drawn(count, 50, dtype=dtype), drawn(37, 50, dtype=dtype, seed=1)
    rows[1, 49], rows[2, 7] = float("nan"), float("inf")
    found = multiply(rows, weight, None)
    assert found[0].isfinite().all()
    assert found[1].isnan().all()
    assert not found[2].isfinite().any()


def test_bfloat16_is_rounded_once_to_the_even_number() -> None:
    """Sums that lie between two numbers of bfloat16, which a product in pieces of bfloat16 would lose."""
    ones = torch.ones(1, 3, dtype=torch.bfloat16)
    weight = torch.tensor([[256.0, 0.5, 0.5], [256.0, 2.0, 1.0], [258.0, 1.0, 0.0]], dtype=torch.bfloat16)
    for count in (1, 50, 70):
        assert multiply(ones.expand(count, 3).contiguous(), weight, None)[-1].tolist() == [256.0, 260.0, 260.0]


def test_memory_beside_rows_and_results_is_left_alone() -> None:
    """Weights and rows end where their memory does, and what is around the results stays."""
    for count in (1, 4, 20, 40, 70):
        rows, weight = drawn(count, 21, dtype=torch.bfloat16), drawn(19, 21, dtype=torch.bfloat16, seed=1)
        around = torch.full((count + 2, 19), 7.0, dtype=torch.bfloat16)
        place = (around[1].data_ptr(), 19)
        native.extension.product((rows.data_ptr(), 21), place, weight.data_ptr(), 0, count, 21, 19, True, 1)
        assert torch.equal(around[0], around[-1])
        check(around[1:-1], rows, weight, None)


class AtTheEnd:
    """Memory that ends where a page begins that nobody may read."""

    def __init__(self, size: int) -> None:
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        self.memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
        start = np.frombuffer(self.memory, np.uint8).ctypes.data
        assert not ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + whole), ctypes.c_size_t(mmap.PAGESIZE), 0)
        self.address = start + whole - size


@pytest.mark.skipif(sys.platform != "linux", reason="mprotect")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 7, 16, 31, 70])
@pytest.mark.parametrize(("inputs", "outputs"), [(21, 19), (259, 26), (32, 24)])
def test_nothing_is_read_behind_rows_weights_and_bias(
    count: int, inputs: int, outputs: int, dtype: torch.dtype
) -> None:
    rows, weight = drawn(count, inputs, dtype=dtype), drawn(outputs, inputs, dtype=dtype, seed=1)
    bias, out = drawn(outputs, dtype=dtype, seed=2), torch.empty(count, outputs, dtype=dtype)
    at: list[int] = []
    held = []
    for each in (rows, weight, bias, out):
        held.append(AtTheEnd(each.nbytes))
        ctypes.memmove(held[-1].address, each.data_ptr(), each.nbytes)
        at.append(held[-1].address)
    sizes = (count, inputs, outputs)
    native.extension.product((at[0], inputs), (at[3], outputs), at[1], at[2], *sizes, dtype == torch.bfloat16, 1)
    ctypes.memmove(out.data_ptr(), at[3], out.nbytes)
    check(out, rows, weight, bias)


@pytest.mark.parametrize("wrong", [{"rows": -1}, {"inputs": 0}, {"outputs": 0}])
def test_numbers_that_do_not_fit_are_refused(wrong: dict[str, int]) -> None:
    place, size = (0, 8), {"rows": 1, "inputs": 8, "outputs": 8} | wrong
    with pytest.raises(ValueError, match="at least one"):
        native.extension.product(place, place, 0, 0, **size, bf16=True, threads=1)


def test_no_row_is_no_work() -> None:
    assert multiply(torch.empty(0, 8), torch.ones(3, 8), None).shape == (0, 3)


# ---------------------------------------------------------------- layers


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "is_native_faster", lambda dtype: dtype in DTYPES)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_layers_use_it_for_what_it_serves(bias: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    layer: Any = nn.Linear(24, 40, bias=bias, dtype=dtype).requires_grad_(False)
    plain, held = copy.deepcopy(layer), layer.weight
    use_native_products(nn.Sequential(layer))
    assert type(layer) is NativeLinear
    assert layer.weight is held, "no second copy"
    asked: list[int] = []

    def counted(rows: Tensor, *given: Any) -> Tensor:
        asked.append(len(rows))
        return multiply(rows, *given)

    monkeypatch.setattr(native_linear, "multiply", counted)
    for shape in ((5, 24), (1, 7, 24), (24,), (60, 24)):
        rows = drawn(*shape, dtype=dtype)
        check(layer(rows), rows, plain.weight, plain.bias)
    assert asked == [5, 1, 24, 60]
    gaps = drawn(4, 48, dtype=dtype)[:, ::2]
    torch.testing.assert_close(layer(gaps), plain(gaps))
    assert len(asked) == 4
    with pytest.raises(RuntimeError):
        layer(drawn(2, 12, dtype=dtype))


@pytest.mark.usefixtures("always")
def test_gradients_go_the_plain_way() -> None:
    layer = nn.Linear(24, 40).requires_grad_(False)
    use_native_products(nn.Sequential(layer))
    rows = torch.ones(3, 24, requires_grad=True)
    layer(rows).sum().backward()
    assert rows.grad is not None


@pytest.mark.usefixtures("always")
def test_only_plain_layers_that_it_can_serve_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    double, mixed, gaps, elsewhere = (
        nn.Linear(8, 4, dtype=torch.float64),
        nn.Linear(8, 4, dtype=torch.bfloat16),
        nn.Linear(8, 4),
        nn.Linear(8, 4, device="meta"),
    )
    mixed.bias = nn.Parameter(torch.ones(4), requires_grad=False)
    gaps.weight = nn.Parameter(torch.ones(4, 16)[:, ::2], requires_grad=False)
    layers = [double, mixed, gaps, elsewhere]
    use_native_products(nn.ModuleList(layers))
    assert {type(each) for each in layers} == {nn.Linear}
    monkeypatch.setattr(native, "extension", object())
    plain = nn.Linear(8, 4)
    use_native_products(plain)
    assert type(plain) is nn.Linear


def test_others_leave_its_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "is_native_faster", lambda dtype: dtype == torch.bfloat16)
    monkeypatch.setattr(linear, "_is_onednn_faster", lambda dtype: True)
    monkeypatch.setattr(linear, "is_packing_faster", lambda dtype: True)
    layer, other = nn.Linear(8, 4, dtype=torch.bfloat16), nn.Linear(8, 4)
    model = nn.ModuleList([layer, other])
    for change in (use_native_products, pack_weights, use_onednn):
        change(model)
    assert (type(layer), type(other)) == (NativeLinear, PackedLinear)


@pytest.mark.parametrize("best", [True, False])
def test_it_is_used_where_it_is_faster(best: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "is_faster", lambda ours, plain, most: best)
    monkeypatch.setattr(native.extension, "instructions", lambda: "avx2")
    assert native_linear.is_native_faster.__wrapped__(torch.bfloat16) is best
    assert not native_linear.is_native_faster.__wrapped__(torch.float64)
    monkeypatch.setattr(native.extension, "instructions", lambda: "avx512")
    assert not native_linear.is_native_faster.__wrapped__(torch.bfloat16)


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "multiply", lambda *given: multiply(*given) * 1.01)
    assert not native_linear._is_exact.__wrapped__(torch.bfloat16)


def test_the_look_at_load_runs_both_kernels_and_believes_no_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows are dotted, sixteen are lanes, and many pass over panels."""
    counts: list[int] = []

    def counted(rows: torch.Tensor, *given: Any) -> torch.Tensor:
        counts.append(len(rows))
        return multiply(rows, *given)

    monkeypatch.setattr(native_linear, "multiply", counted)
    assert native_linear._is_exact.__wrapped__(torch.float32)
    assert min(counts) < LANES < sorted(counts)[-2] <= MOST_FEW < max(counts)
    monkeypatch.setattr(native_linear, "multiply", lambda *given: multiply(*given) * torch.nan)
    assert not native_linear._is_exact.__wrapped__(torch.float32)


@pytest.mark.parametrize("faster", [True, False])
def test_other_products_take_the_same_way(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_linear, "is_native_faster", lambda dtype: faster)
    rows, weight = drawn(9, 2 * 20, dtype=torch.bfloat16)[:, ::2], drawn(6, 20, dtype=torch.bfloat16)
    check(run_linear(rows, weight, None), rows, weight, None)
