"""ucx beside nixl is another medium (its UCX is a second copy): what tests ucx alone gets a process without nixl."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import pytest


class UcxAlone:
    """A pytest plugin. The tests of one file that are marked ``ucx_alone`` share such a process: pytest starts slowly.

    ``_said``: by test, what that process said of it, and has not been told yet.
    """

    def __init__(self) -> None:
        self._said: dict[str, ElementTree.Element] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if not is_alone(pyfuncitem) or not any(name.startswith("nixl") for name in sys.modules):
            return None
        if pyfuncitem.nodeid not in self._said:
            self._run([item for item in pyfuncitem.session.items if item.path == pyfuncitem.path and is_alone(item)])
        said = self._said.pop(pyfuncitem.nodeid)
        if (skipped := said.find("skipped")) is not None:
            pytest.skip(skipped.get("message", ""))
        problems = [problem.text or "" for kind in ("failure", "error") for problem in said.findall(kind)]
        assert not problems, "in a process of its own:\n" + "\n".join(problems)
        return True

    def _run(self, items: Sequence[pytest.Item]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.xml")
            command = [sys.executable, "-m", "pytest", "-q", "-m", "", "-p", "no:cacheprovider", "-n", "0"]
            command += [f"--junitxml={report}", *(item.nodeid for item in items)]
            done = subprocess.run(command, cwd=items[0].config.rootpath, capture_output=True, text=True)
            assert report.exists(), f"no report of {' '.join(command)}:\n{done.stdout[-8000:]}{done.stderr[-4000:]}"
            told = {case.get("name"): case for case in ElementTree.parse(report).iter("testcase")}
        for item in items:
            assert item.name in told, f"{item.name} was not run:\n{done.stdout[-8000:]}{done.stderr[-4000:]}"
        self._said |= {item.nodeid: told[item.name] for item in items}


def is_alone(item: pytest.Item) -> bool:
    return item.get_closest_marker("ucx_alone") is not None
