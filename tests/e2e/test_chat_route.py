"""Chats with one, two and three images over several turns: served as transformers' documented chat route answers them.

The oracle calls ``apply_chat_template(messages, tokenize=True, return_dict=True)`` and ``generate()``; it shares
neither the rendering of the chat nor the preprocessing of images with what serves.
"""

from __future__ import annotations

from typing import Any

import pytest

from support.checkpoint_files import checkpoint
from support.paths import PHOTOS
from support.recordings import TEXT_ONLY, oracle, problems, serve
from support.stage_driver import picture
from support.thinned import FEW, rarely
from trinity.core.scheduler import BatchRules
from trinity.request import Request, Sampling
from trinity.testing.checkpoints import ARCHITECTURES
from trinity.testing.oracle import OracleAnswer

OUTPUTS = 12
IMAGE = {"type": "image"}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _chat(name: str, turns: list[Any], images: list[Any]) -> Request:
    """A chat of ``turns``, in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(turns)]
    sampling = Sampling(ignore_eos=True)
    return Request(messages=messages, images=images, max_tokens=OUTPUTS, sampling=sampling, request_id=name)


FIRST, SECOND, THIRD = picture(2, 60, 80), PHOTOS / "cat.jpg", picture(3, 33, 120)
ASKED = [_text("What is this?"), IMAGE]
TURNS: dict[str, tuple[list[Any], list[Any]]] = {
    "words": (["Good morning"], []),
    "one": ([[IMAGE, _text("What is in this picture?")]], [FIRST]),
    "two": ([[IMAGE, _text("or"), IMAGE, _text("which is larger?")]], [FIRST, SECOND]),
    "three": ([[IMAGE, IMAGE, _text("and"), IMAGE]], [FIRST, SECOND, THIRD]),
    "second turn": ([ASKED, "A boat.", "Which colour has it?"], [FIRST]),
    "image later": ([ASKED, "A boat.", [IMAGE, _text("And this one?")]], [FIRST, THIRD]),
    "three turns": ([ASKED, "A boat.", ASKED, [_text("A cat.")], [_text("Again:"), IMAGE]], [FIRST, SECOND, FIRST]),
}
RAW = {
    "raw two": Request("<image> beside <image>: what differs?", images=[FIRST, SECOND]),
    "raw one": Request("What is this? <image>", images=[SECOND]),
}


def _requests(name: str) -> list[Request]:
    chats = {each: _chat(each, *said) for each, said in TURNS.items() if name not in TEXT_ONLY or not said[1]}
    if name in TEXT_ONLY:
        return [*chats.values(), _chat("turns", ["Who?", "Me.", "Why?"], [])]
    raw = [_same_settings(each, request) for each, request in RAW.items()]
    return [*chats.values(), *raw]


def _same_settings(name: str, request: Request) -> Request:
    sampling = Sampling(ignore_eos=True)
    return Request(request.prompt, images=request.images, max_tokens=OUTPUTS, sampling=sampling, request_id=name)


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.xdist_group(each), *rarely(each in FEW)]) for each in ARCHITECTURES],
)
def test_chats_are_answered_as_transformers_answers_them(name: str) -> None:
    asked = _requests(name)
    answers: dict[str, OracleAnswer] = {each.request_id: oracle(name).answer(each) for each in asked}
    method = "P+D" if name in TEXT_ONLY else "E+P+D"
    # In two waves: images of the first are in the caches when the second asks for them in other company.
    found = serve(
        checkpoint(name),
        method,
        (asked[:2], asked[2:]),
        rules=BatchRules(token_budget=61, image_budget=120),
        pools={"image": 128, "kv": 512},
        image_block_size=7,
    )
    assert {request: len(work.prompt) for request, work in found.works.items()} == {
        request: int(prompt) for request, prompt in _prompt_lengths(name, asked).items()
    }
    assert problems(found, answers) == {}


def _prompt_lengths(name: str, asked: list[Request]) -> dict[str, int]:
    return {each.request_id: oracle(name).inputs(each)["input_ids"].shape[1] for each in asked}
