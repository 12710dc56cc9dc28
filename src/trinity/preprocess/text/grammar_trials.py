"""Trials of grammars, so many at once and no more: one that takes long waits and runs beside others of its kind alone.

Each text is tried by itself, in a process that may be killed, first for a short time and then, if that was too short,
in a second lane for a longer one. Clients have fair turns in both: those of others cost a harmless grammar a short
time, however many they are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from pathlib import Path

from trinity.errors import ClosedError, Overloaded
from trinity.preprocess.preparation_lanes import PreparationLane
from trinity.preprocess.text import grammars
from trinity.preprocess.text.grammars import GrammarProblem, NoTime, SlowGrammar, check_grammar

MOST_TRIALS = 256  # texts that are being tried or wait for it: 64 KiB each at most
MOST_OF_CLIENT = 32  # of them, of one client
MOST_SLOW = 16  # of them that took more than the short time
MOST_SLOW_OF_CLIENT = 4
_SIDE_BY_SIDE = 4  # short trials: as many processes of ``grammars.MEMORY_BYTES`` at most, and one more
_MOST_KEPT = 256  # answers


class _Trial:
    """A text's trial, and how many requests wait for it."""

    def __init__(self, task: asyncio.Task[str], client: str) -> None:
        self.task, self.client, self.waiting, self.slow = task, client, 0, False


class GrammarTrials:
    """Tries grammars for one checkpoint's tokenizer, on threads that wait for the processes which do.

    - ``directory``: of the checkpoint.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._closed = directory, False
        self._quick = PreparationLane("trinity-grammar-quick", _SIDE_BY_SIDE)
        self._slow = PreparationLane("trinity-grammar-slow", 1)
        self._trials: dict[str, _Trial] = {}
        self._answers: OrderedDict[str, str] = OrderedDict()

    async def find_problem(self, structured: str, request_id: str = "", client: str = "") -> str:
        """Return why a grammar cannot be served, "" if it can. Requests of one text share its trial.

        - ``structured``: as in ``ResolvedSampling``.
        - ``client``: has its turn among other clients.

        Raises ``Overloaded`` where too many others are being tried or the host has no time for it, and ``ClosedError``
        after ``close()``. Whoever is cancelled leaves no trial that waits.
        """
        if structured in self._answers:
            self._answers.move_to_end(structured)
            return self._answers[structured]
        trial = self._trials.get(structured) or self._begin(structured, request_id, client)
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

    def _begin(self, structured: str, request_id: str, client: str) -> _Trial:
        own = sum(each.client == client for each in self._trials.values())
        for most, count, whose in ((MOST_TRIALS, len(self._trials), ""), (MOST_OF_CLIENT, own, " of yours")):
            if count >= most:
                text = f"{most} other grammars or schemas{whose} are being tried; send the request again later"
                raise Overloaded(text, request_id)
        made = _Trial(asyncio.get_running_loop().create_task(self._try(structured)), client)
        self._trials[structured] = made
        made.task.add_done_callback(lambda _: self._forget(structured, made))
        return made

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
        trial = self._trials[structured]
        try:
            return await self._run(self._quick, structured, grammars.QUICK_S, trial.client)
        except SlowGrammar:
            slow = [each for each in self._trials.values() if each.slow]
            own = [each for each in slow if each.client == trial.client]
            for most, count in ((MOST_SLOW, len(slow)), (MOST_SLOW_OF_CLIENT, len(own))):
                if count >= most:
                    text = f"{most} grammars that take long to compile are being tried; simplify it, or send it later"
                    raise Overloaded(text) from None
        trial.slow = True
        try:
            return await self._run(self._slow, structured, grammars.CPU_S, trial.client)
        except SlowGrammar as problem:
            return str(problem)

    async def _run(self, lane: PreparationLane, structured: str, cpu_s: float, client: str) -> str:
        try:
            async with lane.visit(client) as visit:
                await visit.run(self._check, structured, cpu_s)
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
            lane.stop()
        for lane in (self._quick, self._slow):
            lane.join()
