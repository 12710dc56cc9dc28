"""Clips in requests: their places, keys and limits, and who may give several of them."""

from __future__ import annotations

import asyncio
import base64
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.checkpoint_files import checkpoint
from support.sounds import clip, encoded
from trinity.errors import BadMedia, RequestError, RequestTooLarge, UnsupportedModel
from trinity.preprocess.checkpoint.model_types import check_config
from trinity.preprocess.media.audio_kind import AudioReader
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.preprocess.worker_processes import KillableProcessor
from trinity.request import Media, Request
from trinity.testing.checkpoints import AUDIO_ARCHITECTURES
from trinity.testing.oracle import Oracle, own_processor

WAV = encoded(clip(1))
DATA = base64.b64encode(WAV).decode()


@cache
def processor_of(name: str) -> RequestProcessor:
    return RequestProcessor(checkpoint(name))


def reader_of(processor: RequestProcessor) -> AudioReader:
    reader = processor.readers["audio"]
    assert isinstance(reader, AudioReader)
    return reader


@pytest.mark.parametrize("name", AUDIO_ARCHITECTURES)
def test_what_is_made_of_a_clip_is_what_the_processor_makes(name: str) -> None:
    processor = processor_of(name)
    found = processor.process(Request("Hear <audio> now", media=[Media("audio", WAV)]))
    whole = Path(checkpoint(name))
    own, text = own_processor(whole), processor.loaded.placeholders["audio"].marker
    wanted = dict(own(text=[f"Hear {text} now"], audio=[clip_as_read()], return_tensors="pt"))
    assert list(found.work.prompt) == wanted["input_ids"][0].tolist()
    assert {name: value.tolist() for name, value in found.inputs[0].items()} == {
        name: value.tolist() for name, value in wanted.items() if name in found.inputs[0]
    }
    (span,) = found.work.media
    assert (span.kind, span.tokens) == ("audio", span.length)
    assert "audio" in processor.media_kinds


def clip_as_read() -> np.ndarray:
    from transformers.audio_utils import load_audio

    return load_audio(DATA, sampling_rate=16000, backend="soundfile")


