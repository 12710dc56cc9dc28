"""Elementwise parts of transformers' modules in one pass each, by csrc/elementwise*.cpp, on CPUs.

Eagerly, a norm is seven passes over its rows, a rotary embedding ten (decision 0027 has figures). A module keeps its
class as a base, and is swapped only where its own forward gives the same on random rows at load: one that is called
alike but computes otherwise (Gemma's norms, say) stays as it is. Rows that the kernels are not for (other dtypes,
layouts or devices) take transformers' own way. Inference only.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from trinity.memory import native
from trinity.stages.kernels.encoder_attention import FUNCTIONS, functions_for

Pair = tuple[Tensor, Tensor]
ROTARY = "apply_rotary_pos_emb"
TILE = 1 << 21  # elements of a gated MLP's inner rows that are worked on together: longer ones cost fresh pages
_DTYPES = (torch.float32, torch.bfloat16)
_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}  # bfloat16: two units in the last place


def available() -> bool:
    """Whether the extension is there and has these kernels."""
    return hasattr(native.extension, "rotary")


def fuse(model: Any) -> None:
    """Let the norms, gated MLPs, activations and attention layers of ``model`` use the kernels, where they fit."""
    if not available() or any(each.is_cuda for each in model.parameters()):
        return
    for module in model.modules():
        kind: Any = type(module)
        swapped = _swapped(kind, _dtype(module))
        if swapped is not None and swapped.fits(module):
            module.__class__ = swapped


def fused(model: Any) -> int:
    """How many modules of ``model`` use the kernels."""
    return sum(isinstance(module, _Fused) for module in model.modules())


# ---------------------------------------------------------------- kernels


def rms_norm(rows: Tensor, weight: Tensor, eps: float, kernel: str = "best") -> Tensor:
    """``rows`` / sqrt(mean of squares + ``eps``) * ``weight`` over the last axis; contiguous, float32 or bfloat16."""
    out, width = torch.empty_like(rows), rows.shape[-1]
    given = ((rows.data_ptr(), width), weight.data_ptr(), (out.data_ptr(), width), rows.numel() // width, width)
    native.extension.rms_norm(*given, eps, *_how(rows, kernel))
    return out


def add_norm(
    rows: Tensor, added: Tensor, sums: Tensor, norm: tuple[Tensor, float] | None, kernel: str = "best"
) -> Tensor:
    """``rows`` + ``added`` into ``sums``, which may be ``rows``; returns their norm by (weight, eps), where asked for.

    All contiguous and alike; without a norm what is returned is ``sums``.
    """
    out, width, (weight, eps) = sums, rows.shape[-1], norm or (None, 0.0)
    if weight is not None:
        out = torch.empty_like(rows)
    given = [(each.data_ptr(), width) for each in (rows, added, sums)]
    at = 0 if weight is None else weight.data_ptr()
    native.extension.add_rms_norm(
        *given, at, (out.data_ptr(), width), rows.numel() // width, width, eps, *_how(rows, kernel)
    )
    return out


def turn(heads: Tensor, cosine: Tensor, sine: Tensor, out: Tensor, kernel: str = "best") -> None:
    """``rotate`` of ``heads`` [rows, heads * width] into ``out``, alike, which may be ``heads``; all contiguous."""
    (rows, total), width = heads.shape, cosine.shape[-1]
    given = [(each.data_ptr(), each.shape[-1]) for each in (cosine, sine, out)]
    count = total // width
    native.extension.rotary((heads.data_ptr(), total), width, *given, width, rows, count, width, *_how(heads, kernel))


def silu_mul(gate: Tensor, up: Tensor, kernel: str = "best") -> Tensor:
    """silu(``gate``) * ``up``, written over ``gate``; contiguous and alike."""
    return _gated(gate, up.data_ptr(), gate, 1.0, kernel)


def quick_gelu(rows: Tensor, kernel: str = "best") -> Tensor:
    """``rows`` * sigmoid(1.702 * ``rows``); contiguous."""
    return _gated(rows, 0, torch.empty_like(rows), 1.702, kernel)


def rotate(heads: Tensor, cosine: Tensor, sine: Tensor, kernel: str = "best") -> Tensor:
    """``heads`` [1, heads, rows, width] turned by ``cosine`` and ``sine`` [1, rows, width]; heads of a row lie together
    in what is returned."""
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
        *_how(heads, kernel),
    )
    return out


def _gated(gate: Tensor, up: int, out: Tensor, slope: float, kernel: str) -> Tensor:
    width = max(1, gate.shape[-1])
    given = ((gate.data_ptr(), width), (up, width), (out.data_ptr(), width), gate.numel() // width, width)
    native.extension.gated(*given, slope, *_how(gate, kernel))
    return out


def _how(rows: Tensor, kernel: str) -> tuple[bool, int, str]:
    return rows.dtype == torch.bfloat16, torch.get_num_threads(), kernel


def _plain(*rows: Tensor) -> bool:
    """Whether the kernels can read ``rows``: on the CPU, of one dtype that they know, without gaps."""
    dtype = rows[0].dtype
    return dtype in _DTYPES and all(
        each.dtype == dtype and each.device.type == "cpu" and each.is_contiguous() for each in rows
    )


# ---------------------------------------------------------------- modules


class _Fused(nn.Module):
    """In front of a class of transformers': ``own`` is its forward."""

    own: Callable[..., Any]

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Whether ``module`` computes what this class does, by its own forward on random rows."""
        raise NotImplementedError


class _Norm(_Fused):
    def forward(self, hidden_states: Tensor) -> Tensor:
        weight: Any = self.weight
        if not _plain(hidden_states, weight):
            found: Tensor = self.own(hidden_states)
            return found
        return rms_norm(hidden_states, weight, _eps(self))

    @classmethod
    def fits(cls, module: Any) -> bool:
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Tensor) or weight.ndim != 1 or _eps(module) is None:
            return False
        return _same(module, cls, _rows(weight.shape[0], weight.dtype))


class _GatedMlp(_Fused):
    def forward(self, x: Tensor) -> Tensor:
        parts: Any = self
        if not _plain(x):
            found: Tensor = self.own(x)
            return found
        rows, inner = x.reshape(-1, x.shape[-1]), getattr(parts.gate_proj, "out_features", 1)
        tiles: Any = torch.split(rows, max(64, TILE // inner // 64 * 64))
        done = [parts.down_proj(silu_mul(parts.gate_proj(tile), parts.up_proj(tile))) for tile in tiles]
        return (done[0] if len(done) == 1 else torch.cat(done)).view(*x.shape[:-1], -1)

    @classmethod
    def fits(cls, module: Any) -> bool:
        """Of small layers in place of its own: what is compared is what lies between them."""
        names = {name: type(child) for name, child in module.named_children()}
        if {"gate_proj", "up_proj", "down_proj", "act_fn"} != set(names):
            return False
        if not all(issubclass(kind, nn.Linear) for name, kind in names.items() if name != "act_fn"):
            return False
        dtype, small = module.gate_proj.weight.dtype, copy.copy(module)
        small._modules = dict(module._modules)
        for name, (inputs, outputs) in {"gate_proj": (24, 40), "up_proj": (24, 40), "down_proj": (40, 24)}.items():
            small._modules[name] = nn.Linear(inputs, outputs, dtype=dtype)
        return _same(small, cls, _rows(24, dtype))


class _QuickGelu(_Fused):
    def forward(self, input: Tensor) -> Tensor:
        if not _plain(input):
            found: Tensor = self.own(input)
            return found
        return quick_gelu(input)

    @classmethod
    def fits(cls, module: Any) -> bool:
        return all(_same(module, cls, _rows(40, dtype)) for dtype in _DTYPES)


class _Renamed(_Fused):
    """Its forward is its base's but for functions that it calls: checked where those are replaced."""

    @classmethod
    def fits(cls, module: Any) -> bool:
        return True


