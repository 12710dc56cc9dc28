"""Fork server: a process that imports torch once and forks instances, so that each starts in a fraction of a second.

Speaks JSON lines. {"id", "address", "secret", "model", "once", "shared", "tls"} on stdin forks an instance; on stdout
are {"ready"}, {"taken"} (an order's id), {"id", "process"} or {"id", "error"}, and {"exited", "status"}; an instance
itself says {"listening", "process"} there, its address. Between two pipelines of its program, {"rest"} (seconds) has it
say {"idle"} after so long without an order, and {"wake"} (a mark) is answered by {"awake"}. Whatever else writes to
stdout finds stderr there. It ends when stdin or its program does, or it is told {"end"}, and its children with it; so
it does in place of a rest, if it is no more as it began.
"""

from __future__ import annotations

import contextlib
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

from trinity.errors.parent_process import die_with_parent

PACED_MODULES = ("trinity.remote.server",)
LOOK_S = 5.0  # between two looks at whether its program is there
MODEL_MODULES = ("torch", "transformers", *PACED_MODULES, "trinity.stages.language", "trinity.stages.encode")
_preloaded: set[str] = set()
_answers = 1  # descriptor of the answers


def main() -> None:
    """Fork an instance for every order on stdin, and report those that end, until stdin or the program ends.

    The number among the arguments is the program's process: it may have ended before this one looks for its parent.
    """
    program = next(int(each) for each in sys.argv[1:] if each.isdigit())
    keep_answers()
    gc.disable()  # modules stay: looking through them again and again is a tenth of the time that imports take
    preload(PACED_MODULES if "--paced" in sys.argv else MODEL_MODULES)
    gc.freeze()
    gc.enable()
    ended, bequest = watch_children(), describe_bequest()
    write_message({"ready": os.getpid()})
    children: set[int] = set()
    pending, rested = b"", math.inf
    while has_parent(program):  # its stdin may be held open by a copy of the program, which that has forked
        wait_s = max(0.0, min(LOOK_S, rested - time.monotonic()))
        ready, _, _ = select.select([0, ended], [], [], wait_s)
        if ended in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(ended, 4096)
            reap_children(children)
        if 0 in ready:
            data = os.read(0, 65536)
            if not data:
                break
            *lines, pending = (pending + data).split(b"\n")
            orders = [json.loads(line) for line in lines]
            for order in orders:
                rested = carry_out(order, children)
            if any("end" in each or ("rest" in each and describe_bequest() != bequest) for each in orders):
                break
        elif time.monotonic() >= rested:
            rested = math.inf
            write_message({"idle": os.getpid()})
    end_all(children)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch would take a third of a second to end in order


def has_parent(program: int) -> bool:
    """Tell if the program is there still; out of its sight, in a PID namespace below its own, nobody can."""
    return os.getppid() in (program, 0)


def describe_bequest() -> tuple[object, ...]:
    """Describe what a fork of this process would have from it, beside its modules: what imports may have changed.

    A thread, or a context on a device (which has threads and open files), makes each fork of it useless. In a sandbox
    that shows no process nobody can tell: two descriptions are never equal there.
    """
    from trinity.remote.process_identity import describe_inheritance

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


def carry_out(order: dict[str, Any], children: set[int]) -> float:
    """Carry out an order; return when it will have rested, on the monotonic clock."""
    if "end" in order:
        return math.inf
    if "rest" in order:
        return time.monotonic() + float(order["rest"])
    if "wake" in order:
        write_message({"awake": order["wake"]})
        return math.inf
    write_message({"taken": order["id"]})
    preload_model(order["model"])
    process = fork_instance(order)
    if process:
        children.add(process)
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
        gc.freeze()
        importlib.invalidate_caches()  # what has been installed since this launcher began is found
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


if __name__ == "__main__":
    main()
