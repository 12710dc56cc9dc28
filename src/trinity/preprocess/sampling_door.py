"""Sampling door: checks, before anything is computed, that what a request's sampling names is there and can serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trinity.core.logits_processors import find_logits_processor
from trinity.errors import ClosedError, ConfigError, RequestError, own_errors
from trinity.preprocess.grammars import GrammarProblem, check_grammar, join_grammar
from trinity.request import Request, Sampling

FindStopIds = Callable[[Sampling], tuple[Collection[int], Collection[int]]]


class SamplingDoor:
    """Checks of one pipeline's requests, on a thread of their own: a slow grammar delays others of its kind alone.

    - ``directory``: of the checkpoint.
    - ``registered`` (True): processors that this process registered count, since instances are threads of it.
    """

    registered = True

    def __init__(self, directory: Path) -> None:
        self._directory, self._closed = directory, False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="trinity-sampling-door")  # starts with the first check

    async def admit(self, request: Request, find_stop_ids: FindStopIds) -> Request:
        """Return a checked request whose sampling can serve; ``find_stop_ids`` lists tokens that end its output.

        Raises ``RequestError``, or ``ClosedError`` after ``close()``.
        """
        sampling = request.sampling
        if sampling.logits_processor is not None or sampling.structured is not None:
            if self._closed:
                raise ClosedError("the request processor is closed")
            await asyncio.get_running_loop().run_in_executor(self._pool, self._check, request, find_stop_ids)
        return request

    def _check(self, request: Request, find_stop_ids: FindStopIds) -> None:
        if self._closed:
            raise ClosedError("the request processor was closed before it reached this request")
        sampling = request.sampling
        try:
            with own_errors(request.request_id, "checking the sampling", (GrammarProblem,)):
                if sampling.logits_processor is not None:
                    find_logits_processor(sampling.logits_processor, registered=self.registered)
                if sampling.structured is not None:
                    if not find_stop_ids(sampling)[0]:
                        raise GrammarProblem(
                            "structured output ends with an end-of-sequence token, and there is none here; "
                            "leave ignore_eos out, or name one in stop_token_ids"
                        )
                    check_grammar(join_grammar(sampling.structured), self._directory)
        except (ConfigError, GrammarProblem) as problem:
            raise RequestError(str(problem), request.request_id) from problem

    def close(self) -> None:
        """Let a running check end, refuse those that wait, join the thread. Blocks."""
        self._closed = True
        self._pool.shutdown(wait=True)
