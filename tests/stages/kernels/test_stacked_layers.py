"""Layers made by one kernel module over those of another: each finds the forward of the class below it."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trinity.stages.kernels import decoder_layers, encoder_layers

BASES: dict[str, tuple[Any, str]] = {
    "two passes": (decoder_layers.TwoPassLayer, "original_forward"),
    "fused decoder": (decoder_layers.FusedDecoderLayer, "unfused_forward"),
}


class Plain(nn.Module):
    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        return hidden_states + 1


@pytest.mark.parametrize("order", list(permutations(BASES)), ids=" over ".join)
def test_each_falls_back_to_the_one_below_it(order: tuple[str, ...]) -> None:
    kind: Any = Plain
    for name in reversed(order):
        base, forward = BASES[name]
        kind = type(kind.__name__, (base, kind), {forward: kind.forward, "__module__": kind.__module__})
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    torch.testing.assert_close(layer.forward(torch.zeros(1, 3, 4)), torch.ones(1, 3, 4))


def test_layers_that_may_be_stacked_keep_the_forward_below_under_names_of_their_own() -> None:
    kept = [
        {name for name in vars(base)["__annotations__"] if name.endswith("_forward")}
        for base in (decoder_layers.TwoPassLayer, decoder_layers.FusedDecoderLayer)
    ]
    assert all(len(names) == 1 for names in kept)
    assert kept[0].isdisjoint(kept[1])
    assert "unfused_forward" in vars(encoder_layers._FusedEncoderLayer)["__annotations__"]
