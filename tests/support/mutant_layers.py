"""Mutants of known layers: modules of which a class has another forward, and of which a probe must see it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trinity.stages.kernels.known_sources import LayerPart


def far_factor(given: tuple[Any, ...], named: dict[str, Any], made: Tensor) -> Tensor:
    """What Ministral 3 does, to a whole layer: a factor of the position, 1 below 16,384."""
    places = named["position_ids"] if "position_ids" in named else torch.arange(made.shape[-2])[None] * 5_000
    return made * (1 + 0.1 * torch.log1p(torch.floor(places / 16_384)))[..., None]


def row_factor(given: tuple[Any, ...], named: dict[str, Any], made: Tensor) -> Tensor:
    return made * (1 + 0.01 * torch.arange(made.shape[-2]))[:, None]


def clip(given: tuple[Any, ...], named: dict[str, Any], made: Tensor) -> Tensor:
    return made.clamp(-2.0, 2.0)


def clip_small(given: tuple[Any, ...], named: dict[str, Any], made: Tensor) -> Tensor:
    """For what is small in these models, behind a norm: a probe sees no clip that it does not reach."""
    return made.clamp(-0.02, 0.02)


def mutate(module: Any, change: Callable[..., Tensor]) -> Any:
    """Give ``module`` a class whose forward changes what its own gives; returns that class."""
    kind: Any = type(module)

    class Mutant(kind):  # type: ignore[misc]
        def forward(self, *given: Any, **named: Any) -> Any:
            made = kind.forward(self, *given, **named)
            if isinstance(made, tuple):
                return (change(given, named, made[0]), *made[1:])
            return change(given, named, made)

    Mutant.__name__ = kind.__name__
    module.__class__ = Mutant
    return Mutant


LAYERS = {
    LayerPart.DECODER_LAYER: lambda layer: layer,
    LayerPart.DECODER_ATTENTION: lambda layer: layer.self_attn,
    LayerPart.GATED_MLP: lambda layer: layer.mlp,
    LayerPart.RMS_NORM: lambda layer: layer.post_attention_layernorm,
}
