"""Runs a decoder layer on a GPU as nine kernels: four products, attention, and four of Triton between them.

transformers' own layer is some 45 operators, and a decode step of few rows waits for launches. Here queries, keys and
values are one product, gate and up another; a norm takes the sum before it along (the next layer's, the sum at the end
of this one); the rotary embedding writes keys and values into the paged cache, where the attention backend reads them.

Merged weights are one tensor of which the layers' own parameters become views: nothing is held twice, and a layer's own
forward still runs. Which layers are swapped is decided as on a CPU (``decoder_layers.swap_layers``): by sources that
were read, and by a probe. Importing this module imports Triton.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, linear

from trinity.memory.devices import free_cached_memory
from trinity.stages.attention.fp8 import FP8
from trinity.stages.attention.interface import PagedBatch, PagedRows
from trinity.stages.kernels.admission import fingerprint_part, is_known_module
from trinity.stages.kernels.decoder_layers import (
    DecoderAttentionProbe,
    DecoderLayerPlan,
    FusedDecoderLayer,
    RotaryAngles,
    Tolerances,
    TwoPassLayer,
    list_products,
    swap_layers,
)
from trinity.stages.kernels.fused_elementwise import norm_epsilon
from trinity.stages.kernels.gpu.device_elementwise import (
    DEVICE_DTYPES,
    MOST_NORM_WIDTH,
    CachePlace,
    DeviceNorm,
    GateActivation,
    launch_add_norm,
    launch_gate,
    launch_norm,
    launch_rotary,
)
from trinity.stages.kernels.gpu.fp8_linear import Fp8Linear, Fp8Product, can_merge
from trinity.stages.kernels.known_sources import KNOWN_SOURCES, NORMS_ROUNDED_ONCE, LayerPart
from trinity.stages.kernels.probes import is_close, make_scaled_rows
from trinity.stages.kernels.swaps import Hooks, collect_hooks, find_own_class, has_hooks

logger = logging.getLogger("trinity")
_PROBE_BLOCK = 16
_PART_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}  # two units in the last place
_FLOAT16_ROWS = 15
_NORMED = "normed rows"
_MODEL = LayerPart.SPLIT_MODEL  # hands each layer's states to the next one as they are


@dataclass(frozen=True, slots=True)
class MergedProduct:
    """Weight [outputs, inputs] and bias of one or more linear layers, one behind the other."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, rows: Tensor) -> Tensor:
        return linear(rows, self.weight, self.bias)

    def part(self, outputs: slice) -> MergedProduct:
        """Return some of the outputs; nothing is copied."""
        return MergedProduct(self.weight[outputs], None if self.bias is None else self.bias[outputs])


def merge_products(modules: Sequence[Any]) -> MergedProduct | Fp8Product:
    """Lay the weights of linear layers behind each other; their own parameters become views of the one tensor.

    Those that lie so already, as in memory that processes share, stay where they are.
    """
    with torch.inference_mode(False):
        weight, bias = (_merge(modules, name) for name in ("weight", "bias"))
        scales = _merge(modules, "weight_scale_inv") if isinstance(modules[0], Fp8Linear) else None
    if weight.is_cuda:
        free_cached_memory(weight.device)  # the parts were blocks of their own: too small for the next merged tensor
    return MergedProduct(weight, bias) if scales is None else Fp8Product(weight, scales, bias, modules[0].block_size[0])


def _merge(modules: Sequence[Any], name: str) -> Any:
    parts = [getattr(each, name) for each in modules]
    if parts[0] is None:
        return None
    whole = _find_whole(parts)
    if whole is not None:
        return whole
    whole = torch.cat([each.detach() for each in parts])
    for module, part in zip(modules, torch.split(whole, [len(each) for each in parts]), strict=True):
        setattr(module, name, nn.Parameter(part, requires_grad=False))
    return whole


