"""Tests of one file run in one process, and so do files that a mark joins; a mark splits a file too."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from support.paths import PYTHON_PATH

pytest_plugins = ["pytester"]

CONFTEST = """
from support.shared_processes import SharedProcesses

def pytest_configure(config):
    config.pluginmanager.register(SharedProcesses())
"""
PLAIN = """
import time, pytest

@pytest.mark.parametrize("number", range(4))
def test_plain(number):
    time.sleep(0.02)  # for the other process to take its share
"""
JOINED = PLAIN.replace("import time, pytest", "import time, pytest\npytestmark = pytest.mark.xdist_group('both')")
SPLIT = """
import time, pytest

@pytest.mark.parametrize("number", [pytest.param(n, marks=pytest.mark.xdist_group(f"part {n % 2}")) for n in range(8)])
def test_split(number):
    time.sleep(0.02)
"""


def test_groups_share_a_process(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", PYTHON_PATH)
    pytester.makeconftest(CONFTEST)
    plain = {f"test_plain_{number}": PLAIN for number in range(3)}
    pytester.makepyfile(**plain, test_join_1=JOINED, test_join_2=JOINED, test_split=SPLIT)
    plugins = ("no:asyncio", "no:hypothesispytest", "no:cacheprovider", "no:anyio")
    run = pytester.runpytest_subprocess(
        "-n", "2", "--dist", "loadgroup", "-v", *[word for each in plugins for word in ("-p", each)]
    )
    run.assert_outcomes(passed=28)
    processes: dict[str, set[str]] = defaultdict(set)
    for line in run.outlines:
        if found := re.match(r"\[(gw\d)\] .* PASSED test_(\w+)\.py::test_\w+\[(\d)\]\s*$", line):
            process, file, number = found.groups()
            group = {"join_1": "both", "join_2": "both", "split": f"part {int(number) % 2}"}.get(file, file)
            processes[group].add(process)
    assert sorted(processes) == ["both", "part 0", "part 1", "plain_0", "plain_1", "plain_2"], "ids are whole again"
    assert all(len(found) == 1 for found in processes.values()), processes
    assert set.union(*processes.values()) == {"gw0", "gw1"}
