"""Rows and positions at which a layer is compared with the kernels that would stand in for it.

A probe sees what a table of known sources cannot: a config that opens a branch, a value that was clipped, another
epsilon, a factor of the position. Its positions lie around every number of the config and reach beyond any context;
its rows go from where an epsilon decides to where a clip does.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trinity.stages.attention.interface import PagedRows

ROW_SCALES = (1.0, 1e-3, 30.0, 1e3)
FAR_POSITIONS = (1_000, 4_097, 16_384, 32_769, 131_072, 1_000_003)
_LIMITS = ("position", "window", "chunk", "length", "rope")
_MOST_POSITION = 10_000_000
_ROWS_EACH, _FEW_ROWS = 5, 3


def list_positions(config: Any) -> list[int]:
    """List 0 to 4, far positions, and those around each whole number of ``config``, nested ones included."""
    around = {number + step for number in _find_numbers(vars(config)) for step in (-1, 0, 1)}
    return sorted({*range(_ROWS_EACH), *FAR_POSITIONS, *(each for each in around if 0 <= each <= _MOST_POSITION)})


def place_rows(config: Any) -> tuple[Tensor, Tensor]:
    """Return positions and sizes of a probe's rows: each position once at size 1, and a few rows of each other size.

    A layer's weights are read whatever the number of rows; some 60 rows cost a large model little more than five.
    """
    places, others = list_positions(config), ROW_SCALES[1:]
    sizes = [1.0] * len(places) + [scale for scale in others for _ in range(_FEW_ROWS)]
    return torch.tensor([*places, *places[-_FEW_ROWS:] * len(others)]), torch.tensor(sizes)


def find_limits(config: Any) -> set[int]:
    """Find the whole numbers of ``config`` that its names call positions, windows, chunks or lengths."""
    named = {name: value for name, value in vars(config).items() if any(word in name for word in _LIMITS)}
    return _find_numbers(named)


def _find_numbers(value: Any) -> set[int]:
    if isinstance(value, dict):
        return set().union(*map(_find_numbers, value.values()))
    if isinstance(value, float) and value.is_integer():
        return {int(value)}
    return {value} if isinstance(value, int) and not isinstance(value, bool) else set()


def make_noise(count: int, width: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Make [1, ``count``, ``width``] of normal numbers."""
    return torch.randn(1, count, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def make_scaled_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Make [1, rows, ``width``]: five rows of each of ``ROW_SCALES``."""
    scales = torch.tensor(ROW_SCALES).repeat_interleave(_ROWS_EACH)
    return (make_noise(len(scales), width, torch.float32) * scales[None, :, None]).to(dtype)


def make_empty_rows() -> PagedRows:
    """Make the cache places of no row, for stand-ins that have no cache."""
    none = torch.empty(0, dtype=torch.int64)
    return PagedRows(none, none, np.empty((0, 0), np.int64), np.empty(0, np.int64))


def is_close(found: Any, wanted: Any, near: float) -> bool:
    """Tell if no value is off by more than ``near`` of the largest of its row, along the last axis."""
    if not isinstance(wanted, Tensor) or not isinstance(found, Tensor):
        return False
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    exact = wanted.float()
    off, largest = (found.float() - exact).abs().amax(-1), exact.abs().amax(-1)
    return bool(torch.isfinite(exact).all()) and bool((off <= near * largest).all())
