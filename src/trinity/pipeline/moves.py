"""Moves of decodes that readers have asked for, each until it is answered or its time is up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from trinity.core.frontend.messages import MoveEnd, MoveRequest
from trinity.core.messages import Failure, Value
from trinity.errors import MoveError
from trinity.pipeline.stream import make_error


class Moves:
    """Answers that are waited for, by request."""

    def __init__(self) -> None:
        self._answers: dict[str, asyncio.Future[Failure | None]] = {}

    async def ask(self, post: Callable[[Value], None], request_id: str, to: str, within_s: float) -> None:
        """Have the front end move a request, and wait so long (seconds). Raises ``MoveError``."""
        if request_id in self._answers:
            raise MoveError("the request is moving just now", request_id, "moving")
        answer = self._answers[request_id] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(within_s):
                post(MoveRequest(request_id, to))
                failure = await answer
        except TimeoutError:
            text = f"no answer within {within_s:g} s: Stream.place says where the request is once it is known"
            raise MoveError(text, request_id, "late") from None
        finally:
            self._answers.pop(request_id, None)
        if failure is not None:
            raise make_error(failure, request_id)

    def answer(self, end: MoveEnd) -> None:
        """Pass the answer to whoever waits for it still."""
        answer = self._answers.get(end.request)
        if answer is not None and not answer.done():
            answer.set_result(end.failure)

    def give_up(self, why: str) -> None:
        """End all: nobody answers any more."""
        for request_id in self._answers:
            self.answer(MoveEnd(request_id, Failure("MoveError", why, {"reason": "ended"})))
