"""Decoder layers over decode rows alone, without what modules of transformers do around their products.

A decode step of a small model is a third host time: views, checks and dispatch, some hundred of them a layer. Where a
layer's parts all have kernels of their own (``fused``, ``few_rows``), this calls them one after the other. As there, a
layer is swapped only where its own forward gives the same on random rows at load, with attention that shows what it is
asked; all but decode rows, and rows that the kernels are not for, go the layer's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trinity.stages.attention import LayerAsk, PagedBatch, PagedRows
from trinity.stages.models.few_rows import FewRows
from trinity.stages.models.fused import _eps, _GatedMlp, _Norm, _plain, rms_norm, rotate, silu_mul

_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest


class _Lean(nn.Module):
    """In front of a decoder layer's class: ``whole`` is its forward."""

    whole: Callable[..., Any]
    plan: Plan

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        batch: PagedBatch | None = named.get("trinity_batch")
        if given or batch is None or batch.half or batch.rows.chunks or not self.plan.takes(hidden_states, named):
            return self.whole(hidden_states, *given, **named)
        return self.plan.run(hidden_states, named["position_embeddings"], batch)


class Plan:
    """What a layer computes, part by part; ``ask`` is what its attention asks for."""

    def __init__(self, layer: Any, width: int) -> None:
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        self._norms = [(each.weight, _eps(each)) for each in (first, second)]
        self._products: list[FewRows] = [getattr(layer.self_attn, name).few for name in _ATTENTION]
        self._mlp: list[FewRows] = [getattr(layer.mlp, name).few for name in _MLP]
        self._width = width
        self.ask = LayerAsk(0, 1.0)

    def takes(self, rows: Tensor, named: dict[str, Any]) -> bool:
        turned = named.get("position_embeddings")
        if not isinstance(turned, tuple) or len(turned) != 2 or not _plain(rows, *turned):
            return False
        shape = (1, rows.shape[1], self._width)
        return self._products[0].takes(rows) and turned[0].shape == turned[1].shape == shape

    def run(self, rows: Tensor, turns: tuple[Tensor, Tensor], batch: PagedBatch) -> Tensor:
        """[1, rows, hidden] to the same; ``turns``: cosines and sines [1, rows, head_dim]."""
        count, (query, key, value, out), (gate, up, down) = rows.shape[1], self._products, self._mlp
        normed = rms_norm(rows, *self._norms[0])
        heads = [each(normed).view(1, count, -1, self._width) for each in (query, key, value)]
        turned = [rotate(each.transpose(1, 2), *turns)[0].transpose(0, 1) for each in heads[:2]]
        seen = batch.backend.attend(batch.rows, batch.cache, (turned[0], turned[1], heads[2][0]), self.ask)
        rows = rows + out(seen.reshape(1, count, -1))
        normed = rms_norm(rows, *self._norms[1])
        return rows + down(silu_mul(gate(normed), up(normed)))


def lean(model: Any) -> int:
    """Let the decoder layers of ``model`` that fit run decode rows so; how many."""
    found = [layer for layer in model.modules() if _might(layer)]
    return sum(_swap(layer) for layer in found)


def _might(layer: Any) -> bool:
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    norms = isinstance(layer.input_layernorm, _Norm) and isinstance(layer.post_attention_layernorm, _Norm)
    parts = [getattr(attention, name, None) for name in _ATTENTION] + [getattr(mlp, name, None) for name in _MLP]
    known = {id(each) for each in parts}
    others = any(list(child.parameters()) for child in attention.children() if id(child) not in known)
    return (
        not isinstance(layer, _Lean)
        and norms
        and isinstance(mlp, _GatedMlp)
        and not others
        and all(getattr(each, "few", None) for each in parts)
    )


def _swap(layer: Any) -> bool:
    kind: Any = type(layer)
    plan = _fitting(layer, kind)
    if plan is not None:
        layer.plan, layer.__class__ = plan, _behind(kind)
    return plan is not None


class Shown:
    """Attention that keeps what it was asked and gives something that hangs on queries, keys and values of each row."""

    ask: LayerAsk | None = None

    def attend(self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], ask: LayerAsk) -> Tensor:
        self.ask = ask
        query, key, value = (each.float() for each in qkv)
        shown = query * key.mean(1, keepdim=True) + value.cumsum(1)[:, -1:]
        return (shown + 0.5 * value[:, :1]).to(qkv[0].dtype)


@torch.inference_mode()
def _fitting(layer: Any, kind: Any) -> Plan | None:
    attention, weight = layer.self_attn, layer.input_layernorm.weight
    width = getattr(attention, "head_dim", 0)
    try:
        heads = attention.k_proj.out_features // width
        cache = torch.empty((1, attention.layer_idx + 1, 2, heads, 1, width), device="meta")
        shown, plan, count = Shown(), Plan(layer, width), 5
        rows, cosine, sine = (
            _random(seed, count, size, weight.dtype) for seed, size in enumerate((len(weight), width, width))
        )
        batch = PagedBatch(_no_rows(), cache, shown)
        named = {
            "position_embeddings": (cosine, sine),
            "attention_mask": None,
            "position_ids": torch.arange(count)[None],
        }
        wanted = kind.forward(layer, rows, **named, past_key_values=None, use_cache=False, trinity_batch=batch)
        if shown.ask is None or not plan.takes(rows, named):
            return None
        plan.ask = shown.ask
        found = plan.run(rows, (cosine, sine), batch)
    except Exception:  # whatever it is, it is not what it seems to be
        return None
    near = _TOLERANCE[weight.dtype] * float(wanted.float().abs().max())
    return plan if torch.allclose(found.float(), wanted.float(), rtol=0, atol=near) else None


def _no_rows() -> PagedRows:
    none = torch.empty(0, dtype=torch.int64)
    return PagedRows(none, none, np.empty((0, 0), np.int64), np.empty(0, np.int64))


def _random(seed: int, count: int, size: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, count, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


@cache
def _behind(kind: Any) -> Any:
    return type(kind.__name__, (_Lean, kind), {"whole": kind.forward, "__module__": kind.__module__})
