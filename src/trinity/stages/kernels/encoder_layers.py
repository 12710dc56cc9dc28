"""Layers of vision encoders as a row of kernels, without what modules of transformers do around their products.

For layers as CLIP's and SigLIP's are: layer norm, attention of all rows to all, layer norm, two products around an
activation. Sums go with the norms behind them, and nothing is copied that is needed no more. As in ``lean``, a layer is
swapped only where its own forward gives the same on random rows at load, with attention that shows what it is asked;
masks, other keywords and rows that the kernels are not for go the layer's own way. Products stay modules with hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trinity.stages.kernels import encoder_attention
from trinity.stages.kernels.encoder_attention import FUNCTIONS
from trinity.stages.kernels.encoder_elementwise import _LayerNorm, _Tabled, add_norm, layer_norm, mapped
from trinity.stages.kernels.fused_elementwise import _close, _gated, _plain, _QuickGelu, _rows, finding

BLOCK, MANY = 12, 1024  # oneDNN's float32 products of fewer rows than MANY lose a fourteenth by rows left over
_LAYER = {"self_attn", "layer_norm1", "layer_norm2", "mlp"}
_TOLD = ("output_hidden_states", "return_dict")  # what a model is to show of what its layers make
_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class _LeanLayer(nn.Module):
    """In front of an encoder layer's class: ``whole`` is its forward."""

    whole: Callable[..., Any]
    plan: Plan

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        asked = [*given, *(each for name, each in named.items() if name not in _TOLD)]
        if any(each is not None for each in asked) or not self.plan.takes(hidden_states):
            return self.whole(hidden_states, *given, **named)
        return self.plan.run(hidden_states)


class Plan:
    """What a layer computes, part by part; its ``attend`` takes queries, keys, values and ``scale``."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        norms = layer.layer_norm1, layer.layer_norm2
        self._norms: Any = [(each.weight, each.bias, each.eps) for each in norms]
        self._products = [getattr(attention, name) for name in _ATTENTION]
        self._inner, self._outer, self._act = mlp.fc1, mlp.fc2, _in_place(mlp.activation_fn)
        self._config, self._width = attention.config, attention.head_dim
        self.scale, self.attend = 1.0, attend

    def takes(self, states: Tensor) -> bool:
        ours = states.ndim == 3 and states.numel() and _plain(states, self._norms[0][0]) and not states.requires_grad
        return bool(ours) and self._config._attn_implementation == "sdpa"

    def run(self, states: Tensor) -> Tensor:
        """[batch, rows, hidden] to the same."""
        *heads, out = self._products
        normed = layer_norm(states, *self._norms[0])
        parts = [each(normed).view(*states.shape[:2], -1, self._width).transpose(1, 2) for each in heads]
        total: Tensor = out(self.attend(parts[0], parts[1], parts[2], self.scale).view(*states.shape[:2], -1))
        count = states.numel() // states.shape[-1]
        room = _room(states, count)
        add_norm(states, total, self._norms[1], room[:count])  # what is added to, total, is the sum from here
        made: Tensor = self._outer(self._act(self._inner(room)))[:count].view(states.shape)
        return torch.add(total, made, out=made)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """``encoder_attention.attend_all``, or torch's own attention of such heads as that is not for."""
    if encoder_attention._fits(query, key, value):
        return encoder_attention.attend_all(query, key, value, scale)
    return scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).contiguous()


def _room(states: Tensor, count: int) -> Tensor:
    """[``count`` and some rows more, hidden], of which those more are zero."""
    further = -count % BLOCK if states.dtype == torch.float32 and count < MANY else 0
    room = states.new_empty((count + further, states.shape[-1]))
    room[count:] = 0
    return room


def _in_place(act: Any) -> Callable[[Tensor], Tensor]:
    """``act`` over rows that nobody else needs."""
    if isinstance(act, _Tabled):
        return lambda rows: mapped(rows, act.table, rows)
    if isinstance(act, _QuickGelu):
        return lambda rows: _gated(rows, 0, rows, 1.702, "best")
    found: Callable[[Tensor], Tensor] = act
    return found


def lean_encoder(model: Any) -> int:
    """Let the encoder layers of ``model`` that fit run so; how many."""
    return sum(_swap(layer) for layer in list(model.modules()) if _might(layer))


def _might(layer: Any) -> bool:
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    parts = {name for name, _ in attention.named_children()}, {name for name, _ in mlp.named_children()}
    linear = [getattr(attention, name, None) for name in _ATTENTION] + [
        getattr(mlp, name, None) for name in ("fc1", "fc2")
    ]
    return (
        not isinstance(layer, _LeanLayer)
        and parts == (set(_ATTENTION), {"fc1", "fc2", "activation_fn"})
        and all(isinstance(each, _LayerNorm) for each in (layer.layer_norm1, layer.layer_norm2))
        and all(isinstance(each, nn.Linear) for each in linear)
    )


def _swap(layer: Any) -> bool:
    kind: Any = type(layer)
    plan = _fitting(layer, kind)
    if plan is not None:
        layer.plan, layer.__class__ = plan, _behind(kind)
    return plan is not None


class Shown:
    """Transformers' attention functions, of which there is one: it keeps what it is asked for, and gives ``show``."""

    scale: float | None = None

    def get_interface(self, name: str, default: Any) -> Any:
        return self._attend

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any) -> Any:
        if mask is None and encoder_attention._sees_all(module, named):
            scale = named.get("scaling")
            self.scale = query.shape[3] ** -0.5 if scale is None else scale
        return self.show(query, key, value, 1.0), None

    @staticmethod
    def show(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """[batch, rows, heads, width], something that hangs on each of them."""
        return (query + 0.5 * key + 0.25 * value).transpose(1, 2).contiguous()


@torch.inference_mode()
def _fitting(layer: Any, kind: Any) -> Plan | None:
    attention, weight = layer.self_attn, layer.layer_norm1.weight
    try:
        plan, shown, states = Plan(layer), Shown(), _rows(len(weight), weight.dtype)
        if not encoder_attention.available(weight.dtype) or not plan.takes(states):
            return None
        attention.forward = MethodType(finding(type(attention).forward, {FUNCTIONS: shown}), attention)
        try:
            wanted = kind.forward(layer, states, None)
        finally:
            del attention.forward
        plan.attend = shown.show
        found = plan.run(states)
    except Exception:  # whatever it is, it is not what it seems to be
        return None
    if shown.scale is None or not _close(found, wanted):
        return None
    plan.scale, plan.attend = shown.scale, attend
    return plan


@cache
def _behind(kind: Any) -> Any:
    return type(kind.__name__, (_LeanLayer, kind), {"whole": kind.forward, "__module__": kind.__module__})
