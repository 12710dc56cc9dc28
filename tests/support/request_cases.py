"""The requests that every architecture serves under every method, and what makes each situation really occur."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from support.checkpoint_files import checkpoint
from support.paths import PHOTOS
from support.recordings import TEXT_ONLY, oracle, parting
from support.stage_driver import picture
from trinity.core.messages import MediaSpan, Work
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Request, Sampling
from trinity.testing.oracle import OracleAnswer

BUDGET = 13  # tokens a step: small, and no divisor of a block, so that prompts are cut anywhere
BLOCK = 16
ON = Sampling(ignore_eos=True)

Waves = tuple[tuple[Request, ...], ...]


def red() -> Any:
    return picture(1, 130, 90)


def blue() -> Any:
    """Another image of the same size: the prompt has the same token ids."""
    return picture(11, 130, 90)


def ask(name: str, prompt: str, images: Sequence[Any] = (), outputs: int = 36, **sampling: Any) -> Request:
    """A request that goes on for ``outputs`` tokens whatever they are."""
    chosen = Sampling(ignore_eos=True, **sampling)
    return Request(prompt, images=images, max_tokens=outputs, sampling=chosen, request_id=name)


TEXT = "Tell me about a small red boat that lies on the shore in the morning"
THREE = "First <image> and then <image>\nwhich are unlike <image> in some ways. Compare them in a few words"
WAVES_OF_TEXT: Waves = (
    (ask("one", "A model reads the prompt once and keeps what it has read, said the", outputs=48),),
    (ask("text", TEXT, outputs=96), ask("other", "How many people are there near the old bridge?")),
    (ask("words", TEXT + ", and who left it there"), ask("short", "Why?")),
)


@cache
def waves(architecture: str) -> Waves:
    """All cases. "one" is alone while it is prefilled; later waves find those before them in the caches.

    text: no image. one: one image, cut by a chunk's border. three: three images. pair, twin: the same new image at
    the same time. again: an image seen before, behind other text. other: the prompt of "one" with another image.
    inside: begins like "one" up to its image's end, and the last block they share ends inside it. longer: begins
    with all of "three". words: begins with all of "text".
    """
    if architecture in TEXT_ONLY:
        return WAVES_OF_TEXT
    opening = _opening(architecture)
    three = [picture(2, 60, 80), picture(3, 33, 120), PHOTOS / "cat.jpg"]
    return (
        (ask("one", f"{opening}<image>\nWhat is in this picture?", [red()], 48),),
        (
            ask("text", TEXT, outputs=96),
            ask("three", THREE, three, 40),
            ask("pair", "What is on the table? <image>", [PHOTOS / "coffee.jpg"]),
            ask("twin", "Look at this: <image>\nName the colours", [PHOTOS / "coffee.jpg"]),
        ),
        (
            ask("again", "Once more <image> describe it", [red()]),
            ask("other", f"{opening}<image>\nWhat is in this picture?", [blue()], 48),
            ask("inside", f"{opening}<image> in one sentence, please", [red()]),
            ask("longer", THREE + ", please, and say which of them is the best one", three),
            ask("words", TEXT + ", and who left it there"),
        ),
    )


def names(architecture: str) -> tuple[str, ...]:
    return tuple(request.request_id for wave in waves(architecture) for request in wave)


@cache
def answers(architecture: str) -> dict[str, OracleAnswer]:
    """The oracle's answers, computed once per process."""
    asked = [request for wave in waves(architecture) for request in wave]
    return {request.request_id: oracle(architecture).answer(request) for request in asked}


@cache
def processor_of(architecture: str) -> RequestProcessor:
    return RequestProcessor(checkpoint(architecture))


@cache
def _opening(architecture: str) -> str:
    """Words before the image, so many that a chunk of the budget and the last block shared with "inside" end in it."""

    def work(prompt: str) -> Work:
        return processor_of(architecture).process(ask("measured", prompt, [red()])).work

    for count in range(64):
        opening = "Now" + " the" * count + ": "
        one, inside = (work(f"{opening}<image>{end}") for end in ("\nWhat is in this picture?", " in one sentence"))
        span = one.media[0]
        hit = shared(one, inside) // BLOCK * BLOCK
        if span.offset > BLOCK and cuts(BUDGET, span) and _strictly_inside(span, hit):
            return opening
    raise AssertionError(f"no opening puts a chunk's and a block's border into the image of {architecture}")


def cuts(step: int, span: MediaSpan) -> bool:
    """Whether a multiple of ``step`` lies strictly inside the span."""
    return any(_strictly_inside(span, at) for at in range(step, span.end, step))


def _strictly_inside(span: MediaSpan, position: int) -> bool:
    return span.offset < position < span.end


def shared(one: Work, other: Work) -> int:
    """Prompt tokens that two requests have in common from the start."""
    return parting(one.prompt, other.prompt)
