"""One launcher with torch for the pipelines of many files: to import torch and a model takes it four seconds of CPU.

``conftest.torch_launcher`` starts it. What needs an environment of its own (settings of UCX, a plug-in) keeps its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from trinity.remote.supervision import fork_client
from trinity.remote.supervision.fork_client import Launcher


@contextmanager
def sharing(launcher: Launcher) -> Iterator[Launcher]:
    """Have pipelines that are made within fork their instances from it, as ``kept_launcher`` does with a new one."""
    fork_client._kept.append(launcher)
    try:
        yield launcher
    finally:
        fork_client._kept.remove(launcher)
