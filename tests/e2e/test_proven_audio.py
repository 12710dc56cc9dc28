"""Pipelines of audio types that nobody listed, after their proof: tokens and logits of their own generate()."""

from __future__ import annotations

import asyncio
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.checkpoint_files import checkpoint
from support.recordings import METHODS, Served, case_of, copy_of, serve
from support.sounds import clip, encoded
from support.wrapped_transports import zero_after_read
from trinity.core.scheduler import BatchRules
from trinity.errors import BadMedia
from trinity.pipeline import Pipeline
from trinity.preprocess.checkpoint.verdicts import find_verdict
from trinity.preprocess.media_limits import MediaLimits
from trinity.request import Media, Request, Sampling
from trinity.stages.proof import prove
from trinity.testing.oracle import Oracle, OracleAnswer

OUTPUTS = 12
WITHIN = 1e-4  # of the largest logit
RULES = BatchRules(token_budget=13, image_budget=4096)  # chunks end in clips; what waits is encoded in one step
SETTINGS: dict[str, Any] = {"pools": {"image": 64, "kv": 256}, "rules": RULES}
# What loads the extractor of these types is in torchaudio alone (tests/preprocess/checkpoint/test_libraries.py).
NEEDS_TORCHAUDIO = ("fun_asr_nano", "granite_speech", "granite_speech_plus")
TYPES = (*NEEDS_TORCHAUDIO, "gemma4", "moss_transcribe_diarize", "nemo_speechlm")
SOON = {"moss_transcribe_diarize": "E+P+D", "granite_speech": "EP+D"}
ALONE = (
    "fun_asr_nano",
    "granite_speech",
    "granite_speech_plus",
)  # their processors pad a prompt's clips to the longest


