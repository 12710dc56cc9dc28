"""The process that forks preprocessing processes for tests: ``python worker_forks.py SOCKET MODEL``.

Each order on the socket comes with descriptors: where to tell the exit code, and what the worker gets under the numbers
that the order names. It is answered by the worker's process number. Once the socket is closed, this process ends.
"""

from __future__ import annotations

import fcntl
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

PROGRAM = "trinity.preprocess.worker"
FREE = 256  # descriptors from here on are nobody's


def main(number: int, model: str) -> None:
    from trinity.preprocess.processor import RequestProcessor

    RequestProcessor(model).close()
    assert threading.active_count() == 1
    orders = socket.socket(fileno=number)
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}
    while True:
        ready, _, _ = select.select([number, woken], [], [])
        if woken in ready:
            os.read(woken, 4096)
            reap(children)
        if number in ready:
            data, descriptors, _, _ = socket.recv_fds(orders, 1 << 20, 16)
            if not data:
                return
            pid = os.fork()
            if not pid:
                run(json.loads(data), descriptors[1:], [number, woken, wake, descriptors[0], *children.values()])
            children[pid] = descriptors[0]
            orders.send(str(pid).encode())
            for each in descriptors[1:]:
                os.close(each)


def reap(children: dict[int, int]) -> None:
    for pid, tell in list(children.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del children[pid]
            with suppress(BrokenPipeError):  # nobody asks any more
                os.write(tell, str(os.waitstatus_to_exitcode(status)).encode())
            os.close(tell)


def run(order: dict[str, Any], given: Sequence[int], others: Sequence[int]) -> None:
    """Be the worker, and never return."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, FREE) for each in given]
        for each in (*given, *others):
            os.close(each)
        for each, wanted in zip(moved, order["numbers"], strict=True):
            os.dup2(each, wanted)
            os.close(each)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.chdir(order["folder"])
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = [PROGRAM, *order["arguments"]]
        sys.path[0] = order["folder"]
        runpy.run_module(PROGRAM, run_name="__main__", alter_sys=True)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
