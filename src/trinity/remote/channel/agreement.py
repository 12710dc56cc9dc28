"""Agreement of a pipeline's instances: on layouts and model when they meet, on every byte of weights while they serve.

Sampled pages, which every instance shows at its start, tell two checkpoints apart unless they differ in single bytes.
The whole is read by a thread of the lowest priority, and the front end compares the digests: of two that differ the
younger instance is refused.

What a pipeline began with it serves for as long as it lives (decision 0096): a later life, of which the files may be
others by then, is compared with that before it has a request, also where nobody else is left that has loaded them.
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

from trinity.emulation.model import EmulatedModel
from trinity.errors import ConfigError, LayoutMismatch
from trinity.memory.weight_digests import LoadedFiles, are_only_touched, whole_digest
from trinity.remote.channel.wire import Hello, ModelIdentity, Setup
from trinity.runtime.host import LoadedInstance

logger = logging.getLogger("trinity")
LOWEST_PRIORITY = 19
HINT = "python -m trinity.check --weights MODEL tells which file differs"
SAME_FOR_ALL = f"every instance must load the same checkpoint in the same dtype; {HINT}"
CHANGED = f"the files have changed under the running pipeline: put them back, or make a new pipeline; {HINT}"


class Dispute(NamedTuple):
    """Another life with other weights: its name ("": one that is gone) and epoch, and what to say of it."""

    name: str
    epoch: int
    why: str


class WeightsAgreement:
    """Memory of what a pipeline serves: its first Hello, and digests of every byte by the lives that hold them.

    All are equal. The last digest that somebody held stays when nobody is left.
    """

    def __init__(self) -> None:
        self._first: Hello | None = None
        self._held: dict[tuple[str, int], str] = {}
        self._kept = ""

    @property
    def served(self) -> ModelIdentity | None:
        """Identity that a life which begins now must have; None before there was any."""
        digest = next(iter(self._held.values()), self._kept)
        return ModelIdentity(self._first.fingerprint, digest) if self._first is not None else None

    def admit(self, setup: Setup, hello: Hello) -> None:
        """Take what a life has loaded. Raises ``LayoutMismatch`` where that is not what the pipeline serves.

        Of a later life (``setup.serves``) every byte has to be known once it is of others: ``ConfigError``, and the
        next one knows that it must read them first.
        """
        served, later = self.served, setup.serves is not None
        if self._first is not None and not later:
            check_layouts(self._first, hello)  # as the two will when they meet
        if served is not None:
            found = ModelIdentity(hello.fingerprint, hello.weights)
            check_served(setup.name, setup.model, served, found, CHANGED if later else SAME_FOR_ALL)
            if later and served.weights and not hello.weights:
                raise ConfigError(f"{setup.name} has not read all of its weights, and they have become known meanwhile")
        self._first = self._first or hello
        if hello.weights:
            self._held[setup.name, setup.epoch] = hello.weights

    def compare(self, name: str, epoch: int, digest: str) -> Dispute | None:
        """Take a digest that a life has found while it serves, "" for none; return who holds, or held, another one."""
        others = [each for each in self._held.items() if each[0] != (name, epoch)]
        other = next((life for life, held in others if digest and digest != held), None)
        if other is None and not others and digest and self._kept not in ("", digest):
            other = ("", 0)
        elif digest:
            self._held[name, epoch] = digest
        if other is None:
            return None
        whose = f"those of {other[0]} ({self._held[other]})" if other[0] else f"those that it began with ({self._kept})"
        text = f"the weights of {name} (digest {digest}) are not {whose}"
        hint = "compare both directories: python -m trinity.check --weights MODEL"
        logger.error("%s: the younger is refused; %s", text, hint)
        return Dispute(*other, f"{text}; {hint}")

    def forget(self, name: str, epoch: int) -> None:
        """Take note that a life has ended."""
        digest = self._held.pop((name, epoch), "")
        if digest and not self._held:
            self._kept = digest


def check_served(
    name: str, where: str | Path, served: ModelIdentity, found: ModelIdentity, hint: str = CHANGED
) -> None:
    """Raise ``LayoutMismatch`` where the model ``found`` for an instance is not the one that its pipeline serves."""
    text = ""
    if found.fingerprint != served.fingerprint:
        text = f"model {found.fingerprint} in {where}, and this pipeline serves {served.fingerprint}"
    elif found.weights and served.weights and found.weights != served.weights:
        text = f"weights of digest {found.weights} in {where}, and this pipeline serves {served.weights}"
    if text:
        raise LayoutMismatch(f"instance {name} has {text}: {hint}")


def check_loaded(loaded: LoadedInstance, serving: LoadedInstance) -> None:
    """Raise ``LayoutMismatch`` where an instance on threads has other weights than one that serves.

    Nobody reads every byte of these: files that were written anew are refused, whatever is in them.
    """
    name, mine, theirs = loaded.spec.name, loaded.model, serving.model
    if isinstance(mine, EmulatedModel) or isinstance(theirs, EmulatedModel):
        return
    check_served(name, mine.directory, ModelIdentity(theirs.fingerprint), ModelIdentity(mine.fingerprint))
    if not are_only_touched(theirs.files, mine.files):
        raise LayoutMismatch(f"instance {name} has files in {mine.directory} that were written anew: {CHANGED}")


def check_layouts(mine: Hello, theirs: Hello) -> None:
    """Raise ``LayoutMismatch``, naming both sides, if they cannot exchange blocks."""
    for kind in mine.layouts.keys() & theirs.layouts.keys():
        if mine.layouts[kind] != theirs.layouts[kind]:
            raise LayoutMismatch(
                f"{kind} blocks differ: {mine.name} has {mine.layouts[kind]}, {theirs.name} has {theirs.layouts[kind]}"
            )
    if mine.fingerprint != theirs.fingerprint or (mine.weights and theirs.weights and mine.weights != theirs.weights):
        text = f"{mine.name} runs model {mine.fingerprint}, {theirs.name} runs {theirs.fingerprint}"
        raise LayoutMismatch(f"{text}: {SAME_FOR_ALL}")


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
