"""The freezing of processes, which tests of failures rest on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.freezing import freeze, thread_states

PROGRAM = """
import threading, time
for _ in range(3):
    threading.Thread(target=lambda: [None for _ in iter(int, 1)], daemon=True).start()
print("runs", flush=True)
time.sleep(1000)
"""


def test_all_threads_have_stopped_at_once() -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE) as busy:
        try:
            assert busy.stdout is not None
            assert busy.stdout.readline() == b"runs\n"
            assert "T" not in thread_states(busy.pid)
            freeze(busy.pid)
            assert thread_states(busy.pid) == ["T"] * 4
        finally:
            busy.kill()
    with pytest.raises(ProcessLookupError):
        freeze(busy.pid)
