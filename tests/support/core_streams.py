"""Helpers of the tables about KV that moves while its prefill runs: source P0 and target D0, three layers."""

from __future__ import annotations

from typing import Any

from support.core_tables import make_core
from trinity.core import InstanceCore
from trinity.core.messages import LayersWritten, Ready
from trinity.core.transfers import TransferPolicy

LAYER = TransferPolicy(kv="layer")
OFFER = "D0: offer P0:1 kv of r [0,1,2] by way of P0"


def source(**settings: Any) -> InstanceCore:
    settings.setdefault("transfers", LAYER)
    return make_core("P0", peers="D0", layers=3, **settings)


def target(**settings: Any) -> InstanceCore:
    return make_core("D0", layers=3, transfers=LAYER, **settings)


def layers(step: int, first: int, end: int) -> LayersWritten:
    return LayersWritten(step, "joint", (first, end))


def again(step: int) -> LayersWritten:
    return LayersWritten(step, "joint", None)


def ready(*numbers: int, blocks: tuple[int, int], void: bool = False) -> Ready:
    return Ready("P0:1", (0,), (numbers[0], numbers[1]) if numbers else None, blocks, void)
