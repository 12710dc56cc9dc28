"""Clips of Phi-4-multimodal, which projects them otherwise where their prompt has an image, and by no getter.

The other side is transformers alone: the processor's call on plain text, and then ``generate()``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from support.checkpoint_files import checkpoint
from support.recordings import serve
from support.sounds import clip
from support.stage_driver import picture
from support.wrapped_transports import zero_after_read
from trinity.core.scheduler import BatchRules
from trinity.errors import BadMedia
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media, Request, Sampling
from trinity.stages.proof import prove
from trinity.testing.oracle import Oracle

OUTPUTS = 6
MODEL = "any-phi4_multimodal"
SERVED: dict[str, Any] = {
    "rules": BatchRules(token_budget=100, image_budget=4096),
    "pools": {"image": 2048, "kv": 1024},
}


def ask(name: str, prompt: str, *media: Media) -> Request:
    asked = Sampling(ignore_eos=True)
    return Request(prompt, media=list(media), max_tokens=OUTPUTS, sampling=asked, request_id=name)


def requests() -> list[Request]:
    """One clip by itself, beside an image on either side, and among strangers' clips of other lengths."""
    sound, image = Media("audio", clip(1)), Media("image", picture(1, 57, 99))
    return [
        ask("heard", "<audio> what is said", sound),
        ask("both", "<image><audio> do they agree", image, sound),
        ask("turned", "<audio> hear, and see <image>", sound, image),
        ask("seen", "<image> what is on the boat", image),
        ask("other", "<audio> what is said", Media("audio", clip(2))),
        ask("long", "<audio> what is said", Media("audio", clip(3, 1.93))),
        ask("text", "what is said"),
    ]


@cache
def own_answers() -> dict[str, tuple[list[int], torch.Tensor]]:
    directory = checkpoint(MODEL)
    if find_verdict(directory) is None:
        assert (failed := prove(directory).failed) is None, f"{failed}"
    oracle = Oracle(directory)
    answers = {str(each.request_id): oracle.answer(each) for each in requests()}
    return {name: (answer.token_ids, answer.logits) for name, answer in answers.items()}


@pytest.mark.timeout(300)
@pytest.mark.xdist_group("phi4")
@pytest.mark.parametrize("method", ["EPD", *(pytest.param(each, marks=pytest.mark.slow) for each in ("EP+D", "E+P+D"))])
def test_clips_are_served_exactly_alone_and_beside_an_image(method: str) -> None:
    own = own_answers()
    found = serve(checkpoint(MODEL), method, [requests()], **SERVED)
    assert max(len(step.encodes) for step in found.record.steps()) > 1, "no step encodes a stranger's clip"
    assert {name: found.tokens(name) for name in own} == {name: tokens for name, (tokens, _) in own.items()}
    for name, (_, logits) in own.items():
        assert float((found.logits(name) - logits).abs().max()) < 1e-4 * float(logits.abs().max()), name
    assert len({tuple(own[name][0]) for name in ("heard", "other", "long", "text")}) == 4, "clips change no tokens"
    media = {name: {span.content for span in work.media} for name, work in found.works.items()}
    assert media["both"] == media["turned"] > media["seen"]
    assert media["both"].isdisjoint(media["heard"]), "one clip's features are taken for those beside an image"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.xdist_group("phi4")
def test_zeroed_blocks_of_a_clip_give_other_tokens() -> None:
    own = own_answers()
    found = serve(checkpoint(MODEL), "E+P+D", [requests()], connector=zero_after_read("image"), **SERVED)
    assert found.tokens("heard") != own["heard"][0]
    assert found.tokens("text") == own["text"][0]


@pytest.mark.xdist_group("phi4")
def test_several_clips_are_refused_as_their_features_depend_on_each_other() -> None:
    own_answers()
    processor = RequestProcessor(checkpoint(MODEL))
    try:
        with pytest.raises(BadMedia, match=r"pads it to the longest.*give one clip"):
            processor.process(ask("two", "<audio><audio>", Media("audio", clip(1)), Media("audio", clip(3, 1.93))))
    finally:
        processor.close()
