"""Runs a decoder layer as a fixed sequence of kernels, skipping transformers' module overhead.

A third of a decode step of a small model is host time: views, checks and dispatch, some hundred of them per layer. If
all parts of a layer have kernels (``fused_elementwise``, ``linear``), this calls them one after the other. A layer is
swapped only if its source and its attention's are known (``admission``) and, at load, its own forward gives the same on
a probe of near and far positions, with a stand-in for attention that records its parameters. Rows that the kernels do
not support, other keywords and hooks within the layer take the layer's own forward.

Long batches pass the parts before and after attention in pieces, so that what lies between two products is small enough
to reuse memory that is still in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.attention.interface import AttentionParams, PagedBatch, PagedRows, StopAfterWrite
from trinity.stages.kernels.admission import is_known_module
from trinity.stages.kernels.fused_elementwise import (
    FusedGatedMlp,
    FusedRmsNorm,
    add_rms_norm,
    apply_rotary_rows,
    are_supported,
    norm_epsilon,
    rms_norm,
    silu_mul,
)
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.last_layer import TwoPassLayer, pick_keywords
from trinity.stages.kernels.linear import PackedLinear
from trinity.stages.kernels.native_linear import NativeLinear, NativeProduct
from trinity.stages.kernels.probes import is_close, make_empty_rows, make_noise, place_rows
from trinity.stages.kernels.small_batch_gemm import SmallBatchGemm
from trinity.stages.kernels.swaps import collect_hooks, has_hooks, is_altered, put_before

PIECE_ROWS = 2400  # each piece reads the weights again, and longer ones cost fresh pages
_LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
ATTENTION_PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_PRODUCTS = ("gate_proj", "up_proj", "down_proj")
_KEYWORDS = {"position_embeddings", "position_ids", "trinity_batch"}
_UNSET = {"attention_mask", "past_key_values", "use_cache", "output_attentions", "output_hidden_states"}
Tolerances = Mapping[torch.dtype, float]
Projection = Callable[[Tensor], Tensor]
RotaryAngles = tuple[Tensor, Tensor]
logger = logging.getLogger("trinity")


class FusedDecoderLayer(nn.Module):
    """Base put before a decoder layer's class; ``unfused_forward`` is that class's forward."""

    unfused_forward: Callable[..., Any]
    plan: DecoderLayerPlan

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        batch: PagedBatch | None = named.get("trinity_batch")
        if given or batch is None or batch.half or not self.plan.accepts(hidden_states, named):
            return self.unfused_forward(hidden_states, *given, **named)
        turns = named["position_embeddings"]
        if batch.sampled is None or not isinstance(self, TwoPassLayer):
            return self.plan.run(hidden_states, turns, batch)
        picked = pick_keywords(named, batch, hidden_states.shape[1])
        if picked is None or batch.last is None:
            return self.unfused_forward(hidden_states, **named)
        self.plan.write(hidden_states, turns, batch)
        if not len(batch.last):
            raise StopAfterWrite
        return self.plan.run(hidden_states[:, batch.last], picked["position_embeddings"], picked["trinity_batch"])


class DecoderLayerPlan:
    """Parts of one decoder layer and their order; ``params`` are its attention's.

    ``tolerances``: what a layer may be off at load, relative to the largest value of a row.
    """

    tolerances: ClassVar[Tolerances]

    def __init__(self, layer: Any, width: int) -> None:
        self._width, self._hidden = width, len(layer.input_layernorm.weight)
        self._hooks = collect_hooks(each for each in layer.modules() if each is not layer)
        self.params = AttentionParams(0, 1.0)

    @classmethod
    def suits(cls, layer: Any) -> bool:
        """Tell if the kernels have all parts of ``layer``, whose children are named as expected."""
        raise NotImplementedError

    def accepts(self, rows: Tensor, named: dict[str, Any]) -> bool:
        """Tell if a call of the layer with these rows and keywords is what it was at load."""
        further = named.keys() - _KEYWORDS
        unset = further <= _UNSET and all(named[name] is None or named[name] is False for name in further)
        if not unset or has_hooks(self._hooks):
            return False
        turned = named.get("position_embeddings")
        if not isinstance(turned, tuple) or len(turned) != 2 or not self._supports(rows, *turned):
            return False
        shape = (1, rows.shape[1], self._width)
        return rows.shape == (*shape[:2], self._hidden) and turned[0].shape == turned[1].shape == shape

    def _supports(self, *rows: Tensor) -> bool:
        """Tell if the kernels can read ``rows``."""
        raise NotImplementedError

    def run(self, rows: Tensor, turns: RotaryAngles, batch: PagedBatch) -> Tensor:
        """Run the layer: [1, rows, hidden] to the same; ``turns``: cosines and sines [1, rows, head_dim]."""
        raise NotImplementedError

    def write(self, rows: Tensor, turns: RotaryAngles, batch: PagedBatch) -> None:
        """Write keys and values of ``rows`` into their blocks, and compute nothing else."""
        raise NotImplementedError

    def run_probe(self, rows: Tensor, turns: RotaryAngles, batch: PagedBatch) -> Tensor | None:
        """Run as ``run`` does, beside a stand-in for attention; None if a way through the layer differs from others."""
        return self.run(rows, turns, batch)


class PackedLayerPlan(DecoderLayerPlan):
    """Plan of a layer on a CPU whose products are packed, or the extension's, and whose norms and MLP have kernels."""

    tolerances: ClassVar[Tolerances] = {torch.float32: 1e-5, torch.bfloat16: 2e-2}

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__(layer, width)
        first, second = layer.input_layernorm, layer.post_attention_layernorm
        self.norms = [(each.weight, norm_epsilon(each)) for each in (first, second)]
        modules = list_products(layer)
        self._products: list[Projection] = [each.forward for each in modules]
        few: list[SmallBatchGemm | NativeProduct | None] = [each.gemm for each in modules]
        self._gemms: Any = few if all(few) else None

    @classmethod
    def suits(cls, layer: Any) -> bool:
        """See ``DecoderLayerPlan.suits``."""
        norms = (layer.input_layernorm, layer.post_attention_layernorm)
        return (
            all(isinstance(each, FusedRmsNorm) for each in norms)
            and isinstance(layer.mlp, FusedGatedMlp)
            and all(isinstance(each, PackedLinear | NativeLinear) for each in list_products(layer))
        )

    def _supports(self, *rows: Tensor) -> bool:
        return are_supported(*rows)

    def run(self, rows: Tensor, turns: RotaryAngles, batch: PagedBatch) -> Tensor:
        """See ``DecoderLayerPlan.run``."""
        states = rows[0]
        products = self._pick_projections(states)
        if batch.half == "read":
            (query,) = self._project_heads(states, turns, products[:1])
            backend: Any = batch.backend
            seen = backend.read(batch.rows, batch.cache, query, self.params)
        else:
            query, key, value = self._project_heads(states, turns, products[:3])
            seen = batch.backend.attend(batch.rows, batch.cache, (query, key, value), self.params)
        kept = batch.rows.memo
        made = rows if kept.get("layer states") is rows else torch.empty_like(rows)
        kept["layer states"] = made
        self._run_after_attention(states, seen.reshape(len(states), -1), made[0], products[3:])
        return made

    def write(self, rows: Tensor, turns: RotaryAngles, batch: PagedBatch) -> None:
        """See ``DecoderLayerPlan.write``."""
        key, value = self._project_heads(rows[0], turns, self._pick_projections(rows[0])[1:3])
        backend: Any = batch.backend
        backend.write(batch.rows, batch.cache, key, value, self.params.layer)

    def _pick_projections(self, states: Tensor) -> list[Projection]:
        found: list[Projection] = self._gemms if self._gemms and self._gemms[0].accepts(states) else self._products
        return found

    def _project_heads(self, states: Tensor, turns: RotaryAngles, products: list[Projection]) -> list[Tensor]:
        """Project the rows' norm to [rows, heads, width] each; the last of two or more projections gives values."""
        turned = max(1, len(products) - 1)
        found: list[Tensor] = []
        for at in _pieces(len(states)):
            normed = rms_norm(states[at], *self.norms[0])
            angles = turns[0][0, at], turns[1][0, at]
            for number, product in enumerate(products):
                made = product(normed)
                if at.start == 0:
                    found.append(made if len(made) == len(states) else made.new_empty((len(states), made.shape[1])))
                if number < turned:
                    apply_rotary_rows(made, *angles, found[number][at])
                elif made is not found[number]:
                    found[number][at] = made
        return [each.view(len(states), -1, self._width) for each in found]

    def _run_after_attention(self, rows: Tensor, seen: Tensor, made: Tensor, products: list[Projection]) -> None:
        """Compute all that follows attention, from ``rows`` and their attention output ``seen``, into ``made``."""
        out, gate, up, down = products
        for at in _pieces(len(rows)):
            states = made[at]
            normed = add_rms_norm(rows[at], out(seen[at]), states, self.norms[1])
            add_rms_norm(states, down(silu_mul(gate(normed), up(normed))), states, None)


