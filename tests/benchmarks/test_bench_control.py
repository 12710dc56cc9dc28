"""The benchmark of control: that it measures, not what."""

from __future__ import annotations

import pytest

from benchmarks.setting import Setting
from benchmarks.transfers import control
from support.checkpoint_files import checkpoint
from trinity.request import Output


async def test_hops_between_processes() -> None:
    seconds = await control.hops(50)
    assert len(seconds) == 45
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


async def test_migrations_of_paced_instances() -> None:
    found = await control.paced(4096.0, "shm", 2)
    assert list(found) == ["E to P", "P to D"]
    assert all(len(seconds) == 2 for seconds in found.values())


def test_share() -> None:
    spans = {"encode": 0.5, "ep_migration": 0.01, "prefill": 0.3, "pd_migration": 0.03, "decode": 0.16}
    assert control.share(Output(request_id="id", latency_s=2.0, spans=spans)) == pytest.approx(0.02)


@pytest.mark.slow
def test_the_whole() -> None:
    result = control.run(Setting(quick=True, checkpoint=checkpoint))
    assert result.tables[0].rows[0][0] == "a hop of control"
    assert len(result.tables[0].rows) == 5
    assert 0 < result.values["share"] < 1
