"""Prompts at the edges: nothing but an image, images side by side, an image at the end, one image several times."""

from __future__ import annotations

from functools import cache

import pytest

from support.checkpoint_files import checkpoint
from support.recordings import MULTIMODAL, WHOLE_MEDIA, copy_of, oracle, problems, serve
from support.request_cases import BLOCK, BUDGET, ask, blue, processor_of, red
from support.thinned import in_turns, rarely
from trinity.core.scheduler import BatchRules
from trinity.request import Request
from trinity.testing.oracle import OracleAnswer


def _of(names: tuple[str, ...]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in names]


def _edges() -> list[Request]:
    return [
        ask("nothing else", "<image>", [red()]),
        ask("side by side", "<image><image>Which is larger?", [red(), blue()]),
        ask("at the end", "Tell me what you can see in this picture <image>", [blue()]),
        ask("twice the same", "Is <image> the same as <image> or not", [red(), red()]),
        ask("many", "<image>" * 6 + " or " + "<image>" * 3, [red(), blue(), red()] * 3),
    ]


@cache
def _answers(architecture: str) -> dict[str, OracleAnswer]:
    return {request.request_id: oracle(architecture).answer(request) for request in _edges()}


@pytest.mark.parametrize(
    ("architecture", "method"),
    [
        pytest.param(name, method, marks=[pytest.mark.xdist_group(name), *rarely(often)])
        for name, method, often in in_turns(MULTIMODAL, ("E+P+D", "EPD", "ED+P"), 6)
    ],
)
def test_images_anywhere_and_any_number_of_times(architecture: str, method: str) -> None:
    """All of them, then all of them again from the caches."""
    expected = _answers(architecture)
    waves = [_edges(), [copy_of(request, 2) for request in _edges()]]
    found = serve(checkpoint(architecture), method, waves, rules=BatchRules(token_budget=BUDGET), image_block_size=7)
    assert problems(found, expected) == {}
    looks = 2 if architecture == "llava_onevision" else 1  # alone in its prompt, an image is cut into tiles
    assert len(found.record.encodes()) == 2 * looks, "there are but two images"
    for request in _edges():
        again, prompt = found.outputs[f"{request.request_id}#2"], found.works[request.request_id].prompt
        most = (len(prompt) - 1) // BLOCK * BLOCK
        assert again.cached_tokens == most or architecture in WHOLE_MEDIA
        assert again.cached_tokens <= most


@pytest.mark.parametrize("architecture", [*_of(("llava", "mistral"))])
@pytest.mark.parametrize("method", ["EPD", "E+P+D"])
def test_a_prompt_of_whole_blocks_is_never_taken_whole(architecture: str, method: str) -> None:
    """Its last token must be run for the first output, however much of it is cached."""
    placement = method if architecture == "llava" else method.replace("E+", "").replace("E", "")
    request = _of_whole_blocks(architecture)
    waves = [[request], [copy_of(request, 2)]]
    found = serve(checkpoint(architecture), placement, waves)
    assert problems(found, {"blocks": oracle(architecture).answer(request)}) == {}
    length = len(found.works["blocks"].prompt)
    assert length % BLOCK == 0
    assert found.outputs["blocks#2"].cached_tokens == length - BLOCK


def _of_whole_blocks(architecture: str) -> Request:
    """A text of a multiple of the block's tokens."""
    for count in range(64):
        request = ask("blocks", "Read the words" + " the" * count + " and go on")
        if len(processor_of(architecture).process(request).work.prompt) == 3 * BLOCK:
            return request
    raise AssertionError("no text has that many tokens")
