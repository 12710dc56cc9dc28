"""First look at a machine with a GPU, in plain words: python benchmarks/gpu/probe.py [--seconds 230] [--json FILE]

Each item runs in a process of its own, for a bounded time: one that fails, hangs or loses the device ends nothing else.
Prints a sentence for each as it ends, and the JSON has them too; the exit code is 0 where nothing fails. An item that
needs what is not here says so. ``--device cpu`` runs what can run on a CPU.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

from benchmarks.gpu.probe_items import ITEMS, NotHere

Outcome = Literal["works", "fails", "not here"]
GRACE_S = 5.0  # for a process that was asked to end


@dataclass
class Finding:
    """Outcome of one item, in a sentence, and how long it took."""

    item: str
    outcome: Outcome
    sentence: str
    seconds: float

    def line(self) -> str:
        return f"{self.outcome.upper():8} {self.item}: {self.sentence} ({self.seconds:.1f} s)"


def run_item(name: str, device: str, seconds: float, run: Callable[[str], str] | None = None) -> Finding:
    """Run an item in a forked process, which is killed after ``seconds``. This process never touches the GPU.

    ``run`` (None): a function in place of the item's own.
    """
    run = run or ITEMS[name].run
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)
    child = fork.Process(target=_answer, args=(run, device, theirs), name=f"probe {name}")
    started = time.monotonic()
    child.start()
    theirs.close()
    answer: tuple[Outcome, str] = ("fails", f"it did not end within {seconds:.0f} s")
    try:
        if ours.poll(seconds):
            answer = ours.recv()
            child.join(GRACE_S)
    except EOFError:
        child.join(GRACE_S)
        answer = ("fails", f"its process died with exit code {child.exitcode}")
    finally:
        ours.close()
        _end(child)
    return Finding(name, *answer, time.monotonic() - started)


def _answer(run: Callable[[str], str], device: str, pipe: Connection) -> None:
    os.setsid()  # so that instances it has started end with it
    answer: tuple[Outcome, str]
    kernels = _watch_kernels()
    try:
        answer = ("works", run(device))
    except NotHere as error:
        answer = ("not here", str(error))
    except BaseException as error:
        answer = ("fails", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
    if kernels:
        found = kernels.count(True)
        answer = (answer[0], f"{answer[1]}; {len(kernels) - found} kernels compiled, {found} found in Triton's cache")
    pipe.send(answer)


def _watch_kernels() -> list[bool]:
    """Have Triton, where it is installed, note for each kernel of this process if it was in the cache."""
    found: list[bool] = []
    if importlib.util.find_spec("triton") is not None:
        from triton import knobs

        knobs.compilation.listener = lambda *, cache_hit, **_: found.append(cache_hit)
    return found


def _end(child: Any) -> None:
    """Kill what is left of an item and of the processes that it has started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join(GRACE_S)


def probe(device: str, seconds: float, names: Sequence[str] = (), path: Path | None = None) -> list[Finding]:
    """Run the items in turn for at most ``seconds`` in all; writes what is known to ``path`` after each."""
    until = time.monotonic() + seconds
    found: list[Finding] = []
    for name in names or tuple(ITEMS):
        left = until - time.monotonic()
        if left < 1:
            found.append(Finding(name, "not here", "no time was left for it", 0.0))
        else:
            found.append(run_item(name, device, min(left, ITEMS[name].seconds)))
        print(found[-1].line(), flush=True)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps([asdict(each) for each in found], indent=1), encoding="utf-8")
    return found


def summarise(found: Sequence[Finding]) -> str:
    """Say in a sentence how many items work, and which do not."""
    names = {outcome: [each.item for each in found if each.outcome == outcome] for outcome in ("fails", "not here")}
    works = sum(each.outcome == "works" for each in found)
    parts = [f"{works} of {len(found)} items work"]
    parts += [
        f"{word}: {', '.join(names[key])}"
        for key, word in (("fails", "failed"), ("not here", "not here"))
        if names[key]
    ]
    return "; ".join(parts) + "."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ... or cpu")
    parser.add_argument("--seconds", type=float, default=230.0, help="for all items together")
    parser.add_argument("--only", choices=tuple(ITEMS), action="append", default=[], help="one item; several times")
    parser.add_argument("--json", type=Path, default=None, help="where the findings go as JSON")
    asked = parser.parse_args(arguments)
    found = probe(asked.device, asked.seconds, asked.only, asked.json)
    print(summarise(found))
    return int(any(each.outcome == "fails" for each in found))


if __name__ == "__main__":
    raise SystemExit(main())
