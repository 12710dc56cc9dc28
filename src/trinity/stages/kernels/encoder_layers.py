"""Runs a vision encoder layer as a fixed sequence of kernels, with layer norms and activations in one pass on a CPU.

For layers like those of CLIP and SigLIP: layer norm, attention of all rows to all, layer norm, two products around an
activation. Sums are fused with the norms after them, and no row is copied that is not needed again. As in
``decoder_layers``, a layer is swapped only if its source, its attention's and its MLP's are known and its own forward
gives the same on a probe at load, with a stand-in for attention that records its scale. Masks, other keywords,
unsupported rows and hooks take the layer's own forward. Products stay modules, so that their hooks run.

As in ``fused_elementwise``, a module gets a subclass of its class if its source is known and its own forward gives the
same on a probe at load. A layer norm can include a sum in its pass. A bfloat16 activation has 65,536 results: the
module itself computes them once, and they are looked up, so they equal the module's own to the bit, whichever
activation it is. A convolution over patches that do not overlap is one product whose rows lie as the next layer reads
them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from trinity.memory import native
from trinity.stages.attention.interface import find_attention_name
from trinity.stages.kernels import encoder_attention
from trinity.stages.kernels.admission import is_known, is_known_module
from trinity.stages.kernels.encoder_attention import ATTENTION_FUNCTIONS
from trinity.stages.kernels.fused_elementwise import (
    FusedModule,
    FusedQuickGelu,
    are_supported,
    gives_same,
    kernel_options,
    rebind_globals,
    run_gated,
)
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.native_linear import run_linear
from trinity.stages.kernels.probes import is_close, make_noise, make_scaled_rows
from trinity.stages.kernels.swaps import collect_hooks, find_own_class, has_hooks, is_altered, put_before

LayerNormParams = tuple[Tensor, Tensor, float]  # weight, bias, eps
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
_NUMBERS = 1 << 16
_tables: dict[bytes, Tensor] = {}
ROW_BLOCK, MANY_ROWS = 12, 1024  # below MANY_ROWS, float32 products whose rows are no multiple of 12 lose 7 %
_LAYER = {"self_attn", "layer_norm1", "layer_norm2", "mlp"}
_OUTPUT_KEYWORDS = ("output_hidden_states", "return_dict")  # about the model's output, not the layer's
_ATTENTION = ("q_proj", "k_proj", "v_proj", "out_proj")
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # relative to the largest value of a row


def has_encoder_kernels() -> bool:
    """Tell if the extension has these kernels."""
    return hasattr(native.extension, "mapped")


def fuse_encoder_elementwise(model: Any) -> None:
    """Swap the layer norms, patch convolutions and bfloat16 activations of ``model`` that fit."""
    dtypes = {each.dtype for each in model.parameters()}
    if not has_encoder_kernels() or any(each.is_cuda for each in model.parameters()):
        return
    for module in model.modules():
        kind: Any = {nn.LayerNorm: FusedLayerNorm, nn.Conv2d: _PatchProduct}.get(type(module))
        if kind is not None:
            if kind.fits(module) and kind.is_known(module):
                module.__class__ = kind
        elif torch.bfloat16 in dtypes and type(module).__module__ in _ACTIVATIONS:
            _tabulate(module)


# ---------------------------------------------------------------- kernels


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor, eps: float, kernel: str = "best") -> Tensor:
    """Compute ``torch.nn.functional.layer_norm`` over the last axis; all contiguous, float32 or bfloat16."""
    out = torch.empty_like(rows)
    _run_layer_norm(rows, None, (weight, bias, eps), out, kernel)
    return out


def add_layer_norm(rows: Tensor, added: Tensor, norm: LayerNormParams, out: Tensor, kernel: str = "best") -> None:
    """Write the layer norm of ``rows`` + ``added`` into ``out`` and the sum itself into ``added``.

    All tensors are contiguous and of equal size.
    """
    _run_layer_norm(rows, added, norm, out, kernel)


def _run_layer_norm(rows: Tensor, added: Tensor | None, norm: LayerNormParams, out: Tensor, kernel: str) -> None:
    (weight, bias, eps), width = norm, rows.shape[-1]
    sums = (0 if added is None else added.data_ptr(), width)
    given = ((rows.data_ptr(), width), sums, sums, weight.data_ptr(), bias.data_ptr(), (out.data_ptr(), width))
    native.extension.layer_norm(*given, rows.numel() // width, width, eps, *kernel_options(rows, kernel))


def apply_table(rows: Tensor, table: Tensor, out: Tensor, kernel: str = "best") -> Tensor:
    """Look up each bfloat16 of ``rows`` in ``table``, into ``out``, which may be ``rows``; both contiguous."""
    width = max(1, rows.shape[-1])
    given = ((rows.data_ptr(), width), table.data_ptr(), (out.data_ptr(), width), rows.numel() // width, width)
    native.extension.mapped(*given, torch.get_num_threads(), kernel)
    return out


# ---------------------------------------------------------------- modules


class FusedLayerNorm(FusedModule, nn.LayerNorm):
    swapped_from, part = nn.LayerNorm, LayerPart.LAYER_NORM
    original_forward = nn.LayerNorm.forward

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad or not are_supported(input, self.weight, self.bias):
            return self.original_forward(input)
        return layer_norm(input, self.weight, self.bias, self.eps)

    @classmethod
    def fits(cls, module: Any) -> bool:
        weight, bias = module.weight, module.bias
        if weight is None or bias is None or weight.ndim != 1 or not are_supported(weight, bias):
            return False
        return gives_same(module, cls, make_scaled_rows(len(weight), weight.dtype))


class _PatchProduct(FusedModule, nn.Conv2d):
    swapped_from, part = nn.Conv2d, LayerPart.CONVOLUTION
    original_forward = nn.Conv2d.forward

    def forward(self, input: Tensor) -> Tensor:
        (high, wide), whole = self.kernel_size, input.ndim == 4 and input.shape[1] == self.in_channels
        if not whole or input.shape[2] % high or input.shape[3] % wide or not are_supported(input, self.weight):
            return self.original_forward(input)
        batch, channels, height, width = input.shape
        tall, broad = height // high, width // wide
        patches = input.view(batch, channels, tall, high, broad, wide).permute(0, 2, 4, 1, 3, 5)
        rows = patches.reshape(batch * tall * broad, channels * high * wide)
        made = run_linear(rows, self.weight.view(self.out_channels, -1), self.bias)
        return made.view(batch, tall, broad, -1).permute(0, 3, 1, 2)

    @classmethod
    def fits(cls, module: Any) -> bool:
        simple = module.padding in ("valid", 0, (0, 0)) and module.groups == 1 and module.dilation == (1, 1)
        if not simple or module.kernel_size != module.stride or not are_supported(module.weight):
            return False
        (high, wide), channels = module.kernel_size, module.in_channels
        rows = make_noise(1, channels * 6 * high * wide, module.weight.dtype)
        return gives_same(module, cls, rows.view(1, channels, 2 * high, 3 * wide) / (channels * high * wide) ** 0.5)


class TableActivation(FusedModule):
    """Activation by lookup; ``table`` (bfloat16 [65537]) is indexed by the bits of a number."""

    table: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.bfloat16 or input.requires_grad or not are_supported(input):
            return self.original_forward(input)
        return apply_table(input, self.table, torch.empty_like(input))


def _tabulate(module: Any) -> None:
    if list(module.children()) or list(module.parameters()) or list(module.buffers()):
        return
    table = _make_table(module)
    if table is not None and is_known_module(LayerPart.ACTIVATION, module):
        module.table = _tables.setdefault(table.view(torch.uint8).numpy().tobytes(), table)
        kind: Any = type(module)
        module.__class__ = put_before(TableActivation, kind)


@torch.inference_mode()
def _make_table(module: Any) -> Tensor | None:
    """Compute ``module`` of every bfloat16 number; None if a result depends on its neighbours."""
    every = torch.arange(_NUMBERS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    mixed = torch.randperm(_NUMBERS, generator=torch.Generator().manual_seed(0))
    try:
        found, other = module(every), module(every[mixed].view(1, 64, -1)).flatten()
    except Exception:  # not an activation as expected: leave it alone
        return None
    alike = all(made.shape == every.shape and made.dtype == every.dtype for made in (found, other))
    if not alike or not torch.equal(found[mixed].nan_to_num(7.0), other.nan_to_num(7.0)):
        return None
    return torch.cat([found, found[:1]])


class _FusedEncoderLayer(nn.Module):
    """Base put before an encoder layer's class; ``unfused_forward`` is that class's forward."""

    unfused_forward: Callable[..., Any]
    plan: EncoderLayerPlan

    def forward(self, hidden_states: Tensor, *given: Any, **named: Any) -> Any:
        asked = [*given, *(each for name, each in named.items() if name not in _OUTPUT_KEYWORDS)]
        if any(each is not None for each in asked) or not self.plan.accepts(hidden_states):
            return self.unfused_forward(hidden_states, *given, **named)
        return self.plan.run(hidden_states)


class EncoderLayerPlan:
    """Parts of one encoder layer and their order; ``attend`` takes queries, keys, values and ``scale``."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        norms = layer.layer_norm1, layer.layer_norm2
        self._norms: Any = [(each.weight, each.bias, each.eps) for each in norms]
        self._products = [getattr(attention, name) for name in _ATTENTION]
        self._inner, self._outer, self._act = mlp.fc1, mlp.fc2, _make_in_place(mlp.activation_fn)
        self._config, self._width = attention.config, attention.head_dim
        self._hooks = collect_hooks([*norms, attention, mlp, mlp.activation_fn])
        self.functions = find_own_class(attention).forward.__globals__[ATTENTION_FUNCTIONS]
        self.sdpa = self.functions["sdpa"]
        self.scale, self.attend = 1.0, attend_encoder_heads

    def accepts(self, states: Tensor) -> bool:
        if states.ndim != 3 or not states.numel() or states.requires_grad or has_hooks(self._hooks):
            return False
        asked = find_attention_name(self._config) == "sdpa" and self.functions["sdpa"] is self.sdpa
        return asked and are_supported(states, self._norms[0][0])

    def run(self, states: Tensor) -> Tensor:
        """Run the layer: [batch, rows, hidden] to the same."""
        *heads, out = self._products
        normed = layer_norm(states, *self._norms[0])
        parts = [each(normed).view(*states.shape[:2], -1, self._width).transpose(1, 2) for each in heads]
        total: Tensor = out(self.attend(parts[0], parts[1], parts[2], self.scale).view(*states.shape[:2], -1))
        count = states.numel() // states.shape[-1]
        room = _allocate_padded(states, count)
        add_layer_norm(states, total, self._norms[1], room[:count])  # from here on ``total`` is the sum
        made: Tensor = self._outer(self._act(self._inner(room)))[:count].view(states.shape)
        return torch.add(total, made, out=made)


