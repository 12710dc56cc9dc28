"""Linear layers through oneDNN: the same function, chosen only where it is faster."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn

from checkpoint_fixtures import checkpoint
from trinity.stages.models import linear, load_model
from trinity.stages.models.linear import OneDnnLinear, quicken


class Named(nn.Linear):
    """A model's own kind of linear layer, which may do anything."""


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_faster", lambda dtype: True)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 24), (1, 7, 24), (2, 3, 4, 24), (1, 24)])
def test_equals_the_plain_layer(bias: bool, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    layer = nn.Linear(24, 40, bias=bias, dtype=dtype).requires_grad_(False)
    rows = torch.randn(shape).to(dtype)
    strided = rows.expand(2, *shape).transpose(0, -2)
    expected = [layer(rows), layer(strided)]
    quicken(nn.Sequential(layer))
    assert isinstance(layer, OneDnnLinear)
    for found, wanted in zip((layer(rows), layer(strided)), expected, strict=True):
        tolerance = 1e-5 if dtype is torch.float32 else 1e-2
        torch.testing.assert_close(found, wanted, atol=tolerance, rtol=tolerance)


@pytest.mark.usefixtures("always")
def test_only_plain_layers_on_a_cpu_are_changed() -> None:
    own, plain, elsewhere = Named(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, device="meta")
    kept = plain.weight
    quicken(nn.ModuleList([own, plain, elsewhere]))
    assert (type(own), type(plain), type(elsewhere)) == (Named, OneDnnLinear, nn.Linear)
    assert plain.weight is kept, "no second copy"


def _slower(rows: object, weight: object, bias: object) -> None:
    for _ in range(200):
        nn.functional.linear(rows, weight)  # type: ignore[arg-type]


def _lacking(rows: object, weight: object, bias: object) -> None:
    raise AttributeError("no such operator")


def _free(rows: object, weight: object, bias: object) -> None:
    pass


@pytest.mark.parametrize(("operator", "wanted"), [(_slower, False), (_lacking, False), (_free, True)])
def test_the_faster_way_is_taken(
    operator: Callable[[object, object, object], None], wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "_onednn", operator)
    linear._faster.cache_clear()
    assert linear._faster(torch.float32) is wanted
    linear._faster.cache_clear()


@pytest.mark.usefixtures("always")
def test_loaded_parts_are_quickened() -> None:
    model = load_model(checkpoint("llava"), "EPD", dtype=torch.float64)
    for part in (model.vision, model.language):
        assert any(isinstance(module, OneDnnLinear) for module in part.modules())
        assert not any(type(module) is nn.Linear for module in part.modules())


def test_code_for_shapes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRU_CACHE_CAPACITY", raising=False)
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "7")
    linear._faster.cache_clear()
    linear._faster(torch.float32)
    assert os.environ["LRU_CACHE_CAPACITY"] == str(linear.KERNELS)
    assert os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] == "7"
