"""Runs a decoder layer as a fixed sequence of kernels, and none of the rows and layers that no output depends on.

A third of a decode step of a small model is host time: views, checks and dispatch, some hundred of them per layer. If
all parts of a layer have kernels (``fused_elementwise``, ``linear``), this calls them one after the other. A layer is
swapped only if its source and its attention's are known (``admission``) and, at load, its own forward gives the same on
a probe of near and far positions, with a stand-in for attention that records its parameters. Rows that the kernels do
not support, other keywords and hooks within the layer take the layer's own forward.

Long batches pass the parts before and after attention in pieces, so that what lies between two products is small enough
to reuse memory that is still in the cache.

Only a prompt's last token is sampled. The last layer needs all other rows only for their keys and values: their
queries, attention, output projection and MLP, over nine tenths of the layer, affect nothing. So that layer runs twice:
over all rows until its keys and values are in their blocks, then over the sampled rows, which read them as decode rows
do. Both times the code is transformers' own.

LLaVA takes the states before the encoder's last layer (``vision_feature_layer`` -2); transformers runs that layer
anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.attention.interface import (
    AttentionParams,
    PagedBatch,
    PagedRows,
    StopAfterWrite,
    as_split_attention,
)
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
from trinity.stages.kernels.linear import PackedLinear
from trinity.stages.kernels.native_linear import NativeLinear, NativeProduct
from trinity.stages.kernels.probes import is_close, list_positions, make_empty_rows, make_noise, place_rows
from trinity.stages.kernels.small_batch_gemm import SmallBatchGemm
from trinity.stages.kernels.swaps import collect_hooks, has_hooks, is_altered, put_before

_ROWS_AT = {"position_embeddings": -2, "position_ids": -1}  # the axis that counts a batch's rows
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


class TwoPassLayer(nn.Module):
    """Base put before a decoder layer's class; ``original_forward`` is that class's forward."""

    original_forward: Callable[..., Any]

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        batch: Any = named.get("trinity_batch")
        picked = None if given or batch is None else pick_keywords(named, batch, hidden_states.shape[1])
        if picked is None:
            return self.original_forward(hidden_states, *given, **named)
        writing = named | {"trinity_batch": replace(batch, half="write")}
        if not len(batch.last):
            return self.original_forward(
                hidden_states, **writing
            )  # raises StopAfterWrite, which ends the model's forward
        with suppress(StopAfterWrite):
            self.original_forward(hidden_states, **writing)
        return self.original_forward(hidden_states[:, batch.last], **picked)


def pick_keywords(named: Mapping[str, Any], batch: PagedBatch, total: int) -> dict[str, Any] | None:
    """Return a layer's keywords for the sampled rows alone; None if it needs all rows or a keyword is unknown."""
    if batch.sampled is None or batch.last is None or as_split_attention(batch.backend) is None:
        return None
    found = {"trinity_batch": replace(batch, rows=batch.sampled, half="read")}
    try:
        for name in named.keys() - found.keys():
            found[name] = _select_rows(named[name], _ROWS_AT.get(name), batch.last, total)
    except ValueError:
        return None
    return found


def _select_rows(value: Any, axis: int | None, last: Tensor, total: int) -> Any:
    if isinstance(value, tuple):
        return tuple(_select_rows(each, axis, last, total) for each in value)
    if not isinstance(value, Tensor):
        return value
    if axis is None or value.shape[axis] != total:
        raise ValueError
    return value.index_select(axis, last)


class _Identity(nn.Module):
    """Layer that returns its input."""

    irreversible = True

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Tensor:
        return hidden_states


