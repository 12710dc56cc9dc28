"""Setting of benchmarks: checkpoints, prompts, photographs, the machine's facts and how busy others keep it."""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trinity.bench import machine
from trinity.bench.machine import MAX_FOREIGN_SHARE, busy_seconds

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
PHOTOS = ROOT / "examples" / "photos"
CACHE = ROOT / "build" / "bench-checkpoints"
WORDS = (
    "the",
    "light",
    "falls",
    "on",
    "an",
    "old",
    "wall",
    "while",
    "two",
    "boats",
    "wait",
    "for",
    "rain",
    "or",
    "wind",
)


def build_cached(name: str) -> Path:
    """The checkpoint's directory, built when first asked for, and anew when recipes or transformers change."""
    import transformers

    from trinity.testing import checkpoints

    digest = hashlib.sha256(transformers.__version__.encode())
    for source in sorted(Path(checkpoints.__file__).parent.glob("checkpoints*.py")):
        digest.update(source.read_bytes())
    target = CACHE / digest.hexdigest()[:12] / name
    if not (target / "config.json").exists():
        build = checkpoints.build_midsize if name in checkpoints.MIDSIZE_CHECKPOINTS else checkpoints.build_checkpoint
        scratch = target.with_name(f"{name}-{os.getpid()}")
        build(name, scratch)
        scratch.rename(target)
    return target


@dataclass(frozen=True)
class Setting:
    """``quick``: tiny checkpoints and few repetitions, to see that everything runs; its figures mean nothing.

    ``patience_s``: how long a round may wait for others to leave the machine alone. ``minutes``: how long a benchmark
    of many cases may take; the folder ``kept`` has what it did before, and gets the rest (None: kept nowhere).
    """

    quick: bool = False
    patience_s: float = 0.0
    minutes: float = 5.0
    kept: Path | None = None
    checkpoint: Callable[[str], Path] = build_cached
    photos: Sequence[Path] = field(default_factory=lambda: sorted(PHOTOS.glob("*.jpg")))

    def pick(self, name: str, tiny: str) -> Path:
        """The mid-size checkpoint ``name``, or ``tiny`` where quick."""
        return self.checkpoint(tiny if self.quick else name)

    def settle(self) -> None:
        """Return once others take little of the machine, or patience ends."""
        until = time.monotonic() + self.patience_s
        while time.monotonic() < until:
            with ForeignLoad() as load:
                time.sleep(1.0)
            if load.share <= MAX_FOREIGN_SHARE / 2:
                return


def prompt_of(tokenizer: Any, tokens: int, seed: int) -> str:
    """Text of about ``tokens`` tokens, another one for every seed."""
    draw = random.Random(seed)
    words = [draw.choice(WORDS) for _ in range(tokens + 1)]
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(tokenizer(" ".join(words[:middle]))["input_ids"]) <= tokens
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(words[:low])


class ForeignLoad:
    """The share of the machine's CPU time that other processes took within the block: ``.share``, 0 to 1."""

    share = 0.0

    def __enter__(self) -> ForeignLoad:
        self._busy, self._own, self._wall = busy_seconds(), _own_seconds(), time.monotonic()
        return self

    def __exit__(self, *_: object) -> None:
        room = (time.monotonic() - self._wall) * (os.cpu_count() or 1)
        foreign = (busy_seconds() - self._busy) - (_own_seconds() - self._own)
        self.share = min(1.0, max(0.0, foreign / room)) if room > 0 else 0.0


def calm(rounds: Sequence[tuple[float, T]]) -> tuple[list[T], bool]:
    """Of (foreign share, what was measured): what counts, and whether it does; all where every round was disturbed."""
    quiet = [found for share, found in rounds if share <= MAX_FOREIGN_SHARE]
    return (quiet, True) if quiet else ([found for _, found in rounds], False)


def disturbed(which: Sequence[object]) -> list[str]:
    """A note on the figures that had no undisturbed round."""
    named = ", ".join(map(str, which))
    return (
        [f"Others took more than {MAX_FOREIGN_SHARE:.0%} of the machine in every round of: {named}."] if which else []
    )


def _own_seconds() -> float:
    """CPU seconds of this process and of all that descend from it: a launcher's instances are children's children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + _descendants_seconds()


def _descendants_seconds() -> float:
    """Of those that run, with the children of theirs that have ended; 0 where the system does not say."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        parents[int(folder.name)], ticks[int(folder.name)] = int(fields[1]), sum(map(int, fields[11:15]))

    def ours(process: int) -> bool:
        while process in parents:
            process = parents[process]
            if process == os.getpid():
                return True
        return False

    return sum(ticks[each] for each in parents if ours(each)) / os.sysconf("SC_CLK_TCK")


def facts(foreign_load: float = 0.0) -> dict[str, Any]:
    """Collect what a figure depends on: machine, versions, threads, commit, date."""
    import torch

    return {
        **machine.machine_facts(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30),
        "threads": torch.get_num_threads(),
        "foreign_load": foreign_load,
    }
