"""Decodes that move again and again: asked by their reader after each token, or at the end of each step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from support.recordings import Recording
from trinity.core.instance import instance_core
from trinity.core.instance.state import State
from trinity.core.messages import Move, Moved, Send, Stepped
from trinity.core.migration.moves import handle_move
from trinity.errors import MoveError
from trinity.pipeline import Pipeline
from trinity.pipeline.stream import Stream
from trinity.request import Output, Request, Sampling, Structured


async def read_moving(stream: Stream, names: Sequence[str]) -> tuple[Output, int]:
    """Read all of it; after each token it is to go to the next of these instances. Returns how often it did."""
    moved = 0
    async with stream as tokens:
        async for _ in tokens:
            at = names.index(stream.place) if stream.place in names else 0
            try:
                await stream.move(names[(at + 1) % len(names)])
                moved += 1
            except MoveError:
                pass
    return stream.output, moved


async def reason_of(pipe: Pipeline, request: Request, to: str) -> str:
    """Say why a request cannot move there behind its first token."""
    async with pipe.stream(request) as tokens:
        await anext(aiter(tokens))
        try:
            await tokens.move(to)
        except MoveError as error:
            return error.reason
    return ""


def sampled(images: Sequence[Any], length: int = 32) -> tuple[Request, ...]:
    """Ask with penalties, log-probabilities, a grammar and bounds on what may be drawn."""
    drawn: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
    ways = {
        "penalties": Sampling(seed=1, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, **drawn),
        "logprobs": Sampling(seed=2, top_k=40, frequency_penalty=0.4, logprobs=2, **drawn),
        "grammar": Sampling(seed=3, temperature=0.8, structured=Structured(regex="(yes|no)( and (yes|no)){80}")),
        "bounds": Sampling(seed=4, min_tokens=8, no_repeat_ngram_size=3, logit_bias={5: 2.0}, **drawn),
    }
    prompt = f"{'<image> ' * len(images)}Go on."
    return tuple(
        Request(prompt, images=images, max_tokens=length, sampling=way, request_id=name) for name, way in ways.items()
    )


def check_alike(found: Output, alone: Output) -> None:
    """Check that a request that moved has all that it has when it is left alone."""
    assert found.token_ids == alone.token_ids, found.request_id
    assert (found.text, found.finish_reason) == (alone.text, alone.finish_reason)
    assert found.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert found.lives == 1, "no move costs a recovery"


def move_at_each_step(patch: pytest.MonkeyPatch, names: Sequence[str]) -> None:
    """Have instances of this process hand on each decode that a step has given a token to, to the next of these."""

    def stepped(s: State, event: Stepped, now: float) -> None:
        plain(s, event, now)
        if s.settings.name not in names:
            return
        to = names[(names.index(s.settings.name) + 1) % len(names)]
        for request in event.sampled.keys() & s.decoding.keys():
            handle_move(s, Move(request, s.requests[request].attempt, to), now)

    plain = instance_core._HANDLERS[Stepped]
    patch.setattr(instance_core, "_HANDLERS", instance_core._HANDLERS | {Stepped: stepped})


def count_moves(record: Recording) -> Counter[str]:
    """Count how often each request came to an instance by a move."""
    sent = (command.message for _, command in record.commands(Send))
    return Counter(said.request for said in sent if isinstance(said, Moved) and said.start)
