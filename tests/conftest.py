"""What holds for every test: one thread, no hub, no GPU unless asked for, nothing blocked, nothing left behind."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from typing import Any

# Before torch is imported by anything: two threads per process on a busy machine cost ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# What is measured stays out of the user's home, and no test finds what an earlier run has left.
os.environ["TRINITY_CACHE"] = tempfile.mkdtemp(prefix="trinity-cache-")

from support import gpu

# Before triton is imported, which transformers may do: without a GPU its kernels run in its interpreter.
if not gpu.has_gpu():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from support import no_hypothesis, quick_interpreter
from support.leak_guard import LeakGuard
from support.loop_guard import LoopGuard
from support.shared_processes import SharedProcesses
from support.ucx_alone import UcxAlone

try:
    from hypothesis import HealthCheck, Phase, settings
except ModuleNotFoundError:  # a foreign machine with a GPU
    no_hypothesis.install()
else:
    # A slow example says that the machine is busy, no more: time is pytest-timeout's business.
    SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]
    settings.register_profile(
        "ci", derandomize=True, print_blob=True, deadline=None, database=None, suppress_health_check=SLOW
    )
    settings.register_profile(
        "thorough",
        max_examples=1000,
        print_blob=True,
        deadline=None,
        suppress_health_check=SLOW,
        phases=list(Phase),
    )
    settings.load_profile("ci")


atexit.register(shutil.rmtree, os.environ["TRINITY_CACHE"], ignore_errors=True)


@atexit.register  # before any other, so it runs after them
def end_quietly() -> None:
    """Close stderr of a worker that used Triton: at exit its bindings list all that execnet's thread still holds."""
    if "PYTEST_XDIST_WORKER" in os.environ and "triton" in sys.modules:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stderr__.fileno() if sys.__stderr__ else 2)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LoopGuard(), "trinity-loop-guard")
    config.pluginmanager.register(LeakGuard(), "trinity-leak-guard")
    config.pluginmanager.register(SharedProcesses(), "trinity-shared-processes")
    config.pluginmanager.register(UcxAlone(), "trinity-ucx-alone")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while modules are imported, and none of what they leave: a fifth of the time it takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Make ready what test modules have imported.

    Make contexts before the guards look for the first time: a test that is first on a GPU leaves nothing behind.
    """
    quick_interpreter.install()
    if any(item.get_closest_marker("gpu") for item in session.items) and gpu.has_gpu():
        gpu.open_contexts()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Escape what UTF-8 cannot say in what a test has logged: xdist's workers end where they cannot send it."""
    report = yield
    report.sections = [(name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections]
    return report


@pytest.fixture(scope="session")
def torch_launcher() -> Iterator[Any]:
    """A launcher for all files that use ``support.shared_launcher``, from its first use to the end."""
    from trinity.remote.supervision.fork_client import Launcher

    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def forked_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork preprocessing processes from this one, as ``trinity serve`` does: to load again takes 5 s of CPU each."""
    monkeypatch.setattr("trinity.preprocess.worker_processes.forks_itself", True)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    if "torch" in sys.modules and sys.modules["torch"].get_num_threads() != 1:
        sys.modules["torch"].set_num_threads(1)
