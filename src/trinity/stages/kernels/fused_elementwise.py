"""Elementwise parts of transformers' modules in one pass each on a CPU: norms, rotary embeddings, gated activations.

Eagerly, a norm is seven passes over its rows and a rotary embedding ten (figures in decision 0027). A swapped module
keeps its class as a base, and is swapped only if its source is known (``admission``) and its own forward gives the same
on a probe at load: one with the same name but another result (such as Gemma's norms) stays as it is. Rows that the
kernels do not support (other dtypes, layouts or devices) take transformers' own forward. Inference only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.kernels.admission import is_known, is_known_module
from trinity.stages.kernels.encoder_attention import ATTENTION_FUNCTIONS, pick_attention_functions
from trinity.stages.kernels.known_sources import LayerPart
from trinity.stages.kernels.probes import is_close, make_noise, make_scaled_rows
from trinity.stages.kernels.swaps import copy_with, is_altered, make_swapped_class, own_hooks, put_before

TensorPair = tuple[Tensor, Tensor]
ROTARY_FUNCTION = "apply_rotary_pos_emb"
MLP_TILE = 1 << 21  # elements of a gated MLP's inner rows per tile; longer ones cost fresh pages
_DTYPES = (torch.float32, torch.bfloat16)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # bfloat16: two units in the last place


def has_fused_kernels() -> bool:
    """Tell if the extension has these kernels."""
    return hasattr(native.extension, "rotary")


def fuse_elementwise(model: Any) -> None:
    """Swap the norms, gated MLPs, activations and attention layers of ``model`` that fit."""
    if not has_fused_kernels() or any(each.is_cuda for each in model.parameters()):
        return
    for module in model.modules():
        kind: Any = type(module)
        swapped = _find_class(kind, _dtype(module))
        if swapped is not None and swapped.fits(module) and swapped.is_known(module):
            module.__class__ = swapped


def count_fused(model: Any) -> int:
    """Count the modules of ``model`` that use the kernels."""
    return sum(isinstance(module, FusedModule) for module in model.modules())


# ---------------------------------------------------------------- kernels


def rms_norm(rows: Tensor, weight: Tensor, eps: float, kernel: str = "best") -> Tensor:
    """Compute ``rows`` / sqrt(mean of squares + ``eps``) * ``weight`` over the last axis.

    All tensors are contiguous, float32 or bfloat16.
    """
    out, width = torch.empty_like(rows), rows.shape[-1]
    given = ((rows.data_ptr(), width), weight.data_ptr(), (out.data_ptr(), width), rows.numel() // width, width)
    native.extension.rms_norm(*given, eps, *kernel_options(rows, kernel))
    return out


def add_rms_norm(
    rows: Tensor, added: Tensor, sums: Tensor, norm: tuple[Tensor, float] | None, kernel: str = "best"
) -> Tensor:
    """Write ``rows`` + ``added`` into ``sums``, which may be ``rows``; returns the sums' norm by (weight, eps).

    All tensors are contiguous and of equal size; without a norm it returns ``sums``.
    """
    out, width, (weight, eps) = sums, rows.shape[-1], norm or (None, 0.0)
    if weight is not None:
        out = torch.empty_like(rows)
    given = [(each.data_ptr(), width) for each in (rows, added, sums)]
    at = 0 if weight is None else weight.data_ptr()
    native.extension.add_rms_norm(
        *given, at, (out.data_ptr(), width), rows.numel() // width, width, eps, *kernel_options(rows, kernel)
    )
    return out


def apply_rotary_rows(heads: Tensor, cosine: Tensor, sine: Tensor, out: Tensor, kernel: str = "best") -> None:
    """Apply the rotary embedding to ``heads`` [rows, heads * width], into ``out``, which may be ``heads``.

    ``cosine`` and ``sine`` are [rows, width]; all are contiguous.
    """
    (rows, total), width = heads.shape, cosine.shape[-1]
    given = [(each.data_ptr(), each.shape[-1]) for each in (cosine, sine, out)]
    count = total // width
    native.extension.rotary(
        (heads.data_ptr(), total), width, *given, width, rows, count, width, *kernel_options(heads, kernel)
    )


def silu_mul(gate: Tensor, up: Tensor, kernel: str = "best") -> Tensor:
    """Compute silu(``gate``) * ``up`` in place of ``gate``; both contiguous and of equal size."""
    return run_gated(gate, up.data_ptr(), gate, 1.0, kernel)


def quick_gelu(rows: Tensor, kernel: str = "best") -> Tensor:
    """Compute ``rows`` * sigmoid(1.702 * ``rows``); contiguous."""
    return run_gated(rows, 0, torch.empty_like(rows), 1.702, kernel)


def apply_rotary_heads(heads: Tensor, cosine: Tensor, sine: Tensor, kernel: str = "best") -> Tensor:
    """Apply the rotary embedding to ``heads`` [1, heads, rows, width]; ``cosine`` and ``sine`` are [1, rows, width].

    In the result the heads of a row lie together.
    """
    _, count, rows, width = heads.shape
    out = heads.new_empty((1, rows, count, width)).transpose(1, 2)
    native.extension.rotary(
        (heads.data_ptr(), heads.stride(2)),
        heads.stride(1),
        (cosine.data_ptr(), cosine.stride(1)),
        (sine.data_ptr(), sine.stride(1)),
        (out.data_ptr(), out.stride(2)),
        out.stride(1),
        rows,
        count,
        width,
        *kernel_options(heads, kernel),
    )
    return out


def run_gated(gate: Tensor, up: int, out: Tensor, slope: float, kernel: str) -> Tensor:
    """Write ``gate`` * sigmoid(``slope`` * ``gate``) to ``out``, times the rows at address ``up`` unless it is 0."""
    width = max(1, gate.shape[-1])
    given = ((gate.data_ptr(), width), (up, width), (out.data_ptr(), width), gate.numel() // width, width)
    native.extension.gated(*given, slope, *kernel_options(gate, kernel))
    return out


def kernel_options(rows: Tensor, kernel: str) -> tuple[bool, int, str]:
    """Return the last arguments of every elementwise kernel: if rows are bfloat16, how many threads, which code."""
    return rows.dtype == torch.bfloat16, torch.get_num_threads(), kernel


def are_supported(*rows: Tensor) -> bool:
    """Tell if the kernels can read ``rows``: on the CPU, of one supported dtype, contiguous."""
    dtype = rows[0].dtype
    return dtype in _DTYPES and all(
        each.dtype == dtype and each.device.type == "cpu" and each.is_contiguous() for each in rows
    )


# ---------------------------------------------------------------- modules


class FusedModule(nn.Module):
    """Base put before a class of transformers; ``original_forward`` is that class's forward."""

    original_forward: Callable[..., Tensor]
    part: ClassVar[LayerPart | None] = None

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Tell if ``module``'s own forward gives the same as this class on a probe."""
        raise NotImplementedError

    @classmethod
    def is_known(cls, module: Any) -> bool:
        """Tell if the source of ``module`` is one that was read as this class's part."""
        return cls.part is not None and is_known_module(cls.part, module)


