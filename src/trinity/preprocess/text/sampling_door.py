"""Sampling door: checks, before anything is computed, that what a request's sampling names is there and can serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from trinity.core.logits_processors import find_logits_processor
from trinity.errors import ClosedError, ConfigError, RequestError, own_errors
from trinity.preprocess.text.generation_config import GenerationDefaults
from trinity.preprocess.text.grammar_trials import GrammarTrials
from trinity.preprocess.text.grammars import GrammarProblem, check_begin, check_installed, join_grammar, list_unwritten
from trinity.request import Request, Sampling

FindStopIds = Callable[[Sampling], tuple[Collection[int], Collection[int]]]


class SamplingDoor:
    """Checks of one pipeline's requests, on threads of their own: a slow grammar delays others of its kind alone.

    - ``directory``, ``config`` (None): of the checkpoint.
    - ``registered`` (True): processors that this process registered count, since instances are threads of it.
    """

    registered = True

    def __init__(self, directory: Path, config: Any = None) -> None:
        self._closed, self._directory, self._unwritten = False, directory, list_unwritten(config)
        self._trials = GrammarTrials(directory)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trinity-sampling-door")  # starts with the first check

    async def admit(self, request: Request, find_stop_ids: FindStopIds, defaults: GenerationDefaults) -> Request:
        """Return a checked request whose sampling can serve; ``find_stop_ids`` lists tokens that end its output.

        ``defaults``: of the checkpoint, which may ban tokens where the request says nothing.

        Raises ``RequestError`` (``Overloaded`` where too many grammars are being tried, or the host is too busy), or
        ``ClosedError`` after ``close()``.
        """
        sampling = request.sampling
        if sampling.logits_processor is None and sampling.structured is None:
            return request
        if self._closed:
            raise ClosedError("the request processor is closed")
        try:
            with own_errors(request.request_id, "checking the sampling", (GrammarProblem, asyncio.CancelledError)):
                if sampling.logits_processor is not None:
                    loop = asyncio.get_running_loop()
                    await loop.run_in_executor(self._pool, self._find_processor, sampling.logits_processor)
                if sampling.structured is not None:
                    check_ends(sampling, find_stop_ids)
                    await self._try(join_grammar(sampling.structured), request)
                    await self._check_begin(join_grammar(sampling.structured), defaults.complete(sampling, 0))
        except (ConfigError, GrammarProblem) as problem:
            raise RequestError(str(problem), request.request_id) from problem
        return request

    def _find_processor(self, name: str) -> None:
        if self._closed:
            raise ClosedError("the request processor was closed before it reached this request")
        find_logits_processor(name, registered=self.registered)

    async def _try(self, structured: str, request: Request) -> None:
        check_installed()
        problem = await self._trials.find_problem(structured, request.request_id, request.client)
        if problem:
            raise GrammarProblem(problem)

    async def _check_begin(self, structured: str, sampling: Sampling) -> None:
        words = {word[0] for word in sampling.bad_words_ids or () if len(word) == 1}
        banned = self._unwritten.union(words, sampling.suppress_tokens or (), sampling.begin_suppress_tokens or ())
        if banned:
            loop = asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, check_begin, structured, self._directory, banned)

    def close(self) -> None:
        """Let running checks end, refuse those that wait, join the threads. Blocks."""
        self._closed = True
        self._trials.close()
        self._pool.shutdown(wait=True)


def check_ends(sampling: Sampling, find_stop_ids: FindStopIds) -> None:
    """Raise ``GrammarProblem`` where nothing may end an output of a form."""
    if not find_stop_ids(sampling)[0]:
        raise GrammarProblem(
            "structured output ends with an end-of-sequence token, and there is none here; "
            "leave ignore_eos out, or name one in stop_token_ids"
        )
