"""Attention backends by name, and the choice of the best one for a cache.

Each backend is a line in ``BACKENDS``. ``auto`` takes the first that can serve the cache. This module does not import
torch; the backends do when they are made.

A GPU kernel can be installed and still not work, because of another driver, GPU or shape. Each is therefore run once
per process and kind of cache on a small random batch and compared with torch (``probe``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

from trinity.errors import ConfigError, UnknownName, pip_install
from trinity.memory import native

if TYPE_CHECKING:
    import torch

    from trinity.stages.attention.interface import AttentionBackend

logger = logging.getLogger("trinity")
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class CacheKind:
    """KV cache that a backend must serve; ``shape`` is a block's: [layers, 2, kv_heads, rows, head_dim]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """One way to compute paged attention.

    - ``obstacle``: returns the reason why it cannot serve a cache, as words that end a sentence; None if it can.
    - ``make``: makes a backend for a cache without an obstacle.
    """

    obstacle: Callable[[CacheKind], str | None]
    make: Callable[[CacheKind], AttentionBackend]


def check_name(name: str) -> str:
    """Return ``name``. Raises ``UnknownName`` (a ``ConfigError``) if there is no such backend."""
    if name != AUTO and name not in BACKENDS:
        raise UnknownName("attention backend", name, [AUTO, *BACKENDS])
    return name


def make_backend(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """Make a backend for blocks of ``shape`` [layers, 2, kv_heads, rows, head_dim]; it serves one thread at a time.

    Raises ``ConfigError`` with the reason if the named backend cannot run here.
    """
    kind = CacheKind(tuple(shape), dtype, device)
    picked = pick_backend(name, kind)
    if device.type != "cpu":
        logger.info("attention on %s, %s: %s", device, dtype, picked)
    return BACKENDS[picked].make(kind)


def pick_backend(name: str, kind: CacheKind) -> str:
    """Return the name of the backend that serves such a cache: ``name`` itself, or the best one for "auto".

    Raises ``ConfigError`` with the reason if the named backend cannot run here.
    """
    if check_name(name) == AUTO:
        return next(each for each, backend in BACKENDS.items() if backend.obstacle(kind) is None)
    obstacle = BACKENDS[name].obstacle(kind)
    if obstacle is not None:
        raise ConfigError(f"attention={name!r} cannot run here: {obstacle}; attention='auto' takes a backend that can")
    return name


def _native_obstacle(kind: CacheKind) -> str | None:
    if kind.device.type != "cpu":
        return f"it is a kernel for CPUs, and the cache is on {kind.device}"
    if str(kind.dtype) not in ("torch.float32", "torch.bfloat16"):
        return f"it computes in float32 and bfloat16, and the cache holds {kind.dtype}"
    if native.extension is None:
        return native.describe()
    if not hasattr(native.extension, "PagedAttention"):
        return "the extension in use was built without it: install trinity again"
    return None


def _make_native(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.native import NativeAttention

    return NativeAttention()


def _make_torch(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.torch_reference import TorchAttention

    return TorchAttention()


def _gpu_backend(
    name: str, own_obstacle: Callable[[CacheKind], str | None], make: Callable[[CacheKind], AttentionBackend]
) -> BackendSpec:
    """Describe a GPU kernel: ``own_obstacle`` says what it lacks; if it lacks nothing, it is probed."""

    def obstacle(kind: CacheKind) -> str | None:
        if kind.device.type != "cuda":
            return f"it is a kernel for GPUs, and the cache is on {kind.device}"
        return _gpu_obstacle(kind) or own_obstacle(kind) or probe(kind)

    @cache
    def probe(kind: CacheKind) -> str | None:
        from trinity.stages.attention.probe import find_fault

        fault = find_fault(make(kind), kind.shape, kind.dtype, kind.device)
        if fault is not None:
            logger.warning("attention backend %s is not used: %s", name, fault)
        return fault

    return BackendSpec(obstacle, make)


def _gpu_obstacle(kind: CacheKind) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU that torch can use"
    if str(kind.dtype) not in ("torch.float32", "torch.bfloat16", "torch.float16"):
        return f"it computes in float32, bfloat16 and float16, and the cache holds {kind.dtype}"
    return None


def _triton_obstacle(kind: CacheKind) -> str | None:
    return None if find_spec("triton") else f"triton is not installed: {pip_install('cuda')}"


def _make_triton(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.triton import TritonAttention

    return TritonAttention()


def _varlen_obstacle(kind: CacheKind) -> str | None:
    from trinity.stages.attention.flash import varlen_supports_block_tables

    if not varlen_supports_block_tables():
        return "torch.nn.attention.varlen takes a block table from torch 2.12 on"
    return _half_precision_obstacle(kind)


def _make_varlen(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.flash import FlashAttention, call_torch_varlen

    return FlashAttention(call_torch_varlen, softcap=False)


def _flash_obstacle(kind: CacheKind) -> str | None:
    from trinity.stages.attention.flash import FLASH_PAGE

    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if kind.shape[3] % FLASH_PAGE:
        return f"flash-attn takes blocks of {FLASH_PAGE} tokens, and these have {kind.shape[3]}: set kv_block_size"
    return _half_precision_obstacle(kind)


def _half_precision_obstacle(kind: CacheKind) -> str | None:
    if str(kind.dtype) == "torch.float32":
        return "it computes in bfloat16 and float16, and the cache holds torch.float32"
    return None


def _make_flash(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.flash import FlashAttention, call_flash_attn

    return FlashAttention(call_flash_attn, softcap=True)


BACKENDS = {  # best first, as auto takes them; triton is the first for GPUs because it runs in CUDA graphs
    "native": BackendSpec(_native_obstacle, _make_native),
    "triton": _gpu_backend("triton", _triton_obstacle, _make_triton),
    "varlen": _gpu_backend("varlen", _varlen_obstacle, _make_varlen),
    "flash": _gpu_backend("flash", _flash_obstacle, _make_flash),
    "torch": BackendSpec(lambda kind: None, _make_torch),
}