def ask(name: str, *sounds: Any) -> Request:
    """A chat of two turns, with a clip in the first, or without, and a second clip in the last."""
    first, last = ([{"type": "audio"}] if len(sounds) > at else [] for at in range(2))
    turns = [
        {"role": "user", "content": [*first, {"type": "text", "text": "What is said?"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Two words."}]},
        {"role": "user", "content": [*last, {"type": "text", "text": "Which?"}]},
    ]
    media, asked = [Media("audio", each) for each in sounds], Sampling(ignore_eos=True)
    return Request(messages=turns, media=media, max_tokens=OUTPUTS, sampling=asked, request_id=name)


def requests() -> list[Request]:
    """one: a clip. other: another of its length. long, short: strangers of other lengths. file: stereo, resampled."""
    stereo = encoded(np.stack([clip(5, 0.9, 44100), clip(4, 0.9, 44100)]), 44100)
    return [
        ask("one", clip(1)),
        ask("other", clip(2)),
        ask("long", clip(3, 1.93)),
        ask("short", clip(4, 0.31)),
        ask("file", stereo),
        ask("text"),
    ]


@cache
def proven(name: str) -> Path:
    if name in NEEDS_TORCHAUDIO:
        pytest.importorskip("torchaudio")
    directory = checkpoint(f"any-{name}")
    if find_verdict(directory) is None:
        failed = prove(directory).failed
        assert failed is None, failed
    return directory


@cache
def answers(name: str) -> dict[str, OracleAnswer]:
    oracle = Oracle(proven(name))
    return {each.request_id: oracle.answer(each) for each in requests()}


def differences(name: str, found: Served) -> dict[str, str]:
    """Every request whose tokens are not the model's own, or whose logits are too far from them."""
    wrong = {}
    for request in found.outputs:
        own = answers(name)[case_of(request)]
        off = float((found.logits(request) - own.logits).abs().max() / own.logits.abs().max())
        if found.tokens(request) != own.token_ids or not off < WITHIN:
            wrong[request] = f"{found.tokens(request)} and {own.token_ids}, logits {off:.2g} off"
    return wrong


def _mark(name: str, method: str) -> Any:
    marks = [] if SOON.get(name) == method else [pytest.mark.slow]
    return pytest.param(name, method, marks=marks, id=f"{name}-{method}")


@pytest.mark.parametrize(("name", "method"), [_mark(name, method) for name in TYPES for method in METHODS])
def test_an_audio_type_that_nobody_listed_is_served_exactly(name: str, method: str) -> None:
    """Alone, then beside strangers' clips of other lengths, then out of the caches."""
    wanted = answers(name)
    one, *others = requests()
    found = serve(proven(name), method, [[one], [*others, copy_of(one, 1)]], **SETTINGS)
    assert differences(name, found) == {}
    assert found.outputs.keys() == {*wanted, "one#1"}
    assert wanted["one"].token_ids != wanted["other"].token_ids, "another clip gives other tokens"
    borders = [row.start + row.length for row in found.record.prefills() if row.request == "one"]
    span = found.works["one"].media[0]
    assert any(span.offset < border < span.end for border in borders), "no chunk's border was inside the clip"


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_zeroed_blocks_of_a_clip_change_the_tokens(name: str) -> None:
    wanted, asked = answers(name), requests()
    chosen = [each for each in asked if each.request_id in ("one", "text")]
    silent = serve(proven(name), "E+P+D", [chosen], connector=zero_after_read("image"), **SETTINGS)
    assert silent.tokens("one") != wanted["one"].token_ids
    assert silent.tokens("text") == wanted["text"].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_preempted_clip_goes_on_as_if_nothing_had_been(name: str) -> None:
    answers(name)
    alike = [each for each in requests() if each.request_id in ("one", "other")]
    blocks = -(-(Oracle(proven(name)).inputs(alike[0])["input_ids"].shape[1] + 1) // 4)
    tight = {**SETTINGS, "pools": {"image": 64, "kv": 2 * (blocks + 1) + 1}, "rules": BatchRules(token_budget=256)}
    waves = [[copy_of(each, number) for number in range(2) for each in alike]]
    found = serve(proven(name), "EPD", waves, **tight, kv_block_size=4, reservation="optimistic", prefix_cache=False)
    assert differences(name, found) == {}
    assert any(output.preemptions for output in found.outputs.values()), "the pool was large enough for all"


@pytest.mark.slow
def test_granite_speech_with_a_template_of_strings_as_its_checkpoints_have(tmp_path: Path) -> None:
    """The oracle is what their page documents: the placeholder in the text, and the processor called with both."""
    import torch
    from transformers import AutoProcessor, AutoTokenizer, GraniteSpeechForConditionalGeneration

    directory = Path(shutil.copytree(proven("granite_speech"), tmp_path / "model"))
    template = "{% for m in messages %}<|im_start|>{{ m['role'] + ': ' + m['content'] }}<|im_end|>{% endfor %}"
    (directory / "chat_template.jinja").write_text(template + "{% if add_generation_prompt %}<|im_start|>{% endif %}")
    found = serve(directory, "E+P+D", [[ask("one", clip(1)), ask("text")]], **SETTINGS)

    local: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    load_processor: Any = AutoProcessor.from_pretrained
    load_words: Any = AutoTokenizer.from_pretrained
    load_model: Any = GraniteSpeechForConditionalGeneration.from_pretrained
    processor, words = load_processor(directory, **local), load_words(directory, **local)
    model = load_model(directory, dtype=torch.float32, **local).eval()
    for name, sound in (("one", clip(1)), ("text", None)):
        turns = [processor.audio_token * (sound is not None) + "What is said?", "Two words.", "Which?"]
        roles = ("user", "assistant", "user")
        chat = [{"role": role, "content": turn} for role, turn in zip(roles, turns, strict=True)]
        text = words.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = dict(
            processor(text, sound, return_tensors="pt") if sound is not None else words(text, return_tensors="pt")
        )
        inputs.pop("audio_embed_sizes", None)
        tokens = model.generate(**inputs, max_new_tokens=OUTPUTS, min_new_tokens=OUTPUTS, do_sample=False)
        assert found.tokens(name) == tokens[0, -OUTPUTS:].tolist(), name
        assert list(found.works[name].prompt) == inputs["input_ids"][0].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS_TORCHAUDIO)
def test_instances_in_processes_and_preprocessing_too(name: str) -> None:
    wanted = answers(name)

    async def run() -> dict[str, list[int]]:
        given: dict[str, Any] = {"hosting": "process", "limits": MediaLimits(processes=1)}
        async with Pipeline(proven(name), "1E1P1D", dtype="float32", **given) as pipe:
            outputs = await asyncio.gather(*(pipe.complete(each) for each in requests()))
        return {each.request_id: each.token_ids for each in outputs}

    assert asyncio.run(run()) == {request: own.token_ids for request, own in wanted.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_second_clip_in_a_prompt_is_refused_where_the_processor_would_pad_it_or_take_none(name: str) -> None:
    directory = proven(name)

    async def run() -> None:
        async with Pipeline(directory, "EPD", dtype="float32") as pipe:
            with pytest.raises(BadMedia, match=r"not alone in its prompt.*give one clip"):
                await pipe.complete(ask("two", clip(1), clip(6, 0.93)))
            assert (await pipe.complete(ask("one", clip(1)))).token_ids

    asyncio.run(run())
