"""What a reader hears of a move that it asked for, whoever answers and whenever."""

from __future__ import annotations

import asyncio
import pickle
from typing import Any

import pytest

from trinity.core.frontend.messages import MoveEnd, MoveRequest
from trinity.core.messages import Failure, Value
from trinity.errors import ConfigError, MoveError, RequestError
from trinity.pipeline.frontend_host import Moves
from trinity.pipeline.stream import Stream
from trinity.request import Request

ROOM = Failure("MoveError", "no room", {"reason": "refused"})


def told(caught: pytest.ExceptionInfo[MoveError]) -> tuple[str, str]:
    return caught.value.request_id, caught.value.reason


async def test_a_move_is_asked_for_and_answered() -> None:
    moves, asked = Moves(), list[Value]()
    waits = asyncio.ensure_future(moves.ask(asked.append, "r", "D1", 5.0))
    await asyncio.sleep(0)
    assert asked == [MoveRequest("r", "D1")]
    moves.answer(MoveEnd("x"))
    moves.answer(MoveEnd("r"))
    await waits
    moves.answer(MoveEnd("r"))


async def test_one_that_is_answered_at_once_is_heard() -> None:
    """The front end refuses as it is asked."""
    moves = Moves()
    with pytest.raises(MoveError, match="no room") as caught:
        await moves.ask(lambda event: moves.answer(MoveEnd("r", ROOM)), "r", "D1", 5.0)
    assert told(caught) == ("r", "refused")


async def test_a_second_one_is_refused_and_the_first_is_answered() -> None:
    moves = Moves()
    first = asyncio.ensure_future(moves.ask(lambda event: None, "r", "D1", 5.0))
    await asyncio.sleep(0)
    with pytest.raises(MoveError) as caught:
        await moves.ask(lambda event: None, "r", "D2", 5.0)
    assert told(caught) == ("r", "moving")
    moves.answer(MoveEnd("r"))
    await first


async def test_no_answer_within_its_time_is_told_and_the_late_one_dropped() -> None:
    moves = Moves()
    with pytest.raises(MoveError, match=r"no answer within 0\.01 s") as caught:
        await moves.ask(lambda event: None, "r", "D1", 0.01)
    assert told(caught) == ("r", "late")
    moves.answer(MoveEnd("r"))
    await moves.ask(lambda event: moves.answer(MoveEnd("r")), "r", "D1", 5.0)


async def test_whoever_leaves_may_ask_again() -> None:
    moves = Moves()
    left = asyncio.ensure_future(moves.ask(lambda event: None, "r", "D1", 5.0))
    await asyncio.sleep(0)
    left.cancel()
    await asyncio.wait([left])
    await moves.ask(lambda event: moves.answer(MoveEnd("r")), "r", "D1", 5.0)


async def test_a_front_end_that_fails_answers_all() -> None:
    moves = Moves()
    waits = [asyncio.ensure_future(moves.ask(lambda event: None, name, "D1", 5.0)) for name in "ab"]
    await asyncio.sleep(0)
    moves.give_up("instance D0 failed")
    for each in waits:
        with pytest.raises(MoveError, match="D0 failed"):
            await each


def test_the_error_is_a_requests_own_and_passes_between_processes() -> None:
    error = pickle.loads(pickle.dumps(MoveError("no room", "r", "refused")))
    assert issubclass(MoveError, RequestError)
    assert (error.request_id, error.reason, str(error)) == ("r", "refused", "no room")


WRONG_TO: list[Any] = [[], {}, None, 7]
WRONG_WITHIN: list[Any] = ["30", [], 0.0, -1.0, float("nan"), 10**400, None]
WRONG_MOVES = [*({"to": each} for each in WRONG_TO), *({"within_s": each} for each in WRONG_WITHIN)]


@pytest.mark.parametrize("wrong", WRONG_MOVES, ids=str)
async def test_a_move_with_wrong_arguments_is_not_begun(wrong: dict[str, Any]) -> None:
    """It is checked before the pipeline hears of it."""
    host: Any = None
    stream = Stream(host, Request("x"))
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        await stream.move(**{"to": "D1", **wrong})