def _find_whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the tensor whose rows are those of ``parts``, if they follow each other in memory."""
    first, ends = parts[0], [each.data_ptr() + each.nbytes for each in parts]
    alike = all(each.is_contiguous() and each.shape[1:] == first.shape[1:] for each in parts)
    storages = {each.untyped_storage().data_ptr() for each in parts}
    if not alike or len(storages) > 1 or any(one.data_ptr() != end for one, end in zip(parts[1:], ends, strict=False)):
        return None
    rows = sum(len(each) for each in parts)
    return first.detach().as_strided((rows, *first.shape[1:]), first.stride())


class DeviceLayerPlan(DecoderLayerPlan):
    """Plan of a layer whose parts between products run in Triton.

    A product of merged weights may take another kernel of the vendor's library, and round otherwise: in float32 that is
    some 1e-6 of the largest value, and the tolerance leaves it room.
    """

    tolerances: ClassVar[Tolerances] = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}

    def __init__(self, layer: Any, width: int) -> None:
        super().__init__(layer, width)
        _check_parts(layer)
        query, key, value, out, gate, up, down = list_products(layer)
        self._two_pass = isinstance(layer, TwoPassLayer)
        self.norms = [_read_norm(each) for each in (layer.input_layernorm, layer.post_attention_layernorm)]
        self._heads = (len(query.weight) // width, len(key.weight) // width)
        self._qkv, self._gate_up = merge_products([query, key, value]), merge_products([gate, up])
        self._query = self._qkv.part(slice(0, len(query.weight)))
        self._key_value = self._qkv.part(slice(len(query.weight), None))
        self._out, self._down = (
            each.product() if isinstance(each, Fp8Linear) else MergedProduct(each.weight, each.bias)
            for each in (out, down)
        )
        self._activation = find_activation(layer.mlp.act_fn) or GateActivation.SILU  # suits() has found one
        self._next_norm: DeviceNorm | None = None
        self._between: Hooks = ()
        self._check_mlp(layer.mlp)

    def _check_mlp(self, mlp: Any) -> None:
        """Compare the gated MLP by itself: within a layer it is small beside what it is added to."""
        rows = _make_rows(self.norms[0].weight)
        found = self._down(launch_gate(self._gate_up(rows), self._activation))
        if not is_close(found, mlp(rows), self.tolerances[rows.dtype]):
            raise ValueError(f"the kernels of {type(mlp).__qualname__} give another result")

    @classmethod
    def suits(cls, layer: Any) -> bool:
        """See ``DecoderLayerPlan.suits``."""
        products, norms = list_products(layer), (layer.input_layernorm, layer.post_attention_layernorm)
        if not all(_is_plain_linear(each) for each in products) or not all(_is_plain_norm(each) for each in norms):
            return False
        plain = [each for each in products if not isinstance(each, Fp8Linear)]
        weights = [each.weight for each in (*norms, *plain)]
        key, value, gate, up = (products[index] for index in (1, 2, 4, 5))
        return (
            len({each.dtype for each in weights}) == 1
            and len({each.weight.device for each in (*norms, *products)}) == 1
            and weights[0].dtype in DEVICE_DTYPES
            and all(map(_is_mergeable, (products[:3], products[4:6])))
            and len({each.bias is None for each in products[:3]}) == 1
            and (gate.bias is None) == (up.bias is None)
            and key.weight.shape == value.weight.shape
            and gate.weight.shape == up.weight.shape
            and getattr(layer.self_attn, "head_dim", 1) % 2 == 0
            and is_known_module(LayerPart.GATED_MLP, layer.mlp)
            and find_activation(layer.mlp.act_fn) is not None
        )

    def link(self, layer: Any, following: Any) -> None:
        """Take the first norm of the layer behind this one along with this one's last sum."""
        self._next_norm, self._between = following.plan.norms[0], collect_hooks([layer, following])

    def accepts(self, rows: Tensor, named: dict[str, Any]) -> bool:
        """See ``DecoderLayerPlan.accepts``; a cache of another shape is for the layer's own forward to refuse."""
        batch: PagedBatch | None = named.get("trinity_batch")
        if batch is not None:
            _, layers, _, heads, _, width = batch.cache.shape
            if (heads, width) != (self._heads[1], self._width) or self.params.layer >= layers:
                return False
        return super().accepts(rows, named)

    def _supports(self, *rows: Tensor) -> bool:
        like = self.norms[0].weight
        return all(each.dtype == like.dtype and each.device == like.device and each.is_contiguous() for each in rows)

    def run(self, rows: Tensor, turns: RotaryAngles, batch: PagedBatch) -> Tensor:
        """See ``DecoderLayerPlan.run``."""
        states, kept = rows[0], batch.rows.memo
        seen = self._attend(self._norm(rows, batch), (turns[0][0], turns[1][0]), batch)
        made = rows if kept.get("layer states") is rows else torch.empty_like(rows)
        sums = made[0]
        normed = launch_add_norm(states, self._out(seen.reshape(len(states), -1)), sums, self.norms[1])
        moved = self._down(launch_gate(self._gate_up(normed), self._activation))
        after = None if has_hooks(self._between) else self._next_norm
        normed = launch_add_norm(sums, moved, sums, after)
        kept["layer states"] = made
        if after is not None:
            kept[_NORMED] = (made, after, normed)
        return made

    def write(self, rows: Tensor, turns: RotaryAngles, batch: PagedBatch) -> None:
        """See ``DecoderLayerPlan.write``."""
        both, angles = self._key_value(self._norm(rows, batch)), (turns[0][0], turns[1][0])
        heads = self._heads[1]
        if self._writes_itself(batch):
            launch_rotary(both, angles, (0, heads), self._place(batch))
            return
        launch_rotary(both, angles, (0, heads))
        key, value = both.view(len(both), 2 * heads, -1).chunk(2, 1)
        backend: Any = batch.backend
        backend.write(batch.rows, batch.cache, key, value, self.params.layer)

    def _attend(self, normed: Tensor, angles: RotaryAngles, batch: PagedBatch) -> Tensor:
        """Attend from [rows, hidden] to [rows, heads, head_dim]; keys and values go into the cache on the way."""
        (queries, keys), backend = self._heads, batch.backend
        inner: Any = backend
        made = (self._query if batch.half == "read" else self._qkv)(normed)
        held = made.view(len(made), -1, self._width)
        if batch.half == "read":
            launch_rotary(made, angles, (queries, 0))
        elif self._writes_itself(batch):
            launch_rotary(made, angles, (queries, keys), self._place(batch))
        else:
            launch_rotary(made, angles, (queries, keys))
            query, key, value = torch.split(held, [queries, keys, keys], 1)
            return backend.attend(batch.rows, batch.cache, (query, key, value), self.params)
        found: Tensor = inner.read(batch.rows, batch.cache, held[:, :queries], self.params)
        return found

    def _norm(self, rows: Tensor, batch: PagedBatch) -> Tensor:
        """Return the first norm of ``rows``: the layer before has left it, if these are what it gave."""
        left = batch.rows.memo.pop(_NORMED, None)
        if left is not None and left[0] is rows and left[1] is self.norms[0]:
            found: Tensor = left[2]
            return found
        return launch_norm(rows[0], self.norms[0])

    def _writes_itself(self, batch: PagedBatch) -> bool:
        """Tell if the kernel may write in place of the backend, whose ``read`` then serves chunks as well.

        It rounds to FP8 as the backend does; a cache of yet another dtype is the backend's.
        """
        reads: bool = getattr(batch.backend, "reads_chunks", False)
        return reads and batch.cache.is_contiguous() and batch.cache.dtype in (self.norms[0].weight.dtype, FP8)

    def _place(self, batch: PagedBatch) -> CachePlace:
        return CachePlace(batch.cache, self.params.layer, batch.rows.blocks, batch.rows.offsets)

    def run_probe(self, rows: Tensor, turns: RotaryAngles, batch: PagedBatch) -> Tensor | None:
        """See ``DecoderLayerPlan.run_probe``. All ways run, so that every kernel that serving needs is compiled."""
        found = super().run_probe(rows, turns, batch)
        others = list(self._run_other_ways(rows, turns))
        near = self.tolerances[rows.dtype]
        return found if all(is_close(each, found, near) for each in others) else None

    def _run_other_ways(self, rows: Tensor, turns: RotaryAngles) -> Iterator[Tensor]:
        """Run through a cache, at once and, if the layer has two passes, in halves."""
        at = torch.arange(rows.shape[1], device=rows.device)
        none = np.empty(0, np.int64)
        places = PagedRows(at // _PROBE_BLOCK, at % _PROBE_BLOCK, np.empty((0, 0), np.int64), none)
        shape = (len(at) // _PROBE_BLOCK + 1, self.params.layer + 1, 2, self._heads[1], _PROBE_BLOCK, self._width)
        batch = PagedBatch(places, rows.new_zeros(shape), CachedAttentionProbe())
        yield self.run(rows, turns, batch)
        for backend in (CachedAttentionProbe(), HalvedAttentionProbe()) if self._two_pass else ():
            halves = replace(batch, cache=torch.zeros_like(batch.cache), backend=backend)
            self.write(rows, turns, halves)
            yield self.run(rows, turns, replace(halves, half="read"))


class CachedAttentionProbe(DecoderAttentionProbe):
    """The same stand-in over a cache that the kernel has written."""

    reads_chunks = True

    def read(self, rows: PagedRows, cache: Tensor, query: Tensor, params: Any) -> Tensor:
        """Attend from each row to its own key and value alone."""
        key, value = cache[rows.blocks, params.layer, :, :, rows.offsets].unbind(1)
        return self.attend(rows, cache, (query, key, value), params)


class HalvedAttentionProbe(CachedAttentionProbe):
    """The same with a ``write`` of its own."""

    reads_chunks = False

    def write(self, rows: PagedRows, cache: Tensor, key: Tensor, value: Tensor, layer: int) -> None:
        """Write each row's key and value."""
        cache[rows.blocks, layer, 0, :, rows.offsets] = key
        cache[rows.blocks, layer, 1, :, rows.offsets] = value


def fuse_device_layers(model: Any) -> int:
    """Swap the decoder layers of ``model`` that fit, and link those that follow each other; returns their number."""
    place = next(model.parameters()).device
    with torch.cuda.device(place) if place.type == "cuda" else nullcontext():
        count = swap_layers(model, DeviceLayerPlan)
    for text in model.modules():
        layers: Any = getattr(text, "layers", None)
        if isinstance(layers, nn.ModuleList) and any(map(_is_fused, layers)) and is_known_module(_MODEL, text):
            _link_layers(list(layers))
    total = sum(hasattr(each, "self_attn") and hasattr(each, "mlp") for each in model.modules())
    logger.log(
        logging.INFO if count == total else logging.WARNING,
        "%d of %d decoder layers on %s run by Triton kernels",
        *(count, total, place),
    )
    return count


def _link_layers(layers: list[Any]) -> None:
    for layer, following in pairwise(layers):
        if _is_fused(layer) and _is_fused(following):
            layer.plan.link(layer, following)


def _check_parts(layer: Any) -> None:
    """Compare norms and activation with their kernels, from where an epsilon decides to where a clip does."""
    like, act = layer.input_layernorm.weight, layer.mlp.act_fn
    rows = _make_rows(like)
    for norm in (layer.input_layernorm, layer.post_attention_layernorm):
        if not is_close(launch_norm(rows, _read_norm(norm)), norm(rows), _PART_TOLERANCES[like.dtype]):
            raise ValueError(f"the kernel of {type(norm).__qualname__} gives another result")
    form = find_activation(act)
    gates = torch.cat((rows, torch.ones_like(rows)), -1)
    if form is None or not is_close(launch_gate(gates, form), act(rows), _PART_TOLERANCES[like.dtype]):
        raise ValueError(f"the kernel of {type(act).__qualname__} gives another result")


def _make_rows(like: Tensor) -> Tensor:
    """Make rows [rows, width] of all sizes; float16 has no room for what an MLP makes of the largest."""
    rows = make_scaled_rows(len(like), like.dtype)[0].to(like.device)
    return rows[:_FLOAT16_ROWS] if like.dtype == torch.float16 else rows


def _is_fused(layer: Any) -> bool:
    return isinstance(layer, FusedDecoderLayer) and isinstance(layer.plan, DeviceLayerPlan)


def find_activation(act: Any) -> GateActivation | None:
    """Return the kernel's form of the activation module ``act``; None if it is not known, or rounds otherwise."""
    if fingerprint_part(LayerPart.SILU, find_own_class(act)) in KNOWN_SOURCES[LayerPart.SILU]:
        return GateActivation.SILU
    if not is_known_module(LayerPart.ACTIVATION, act):
        return None
    some = torch.linspace(-8.0, 8.0, 1601, dtype=torch.bfloat16)
    forms = {GateActivation.GELU: gelu(some), GateActivation.GELU_TANH: gelu(some, approximate="tanh")}
    return next((form for form, wanted in forms.items() if torch.equal(act(some), wanted)), None)


def _read_norm(norm: Any) -> DeviceNorm:
    found = fingerprint_part(LayerPart.RMS_NORM, find_own_class(norm))
    return DeviceNorm(norm.weight, float(norm_epsilon(norm)), found not in NORMS_ROUNDED_ONCE)


def _is_plain_norm(norm: Any) -> bool:
    weight = getattr(norm, "weight", None)
    plain = isinstance(weight, Tensor) and weight.ndim == 1 and len(weight) <= MOST_NORM_WIDTH
    return plain and norm_epsilon(norm) is not None and is_known_module(LayerPart.RMS_NORM, norm)


def _is_mergeable(modules: Sequence[Any]) -> bool:
    """Tell if these layers are all plain, or all in FP8 with scales that may lie behind each other."""
    count = sum(isinstance(each, Fp8Linear) for each in modules)
    return count == 0 or (count == len(modules) and can_merge(modules))


def _is_plain_linear(module: Any) -> bool:
    if isinstance(module, Fp8Linear):
        return not module.weight.is_meta
    plain = find_own_class(module) is nn.Linear and not module.weight.is_meta
    return plain and is_known_module(LayerPart.LINEAR, module)