PARTS: list[dict[str, Any]] = [
    {"type": "input_audio", "input_audio": {"data": DATA, "format": "wav"}},
    {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{DATA}"}},
    {"type": "audio", "audio": WAV},
    {"type": "audio", "base64": DATA},
    {"type": "audio", "audio": {"array": clip_as_read(), "sampling_rate": 16000}},
]


def test_every_form_of_a_part_is_the_same_clip() -> None:
    processor = processor_of("qwen2_audio")
    found = [
        processor.process(Request(messages=[{"role": "user", "content": [part, {"type": "text", "text": "Well?"}]}]))
        for part in PARTS
    ]
    assert len({each.work.media[0].content for each in found}) == 1
    assert len({each.work.prompt for each in found}) == 1


def test_several_clips_keep_their_places_and_their_own_features() -> None:
    processor = processor_of("qwen2_audio")
    clips = [clip(1), clip(2, 0.3), clip(3, 1.2)]
    alone = [processor.process(Request("<audio>", media=[Media("audio", each)])) for each in clips]
    found = processor.process(Request("<audio> a <audio> b <audio>", media=[Media("audio", each) for each in clips]))
    for index, each in enumerate(alone):
        assert found.work.media[index].tokens == each.work.media[0].tokens
        assert found.work.media[index].content == each.work.media[0].content
        assert found.inputs[index]["input_features"].tolist() == each.inputs[0]["input_features"].tolist()


ONE_EACH, LONGEST = "takes one clip for each text", "pads it to the longest"


@pytest.mark.parametrize(
    ("name", "reason"),
    [("audioflamingo3", ONE_EACH), ("glmasr", ONE_EACH), ("qwen3_asr", ONE_EACH), ("qwen3_omni_moe_thinker", LONGEST)],
)
def test_a_model_whose_clips_depend_on_company_takes_one_and_says_why(name: str, reason: str) -> None:
    with pytest.raises(BadMedia, match=rf"audio 1 of 2: is not alone in its prompt: .*{reason}"):
        processor_of(name).process(Request("<audio><audio>", media=[Media("audio", WAV)] * 2))


def test_limits_name_the_clip_and_harm_one_request() -> None:
    processor = RequestProcessor(checkpoint("qwen2_audio"), limits=MediaLimits(max_audios=2, max_audio_s=1))
    for media, problem in (
        ([WAV] * 3, "3 audios given, but the limit max_audios is 2"),
        ([WAV, encoded(clip(1, 1.5))], "audio 2 of 2: is 1.5 s long; the limit max_audio_s is 1"),
        ([b"RIFF"], "audio 1 of 1: is no wav and no flac file"),
        ([np.full(999, np.nan)], "audio 1 of 1: has samples that are no numbers"),
        ([np.full(999, -1e30, np.float32)], r"audio 1 of 1: has a sample of 1e\+30; give floats between -1 and 1"),
    ):
        with pytest.raises(BadMedia, match=problem):
            processor.process(Request("<audio>" * len(media), media=[Media("audio", each) for each in media]))
    assert processor.process(Request("<audio>", media=[Media("audio", WAV)])).work.media


def test_what_an_extractor_would_make_is_charged_before_a_clip_is_decoded() -> None:
    limits = MediaLimits(max_processed_bytes=1 << 20)
    processor = RequestProcessor(checkpoint("qwen2_audio"), limits=limits)
    with pytest.raises(BadMedia, match=r"audio 1 of 1: needs .* max_processed_bytes is 1048576"):
        processor.process(Request("<audio>", media=[Media("audio", clip(1, 60.0))]))


def test_the_estimate_covers_the_inputs() -> None:
    for name in AUDIO_ARCHITECTURES:
        reader = reader_of(processor_of(name))
        for seconds in (0.6, 1.9):
            item = reader.read(clip(1, seconds))
            made = sum(each.nbytes for each in item.inputs.values() if each.is_floating_point())
            assert reader.estimate(int(seconds * 16000), 10_000).bytes >= made


@pytest.mark.parametrize("name", AUDIO_ARCHITECTURES)
def test_a_clip_has_at_least_the_tokens_that_its_estimate_says(name: str) -> None:
    reader = reader_of(processor_of(name))
    for seconds in (0.6, 1.9, 7.3, 33.0):
        samples = clip(1, seconds)
        tokens = reader.read(samples).tokens
        for most in (0, tokens // 3, tokens - 1, tokens, 2 * tokens):
            least = reader.estimate(len(samples), most).tokens
            assert least is not None
            assert least <= tokens
            assert least > most or tokens < 2 * most + 2, "it tells within a factor of two"


def test_a_hopeless_clip_is_refused_by_its_length_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flac of silence is small, and its features would take gigabytes and seconds, while others wait."""
    processor = RequestProcessor(checkpoint("audioflamingo3"), limits=MediaLimits(max_audio_s=400))
    silence = encoded(np.zeros(390 * 16000, np.float32), form="FLAC")
    reader, called = reader_of(processor), list[float]()
    own = reader._call

    def call(clips: Any) -> Any:
        called.append(max(map(len, clips)) / reader.rate)
        return own(clips)

    monkeypatch.setattr(reader, "_call", call)
    for _ in range(3):
        with pytest.raises(RequestTooLarge, match=r"media have at least \d+ tokens.* shorter clips"):
            processor.process(Request("<audio>", media=[Media("audio", silence)]))
    assert max(called) < 390 / 1.5, "it was preprocessed"
    assert len(called) == len(set(called)), "each length is tried once"
    assert processor.process(Request("<audio>", media=[Media("audio", WAV)])).work.media


def test_clips_that_have_too_many_tokens_together_are_refused_at_the_first_too_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processor = RequestProcessor(checkpoint("qwen2_audio"), limits=MediaLimits(max_audios=80))  # 50 tokens each
    reader, read = reader_of(processor), list[int]()
    own = reader.read

    def note(samples: Any) -> Any:
        read.append(len(samples))
        return own(samples)

    monkeypatch.setattr(reader, "read", note)
    clips = [Media("audio", clip(at, 3.0)) for at in range(80)]
    with pytest.raises(RequestTooLarge, match="media have at least"):
        processor.process(Request("<audio>" * len(clips), media=clips))
    assert len(read) <= processor.context_length // 50 + 1


LEAST = {"qwen2_audio": 961, "glmasr": 961, "audioflamingo3": 321, "qwen3_omni_moe_thinker": 201}


@pytest.mark.parametrize("name", LEAST)
def test_the_shortest_clip_is_found_by_trying_and_named(name: str) -> None:
    processor, least = processor_of(name), LEAST[name]
    for samples in (1, 200, least - 1):
        seconds = rf"{samples} samples, {samples / 16000:.3f} s .* least is {least}; give a clip of at least 0\.0"
        with pytest.raises(BadMedia, match=rf"audio 1 of 1: is too short for this model: it has {seconds}"):
            processor.process(Request("<audio>", media=[Media("audio", clip(1)[:samples])]))
    found = processor.process(Request("<audio>", media=[Media("audio", clip(1)[:least])]))
    assert found.work.media[0].tokens >= 1


def test_what_is_too_short_is_what_the_models_own_generate_fails_on() -> None:
    """Qwen2-Audio takes a prompt whose placeholders are all apart for one of an old processor, and raises on it."""
    own = Oracle(checkpoint("qwen2_audio"))
    short, least = (
        Request("Hear <audio> now", media=[Media("audio", clip(1)[:samples])], max_tokens=2) for samples in (960, 961)
    )
    with pytest.raises(TypeError):
        own.generate(short)
    with pytest.raises(BadMedia, match="too short"):
        processor_of("qwen2_audio").process(short)
    assert len(own.generate(least)) == 2
    assert processor_of("qwen2_audio").process(least).work.media[0].tokens == 2


def test_a_long_clip_that_the_processor_refuses_keeps_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    processor = RequestProcessor(checkpoint("qwen2_audio"))

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("out of order")

    reader = reader_of(processor)
    least = reader.least_samples
    monkeypatch.setattr(reader, "_call", fail)
    with pytest.raises(BadMedia, match=r"which the model's processor refuses \(ValueError: out of order\)"):
        processor.process(Request("<audio>", media=[Media("audio", clip(1)[:least])]))


@pytest.mark.parametrize("name", ["llava", "llama"])
def test_a_model_without_audio_refuses_it_by_name(name: str) -> None:
    processor = RequestProcessor(checkpoint(name))
    for request in (
        Request("<audio>", media=[Media("audio", WAV)]),
        Request(messages=[{"role": "user", "content": [PARTS[0]]}]),
    ):
        with pytest.raises(BadMedia, match="takes no media of kind 'audio' here; it takes"):
            processor.process(request)


def test_an_audio_model_refuses_images_by_name() -> None:
    with pytest.raises(BadMedia, match="takes no media of kind 'image' here; it takes audio"):
        processor_of("qwen2_audio").process(Request("<image>", images=[b"png"]))


@pytest.mark.parametrize("name", ["qwen2_audio"])
def test_a_clip_of_a_size_for_profiles(name: str) -> None:
    span, inputs = processor_of(name).dummy_inputs()
    assert span.tokens == len(inputs["input_features"]) * 50
    assert processor_of(name).dummy_inputs(30)[0].tokens < span.tokens


@pytest.mark.parametrize(("part", "problem"), [("audio", "an audio tower of type"), ("vision", "no vision tower")])
def test_another_tower_is_refused(part: str, problem: str) -> None:
    known = {"audio_config": SimpleNamespace(model_type="qwen2_audio_encoder"), "vision_config": None}
    check_config(SimpleNamespace(model_type="qwen2_audio", **known))
    other = {**known, f"{part}_config": SimpleNamespace(model_type="whisper")}
    with pytest.raises(UnsupportedModel, match=f"'qwen2_audio' is proven with {problem}"):
        check_config(SimpleNamespace(model_type="qwen2_audio", **other))


def test_processes_make_the_same_of_clips() -> None:
    sources: list[Any] = [WAV, clip(2), {"array": clip(3, 0.4, 8000), "sampling_rate": 8000}]
    asked = [Request("<audio>", media=[Media("audio", each)], request_id="r") for each in sources]
    bad = Request("<audio>", media=[Media("audio", np.full(99, np.inf))], request_id="bad")

    async def served() -> list[Any]:
        processor = await asyncio.to_thread(
            KillableProcessor, checkpoint("qwen2_audio"), limits=MediaLimits(processes=1)
        )
        try:
            with pytest.raises(RequestError, match="audio 1 of 1: has samples that are no numbers"):
                await processor.aprocess(bad)
            return [await processor.aprocess(each) for each in asked]
        finally:
            await processor.aclose()

    own = processor_of("qwen2_audio")
    for found, request in zip(asyncio.run(served()), asked, strict=True):
        wanted = own.process(request)
        assert (found.work.prompt, found.work.media) == (wanted.work.prompt, wanted.work.media)
        assert found.inputs[0]["input_features"].tolist() == wanted.inputs[0]["input_features"].tolist()
