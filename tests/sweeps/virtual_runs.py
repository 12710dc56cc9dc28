"""Runs in virtual time to which all happens at once that can happen (``support.together``), as many as you like.

    python tests/sweeps/virtual_runs.py [--runs 20000] [--first 0] [--processes 2]

Prints what happened how often, and how requests ended. Each run that a check stops is named with its reason, and makes
the exit status 1.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from support.together import play, together

PER_TASK = 100


def play_some(seeds: range) -> tuple[Counter[str], list[str]]:
    """Play these runs. Returns what happened, and of each run that a check stopped its seed and why."""
    seen, stopped = Counter[str](), []
    for seed in seeds:
        try:
            seen += play(together(seed))
        except Exception as error:
            stopped.append(f"seed {seed}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return seen, stopped


def play_all(first: int, runs: int, processes: int) -> tuple[Counter[str], list[str]]:
    """Play so many runs in so many processes; stopped ones are printed as they come."""
    tasks = [range(at, min(at + PER_TASK, first + runs)) for at in range(first, first + runs, PER_TASK)]
    seen, stopped = Counter[str](), list[str]()
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for some, failed in pool.imap_unordered(play_some, tasks):
            seen += some
            stopped += failed
            print("\n".join(failed), end="\n" * bool(failed), flush=True)
    return seen, stopped


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--processes", type=int, default=2)
    given = parser.parse_args(argv)
    seen, stopped = play_all(given.first, given.runs, given.processes)
    for what, times in sorted(seen.items()):
        print(f"{times:>10,} {what}")
    print(f"{given.runs:,} runs, of which {len(stopped)} were stopped by a check")
    return 1 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
