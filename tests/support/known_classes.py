"""Admission to kernels on any processor: classes of a test's own declared known, parts that some processors lack."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from trinity.stages.kernels import encoder_attention, linear
from trinity.stages.kernels.admission import fingerprint_part
from trinity.stages.kernels.known_sources import KNOWN_SOURCES, LayerPart


def declare_known(monkeypatch: pytest.MonkeyPatch, part: LayerPart, *kinds: Any) -> None:
    """Add the fingerprints of ``kinds`` to those of ``part``, until the test ends."""
    for kind in kinds:
        found = fingerprint_part(part, kind)
        assert found is not None, f"{kind} has no source"
        monkeypatch.setitem(KNOWN_SOURCES[part], found, f"{kind.__module__}:{kind.__qualname__}")


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of ``dtype`` here; in bfloat16 it asks for AVX-512."""
    try:
        linear.run_onednn(torch.ones(4, 16, dtype=dtype), linear.pack_weight(torch.ones(16, 16, dtype=dtype)), None)
    except (RuntimeError, AttributeError):
        return False
    return True


def attend_without_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admit encoder layers also where the processor has no attention kernel: torch attends then."""
    has, fits = encoder_attention.has_attend_all, encoder_attention.fits_kernel
    monkeypatch.setattr(encoder_attention, "has_attend_all", lambda dtype: True)
    monkeypatch.setattr(encoder_attention, "fits_kernel", lambda query, *rest: has(query.dtype) and fits(query, *rest))
