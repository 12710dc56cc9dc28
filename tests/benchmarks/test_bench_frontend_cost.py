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


@pytest.mark.parametrize("reader", frontend_cost.READERS)
async def test_frames_are_taken_by_the_real_front_end_and_read(reader: str) -> None:
    bench = frontend_cost.FrameBench(6, 2)
    assert sorted(map(len, bench.sent.values())) == [3, 3]
    for step in range(4):
        for frame in bench.frames(step):
            assert await bench.take(frame) > 0
    assert [stream.token_count for stream in bench.streams] == [4] * 6
    assert await frontend_cost.measure_frames(reader, False, 8, 2, steps=5) > 0


@pytest.mark.slow
def test_what_frames_cost_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    frontend_cost.print_frames(4, 2, 1)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 * len(frontend_cost.READERS)
    assert all(line.endswith("us a further token") for line in said)