class FusedRmsNorm(FusedModule):
    part = LayerPart.RMS_NORM

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight: Any = self.weight
        if not are_supported(hidden_states, weight):
            return self.original_forward(hidden_states)
        return rms_norm(hidden_states, weight, norm_epsilon(self))

    @classmethod
    def fits(cls, module: Any) -> bool:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 1 or norm_epsilon(module) is None:
            return False
        return gives_same(module, cls, make_scaled_rows(weight.shape[0], weight.dtype))


class FusedGatedMlp(FusedModule):
    """Gated MLP, tile by tile, with its activation and product by one kernel."""

    part = LayerPart.GATED_MLP

    def forward(self, x: Tensor) -> Tensor:
        parts: Any = self
        if not are_supported(x) or any(own_hooks(parts.act_fn)):
            return self.original_forward(x)
        rows, inner = x.reshape(-1, x.shape[-1]), getattr(parts.gate_proj, "out_features", 1)
        tiles: Any = torch.split(rows, max(64, MLP_TILE // inner // 64 * 64))
        done = [parts.down_proj(silu_mul(parts.gate_proj(tile), parts.up_proj(tile))) for tile in tiles]
        return (done[0] if len(done) == 1 else torch.cat(done)).view(*x.shape[:-1], -1)

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Compare with small layers in place of its own, since only the parts between them matter."""
        names = {name: type(child) for name, child in module.named_children()}
        if {"gate_proj", "up_proj", "down_proj", "act_fn"} != set(names):
            return False
        if not all(issubclass(kind, nn.Linear) for name, kind in names.items() if name != "act_fn"):
            return False
        dtype = module.gate_proj.weight.dtype
        sizes = {"gate_proj": (24, 40), "up_proj": (24, 40), "down_proj": (40, 24)}
        small = copy_with(module, {name: nn.Linear(*size, dtype=dtype) for name, size in sizes.items()})
        return gives_same(small, cls, make_scaled_rows(24, dtype))

    @classmethod
    def is_known(cls, module: Any) -> bool:
        return super().is_known(module) and is_known_module(LayerPart.SILU, module.act_fn)


class FusedQuickGelu(FusedModule):
    part = LayerPart.QUICK_GELU

    def forward(self, input: Tensor) -> Tensor:
        if not are_supported(input):
            return self.original_forward(input)
        return quick_gelu(input)

    @classmethod
    def fits(cls, module: Any) -> bool:
        return all(gives_same(module, cls, make_scaled_rows(40, dtype)) for dtype in _DTYPES)


class _ReboundForward(FusedModule):
    """Module whose forward finds other functions by some of its names; these were checked when they were made."""

    @classmethod
    def fits(cls, module: Any) -> bool:
        return not is_altered(module)

    @classmethod
    def is_known(cls, module: Any) -> bool:
        return True


def norm_epsilon(module: Any) -> Any:
    """Return the epsilon of an RMS norm, by either name that transformers has for it; None if it has neither."""
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _dtype(module: Any) -> torch.dtype:
    """Return the dtype of the module's parameters; float32 if it has none."""
    return next((each.dtype for each in module.parameters()), torch.float32)


def _find_class(kind: Any, dtype: torch.dtype) -> Any:
    """Return the class that modules of ``kind`` get, or None."""
    if issubclass(kind, FusedModule) or dtype not in _DTYPES:
        return None
    bases: dict[str, Any] = {"RMSNorm": FusedRmsNorm, "MLP": FusedGatedMlp, "QuickGELUActivation": FusedQuickGelu}
    base = next((found for name, found in bases.items() if kind.__name__.endswith(name)), None)
    if base is not None:
        return put_before(base, kind)
    forward = _rebind_forward(kind.forward, dtype)
    if forward is None:
        return None
    return make_swapped_class(_ReboundForward, kind, forward=forward)


@torch.inference_mode()
def gives_same(module: Any, swapped: Any, rows: Tensor) -> bool:
    """Compare what ``module`` gives for ``rows`` with what it would as an instance of ``swapped``."""
    changed = copy.copy(module)
    changed.__class__ = swapped
    try:
        wanted, found = type(module).forward(module, rows), swapped.forward(changed, rows)
    except Exception:  # not a module as expected: leave it alone
        return False
    return is_close(found, wanted, _TOLERANCE[rows.dtype])


# ---------------------------------------------------------------- functions that attention layers call


def _rebind_forward(forward: Any, dtype: torch.dtype) -> Any:
    """Rebind the attention functions that ``forward`` calls to the kernels; None if there is none to replace."""
    if not isinstance(forward, FunctionType):
        return None
    found = {ROTARY_FUNCTION: _pick_rotary(forward), ATTENTION_FUNCTIONS: pick_attention_functions(forward, dtype)}
    ours = {name: one for name, one in found.items() if one is not None}
    return rebind_globals(forward, ours) if ours else None


def rebind_globals(forward: Any, ours: Mapping[str, Any]) -> Any:
    """Copy the function ``forward`` so that it finds ``ours`` by name in place of its module's globals."""
    names = {**forward.__globals__, **ours}
    changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _pick_rotary(forward: FunctionType) -> Any:
    """Return the ``apply_rotary_pos_emb`` that ``forward`` should find; None: its own."""
    plain = forward.__globals__.get(ROTARY_FUNCTION) if ROTARY_FUNCTION in forward.__code__.co_names else None
    turned = None if plain is None else _wrap_rotary(plain)
    alike = turned is not None and all(_rotates_alike(plain, turned, dtype) for dtype in _DTYPES)
    return turned if alike and is_known(LayerPart.ROTARY, plain) else None


def _wrap_rotary(plain: Any) -> Callable[..., TensorPair]:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *further: Any, **named: Any) -> TensorPair:
        ours = not further and not named and are_supported(cos, sin) and cos.ndim == 3 and cos.shape == sin.shape
        if not ours or not (_can_rotate(q, cos) and _can_rotate(k, cos)):
            found: TensorPair = plain(q, k, cos, sin, *further, **named)
            return found
        return apply_rotary_heads(q, cos, sin), apply_rotary_heads(k, cos, sin)

    return turned


def _can_rotate(heads: Tensor, cosine: Tensor) -> bool:
    alike = heads.dtype == cosine.dtype and heads.device == cosine.device and heads.ndim == 4
    return alike and heads.stride(3) == 1 and (1, *heads.shape[2:]) == cosine.shape and heads.shape[0] == 1


@torch.inference_mode()
def _rotates_alike(plain: Any, turned: Any, dtype: torch.dtype) -> bool:
    rows = make_noise(5, 9 * 16, dtype).view(1, 5, 9, 16)
    heads = rows[:, :, :4].transpose(1, 2), rows[:, :, 4:6].transpose(1, 2)
    given = (*heads, rows[:, :, 6].contiguous(), rows[:, :, 7].contiguous())
    try:
        wanted = plain(*given)
    except Exception:
        return False
    return all(is_close(one, other, _TOLERANCE[dtype]) for one, other in zip(turned(*given), wanted, strict=True))