def _eps(module: Any) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _dtype(module: Any) -> torch.dtype:
    """Of its parameters; float32 where it has none."""
    return next((each.dtype for each in module.parameters()), torch.float32)


@cache
def _swapped(kind: type[Any], dtype: torch.dtype) -> Any:
    """The class that modules of ``kind`` get, or None."""
    if issubclass(kind, _Fused) or dtype not in _DTYPES:
        return None
    bases: dict[str, Any] = {"RMSNorm": _Norm, "MLP": _GatedMlp, "QuickGELUActivation": _QuickGelu}
    base = next((found for name, found in bases.items() if kind.__name__.endswith(name)), None)
    if base is not None:
        return type(kind.__name__, (base, kind), {"own": kind.forward, "__module__": kind.__module__})
    forward = _with_others(kind.forward, dtype)
    if forward is None:
        return None
    return type(kind.__name__, (_Renamed, kind), {"forward": forward, "__module__": kind.__module__})


def _rows(width: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(1, 5, width, generator=torch.Generator().manual_seed(0)).to(dtype)


@torch.inference_mode()
def _same(module: Any, swapped: Any, rows: Tensor) -> bool:
    try:
        wanted, found = type(module).forward(module, rows), swapped.forward(_as(module, swapped), rows)
    except Exception:  # whatever it is, it is not what it seems to be
        return False
    return _close(found, wanted)


def _as(module: Any, swapped: Any) -> Any:
    changed = copy.copy(module)
    changed.__class__ = swapped
    return changed


def _close(found: Any, wanted: Any) -> bool:
    if not isinstance(wanted, Tensor) or found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    near = _TOLERANCE[wanted.dtype]
    return torch.allclose(found.float(), wanted.float(), rtol=near, atol=near)


# ---------------------------------------------------------------- functions that attention layers call


def _with_others(forward: Any, dtype: torch.dtype) -> Any:
    """``forward`` with ours in place of functions of its module for attention; None where none is to be replaced."""
    if not isinstance(forward, FunctionType):
        return None
    found = {ROTARY: _rotary_for(forward), FUNCTIONS: functions_for(forward, dtype)}
    ours = {name: one for name, one in found.items() if one is not None}
    return finding(forward, ours) if ours else None


def finding(forward: Any, ours: Mapping[str, Any]) -> Any:
    """``forward``, which finds these by their names where it found its module's."""
    names = {**forward.__globals__, **ours}
    changed = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, forward.__closure__)
    changed.__kwdefaults__ = forward.__kwdefaults__
    return changed