def attend_encoder_heads(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Attend with ``encoder_attention.attend_all``, or with torch's attention for heads that it does not support."""
    if encoder_attention.fits_kernel(query, key, value):
        return encoder_attention.attend_all(query, key, value, scale)
    return scaled_dot_product_attention(query, key, value, scale=scale).transpose(1, 2).contiguous()


def _allocate_padded(states: Tensor, count: int) -> Tensor:
    """Allocate [``count`` and some padding rows, hidden]; the padding is zero."""
    further = -count % ROW_BLOCK if states.dtype == torch.float32 and count < MANY_ROWS else 0
    room = states.new_empty((count + further, states.shape[-1]))
    room[count:] = 0
    return room


def _make_in_place(act: Any) -> Callable[[Tensor], Tensor]:
    """Return a form of ``act`` that may overwrite its rows."""
    if isinstance(act, TableActivation):
        return lambda rows: apply_table(rows, act.table, rows)
    if isinstance(act, FusedQuickGelu):
        return lambda rows: run_gated(rows, 0, rows, 1.702, "best")
    found: Callable[[Tensor], Tensor] = act
    return found


def fuse_encoder_layers(model: Any) -> int:
    """Swap the encoder layers of ``model`` that fit; returns their number."""
    return sum(_swap(layer) for layer in list(model.modules()) if _is_candidate(layer))


def _is_candidate(layer: Any) -> bool:
    if {name for name, _ in layer.named_children()} != _LAYER:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    parts = {name for name, _ in attention.named_children()}, {name for name, _ in mlp.named_children()}
    linear = [getattr(attention, name, None) for name in _ATTENTION] + [
        getattr(mlp, name, None) for name in ("fc1", "fc2")
    ]
    return (
        not isinstance(layer, _FusedEncoderLayer)
        and not any(map(is_altered, layer.modules()))
        and parts == (set(_ATTENTION), {"fc1", "fc2", "activation_fn"})
        and all(isinstance(each, FusedLayerNorm) for each in (layer.layer_norm1, layer.layer_norm2))
        and all(isinstance(each, nn.Linear) for each in linear)
    )


def _swap(layer: Any) -> bool:
    kind: Any = type(layer)
    plan = _make_plan(layer, kind)
    known = {
        LayerPart.ENCODER_LAYER: layer,
        LayerPart.ENCODER_ATTENTION: layer.self_attn,
        LayerPart.ENCODER_MLP: layer.mlp,
    }
    if plan is None or not all(is_known_module(part, module) for part, module in known.items()):
        return False
    functions = {LayerPart.ATTENTION_FUNCTIONS: type(plan.functions), LayerPart.SDPA: plan.sdpa}
    if not all(is_known(part, source) for part, source in functions.items()):
        return False
    layer.plan, layer.__class__ = plan, put_before(_FusedEncoderLayer, kind, "unfused_forward")
    return True


class EncoderAttentionProbe:
    """Stands in for transformers' attention functions: records the scale and returns ``mix``."""

    scale: float | None = None

    def get_interface(self, name: str, default: Any) -> Any:
        return self._attend

    def _attend(self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **named: Any) -> Any:
        if mask is None and encoder_attention.sees_all_rows(module, named):
            scale = named.get("scaling")
            self.scale = query.shape[3] ** -0.5 if scale is None else scale
        return self.mix(query, key, value, 1.0), None

    @staticmethod
    def mix(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Return [batch, rows, heads, width] that depends on each of query, key and value."""
        return (query + 0.5 * key + 0.25 * value).transpose(1, 2).contiguous()


@torch.inference_mode()
def _make_plan(layer: Any, kind: Any) -> EncoderLayerPlan | None:
    attention, weight = layer.self_attn, layer.layer_norm1.weight
    try:
        plan, shown = EncoderLayerPlan(layer), EncoderAttentionProbe()
        states = make_scaled_rows(len(weight), weight.dtype)
        if not encoder_attention.has_attend_all(weight.dtype) or not plan.accepts(states):
            return None
        attention.forward = MethodType(rebind_globals(type(attention).forward, {ATTENTION_FUNCTIONS: shown}), attention)
        try:
            wanted = kind.forward(layer, states, None)
        finally:
            del attention.forward
        plan.attend = shown.mix
        found = plan.run(states)
    except Exception:  # not a layer as expected: leave it alone
        return None
    if shown.scale is None or not is_close(found, wanted, _TOLERANCE[weight.dtype]):
        return None
    plan.scale, plan.attend = shown.scale, attend_encoder_heads
    return plan
