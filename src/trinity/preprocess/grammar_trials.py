"""Trials of grammars, so many at once and no more: one that takes long waits and runs beside others of its kind alone.

Each text is tried by itself, in a process that may be killed, first for a short time and then, if that was too short,
in a second lane for a longer one. So those before a harmless grammar cost it a short time each, whatever they are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trinity.errors import ClosedError, Overloaded
from trinity.preprocess import grammars
from trinity.preprocess.grammars import GrammarProblem, NoTime, SlowGrammar, check_grammar

MOST_TRIALS = 64  # texts that are being tried or wait for it
MOST_SLOW = 4  # of them that took more than the short time
_SIDE_BY_SIDE = 4  # short trials: as many processes of ``grammars.MEMORY_BYTES`` at most, and one more
_MOST_KEPT = 256  # answers


class _Trial:
    """A text's trial, and how many requests wait for it."""

    def __init__(self, task: asyncio.Task[str]) -> None:
        self.task, self.waiting = task, 0


class GrammarTrials:
    """Tries grammars for one checkpoint's tokenizer, on threads that wait for the processes which do.

    - ``directory``: of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._closed = directory, False
        self._quick = ThreadPoolExecutor(_SIDE_BY_SIDE, thread_name_prefix="trinity-grammar-quick")
        self._slow = ThreadPoolExecutor(1, thread_name_prefix="trinity-grammar-slow")
        self._trials: dict[str, _Trial] = {}
        self._slow_count = 0
        self._answers: OrderedDict[str, str] = OrderedDict()

    async def find_problem(self, structured: str, request_id: str = "") -> str:
        """Return why a grammar cannot be served, "" if it can. Requests of one text share its trial.

        - ``structured``: as in ``ResolvedSampling``.

        Raises ``Overloaded`` where too many others are being tried or the host has no time for it, and ``ClosedError``
        after ``close()``. Whoever is cancelled leaves no trial that waits.
        """
        if structured in self._answers:
            self._answers.move_to_end(structured)
            return self._answers[structured]
        trial = self._trials.get(structured) or self._begin(structured, request_id)
        trial.waiting += 1
        try:
            return await asyncio.shield(trial.task)
        except Overloaded as error:
            raise Overloaded(str(error), request_id) from None  # each request has an error of its own
        finally:
            trial.waiting -= 1
            if not trial.waiting and not trial.task.done():
                trial.task.cancel()
                self._forget(structured, trial)

    def _begin(self, structured: str, request_id: str) -> _Trial:
        if len(self._trials) >= MOST_TRIALS:
            text = f"{MOST_TRIALS} other grammars or schemas are being tried; send the request again later"
            raise Overloaded(text, request_id)
        trial = self._trials[structured] = _Trial(asyncio.get_running_loop().create_task(self._try(structured)))
        trial.task.add_done_callback(lambda _: self._forget(structured, trial))
        return trial

    def _forget(self, structured: str, trial: _Trial) -> None:
        if self._trials.get(structured) is trial:
            del self._trials[structured]

    async def _try(self, structured: str) -> str:
        try:
            found = await self._try_in_lanes(structured)
        except NoTime as problem:  # the host's fault: not to be kept
            raise Overloaded(str(problem)) from None
        self._answers[structured] = found
        if len(self._answers) > _MOST_KEPT:
            self._answers.popitem(last=False)
        return found

    async def _try_in_lanes(self, structured: str) -> str:
        try:
            return await self._run(self._quick, structured, grammars.QUICK_S)
        except SlowGrammar:
            if self._slow_count >= MOST_SLOW:
                text = f"{MOST_SLOW} grammars that take long to compile are being tried; simplify it, or send it later"
                raise Overloaded(text) from None
        self._slow_count += 1
        try:
            return await self._run(self._slow, structured, grammars.CPU_S)
        except SlowGrammar as problem:
            return str(problem)
        finally:
            self._slow_count -= 1

    async def _run(self, lane: ThreadPoolExecutor, structured: str, cpu_s: float) -> str:
        if self._closed:
            raise ClosedError("the request processor is closed")
        try:
            await asyncio.get_running_loop().run_in_executor(lane, self._check, structured, cpu_s)
        except (SlowGrammar, NoTime):
            raise
        except GrammarProblem as problem:
            return str(problem)
        return ""

    def _check(self, structured: str, cpu_s: float) -> None:
        if self._closed:
            raise ClosedError("the request processor was closed before it reached this request")
        check_grammar(structured, self._directory, cpu_s)

    def close(self) -> None:
        """Let running trials end, refuse those that wait, join the threads. Blocks."""
        self._closed = True
        for lane in (self._quick, self._slow):
            lane.shutdown(wait=True)
