"""Attention backends by name: what can run where, and the best of them for a cache.

A backend is a line in ``BACKENDS``: why it cannot serve a cache (None: it can), and how one is made. ``auto`` takes the
first that can. Torch is imported by those that are made, not by this module.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trinity import native
from trinity.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    import torch

    from trinity.stages.attention import AttentionBackend

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
    backend = BACKENDS[runs(name, kind)]
    return backend.make(kind)


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
    if not hasattr(native.extension, "paged_attention"):
        return "the extension in use was built without it: install trinity again"
    return None


def _native(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention_native import NativeAttention

    return NativeAttention()


def _torch(kind: CacheKind) -> AttentionBackend:
    from trinity.stages.attention_torch import TorchAttention

    return TorchAttention()


BACKENDS = {  # the best first: what auto takes
    "native": Backend(_native_refuses, _native),
    "torch": Backend(lambda kind: None, _torch),
}