def _rotary_for(forward: FunctionType) -> Any:
    """What it is to find as ``apply_rotary_pos_emb``; None: what it finds."""
    plain = forward.__globals__.get(ROTARY) if ROTARY in forward.__code__.co_names else None
    turned = None if plain is None else _rotary(plain)
    return turned if turned is not None and all(_turns_alike(plain, turned, dtype) for dtype in _DTYPES) else None


def _rotary(plain: Any) -> Callable[..., Pair]:
    def turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *further: Any, **named: Any) -> Pair:
        ours = not further and not named and _plain(cos, sin) and cos.ndim == 3 and cos.shape == sin.shape
        if not ours or not (_turnable(q, cos) and _turnable(k, cos)):
            found: Pair = plain(q, k, cos, sin, *further, **named)
            return found
        return rotate(q, cos, sin), rotate(k, cos, sin)

    return turned


def _turnable(heads: Tensor, cosine: Tensor) -> bool:
    alike = heads.dtype == cosine.dtype and heads.device == cosine.device and heads.ndim == 4
    return alike and heads.stride(3) == 1 and (1, *heads.shape[2:]) == cosine.shape and heads.shape[0] == 1


@torch.inference_mode()
def _turns_alike(plain: Any, turned: Any, dtype: torch.dtype) -> bool:
    rows = _rows(9 * 16, dtype).view(1, 5, 9, 16)
    heads = rows[:, :, :4].transpose(1, 2), rows[:, :, 4:6].transpose(1, 2)
    given = (*heads, rows[:, :, 6].contiguous(), rows[:, :, 7].contiguous())
    try:
        wanted = plain(*given)
    except Exception:
        return False
    return all(_close(one, other) for one, other in zip(turned(*given), wanted, strict=True))
