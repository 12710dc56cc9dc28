"""Host time of steps with prefill chunks: the benchmark runs, in a process of its own, whose Triton has no device."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.paths import ROOT


@pytest.mark.slow
def test_a_recording_spares_the_host_most_of_its_time() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    asked = [sys.executable, "-m", "benchmarks.steps.prefill_steps"]
    said = subprocess.run(asked, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=True).stdout
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines()[2:]]
    assert [row[0] for row in rows][:2] == ["64 tokens", "128 tokens"]
    assert int(rows[0][3]) == 324, "nine kernels a layer, attention in splits, the model's own"
    recorded = {row[0]: row[5] for row in rows}
    assert recorded.pop("1,024 tokens") == "eager"
    assert all(float(each) * 5 < float(row[2]) for each, row in zip(recorded.values(), rows, strict=False))
