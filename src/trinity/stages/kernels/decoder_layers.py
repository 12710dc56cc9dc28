"""Decoder layers as a row of kernels, without what modules of transformers do around their products.

A third of a decode step of a small model is host time: views, checks and dispatch, some hundred of them a layer.
Where a layer's parts all have kernels of their own (``fused``, ``linear``), this calls them one after the other. As
there, a layer is swapped only where its own forward gives the same on random rows at load, with attention that shows
what it is asked; rows that the kernels are not for go the layer's own way.

Long batches go through what lies before and behind attention in pieces: what is between two products is then small
enough to be memory that was used just before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.attention.interface import KeysWritten, LayerAsk, PagedBatch, PagedRows
from trinity.stages.kernels.fused_elementwise import _eps, _GatedMlp, _Norm, _plain, add_norm, rms_norm, silu_mul, turn
from trinity.stages.kernels.last_layer import _LastLayer, _picked
from trinity.stages.kernels.linear import PackedLinear
from trinity.stages.kernels.small_batch_gemm import FewRows

PIECE = 2400  # rows: each piece reads the weights anew, and longer ones cost fresh pages
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # of the largest
Product = Callable[[Tensor], Tensor]
Turns = tuple[Tensor, Tensor]


class _Lean(nn.Module):
    """In front of a decoder layer's class: ``whole`` is its forward."""

    whole: Callable[..., Any]
    plan: Plan

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        batch: PagedBatch | None = named.get("trinity_batch")
        if given or batch is None or batch.half or not self.plan.takes(hidden_states, named):
            return self.whole(hidden_states, *given, **named)
        turns = named["position_embeddings"]
        if batch.sampled is None or not isinstance(self, _LastLayer):
            return self.plan.run(hidden_states, turns, batch)
        picked = _picked(named, batch, hidden_states.shape[1])
        if picked is None or batch.last is None:
            return self.whole(hidden_states, **named)
        self.plan.write(hidden_states, turns, batch)
        if not len(batch.last):
            raise KeysWritten
        return self.plan.run(hidden_states[:, batch.last], picked["position_embeddings"], picked["trinity_batch"])


class Plan:
    """What a layer computes, part by part; ``ask`` is what its attention asks for."""

    def __init__(self, layer: Any, width: int) -> None:
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        self._norms = [(each.weight, _eps(each)) for each in (first, second)]
        modules = [getattr(layer.self_attn, name) for name in _ATTENTION]
        modules += [getattr(layer.mlp, name) for name in _MLP]
        self._products: list[Product] = [each.forward for each in modules]
        few: list[FewRows | None] = [each.few for each in modules]
        self._few: Any = few if all(few) else None
        self._width, self._hidden = width, len(first.weight)
        self.ask = LayerAsk(0, 1.0)

    def takes(self, rows: Tensor, named: dict[str, Any]) -> bool:
        turned = named.get("position_embeddings")
        if not isinstance(turned, tuple) or len(turned) != 2 or not _plain(rows, *turned):
            return False
        shape = (1, rows.shape[1], self._width)
        return rows.shape == (*shape[:2], self._hidden) and turned[0].shape == turned[1].shape == shape

    def run(self, rows: Tensor, turns: Turns, batch: PagedBatch) -> Tensor:
        """[1, rows, hidden] to the same; ``turns``: cosines and sines [1, rows, head_dim]."""
        states = rows[0]
        products = self._for(states)
        if batch.half == "read":
            (query,) = self._heads(states, turns, products[:1])
            backend: Any = batch.backend
            seen = backend.read(batch.rows, batch.cache, query, self.ask)
        else:
            query, key, value = self._heads(states, turns, products[:3])
            seen = batch.backend.attend(batch.rows, batch.cache, (query, key, value), self.ask)
        kept = batch.rows.kept
        made = rows if kept.get("lean states") is rows else torch.empty_like(rows)
        kept["lean states"] = made
        self._behind(states, seen.reshape(len(states), -1), made[0], products[3:])
        return made

    def write(self, rows: Tensor, turns: Turns, batch: PagedBatch) -> None:
        """Keys and values of ``rows`` into their blocks, and no more."""
        key, value = self._heads(rows[0], turns, self._for(rows[0])[1:3])
        backend: Any = batch.backend
        backend.write(batch.rows, batch.cache, key, value, self.ask.layer)

    def _for(self, states: Tensor) -> list[Product]:
        found: list[Product] = self._few if self._few and self._few[0].takes(states) else self._products
        return found

    def _heads(self, states: Tensor, turns: Turns, products: list[Product]) -> list[Tensor]:
        """What ``products`` make of the rows' norm, [rows, heads, width]; the last of two or more are values."""
        turned = max(1, len(products) - 1)
        found: list[Tensor] = []
        for at in _pieces(len(states)):
            normed = rms_norm(states[at], *self._norms[0])
            angles = turns[0][0, at], turns[1][0, at]
            for number, product in enumerate(products):
                made = product(normed)
                if at.start == 0:
                    found.append(made if len(made) == len(states) else made.new_empty((len(states), made.shape[1])))
                if number < turned:
                    turn(made, *angles, found[number][at])
                elif made is not found[number]:
                    found[number][at] = made
        return [each.view(len(states), -1, self._width) for each in found]

    def _behind(self, rows: Tensor, seen: Tensor, made: Tensor, products: list[Product]) -> None:
        """What follows attention, of ``rows`` and what they have ``seen``, into ``made``."""
        out, gate, up, down = products
        for at in _pieces(len(rows)):
            states = made[at]
            normed = add_norm(rows[at], out(seen[at]), states, self._norms[1])
            add_norm(states, down(silu_mul(gate(normed), up(normed))), states, None)


def _pieces(count: int) -> Iterator[slice]:
    number = -(-count // PIECE)
    each = -(-count // (number * 16)) * 16 if number > 1 else count
    return (slice(first, min(count, first + each)) for first in range(0, count, each))


def lean(model: Any) -> int:
    """Let the decoder layers of ``model`` that fit run so; how many."""
    if not hasattr(native.extension, "add_rms_norm"):
        return 0
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
        and all(isinstance(each, PackedLinear) for each in parts)
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
