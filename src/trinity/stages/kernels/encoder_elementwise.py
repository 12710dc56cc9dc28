"""Layer norms and activations of encoders in one pass over their rows on a CPU, by csrc/encoder*.cpp; patches.

As in ``fused``, a module becomes one of a subclass of its class, where its own forward gives the same at load. A layer
norm may take a sum into its pass. An activation in bfloat16 has 65,536 results: they are asked of the module itself,
once, and looked up, so that they are its own to the bit, whichever activation it is. A convolution over patches that
do not overlap is one product, and its rows lie as the next layer reads them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.kernels.fused_elementwise import _Fused, _how, _plain, _rows, _same

Norm = tuple[Tensor, Tensor, float]
_ACTIVATIONS = ("transformers.activations", "torch.nn.modules.activation")
_NUMBERS = 1 << 16
_tables: dict[bytes, Tensor] = {}


def available() -> bool:
    """Whether the extension is there and has these kernels."""
    return hasattr(native.extension, "mapped")


def fuse_encoder(model: Any) -> None:
    """Let layer norms, convolutions over patches and, in bfloat16, activations of ``model`` be ours, where they fit."""
    dtypes = {each.dtype for each in model.parameters()}
    if not available() or any(each.is_cuda for each in model.parameters()):
        return
    for module in model.modules():
        if type(module) is nn.LayerNorm and _LayerNorm.fits(module):
            module.__class__ = _LayerNorm
        elif type(module) is nn.Conv2d and _Patches.fits(module):
            module.__class__ = _Patches
        elif torch.bfloat16 in dtypes and type(module).__module__ in _ACTIVATIONS:
            _tabulate(module)


# ---------------------------------------------------------------- kernels


def layer_norm(rows: Tensor, weight: Tensor, bias: Tensor, eps: float, kernel: str = "best") -> Tensor:
    """``torch.nn.functional.layer_norm`` over the last axis; all contiguous, float32 or bfloat16."""
    out = torch.empty_like(rows)
    _norm(rows, None, (weight, bias, eps), out, kernel)
    return out


def add_norm(rows: Tensor, added: Tensor, norm: Norm, out: Tensor, kernel: str = "best") -> None:
    """The layer norm of ``rows`` + ``added`` into ``out``; the sum itself is left in ``added``.

    ``norm``: weight, bias, eps. All contiguous, and of as many elements.
    """
    _norm(rows, added, norm, out, kernel)


def _norm(rows: Tensor, added: Tensor | None, norm: Norm, out: Tensor, kernel: str) -> None:
    (weight, bias, eps), width = norm, rows.shape[-1]
    sums = (0 if added is None else added.data_ptr(), width)
    given = ((rows.data_ptr(), width), sums, sums, weight.data_ptr(), bias.data_ptr(), (out.data_ptr(), width))
    native.extension.layer_norm(*given, rows.numel() // width, width, eps, *_how(rows, kernel))


def mapped(rows: Tensor, table: Tensor, out: Tensor, kernel: str = "best") -> Tensor:
    """``table``'s entry for each of ``rows``, bfloat16, into ``out``, which may be ``rows``; both contiguous."""
    width = max(1, rows.shape[-1])
    given = ((rows.data_ptr(), width), table.data_ptr(), (out.data_ptr(), width), rows.numel() // width, width)
    native.extension.mapped(*given, torch.get_num_threads(), kernel)
    return out


# ---------------------------------------------------------------- modules


class _LayerNorm(_Fused, nn.LayerNorm):
    own = nn.LayerNorm.forward

    def forward(self, input: Tensor) -> Tensor:
        if input.requires_grad or not _plain(input, self.weight, self.bias):
            found: Tensor = self.own(input)
            return found
        return layer_norm(input, self.weight, self.bias, self.eps)

    @classmethod
    def fits(cls, module: Any) -> bool:
        weight, bias = module.weight, module.bias
        if weight is None or bias is None or weight.ndim != 1 or not _plain(weight, bias):
            return False
        return _same(module, cls, _rows(len(weight), weight.dtype))


class _Patches(_Fused, nn.Conv2d):
    own = nn.Conv2d.forward

    def forward(self, input: Tensor) -> Tensor:
        (high, wide), whole = self.kernel_size, input.ndim == 4 and input.shape[1] == self.in_channels
        if not whole or input.shape[2] % high or input.shape[3] % wide or not _plain(input, self.weight):
            found: Tensor = self.own(input)
            return found
        batch, channels, height, width = input.shape
        tall, broad = height // high, width // wide
        patches = input.view(batch, channels, tall, high, broad, wide).permute(0, 2, 4, 1, 3, 5)
        rows = patches.reshape(batch * tall * broad, channels * high * wide)
        made = nn.functional.linear(rows, self.weight.view(self.out_channels, -1), self.bias)
        return made.view(batch, tall, broad, -1).permute(0, 3, 1, 2)

    @classmethod
    def fits(cls, module: Any) -> bool:
        simple = module.padding in ("valid", 0, (0, 0)) and module.groups == 1 and module.dilation == (1, 1)
        if not simple or module.kernel_size != module.stride or not _plain(module.weight):
            return False
        (high, wide), channels = module.kernel_size, module.in_channels
        rows = _rows(channels * 6 * high * wide, module.weight.dtype)[:, :1]
        return _same(module, cls, rows.view(1, channels, 2 * high, 3 * wide) / (channels * high * wide) ** 0.5)


class _Tabled(_Fused):
    """An activation; ``table`` [65537] bfloat16, by the bits of a number."""

    table: Tensor

    def forward(self, input: Tensor) -> Tensor:
        if input.dtype != torch.bfloat16 or input.requires_grad or not _plain(input):
            found: Tensor = self.own(input)
            return found
        return mapped(input, self.table, torch.empty_like(input))


def _tabulate(module: Any) -> None:
    if list(module.children()) or list(module.parameters()) or list(module.buffers()):
        return
    table = _table(module)
    if table is not None:
        module.table = _tables.setdefault(table.view(torch.uint8).numpy().tobytes(), table)
        kind: Any = type(module)
        module.__class__ = _behind(kind)


@torch.inference_mode()
def _table(module: Any) -> Tensor | None:
    """What ``module`` makes of every number; None where that hangs on the numbers beside it."""
    every = torch.arange(_NUMBERS, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    mixed = torch.randperm(_NUMBERS, generator=torch.Generator().manual_seed(0))
    try:
        found, other = module(every), module(every[mixed].view(1, 64, -1)).flatten()
    except Exception:  # whatever it is, it is not what it seems to be
        return None
    alike = all(made.shape == every.shape and made.dtype == every.dtype for made in (found, other))
    if not alike or not torch.equal(found[mixed].nan_to_num(7.0), other.nan_to_num(7.0)):
        return None
    return torch.cat([found, found[:1]])


@cache
def _behind(kind: Any) -> Any:
    return type(kind.__name__, (_Tabled, kind), {"own": kind.forward, "__module__": kind.__module__})
