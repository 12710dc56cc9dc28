"""NativeAttention: paged attention by the kernel of csrc/attention.cpp, on CPUs."""

from __future__ import annotations

from trinity.stages.attention_torch import TorchAttention


class NativeAttention(TorchAttention):
    """``AttentionBackend`` by the extension; what it is not made for goes to torch."""
