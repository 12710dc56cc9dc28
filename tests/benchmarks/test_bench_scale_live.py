"""A replay of the benchmark of scale, live: set as the simulated side is, exact, and what it says that it came to."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.scale import live as scale_live
from benchmarks.scale.live import LIMITS, Task, bounds, paced, pipeline, requests, served, simulator, slowed
from trinity.costs.step_cost import DEVICES
from trinity.traces.trace import TraceRow


@pytest.mark.parametrize("scheduled", [True, False])
async def test_live_instances_have_the_budgets_pools_and_rules_of_simulated_ones(scheduled: bool) -> None:
    task = Task("POPE", "1E1P1ED", scheduled, 10, 5.0, 4)
    async with pipeline(task) as pipe:
        live = [host.loaded.settings for host in pipe.hosts.values()]
    for one, other in zip(live, simulator("POPE", "1E1P1ED", scheduled).settings("1E1P1ED", shared=False), strict=True):
        assert (one.name, one.roles, dict(one.pools)) == (other.name, other.roles, dict(other.pools))
        assert (one.rules.token_budget, one.rules.image_budget) == (other.rules.token_budget, other.rules.image_budget)
        assert one.rules.policy == other.rules.policy
        assert other.rules.limit_s is not None
        assert one.rules.limit_s == pytest.approx(4 * other.rules.limit_s)
        assert (one.image_cache, one.prefix_cache) == (other.image_cache, other.prefix_cache) == (False, False)


def test_every_cost_is_dilated() -> None:
    one, slow = paced(1.0).cost, paced(4.0).cost
    for rows in ((3, 0, 0), (0, 600, 0), (0, 0, 576), (40, 300, 1152)):
        assert slow.seconds(*rows) == pytest.approx(4 * one.seconds(*rows))
    assert bounds("POPE", 0.9, 4).tbt == pytest.approx(0.9 * 4 * bounds("POPE").tbt)
    assert "4 times" in slowed(DEVICES["H20"], 4).name


def moved_bytes(row: TraceRow) -> int:
    """Of a request's image and of the blocks of its prompt, each once: a word of 8 bytes for a row and layer."""
    (image,) = row.images
    assert image.tokens is not None
    return 8 * (image.tokens + -(-row.input_length // 16) * 16 * scale_live.MODEL.language.layers)


@pytest.mark.slow
async def test_a_replay_says_what_it_came_to() -> None:
    """Of a busy machine, too: there a prompt's KV goes in more pieces, whose bytes are the same."""
    found = await asyncio.to_thread(served, Task("POPE", "1E1P1D", True, 12, 12.0, 1))
    assert found["exact"]
    assert found["failed"] == 0
    assert found["verified"] == found["pulls"] >= 2 * (12 + 4), "an image and KV of each request, and of those checked"
    assert found["bytes"] == sum(moved_bytes(row) for count in (12, 4) for row in requests("POPE", count))
    assert found["completed"] > 0
    assert set(found["signs"]) == set(LIMITS)
    assert found["tokens"] == sum(row.output_length for row in requests("POPE", 12))
    assert found["latency"]["TTFT p50"] > paced(1.0).cost.seconds(0, 590, 0)


async def test_wrong_tokens_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task("POPE", "1EPD", True, 12, 12.0, 1)
    async with pipeline(task) as pipe:
        assert await scale_live.right_tokens(pipe, "POPE", 1)
        monkeypatch.setattr(scale_live, "expected_tokens", lambda *_: [8])
        assert not await scale_live.right_tokens(pipe, "POPE", 1)


@pytest.mark.slow
def test_blocks_of_full_size_arrive_as_they_left() -> None:
    found = scale_live.full_size("POPE", 2, 3)
    assert (found["requests"], found["right"], found["verified"], found["pulls"]) == (2, 2, 4, 4)
    assert found["bytes"] > 2 * 590 * 512 * 1024
