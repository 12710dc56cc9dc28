"""Fork server: a process that imports torch once and forks instances, so that each starts in a fraction of a second.

Speaks JSON lines. {"id", "address", "secret", "model", "once", "shared", "tls"} on stdin forks an instance; on stdout
are {"ready"}, {"taken"} (an order's id), {"id", "process", "born"} or {"id", "error"}. An instance says the former
itself as well, as this process may end before it has, and {"listening", "id"}, its address. Between two pipelines of
its program, {"rest"} (seconds) has it say {"idle"} after so long without an order, and {"wake"} (a mark) is answered by
{"awake"}. Whatever else writes to stdout finds stderr there. It ends when stdin does, and in place of a rest, if it is
no more as it began; the kernel ends it with its program. Instances end with the program, too, not with this process.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trinity.errors.parent_process import die_with_holder, name_process
from trinity.remote.supervision.process_identity import describe_inheritance, read_start

PACED_MODULES = ("trinity.remote.server",)
MODEL_MODULES = ("torch", "transformers", *PACED_MODULES, "trinity.stages.language", "trinity.stages.encode")
_preloaded: set[str] = set()
_answers = 1  # descriptor of the answers


def main() -> None:
    """Fork an instance for every order on stdin, until that or the program ends.

    The number among the arguments is the descriptor of the program's lifeline.
    """
    lifeline = next(int(each) for each in sys.argv[1:] if each.isdigit())
    die_with_holder(lifeline)
    keep_answers()
    name_process("launch")
    gc.disable()  # modules stay: looking through them again and again is a tenth of the time that imports take
    preload(PACED_MODULES if "--paced" in sys.argv else MODEL_MODULES)
    gc.freeze()
    gc.enable()
    ended, bequest = watch_children(), describe_bequest()
    write_message({"ready": os.getpid()})
    pending, rested = b"", math.inf
    while True:
        wait_s = None if rested == math.inf else max(0.0, rested - time.monotonic())
        ready, _, _ = select.select([0, ended], [], [], wait_s)
        if ended in ready:
            reap_children(ended)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            orders = [json.loads(line) for line in lines]
            for order in orders:
                rested = carry_out(order, lifeline)
            if any("rest" in each and describe_bequest() != bequest for each in orders):
                break
        elif time.monotonic() >= rested:
            rested = math.inf
            write_message({"idle": os.getpid()})
    os._exit(0)  # torch would take a third of a second to end in order


def describe_bequest() -> tuple[object, ...]:
    """Describe what a fork of this process would have from it, beside its modules: what imports may have changed.

    A thread, or a context on a device (which has threads and open files), makes each fork of it useless. In a sandbox
    that shows no process nobody can tell: two descriptions are never equal there.
    """
    try:
        threads, files = (sorted(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd"))
    except OSError:
        return (object(),)
    return len(threads), files, describe_inheritance()


def watch_children() -> int:
    """Return a descriptor that can be read once a child has ended; signals of the terminal are for the program."""
    ended, end = os.pipe()
    for each in (ended, end):
        os.set_blocking(each, False)
    signal.set_wakeup_fd(end, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends what it started
    return ended


def carry_out(order: dict[str, Any], lifeline: int) -> float:
    """Carry out an order; return when it will have rested, on the monotonic clock."""
    if "rest" in order:
        return time.monotonic() + float(order["rest"])
    if "wake" in order:
        write_message({"awake": order["wake"]})
    else:
        write_message({"taken": order["id"]})
        preload_model(order["model"])
        fork_instance(order, lifeline)
    return math.inf


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
        from trinity.runtime.model_classes import import_model_classes

        import_model_classes(Path(directory))


def write_message(message: dict[str, Any]) -> None:
    """Write one JSON line to what stdout was."""
    os.write(_answers, json.dumps(message).encode() + b"\n")


def reap_children(ended: int) -> None:
    """Take note of every child that has ended: their program hears of that by itself."""
    with contextlib.suppress(BlockingIOError):
        os.read(ended, 4096)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def fork_instance(order: dict[str, Any], lifeline: int) -> None:
    """Fork an instance as ordered; the child never returns."""
    try:
        process = os.fork()
    except OSError as error:  # no memory, or too many processes: this order's fault alone
        return write_message({"id": order["id"], "error": str(error)})
    if process:  # which has not been waited for: its number is no other's
        return write_message({"id": order["id"], "process": process, "born": read_start(process)})
    code = 1
    try:
        die_with_holder(lifeline)
        write_message({"id": order["id"], "process": os.getpid(), "born": read_start(os.getpid())})
        gc.freeze()
        importlib.invalidate_caches()  # what has been installed since this launcher began is found
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        if order.get("shared"):
            os.environ.setdefault("UCX_POSIX_DIR", order["shared"])
        from trinity.remote.channel.tls import TLSConfig
        from trinity.remote.server import serve_instance

        tls = TLSConfig(*order["tls"]) if order.get("tls") else None
        secret = bytes.fromhex(order["secret"])
        announce = functools.partial(say_listening, order["id"])
        code = serve_instance(order["address"], secret, announce, once=order["once"], tls=tls)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say_listening(mark: str, bound: object) -> None:
    """Say where this instance listens, and leave stdout's pipe to the launcher: it must end with that."""
    write_message({"listening": str(bound), "id": mark})
    os.close(_answers)


if __name__ == "__main__":
    main()
