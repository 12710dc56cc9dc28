"""Videos through whole pipelines: tokens and logits are those of generate(), by transformers' own route to it."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from support.checkpoint_files import checkpoint
from support.recordings import Served, oracle, problems, serve
from support.stage_driver import picture
from support.video_clips import ask, chat, clip, videos
from trinity.core.messages import Submit
from trinity.core.scheduler import BatchRules
from trinity.preprocess.media import frame_groups
from trinity.preprocess.media.clips import Clip
from trinity.preprocess.media.media_markup import VIDEO_TEXT
from trinity.request import Media, Request
from trinity.testing.oracle import OracleAnswer

RULES = BatchRules(token_budget=24, image_budget=20)  # prompts are cut inside clips; a step has one or two groups
OPTIONS: dict[str, Any] = {"rules": RULES, "pools": {"image": 200, "kv": 400}, "image_block_size": 7}
QUICK = {
    "internvl": "EPD",
    "llava_next_video": "ED+P",
    "llava_onevision": "E+P+D",
    "qwen2_vl": "EPD",
    "qwen2_5_vl": "EP+D",
    "qwen3_vl": "2E1P1D",
    "smolvlm": "EPD",
    "video_llama_3": "2E1P1D",
}
PLACEMENTS = ("EPD", "E+P+D", "EP+D", "ED+P", "2E1P1D", "3E1PD")


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clips of a few frames have several groups."""
    monkeypatch.setattr(frame_groups, "_LEAST_ROWS", 8)


def later(shown: Clip, first: int) -> Clip:
    return Clip(np.ascontiguousarray(shown.frames[first:]), shown.fps)


@cache
def waves(architecture: str) -> tuple[tuple[Request, ...], ...]:
    """One clip; an image, two clips; a chat. Then another clip at the same place, the first one again, a part of it.

    transformers itself mixes no images and videos in SmolVLM, and takes several clips of one length alone.
    """
    image = [] if architecture == "smolvlm" else [Media("image", picture(5, 80, 60))]
    mark = "a <image>, then " if image else ""
    parts = [{"type": "video"}, *[{"type": "image"} for _ in image], {"type": "text", "text": "And then?"}]
    question = "Look: <video>\nWhat happens?"
    return (
        (ask("one", question, videos(clip(1))),),
        (
            ask("both", f"Here is {mark}<video> and <video>?", [*image, *videos(clip(2), clip(4))]),
            chat("chat", parts, [*videos(clip(3, 6)), *image]),
        ),
        (
            ask("other", question, videos(clip(9))),
            ask("again", "Once more: <video> and now?", videos(clip(1))),
            ask("part", "A part: <video>", videos(later(clip(1), 6))),
        ),
    )


@cache
def answers(architecture: str) -> dict[str, OracleAnswer]:
    return {each.request_id: oracle(architecture).answer(each) for wave in waves(architecture) for each in wave}


def check(architecture: str, placement: str, **options: Any) -> Served:
    answers(architecture)  # outside of the pipeline's event loop
    found = serve(checkpoint(architecture), placement, waves(architecture), **{**OPTIONS, **options})
    assert problems(found, answers(architecture)) == {}
    assert found.tokens("one") != found.tokens("other"), "another clip, and the same tokens"
    spans = [(name, span) for name, work in found.works.items() for span in work.media if span.kind == "video"]
    assert len([name for name, _ in spans if name == "one"]) > 1, "a clip has groups"
    ends = {(row.request, row.start + row.length) for row in found.record.prefills()}
    assert any((name, at) in ends for name, span in spans for at in range(span.offset + 1, span.end)), "none was cut"
    encoded = [row.span.content for row in found.record.encodes() if row.span.kind == "video"]
    assert len(encoded) == len(set(encoded)), "no group is encoded twice, whoever asks for it"
    assert {span.content for name, span in spans if name == "again"} <= set(encoded)
    return found


def quick(architecture: str, placement: str) -> Any:
    return pytest.param(architecture, placement, marks=pytest.mark.xdist_group(architecture), id=architecture)


@pytest.mark.parametrize(("architecture", "placement"), [quick(*each) for each in QUICK.items()])
def test_tokens_and_logits_are_those_of_generate(architecture: str, placement: str) -> None:
    spread = {"spread": 4} if placement[0] == "2" else {}
    found = check(architecture, placement, **spread)
    if spread:
        helped = [each.event for each in found.record.log if isinstance(each.event, Submit) and each.event.asker]
        assert helped, "no encoder helped another"


def test_every_family_is_tried() -> None:
    assert set(QUICK) == set(VIDEO_TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("architecture", sorted(QUICK))
def test_under_every_method(architecture: str, placement: str) -> None:
    check(architecture, placement, **({"spread": 4} if placement[0] in "23" else {}))


def test_a_part_of_a_clip_shares_its_groups() -> None:
    """The second half of a clip is six frames, three groups of which are the first clip's last three."""
    found = check("qwen2_vl", "EPD")
    first, part = ([span.content for span in found.works[name].media] for name in ("one", "part"))
    assert part == first[-len(part) :]
    assert len(part) == 3


def test_without_a_cache_a_clip_is_encoded_again() -> None:
    answers("qwen2_vl")
    again = ((waves("qwen2_vl")[0][0],), (waves("qwen2_vl")[2][1],))
    wanted = {name: answers("qwen2_vl")[name] for name in ("one", "again")}
    found = serve(checkpoint("qwen2_vl"), "EPD", again, **OPTIONS, image_cache=False, prefix_cache=False)
    assert problems(found, wanted) == {}
    encoded = [row.span.content for row in found.record.encodes()]
    assert len(encoded) == 2 * len(set(encoded))
