"""Layer norms, activations and patch convolutions of encoders in one pass over their rows on a CPU.

As in ``fused_elementwise``, a module gets a subclass of its class if its source is known and its own forward gives the
same on a probe at load. A layer norm can include a sum in its pass. A bfloat16 activation has 65,536 results: the
module itself computes them once, and they are looked up, so they equal the module's own to the bit, whichever
activation it is. A convolution over patches that do not overlap is one product whose rows lie as the next layer reads
them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.kernels.admission import is_known_module
from trinity.stages.kernels.fused_elementwise import FusedModule, are_supported, gives_same, kernel_options
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.native_linear import run_linear
from trinity.stages.kernels.probes import make_noise, make_scaled_rows
from trinity.stages.kernels.swaps import put_before

LayerNormParams = tuple[Tensor, Tensor, float]  # weight, bias, eps
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
_NUMBERS = 1 << 16
_tables: dict[bytes, Tensor] = {}


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
