"""Rows for the sampler, one by one, as a language stage batches them from its table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trinity.core.messages import ResolvedSampling
from trinity.stages.sampler_rows import LOOKS_BACK, SAMPLER, SamplerBatch, describe_sampler, make_batch
from trinity.stages.token_bans import HostTexts, TokenBans

NO_IDS = np.zeros(0, dtype=np.int64)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class SamplerRow:
    """Sampling of one row, the index of its output token (from 0), its ids so far, and its bans."""

    sampling: ResolvedSampling
    index: int = 0
    ids: np.ndarray = field(default_factory=lambda: NO_IDS)
    bans: TokenBans | None = None


def row(index: int = 0, ids: np.ndarray = NO_IDS, **fields: Any) -> SamplerRow:
    return SamplerRow(ResolvedSampling(**fields), index, ids)


def batch(rows: Sequence[SamplerRow], device: torch.device = CPU) -> SamplerBatch:
    given = np.array([describe_sampler(row.sampling, row.bans) for row in rows], dtype=SAMPLER)
    given["length"] = [len(row.ids) for row in rows]
    indexes = np.array([row.index for row in rows], dtype=np.int64)
    bans = [(at, row.bans, row.index) for at, row in enumerate(rows) if row.bans is not None]
    back = [rows[at].ids for at in np.flatnonzero(given["needs"] & LOOKS_BACK).tolist()]
    return make_batch(given, indexes, bans, device, HostTexts(back, device) if back else None)
