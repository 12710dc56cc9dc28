"""Agreement of a pipeline's instances: on layouts and model when they meet, on every byte of weights while they serve.

Sampled pages, which every instance shows at its start, tell two checkpoints apart unless they differ in single bytes.
The whole is read by a thread of the lowest priority, and the front end compares the digests: of two that differ the
younger instance is refused.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from trinity.errors import LayoutMismatch
from trinity.memory.weight_digests import LoadedFiles, whole_digest
from trinity.remote.wire import Hello

logger = logging.getLogger("trinity")
LOWEST_PRIORITY = 19


class Dispute(NamedTuple):
    """Another life with other weights: its name and epoch, and what to say of it."""

    name: str
    epoch: int
    why: str


class WeightsAgreement:
    """Digests of the weights that a pipeline serves, by the lives of instances that hold them: all are equal."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], str] = {}

    def compare(self, name: str, epoch: int, digest: str) -> Dispute | None:
        """Take a life's digest, "" where it is not known yet; return one that holds other weights."""
        if digest:
            self._held[name, epoch] = digest
        for (other, its_epoch), held in self._held.items():
            if digest and digest != held:
                text = f"the weights of {name} (digest {digest}) are not those of {other} ({held})"
                hint = "compare both directories: python -m trinity.check --weights MODEL"
                logger.error("%s: the younger is refused; %s", text, hint)
                return Dispute(other, its_epoch, f"{text}; {hint}")
        return None

    def forget(self, name: str, epoch: int) -> None:
        """Take note that a life has ended: once nobody holds them, a pipeline may serve other weights."""
        self._held.pop((name, epoch), None)


def check_layouts(mine: Hello, theirs: Hello) -> None:
    """Raise ``LayoutMismatch``, naming both sides, if they cannot exchange blocks."""
    for kind in mine.layouts.keys() & theirs.layouts.keys():
        if mine.layouts[kind] != theirs.layouts[kind]:
            raise LayoutMismatch(
                f"{kind} blocks differ: {mine.name} has {mine.layouts[kind]}, {theirs.name} has {theirs.layouts[kind]}"
            )
    if mine.fingerprint != theirs.fingerprint or (mine.weights and theirs.weights and mine.weights != theirs.weights):
        text = f"{mine.name} runs model {mine.fingerprint}, {theirs.name} runs {theirs.fingerprint}"
        hint = "python -m trinity.check --weights MODEL tells which file differs"
        raise LayoutMismatch(f"{text}: every instance must load the same checkpoint in the same dtype; {hint}")


async def hash_weights(directory: Path, loaded: LoadedFiles | None = None) -> str:
    """Digest every byte of a checkpoint on a thread of its own; cancelled, the thread ends soon.

    Returns "", which is logged, where its files are not those that were ``loaded``. Raises ``OSError``.
    """
    result: Future[str] = Future()
    stop = threading.Event()
    given = (directory, stop, loaded, result)
    threading.Thread(target=_hash, args=given, name="trinity-weights", daemon=True).start()
    try:
        return await asyncio.wrap_future(result)
    finally:
        stop.set()


def _hash(directory: Path, stop: threading.Event, loaded: LoadedFiles | None, result: Future[str]) -> None:
    with suppress(OSError):  # of this thread alone, on Linux
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_PRIORITY)
    try:
        digest = whole_digest(directory, stop.is_set, loaded)
        if not digest:
            text = "the files in %s were replaced since they were loaded: no digest of the weights that serve is known"
            logger.warning(text, directory)
    except CancelledError:
        result.cancel()
    except Exception as error:
        if result.set_running_or_notify_cancel():
            result.set_exception(error)
    else:
        if result.set_running_or_notify_cancel():
            result.set_result(digest)