def skip_unsampled_rows(text: Any, first: int) -> bool:
    """Make the last layer of the text model ``text`` run its attention and MLP over sampled rows only.

    Returns False and changes nothing if the layer is not as expected: a known decoder layer around the attention of
    that index, at least index ``first``, in a model known to follow it only by a norm, which on a probe of near and far
    positions gives the same in two passes as in one.
    """
    layers = getattr(text, "layers", None)
    if not isinstance(layers, nn.ModuleList) or not first < len(layers) == text.config.num_hidden_layers:
        return False
    if getattr(getattr(layers[-1], "self_attn", None), "layer_idx", None) != len(layers) - 1:
        return False
    layer: Any = layers[-1]
    kind: Any = type(layer)
    if not _is_known_split(text, layer):
        return False
    layer.__class__ = put_before(TwoPassLayer, kind)
    alike = _splits_alike(layer, kind)
    if not alike:
        layer.__class__ = kind
    return alike


def _is_known_split(text: Any, layer: Any) -> bool:
    known = {text: LayerPart.SPLIT_MODEL, layer: LayerPart.SPLIT_LAYER, layer.self_attn: LayerPart.SPLIT_ATTENTION}
    inner = {each: known.get(each, LayerPart.EACH_ROW) for each in layer.modules()}
    return all(is_known_module(part, module) for module, part in {**inner, **known}.items())


class _SplitProbe:
    """Stands in for split attention: each row sees its query and the mean of all keys and values written."""

    def attend(
        self, rows: PagedRows, cache: Tensor, qkv: tuple[Tensor, Tensor, Tensor], params: AttentionParams
    ) -> Tensor:
        self.write(rows, cache, *qkv[1:], params.layer)
        return self.read(rows, cache, qkv[0], params)

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        self.seen = [each.float().mean((0, 1)) for each in (key, value)]

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: AttentionParams) -> Tensor:
        return (query.float() * self.seen[0] + self.seen[1]).to(query.dtype)


@torch.inference_mode()
def _splits_alike(layer: Any, kind: Any) -> bool:
    """Tell if ``layer`` gives sampled rows the same in two passes as in one, with a stand-in for attention."""
    attention, weight = layer.self_attn, layer.input_layernorm.weight
    try:
        positions = torch.tensor(list_positions(attention.config))
        last = torch.arange(1, len(positions), 3)
        rows, cosine, sine = (
            make_noise(len(positions), size, weight.dtype, seed)
            for seed, size in enumerate((len(weight), attention.head_dim, attention.head_dim))
        )
        heads = attention.k_proj.out_features // attention.head_dim
        cache = torch.empty((1, attention.layer_idx + 1, 2, heads, 1, attention.head_dim), device="meta")
        batch = PagedBatch(make_empty_rows(), cache, _SplitProbe(), make_empty_rows(), last)
        named = {"position_embeddings": (cosine, sine), "position_ids": positions[None], "attention_mask": None}
        wanted = kind.forward(layer, rows, **named, trinity_batch=replace(batch, sampled=None, last=None))
        found = layer.forward(rows, **named, trinity_batch=batch)
    except Exception:  # not a layer as expected: leave it alone
        return False
    return is_close(found, wanted[:, last], max(1e-5, 4 * torch.finfo(weight.dtype).eps))


def drop_unused_layers(tower: Any, taken: int | Sequence[int]) -> int:
    """Drop the layers of the encoder ``tower`` that no state in ``taken`` depends on, with their weights.

    ``taken`` counts hidden states as transformers does: 0 is the first layer's input, negative ones count from the end.
    Returns the number of layers dropped.
    """
    count: int = tower.config.num_hidden_layers
    found = [each for each in tower.modules() if isinstance(each, nn.ModuleList) and len(each) == count]
    last = max(each % (count + 1) for each in ([taken] if isinstance(taken, int) else taken))
    if len(found) != 1 or not last or not _is_known_tower(tower, found[0]):
        return 0
    for layer in found[0][last:]:
        kind: Any = type(layer)
        while children := dict(layer.named_children()):  # one that has several names comes by one at a time
            for name in children:
                delattr(layer, name)
        layer.__class__ = put_before(_Identity, kind)
    return count - last


def _is_known_tower(tower: Any, layers: nn.ModuleList) -> bool:
    around = [each for each in tower.modules() if each is not layers and any(one is layers for one in each.modules())]
    return all(is_known_module(LayerPart.TOWER, each) for each in around)


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
