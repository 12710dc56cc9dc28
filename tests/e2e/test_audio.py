"""Audio models answer exactly as transformers' own processor and ``generate()``: one small case each, the rest slow."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from support.checkpoint_files import checkpoint
from support.recordings import Served, copy_of, oracle, problems, serve
from support.sounds import clip, encoded
from support.stage_driver import picture
from support.wrapped_transports import zero_after_read
from trinity.core.scheduler import BatchRules
from trinity.pipeline import Pipeline
from trinity.preprocess.media_limits import MediaLimits
from trinity.request import Media, Request, Sampling
from trinity.testing.checkpoints import AUDIO_ARCHITECTURES
from trinity.testing.oracle import OracleAnswer

ON = Sampling(ignore_eos=True)
SEVERAL = ("qwen2_audio", "qwen2_5_omni_thinker")  # types whose processor takes more than one clip for a text
METHODS = ("EPD", "EP+D", "ED+P", "E+P+D", "PD+E")
RULES = BatchRules(token_budget=13)  # no divisor of a block: clips are cut anywhere
OPTIONS: dict[str, Any] = {"pools": {"image": 48, "kv": 256}, "image_block_size": 7}


WITH_IMAGES = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")


def ask(name: str, prompt: str, *clips: Any, images: Sequence[Any] = (), outputs: int = 20) -> Request:
    media = [Media("image", each) for each in images] + [Media("audio", each) for each in clips]
    return Request(prompt, media=media, max_tokens=outputs, sampling=ON, request_id=name)


def chat(name: str, source: Any) -> Request:
    content = [{"type": "audio"}, {"type": "text", "text": "What is said?"}]
    messages = [{"role": "user", "content": content}]
    return Request(messages=messages, media=[Media("audio", source)], max_tokens=20, sampling=ON, request_id=name)


@cache
def cases(architecture: str) -> tuple[Request, ...]:
    """one: a clip, cut by chunks. other: the same prompt, another clip. file: stereo, resampled. again: seen before."""
    stereo = encoded(np.stack([clip(3, 0.9, 44100), clip(4, 0.9, 44100)]), 44100)
    found = [
        ask("one", "Listen to <audio> and say what it is", clip(1)),
        ask("other", "Listen to <audio> and say what it is", clip(2)),
        ask("file", "A stereo file <audio> from a disk", stereo),
        ask("again", "Once more <audio> the first one", clip(1), outputs=12),
        chat("chat", encoded(clip(5, 1.4, 8000), 8000, "FLAC")),
        ask("text", "How many people are there near the old bridge?"),
    ]
    if architecture in SEVERAL:
        found.append(ask("two", "First <audio> and then <audio> again, compare", clip(1), clip(6, 0.4)))
    if architecture in SEVERAL and architecture in WITH_IMAGES:
        mixed, images = (
            "Listen <audio> and look <image>, <audio> and <image>",
            [picture(1, 130, 90), picture(2, 60, 80)],
        )
        found.append(ask("mixed", mixed, clip(1), clip(7), images=images))
    if architecture in WITH_IMAGES:
        red, blue = picture(1, 130, 90), picture(2, 60, 80)
        found += [
            ask("seen", "Look <image> and listen <audio>, do they agree?", clip(1), images=[red]),
            ask("heard", "Look <image> and <image>, then listen <audio>", clip(7), images=[red, blue]),
            ask("image", "Look <image> and say what it is", images=[blue]),
        ]
    return tuple(found)


@cache
def answers(architecture: str) -> dict[str, OracleAnswer]:
    return {each.request_id: oracle(architecture).answer(each) for each in cases(architecture)}


def check(architecture: str, placement: str, found: Served) -> None:
    assert problems(found, answers(architecture)) == {}, placement
    assert found.tokens("one") != found.tokens("other"), "another clip must change the tokens"
    spans = {name: work.media for name, work in found.works.items()}
    assert [span.kind for span in spans["one"]] == ["audio"]
    assert spans["one"][0].content == spans["again"][0].content != spans["other"][0].content
    assert spans["one"][0].tokens == found.outputs["one"].media_tokens > 3
    assert len({*found.tokens("one")}) > 3


@pytest.mark.parametrize("architecture", AUDIO_ARCHITECTURES)
def test_one_pipeline_of_each_family_is_exact(architecture: str) -> None:
    answers(architecture)
    one, *others = cases(architecture)
    found = serve(checkpoint(architecture), "E+P+D", [[one], others], rules=RULES, **OPTIONS)
    check(architecture, "E+P+D", found)
    encoded_clips = [each.span.content for each in found.record.encodes()]
    assert len(encoded_clips) == len(set(encoded_clips)), "a clip that was seen before was encoded again"
    span = found.works["one"].media[0]
    borders = [row.start + row.length for row in found.record.prefills() if row.request == "one"]
    assert any(span.offset < border < span.end for border in borders), "no chunk's border was inside the clip"


def some(cheap: str) -> list[Any]:
    """All types, of which one is quick enough for each run."""
    return [each if each == cheap else pytest.param(each, marks=pytest.mark.slow) for each in AUDIO_ARCHITECTURES]


@pytest.mark.parametrize("architecture", some("qwen2_audio"))
def test_zeroed_blocks_of_a_clip_change_the_tokens(architecture: str) -> None:
    wanted, (one, *_, text) = answers(architecture), cases(architecture)[:6]
    connector = zero_after_read("image")
    found = serve(checkpoint(architecture), "E+P+D", [[one, text]], connector=connector, rules=RULES, **OPTIONS)
    assert connector.reads["image"] in (1, 2), "a pull of whole blocks, and of the last one's rows"
    assert found.tokens("one") != wanted["one"].token_ids
    assert found.tokens("text") == wanted["text"].token_ids


@pytest.mark.parametrize("method", ["E+P+D", pytest.param("EPD", marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", some("glmasr"))
def test_a_preempted_clip_goes_on_as_if_nothing_had_been(architecture: str, method: str) -> None:
    answers(architecture)
    asked = cases(architecture)[:5]
    rows = max(len(answers(architecture)[each.request_id].token_ids) for each in asked)
    longest = max(oracle(architecture).inputs(each)["input_ids"].shape[1] for each in asked) + rows
    tight = {"image": 48, "kv": longest * 3 // 8 + 2}  # one and a half of the longest requests
    waves = [[copy_of(each, number) for number in range(2) for each in asked]]
    options: dict[str, Any] = {**OPTIONS, "pools": tight, "kv_block_size": 4, "reservation": "optimistic"}
    for _ in range(5):  # whom it meets hangs on how fast steps are
        found = serve(checkpoint(architecture), method, waves, rules=RULES, **options)
        assert problems(found, answers(architecture)) == {}
        if any(output.preemptions and output.media_tokens for output in found.outputs.values()):
            return
    pytest.fail("the pool was large enough for all")


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("architecture", AUDIO_ARCHITECTURES)
def test_every_method_is_exact(architecture: str, method: str) -> None:
    answers(architecture)
    one, *others = cases(architecture)
    again = [copy_of(each, 1) for each in cases(architecture)]
    found = serve(checkpoint(architecture), method, [[one], others, again], rules=RULES, **OPTIONS)
    check(architecture, method, found)
    hits = [found.outputs[each.request_id].cached_tokens for each in again]
    assert sum(hits) > 0, "no prefix was found in the cache"


@pytest.mark.slow
@pytest.mark.parametrize("architecture", AUDIO_ARCHITECTURES)
def test_instances_in_processes_and_preprocessing_too(architecture: str) -> None:
    answers(architecture)

    async def run() -> dict[str, list[int]]:
        given: dict[str, Any] = {"hosting": "process", "limits": MediaLimits(processes=1)}
        async with Pipeline(checkpoint(architecture), "1E1P1D", dtype="float32", **given) as pipe:
            outputs = [await pipe.complete(each) for each in cases(architecture)]
        return {each.request_id: each.token_ids for each in outputs}

    assert asyncio.run(run()) == {name: answer.token_ids for name, answer in answers(architecture).items()}
