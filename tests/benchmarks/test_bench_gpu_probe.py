"""The first look at a machine with a GPU: what a CPU can run of it, what it says without one, and that it goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.probe_items import ITEMS
from support.paths import ROOT

PROBE = [sys.executable, str(ROOT / "benchmarks" / "gpu" / "probe.py")]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT / "src")}


def look(path: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit code, findings and the last line that was printed."""
    command = [*PROBE, "--json", str(path), *arguments]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(path.read_text()), done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_what_a_cpu_can_run_runs(tmp_path: Path) -> None:
    names = ("machine", "attention", "EPD in a thread", "inproc", "graphs")
    only = [word for name in names for word in ("--only", name)]
    code, found, last = look(tmp_path / "found.json", "--device", "cpu", *only)
    assert [each["outcome"] for each in found] == ["works"] * 4 + ["not here"], found
    assert f"torch {torch.__version__}" in found[0]["sentence"]
    assert "are those of generate()" in found[2]["sentence"]
    assert "64 blocks in" in found[3]["sentence"]
    assert (code, last) == (0, "4 of 5 items work; not here: graphs.")


@pytest.mark.slow
def test_all_that_a_cpu_can_run_runs(tmp_path: Path) -> None:
    code, found, _ = look(tmp_path / "found.json", "--device", "cpu")
    assert code == 0
    assert [each["item"] for each in found] == list(ITEMS)
    there = {each["item"]: each["outcome"] for each in found}
    assert there["1E1P1D in processes"] == there["two lanes"] == there["two steps deep"] == "works"
    assert there["cuda_ipc"] == there["streams"] == there["second GPU"] == "not here"


ODD = """
import os, subprocess, sys, time
from pathlib import Path
from benchmarks.gpu import probe
from benchmarks.gpu.probe_items import Item, NotHere

folder = Path(sys.argv[1])
if len(sys.argv) > 2:
    print(probe.summarise(probe.probe("cuda", 60, (), folder / "none.json")))

def hang(device):
    started = subprocess.Popen(["sleep", "600"])
    (folder / "pid").write_text(str(started.pid))
    time.sleep(600)

def die(device):
    os._exit(7)

def wrong(device):
    raise RuntimeError("this is\\n wrong")

def absent(device):
    raise NotHere("no such thing")

def compiles(device):
    import triton
    for cached in (True, False, True):
        triton.knobs.compilation.listener(src=None, metadata={}, metadata_group={}, times=None, cache_hit=cached)
    return device

probe.ITEMS.clear()
probe.ITEMS.update(
    hang=Item(hang, 2), die=Item(die, 60), wrong=Item(wrong, 60), absent=Item(absent, 60), good=Item(str.upper, 60),
    compiles=Item(compiles, 60)
)
found = probe.probe("cpu", 60, (), folder / "found.json")
print(probe.summarise(found))
print(probe.summarise(probe.probe("cpu", 0.5, ("good",))))
"""


def is_running(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_item_that_hangs_dies_or_fails_ends_no_other(tmp_path: Path) -> None:
    """And where torch sees no GPU every item says so: one process imports all for both."""
    command = [sys.executable, "-c", ODD, str(tmp_path), *(() if torch.cuda.is_available() else ("none",))]
    done = subprocess.run(command, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    found = {each["item"]: each for each in json.loads((tmp_path / "found.json").read_text())}
    outcomes = [each["outcome"] for each in found.values()]
    assert outcomes == ["fails", "fails", "fails", "not here", "works", "works"], done.stderr
    assert found["hang"]["sentence"] == "it did not end within 2 s"
    assert found["die"]["sentence"] == "its process died with exit code 7"
    assert found["wrong"]["sentence"] == "RuntimeError: this is wrong"
    assert found["good"]["sentence"] == "CPU"
    assert found["compiles"]["sentence"] == "cpu; 1 kernels compiled, 2 found in Triton's cache"
    *_, first, _, second = done.stdout.splitlines()
    assert first == "2 of 6 items work; failed: hang, die, wrong; not here: absent."
    assert second == "0 of 1 items work; not here: good."
    if not torch.cuda.is_available():
        absent = json.loads((tmp_path / "none.json").read_text())
        said = {(each["outcome"], each["sentence"]) for each in absent}
        assert said == {("not here", f"no GPU: torch {torch.__version__} sees none")}
        assert f"0 of {len(absent)} items work; not here: machine, limits, " in done.stdout
    until = time.monotonic() + 30
    while is_running(int((tmp_path / "pid").read_text())) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(int((tmp_path / "pid").read_text())), "what an item has started outlives it"
