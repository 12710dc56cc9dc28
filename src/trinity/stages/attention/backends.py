"""Attention backends by name: what can run where, and the best of them for a cache.

A backend is a line in ``BACKENDS``: why it cannot serve a cache (None: it can), and how one is made. ``auto`` takes the
first that can. Torch is imported by those that are made, not by this module.

A kernel for GPUs can be installed and not work: for another driver, another GPU, another shape. Each is therefore tried
once per process and kind of cache on a small random batch, beside torch (``attention_probe``).
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
    """The cache that a backend must serve: ``shape`` of a block [layers, 2, kv_heads, rows, head_dim]."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class Backend:
    """``refuses``: why it cannot run for such a cache, in words that end a sentence, or None."""

    refuses: Callable[[CacheKind], str | None]
    make: Callable[[CacheKind], AttentionBackend]


def check_name(name: str) -> str:
    """Raise ``UnknownName`` (a ``ConfigError``) for a backend that nobody knows."""
    if name != AUTO and name not in BACKENDS:
        raise UnknownName("attention backend", name, [AUTO, *BACKENDS])
    return name


def choose(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> AttentionBackend:
    """A new backend for blocks of ``shape`` [layers, 2, kv_heads, rows, head_dim]; each serves one thread at a time.

    Raises ``ConfigError`` with the reason where the named one cannot run here.
    """
    kind = CacheKind(tuple(shape), dtype, device)
    taken = runs(name, kind)
    if device.type != "cpu":
        logger.info("attention on %s, %s: %s", device, dtype, taken)
    return BACKENDS[taken].make(kind)


def runs(name: str, kind: CacheKind) -> str:
    """The backend that serves such a cache when asked for ``name``."""
    if check_name(name) == AUTO:
        return next(each for each, backend in BACKENDS.items() if backend.refuses(kind) is None)
    why = BACKENDS[name].refuses(kind)
    if why is not None:
        raise ConfigError(f"attention={name!r} cannot run here: {why}; attention='auto' takes what can")
    return name


def _native_refuses(kind: CacheKind) -> str | None:
    if kind.device.type != "cpu":
        return f"it is a kernel for CPUs, and the cache is on {kind.device}"
    if str(kind.dtype) not in ("torch.float32", "torch.bfloat16"):
        return f"it computes in float32 and bfloat16, and the cache holds {kind.dtype}"
    if native.extension is None:
        return native.describe()
    if not hasattr(native.extension, "PagedAttention"):
        return "the extension in use was built without it: install trinity again"
    return None


def _native(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.native import NativeAttention

    return NativeAttention()


def _torch(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.torch_reference import TorchAttention

    return TorchAttention()


def _on_gpu(
    name: str, lacks: Callable[[CacheKind], str | None], make: Callable[[CacheKind], AttentionBackend]
) -> Backend:
    """A kernel for GPUs: ``lacks`` says what is missing for it; if nothing is, it is tried."""

    def refuses(kind: CacheKind) -> str | None:
        if kind.device.type != "cuda":
            return f"it is a kernel for GPUs, and the cache is on {kind.device}"
        return _gpu_lacks(kind) or lacks(kind) or tried(kind)

    @cache
    def tried(kind: CacheKind) -> str | None:
        from trinity.stages.attention.probe import problem

        why = problem(make(kind), kind.shape, kind.dtype, kind.device)
        if why is not None:
            logger.warning("attention backend %s is not used: %s", name, why)
        return why

    return Backend(refuses, make)


def _gpu_lacks(kind: CacheKind) -> str | None:
    import torch

    if not torch.cuda.is_available():
        return "there is no GPU that torch could use"
    if str(kind.dtype) not in ("torch.float32", "torch.bfloat16", "torch.float16"):
        return f"it computes in float32, bfloat16 and float16, and the cache holds {kind.dtype}"
    return None


def _triton_lacks(kind: CacheKind) -> str | None:
    return None if find_spec("triton") else f"triton is not installed: {pip_install('cuda')}"


def _triton(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.triton import TritonAttention

    return TritonAttention()


def _varlen_lacks(kind: CacheKind) -> str | None:
    from trinity.stages.attention.flash import varlen_takes_tables

    if not varlen_takes_tables():
        return "torch.nn.attention.varlen takes a block table from torch 2.12 on"
    return _half_lacks(kind)


def _varlen(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.flash import FlashAttention, torch_varlen

    return FlashAttention(torch_varlen, softcap=False)


def _flash_lacks(kind: CacheKind) -> str | None:
    from trinity.stages.attention.flash import FLASH_PAGE

    if find_spec("flash_attn") is None:
        return "the package flash-attn is not installed"
    if kind.shape[3] % FLASH_PAGE:
        return f"flash-attn takes blocks of {FLASH_PAGE} tokens, and these have {kind.shape[3]}: set kv_block"
    return _half_lacks(kind)


def _half_lacks(kind: CacheKind) -> str | None:
    if str(kind.dtype) == "torch.float32":
        return "it computes in bfloat16 and float16, and the cache holds torch.float32"
    return None


def _flash(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention.flash import FlashAttention, flash_attn

    return FlashAttention(flash_attn, softcap=True)


BACKENDS = {  # the best first: what auto takes; triton before the others for GPUs, since it runs in CUDA graphs
    "native": Backend(_native_refuses, _native),
    "triton": _on_gpu("triton", _triton_lacks, _triton),
    "varlen": _on_gpu("varlen", _varlen_lacks, _varlen),
    "flash": _on_gpu("flash", _flash_lacks, _flash),
    "torch": Backend(lambda kind: None, _torch),
}
