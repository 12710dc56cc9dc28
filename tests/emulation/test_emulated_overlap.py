"""Emulated stages report their layers as they write them, so that transfers overlap with the wait."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from support.emulated_instances import HEIGHT, SOURCE, Site, work_of
from support.emulated_pipelines import MODEL, POOLS, asked, check, serve
from trinity.core.messages import KV, Open, Prefill, Step
from trinity.core.scheduler import BatchRules
from trinity.core.transfers import TransferPolicy
from trinity.costs.emulated_cost import LinearCost
from trinity.emulation.stages import iter_layer_groups
from trinity.errors import StageError
from trinity.memory.cache_config import CacheConfig
from trinity.pipeline import Pipeline
from trinity.stages.base import LayerReporter


def test_groups() -> None:
    assert list(iter_layer_groups(7, 3)) == [(0, 3), (3, 6), (6, 7)]
    assert list(iter_layer_groups(4, 4)) == list(iter_layer_groups(4, 9)) == [(0, 4)]


@pytest.mark.parametrize("group", [1, 2, 3, 0])
def test_layers_are_told_when_they_are_written_and_not_before(group: int) -> None:
    work = work_of(images=())
    site, seen = Site("P"), []
    layers = site.raw(KV).view(np.uint64).reshape(16, 3, HEIGHT, -1)

    def told(first: int, end: int) -> None:
        written = [bool(layers[SOURCE[0], layer].all()) for layer in range(3)]
        seen.append((first, end, written))

    assert isinstance(site.stage, LayerReporter)
    site.stage.on_layers = told
    site.stage.open(Open(work=work, blocks=SOURCE))
    row = Prefill("r", 0, len(work.prompt), True)
    sampled = site.stage.forward(Step(1, "joint", prefills=(row,), group=group))
    assert list(sampled) == ["r"]
    wanted = [(first, end, [layer < end for layer in range(3)]) for first, end in iter_layer_groups(3, group or 3)]
    assert seen == (wanted if group else [])


def test_a_step_that_fails_its_checks_tells_nothing() -> None:
    site, seen = Site("P"), list[tuple[int, int]]()
    site.stage.on_layers = lambda first, end: seen.append((first, end))
    work = work_of()
    site.stage.open(Open(work=work, blocks=SOURCE, images=((5, 2),)))
    with pytest.raises(StageError):
        site.stage.forward(Step(1, "joint", prefills=(Prefill("r", 0, 15, True),), group=1))
    assert seen == []


@pytest.mark.parametrize("kv", ["layer", "grouped"])
@pytest.mark.parametrize("hosting", ["thread", "process"])
async def test_kv_moves_while_prefill_waits(kv: Any, hosting: Any) -> None:
    """A layer that was read too early, or never, would be an error: every word is checked at its arrival."""
    model = msgspec.structs.replace(MODEL, cost=LinearCost(prefill_s=1e-4, step_s=0.002))
    settings: dict[str, Any] = {
        "rules": BatchRules(token_budget=700),
        "transfers": TransferPolicy(kv=kv),
        "hosting": hosting,
    }
    requests = asked()
    async with Pipeline(model, "2EP1D", cache=CacheConfig(pools=POOLS), **settings) as pipe, asyncio.timeout(60):
        outputs = await serve(pipe, requests)
    check(outputs, requests)
    moved = [record for output in outputs for record in output.transfers if record["kind"] == "kv"]
    assert max(record.get("pulls", 1) for record in moved) > 2
