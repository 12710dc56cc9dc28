"""The benchmark of the front end's costs: that it measures, not what."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.serving import frontend_cost
from trinity.core.messages import FRONTEND


@pytest.mark.parametrize("policy", frontend_cost.POLICIES)
def test_choices_are_measured(policy: str) -> None:
    alone, reported = frontend_cost.measure_choice(policy, 8, 6, media=True, hosts=2)
    assert alone > 0
    assert reported > 0


def test_a_front_end_knows_instances_by_their_reports() -> None:
    core = frontend_cost.make_core("prefix_hits", 8, 2)
    assert [peer.roles for peer in core.router.peers.values()] == ["PD", "PD", "PD", "E"] * 2
    assert {peer.host for peer in core.router.peers.values()} == {"host0", "host1"}
    reports = frontend_cost.Reports(core, Random(1))
    first, later = reports.draw(), [reports.draw() for _ in range(40)]
    assert first.name in core.router.peers
    assert first.name != FRONTEND
    again = next(each for each in later if each.name == first.name)
    keys = [{each.cached["kv"][at : at + 8] for at in range(0, 4096, 8)} for each in (first, again)]
    assert 0 < len(keys[0] - keys[1]) <= frontend_cost.CHANGED * 41


@pytest.mark.slow
async def test_tokens_are_measured() -> None:
    found = await frontend_cost.measure_tokens(2, 16, 8, 1)
    assert list(found) == list(frontend_cost.READERS)
    assert all(request_s > 0 for request_s, _ in found.values())