def _pieces(count: int) -> Iterator[slice]:
    number = -(-count // PIECE_ROWS)
    each = -(-count // (number * 16)) * 16 if number > 1 else count
    return (slice(first, min(count, first + each)) for first in range(0, count, each))


def fuse_decoder_layers(model: Any) -> int:
    """Swap the decoder layers of ``model`` that fit on a CPU; returns their number."""
    return swap_layers(model, PackedLayerPlan) if hasattr(native.extension, "add_rms_norm") else 0


def swap_layers(model: Any, plans: type[DecoderLayerPlan]) -> int:
    """Swap the decoder layers of ``model`` that ``plans`` suits, if known and alike on a probe; returns how many."""
    found = [layer for layer in model.modules() if _is_candidate(layer) and plans.suits(layer)]
    return sum(_swap(layer, plans) for layer in found)


def list_products(layer: Any) -> list[Any]:
    """List the linear layers of a decoder layer in the order in which it calls them; None for one that it lacks."""
    parts = [getattr(layer.self_attn, name, None) for name in ATTENTION_PRODUCTS]
    return parts + [getattr(layer.mlp, name, None) for name in MLP_PRODUCTS]


def _is_candidate(layer: Any) -> bool:
    if {name for name, _ in layer.named_children()} != _LAYER or isinstance(layer, FusedDecoderLayer):
        return False
    known = {id(each) for each in list_products(layer)}
    others = any(list(child.parameters()) for child in layer.self_attn.children() if id(child) not in known)
    return not others and not any(map(is_altered, layer.modules()))


def _swap(layer: Any, plans: type[DecoderLayerPlan]) -> bool:
    kind: Any = type(layer)
    plan = _make_plan(layer, kind, plans)
    known = {LayerPart.DECODER_LAYER: layer, LayerPart.DECODER_ATTENTION: layer.self_attn}
    if plan is None or not all(is_known_module(part, module) for part, module in known.items()):
        return False
    layer.plan, layer.__class__ = plan, put_before(FusedDecoderLayer, kind, "unfused_forward")
    return True


class DecoderAttentionProbe:
    """Backend that records ``params`` and returns rows that depend on their own query, key and value."""

    params: AttentionParams | None = None

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        self.params = params
        query, key, value = (each.float() for each in qkv)
        shown = query * key.mean(1, keepdim=True) + value.cumsum(1)[:, -1:]
        return (shown + 0.5 * value[:, :1]).to(qkv[0].dtype)


@torch.inference_mode()
def _make_plan(layer: Any, kind: Any, plans: type[DecoderLayerPlan]) -> DecoderLayerPlan | None:
    attention, weight = layer.self_attn, layer.input_layernorm.weight
    width = getattr(attention, "head_dim", 0)
    try:
        heads = attention.k_proj.out_features // width
        cache = torch.empty((1, attention.layer_idx + 1, 2, heads, 1, width), device="meta")
        shown, plan = DecoderAttentionProbe(), plans(layer, width)
        positions, scales = place_rows(attention.config)
        rows, cosine, sine = (
            make_noise(len(scales), size, weight.dtype, seed) for seed, size in enumerate((len(weight), width, width))
        )
        rows = rows * scales[:, None].to(rows.dtype)
        rows, cosine, sine, positions = (each.to(weight.device) for each in (rows, cosine, sine, positions))
        batch = PagedBatch(make_empty_rows(), cache, shown)
        named = {
            "position_embeddings": (cosine, sine),
            "attention_mask": None,
            "position_ids": positions[None],
        }
        wanted = kind.forward(layer, rows, **named, past_key_values=None, use_cache=False, trinity_batch=batch)
        if shown.params is None or not plan.accepts(rows, named):
            return None
        plan.params = shown.params
        found = plan.run_probe(rows, (cosine, sine), batch)
        if is_close(found, wanted, plans.tolerances[weight.dtype]):
            return plan
        logger.info("%s keeps its own code: on a probe its kernels give another result", kind.__qualname__)
    except Exception as error:  # not a layer as expected: leave it alone
        logger.info("%s keeps its own code: %s: %s", kind.__qualname__, type(error).__name__, error)
    return None
