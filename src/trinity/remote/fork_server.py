"""Launcher: a process that has imported torch once and forks instances, so that each starts in a fraction of a second.

Speaks JSON lines: {"id", "address", "secret", "model", "once"} on stdin starts an instance; stdout says {"ready"},
{"id", "process"} and {"exited", "status"}. Its children die with it, and it ends with its stdin.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
PACED = ("trinity.remote.server",)
COMPUTING = ("torch", "transformers", *PACED, "trinity.stages.language", "trinity.stages.encode")
_preloaded: set[str] = set()


def main() -> None:
    preload(PACED if "--paced" in sys.argv else COMPUTING)
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle: it ends what it started
    say({"ready": os.getpid()})
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            reap(children)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return end_all(children)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                preload_model(order["model"])
                children.add(start(order))


def preload(modules: Sequence[str]) -> None:
    """What every instance needs and what takes seconds to import; none of it starts a thread."""
    for module in modules:
        importlib.import_module(module)


def preload_model(directory: str) -> None:
    """Import the modules of a checkpoint's classes, which takes seconds; an instance reports what is wrong with it."""
    if not directory or directory in _preloaded:
        return
    _preloaded.add(directory)
    with contextlib.suppress(Exception):
        from transformers import AutoConfig
        from transformers.models.auto.modeling_auto import MODEL_MAPPING

        from trinity.stages.models.loader import find_model_class

        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        find_model_class(config)
        for name in config.sub_configs:
            MODEL_MAPPING.get(type(getattr(config, name)), None)


def say(message: dict[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def reap(children: set[int]) -> None:
    """Report every child that has ended."""
    for process in list(children):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            children.discard(process)
            say({"exited": process, "status": os.waitstatus_to_exitcode(status)})


def end_all(children: set[int]) -> None:
    for process in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def start(order: dict[str, Any]) -> int:
    launcher, process = os.getpid(), os.fork()
    if process:
        say({"id": order["id"], "process": process})
        return process
    code = 1
    try:
        die_with_parent(launcher)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        from trinity.remote.server import serve

        code = serve(order["address"], bytes.fromhex(order["secret"]), once=order["once"])
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def die_with_parent(parent: int) -> None:
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was gone before it could take anybody with it
        os._exit(1)


if __name__ == "__main__":
    main()
