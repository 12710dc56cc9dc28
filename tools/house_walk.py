"""One image request on its way through a pipeline: the files that it enters, and the calls between them.

The request is really served, on a tiny checkpoint. A call is one entry of a Python function or the resumption of a
coroutine or generator, on any thread; its caller is the frame right below. Calls whose caller is outside the package,
an event loop's for instance, enter a file but come from none. How often a thread wakes depends on timing, so that
counts of calls vary by some percent from run to run; distinct arrows between files vary less.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from tools.house_source import Modules, room

PLACEMENTS = ("EPD", "1E1P1D")
PROMPT, TOKENS = "<image>\nWhat is this?", 4
SETTLE_S = 0.3  # after the last token, instances give back blocks and report once more

Calls = Mapping[tuple[str | None, str], int]


class Recorder:
    """Counts calls by (calling module or None, called module) while ``recording()``."""

    def __init__(self, package: str) -> None:
        self._package, self._on = package, False
        self._seen: list[tuple[str | None, str]] = []  # appending is safe from several threads

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if self._on and event == "call" and (called := self._module(frame)):
            self._seen.append((self._module(frame.f_back), called))

    def _module(self, frame: FrameType | None) -> str | None:
        name = str(frame.f_globals.get("__name__")) if frame else ""
        return name if f"{name}.".startswith(f"{self._package}.") else None

    @contextmanager
    def hearing_threads(self) -> Iterator[None]:
        """Hear each thread that starts inside the block, when it comes to recording."""
        threading.setprofile(self)
        try:
            yield
        finally:
            threading.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record this thread, and those that were started to be heard."""
        self._on = True
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._on = False

    def calls(self) -> Counter[tuple[str | None, str]]:
        return Counter(self._seen)


class Walk(NamedTuple):
    """Files that a request enters, its calls between files of two packages, of one package, and of the root."""

    files: int
    crossing: int
    within: int
    flat: int


def walk_figures(calls: Calls, modules: Modules) -> Walk:
    """Sum up recorded calls. The files at the root are one package here: the flat pile."""
    total: Counter[str] = Counter()
    for (caller, called), times in calls.items():
        if caller and caller != called:
            rooms = [where if (where := room(name, modules)).endswith("/") else "" for name in (caller, called)]
            total["crossing" if rooms[0] != rooms[1] else "within"] += times
            total["flat"] += times if rooms == ["", ""] else 0
    return Walk(len({called for _, called in calls}), total["crossing"], total["within"], total["flat"])


async def _serve_image(placement: str, checkpoint: Path, recorder: Recorder) -> None:
    import numpy as np

    import trinity

    image: Any = np.random.default_rng(1).integers(0, 255, (56, 84, 3), dtype=np.uint8)
    sampling = trinity.Sampling(ignore_eos=True)
    async with trinity.Pipeline(checkpoint, placement, dtype="float32") as pipe:
        with recorder.recording():
            await pipe.complete(trinity.Request(PROMPT, images=[image], max_tokens=TOKENS, sampling=sampling))
            await asyncio.sleep(SETTLE_S)


def record_image(placement: str, checkpoint: Path) -> Calls:
    """Calls of one image request of four tokens on ``placement``, from its submission until all is quiet again."""
    recorder = Recorder("trinity")
    with recorder.hearing_threads():
        asyncio.run(_serve_image(placement, checkpoint, recorder))
    return recorder.calls()


def walks(modules: Modules, checkpoint: Path) -> dict[str, Walk]:
    """Figures by placement, each on instances of its own over one tiny checkpoint."""
    return {placement: walk_figures(record_image(placement, checkpoint), modules) for placement in PLACEMENTS}


@contextmanager
def tiny_checkpoint() -> Iterator[Path]:
    """Tiny LLaVA with random weights, in a folder that goes with the block."""
    from trinity.testing.checkpoints import build_checkpoint

    with tempfile.TemporaryDirectory() as folder:
        yield build_checkpoint("llava", Path(folder) / "llava")
