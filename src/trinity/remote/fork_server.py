"""Fork server: a process that imports torch once and forks instances, so that each starts in a fraction of a second.

Speaks JSON lines. {"id", "address", "secret", "model", "once", "shared", "tls"} on stdin forks an instance; on stdout
are {"ready"}, {"taken"} (an order's id), {"id", "process"} or {"id", "error"}, and {"exited", "status"}; an instance
itself says {"listening", "process"} there, its address. Whatever else writes to stdout finds stderr there. It ends
when stdin ends, and its children with it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PACED_MODULES = ("trinity.remote.server",)
MODEL_MODULES = ("torch", "transformers", *PACED_MODULES, "trinity.stages.language", "trinity.stages.encode")
_preloaded: set[str] = set()
_answers = 1  # descriptor of the answers


def main() -> None:
    """Fork an instance for every order on stdin, and report those that end, until stdin ends."""
    keep_answers()
    preload(PACED_MODULES if "--paced" in sys.argv else MODEL_MODULES)
    wake_read, wake_write = os.pipe()
    for end in (wake_read, wake_write):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends what it started
    write_message({"ready": os.getpid()})
    children: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0, wake_read], [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            reap_children(children)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                return end_all(children)
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                order = json.loads(line)
                write_message({"taken": order["id"]})
                preload_model(order["model"])
                process = fork_instance(order)
                if process:
                    children.add(process)


def keep_answers() -> None:
    """Have the answers to ourselves: what modules print, and what C libraries do, goes to stderr."""
    global _answers
    _answers = os.dup(1)
    os.dup2(2, 1)


def preload(modules: Sequence[str]) -> None:
    """Import the modules that every instance needs; this takes seconds and starts no thread."""
    for module in modules:
        importlib.import_module(module)


def preload_model(directory: str) -> None:
    """Import the modules of a checkpoint's classes, which takes seconds. Errors are left for the instance to report."""
    if not directory or directory in _preloaded:
        return
    _preloaded.add(directory)
    with contextlib.suppress(Exception):
        from trinity.runtime.loader import import_model_classes

        import_model_classes(Path(directory))


def write_message(message: dict[str, Any]) -> None:
    """Write one JSON line to what stdout was."""
    os.write(_answers, json.dumps(message).encode() + b"\n")


def reap_children(children: set[int]) -> None:
    """Report every child that has ended, with its exit code."""
    for process in list(children):
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            children.discard(process)
            write_message({"exited": process, "status": os.waitstatus_to_exitcode(status)})


def end_all(children: set[int]) -> None:
    """Kill every child and wait for its end."""
    for process in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)


def fork_instance(order: dict[str, Any]) -> int:
    """Fork an instance as ordered and return its process number, 0 if that fails; the child never returns."""
    launcher = os.getpid()
    try:
        process = os.fork()
    except OSError as error:  # no memory, or too many processes: this order's fault alone
        write_message({"id": order["id"], "error": str(error)})
        return 0
    if process:
        write_message({"id": order["id"], "process": process})
        return process
    code = 1
    try:
        die_with_parent(launcher)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if order.get("shared"):
            os.environ.setdefault("UCX_POSIX_DIR", order["shared"])
        from trinity.remote.server import serve_instance
        from trinity.remote.tls import TLSConfig

        tls = TLSConfig(*order["tls"]) if order.get("tls") else None
        secret = bytes.fromhex(order["secret"])
        code = serve_instance(order["address"], secret, say_listening, once=order["once"], tls=tls)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say_listening(bound: object) -> None:
    """Say where this instance listens, and leave stdout's pipe to the launcher: it must end with that."""
    write_message({"listening": str(bound), "process": os.getpid()})
    os.close(_answers)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends."""
    import ctypes

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the call above
        os._exit(1)


if __name__ == "__main__":
    main()
