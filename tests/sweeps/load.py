"""Runs the tests that start processes again and again beside busy loops: what fails then failed of load alone.

``make test-load`` runs it. The tests are those whose file starts processes, found by what the file says, and the few
that failed of load before. Each round is one run of pytest beside ``--loops`` processes that only count.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
STARTS = re.compile(r"hosting=\"process\"|running_instances|InstanceSupervisor|os\.kill|subprocess\.Popen")
FAILED_BEFORE = (
    "tests/bench/test_commands.py",
    "tests/benchmarks/test_bench_gpu.py",
    "tests/benchmarks/test_bench_scale_live.py",
    "tests/core/test_broken_cores.py",
    "tests/preprocess/text/test_grammar_trials.py",
    "tests/project/test_demo.py",
    "tests/transport/test_networks.py",
    "tests/transport/test_nixl_push.py",
)
NOT_OF_LOAD = ("tests/project/test_packaging.py", "tests/project/test_site.py")  # builds: one process, no clock


def find_tests(root: Path) -> list[str]:
    """List the files of tests that start processes, and those that failed of load before; paths from ``root``."""
    found = {
        path.relative_to(root).as_posix()
        for path in (root / "tests").rglob("test_*.py")
        if STARTS.search(path.read_text(encoding="utf-8"))
    }
    return sorted((found | {name for name in FAILED_BEFORE if (root / name).exists()}) - set(NOT_OF_LOAD))


@contextmanager
def keep_busy(loops: int) -> Iterator[None]:
    """Run as many processes that only count, until the block ends."""
    command = [sys.executable, "-c", "while True: pass"]
    busy = [subprocess.Popen(command) for _ in range(loops)]
    try:
        yield
    finally:
        for each in busy:
            each.kill()
            each.wait()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--loops", type=int, default=30)
    parser.add_argument("tests", nargs="*", help="in place of those that are found")
    asked = parser.parse_args(argv)
    tests, failed = asked.tests or find_tests(ROOT), 0
    print(f"{len(tests)} files of tests, {asked.rounds} rounds beside {asked.loops} busy loops", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadgroup", "-o", "timeout=1200", *tests]
    with keep_busy(asked.loops):
        for number in range(1, asked.rounds + 1):
            started = time.monotonic()
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            last = done.stdout.strip().splitlines()[-1:] or [done.stderr[-400:]]
            print(f"round {number}: {last[0]} ({time.monotonic() - started:.0f} s)", flush=True)
            if done.returncode:
                failed += 1
                print("\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))))
    print(f"{failed} of {asked.rounds} rounds failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
