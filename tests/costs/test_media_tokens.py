"""Tokens of videos and audio clips: the rules agree with transformers' own processors, encoders and extractors."""

from __future__ import annotations

import ast
import importlib.util
import math
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from trinity.costs.layer_shape import audio_worth
from trinity.costs.media_tokens import AudioRule, MediaRules, VideoRule
from trinity.costs.model_config import from_config
from trinity.costs.model_shape import MODELS, get_model_shape
from trinity.costs.step_cost import Roofline, get_device
from trinity.errors import ConfigError
from trinity.traces.media import TraceAudio, TraceVideo

NOISE = random.Random(7)
SECONDS = [0.02, 0.5, 1.0, 2.5, 29.999, 30.0, *(round(NOISE.uniform(0.1, 30), 3) for _ in range(6))]
LONG = [*SECONDS, 30.01, 61.0]
QWEN2_AUDIO = get_model_shape("qwen2-audio-7b").media.audio
OMNI = get_model_shape("qwen2.5-omni-7b").media.audio


def mel_frames(seconds: float, chunk_length: int = 30, **options: Any) -> int:
    """Log-mel frames that Whisper's feature extractor marks as heard."""
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    sound = np.zeros(round(seconds * 16_000), np.float32)
    made = WhisperFeatureExtractor(chunk_length=chunk_length)(
        sound, sampling_rate=16_000, return_attention_mask=True, **options
    )
    return int(made["attention_mask"].sum())


def own_function(family: str, file: str, name: str) -> Any:
    """A function of a module of transformers that cannot be imported without torchvision."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    assert spec.origin is not None
    source = (Path(spec.origin).parent / "models" / family / f"{file}_{family}.py").read_text()
    found: list[ast.stmt] = [
        node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    scope: dict[str, Any] = {"math": math}
    exec(compile(ast.Module(found, []), file, "exec"), scope)
    return scope[name]


# ---------------------------------------------------------------- audio


@pytest.mark.parametrize("seconds", LONG)
def test_qwen2_audio_as_its_extractor_and_encoder_count(seconds: float) -> None:
    from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder

    heard = mel_frames(seconds, padding="max_length", truncation=True)
    count: Any = Qwen2AudioEncoder._get_feat_extract_output_lengths
    assert QWEN2_AUDIO is not None
    assert QWEN2_AUDIO.count_tokens(seconds) == max(1, count(None, heard)[1])


@pytest.mark.parametrize("seconds", LONG)
def test_qwen_omni_as_its_encoders_count(seconds: float) -> None:
    from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniAudioEncoder

    heard = mel_frames(seconds, chunk_length=300, padding="max_length")
    count: Any = Qwen2_5OmniAudioEncoder._get_feat_extract_output_lengths
    assert OMNI is not None
    assert OMNI.count_tokens(seconds) == max(1, count(None, heard)[1])
    third = AudioRule(halvings=3, chunk=100, rounds_up=True)
    theirs = own_function("qwen3_omni_moe", "processing", "_get_feat_extract_output_lengths")
    assert third.count_tokens(seconds) == theirs(heard)


@pytest.mark.parametrize("seconds", LONG)
def test_voxtral_counts_the_silence_of_its_last_window(seconds: float) -> None:
    from transformers.models.whisper.feature_extraction_whisper import WhisperFeatureExtractor

    rule = AudioRule(stack=4, window=3000, silence_counts=True)
    sound = np.zeros(round(seconds * 16_000), np.float32)
    extract: Any = WhisperFeatureExtractor()
    made = extract(sound, sampling_rate=16_000, padding=True, truncation=False, pad_to_multiple_of=480_000)
    windows = made["input_features"].shape[-1] // 3000
    assert rule.count_tokens(seconds) == windows * 375
    assert rule.encoded_tokens(375) == 375


def test_a_whole_window_is_encoded_whatever_is_heard_of_it() -> None:
    assert QWEN2_AUDIO is not None
    assert [QWEN2_AUDIO.count_tokens(each) for each in (1, 30, 90)] == [25, 750, 750]
    assert [QWEN2_AUDIO.encoded_tokens(each) for each in (25, 750)] == [750, 750]
    assert OMNI is not None
    assert OMNI.encoded_tokens(25) == 25


def test_ultravox_has_a_token_for_eight_positions() -> None:
    rule = get_model_shape("ultravox-v0.3").media.audio
    assert rule is not None
    assert [rule.count_tokens(each) for each in (0.01, 1.0, 30.0)] == [1, math.ceil(50 / 8), math.ceil(1500 / 8)]


@pytest.mark.parametrize("seconds", [-1.0, math.inf, math.nan, 1e300])
def test_odd_seconds_are_refused(seconds: float) -> None:
    with pytest.raises(ConfigError, match="seconds"):
        AudioRule().count_tokens(seconds)


# ---------------------------------------------------------------- videos

FRAMES = [(NOISE.randint(2, 300), NOISE.randint(40, 2000), NOISE.randint(40, 2000)) for _ in range(300)]


def test_qwen3_vl_scales_all_frames_together_as_its_processor() -> None:
    rule, theirs = (
        get_model_shape("qwen3-vl-8b").media.video,
        own_function("qwen3_vl", "video_processing", "smart_resize"),
    )
    assert rule is not None
    small = msgspec.structs.replace(rule, least=128 * 32 * 32, most=32 * 32 * 768)
    for each in (rule, small):
        for frames, width, height in FRAMES:
            tall, wide = theirs(frames, height, width, 2, 32, min_pixels=each.least, max_pixels=each.most)
            assert each.item_tokens(frames, width, height) == tall // 32 * (wide // 32), (frames, width, height)
        assert each.count_items(7) == 4


def test_qwen2_vl_scales_each_frame_as_its_processor() -> None:
    theirs = own_function("qwen2_vl", "video_processing", "smart_resize")
    rule = VideoRule(group=2)
    for frames, width, height in FRAMES:
        tall, wide = theirs(height, width, 28, min_pixels=rule.least, max_pixels=rule.most)
        assert rule.item_tokens(frames, width, height) == tall // 28 * (wide // 28)


def test_frames_that_no_model_takes_are_refused() -> None:
    for name in ("qwen2-vl-7b", "qwen3-vl-8b"):
        with pytest.raises(ConfigError, match="narrow"):
            get_model_shape(name).clip_tokens(TraceVideo(frames=4, width=9000, height=9))


# ---------------------------------------------------------------- models

RULES = MediaRules(video=VideoRule(group=2, tokens=100, work=4.0), audio=AudioRule(stack=2, window=3000, work=0.5))


def test_a_video_becomes_items_of_some_frames() -> None:
    clip = RULES.measure(TraceVideo(frames=7, width=9, height=9))
    assert (clip.kind, clip.items, clip.tokens, clip.list_tokens()) == ("video", 4, 400, [100] * 4)
    assert [clip.name_item("v", at) for at in (0, 3)] == ["v#0", "v#3"]


def test_recorded_tokens_are_shared_out_among_the_items() -> None:
    assert RULES.measure(TraceVideo(frames=6, tokens=100)).list_tokens() == [33, 33, 34]
    assert RULES.measure(TraceVideo(frames=6, tokens=2)).list_tokens() == [2]
    assert RULES.measure(TraceVideo(items=4, tokens=100)).list_tokens() == [25] * 4
    alone = RULES.measure(TraceVideo(tokens=100))
    assert (alone.list_tokens(), alone.name_item("v", 0)) == ([100], "v")


def test_what_a_trace_does_not_say_is_usual() -> None:
    assert RULES.measure(TraceVideo()).tokens == 400  # eight frames
    assert RULES.measure(TraceAudio()).tokens == 750  # a window
    assert RULES.measure(TraceAudio(tokens=9, seconds=30.0)).tokens == 9


def test_work_is_what_encoding_costs() -> None:
    assert RULES.encode_work("video", 100) == 400
    assert RULES.encode_work("audio", 9) == 375  # a whole window, at half the cost of an image's token
    assert RULES.encode_work("image", 9) == 9
    assert MediaRules().encode_work("audio", 9) == 9


@pytest.mark.parametrize("clip", [TraceVideo(frames=2), TraceAudio(seconds=2)])
def test_a_model_that_takes_none_says_so(clip: TraceVideo | TraceAudio) -> None:
    with pytest.raises(ConfigError, match="takes no"):
        MediaRules().measure(clip)


@pytest.mark.parametrize("name", MODELS)
def test_rules_and_encoders_belong_together(name: str) -> None:
    shape = get_model_shape(name)
    assert (shape.audio is None) == (shape.media.audio is None)
    assert shape.vision is not None or shape.media.video is None
    assert msgspec.json.decode(msgspec.json.encode(shape.media), type=MediaRules) == shape.media


def test_an_audio_encoder_takes_the_time_of_its_products() -> None:
    """Qwen2-Audio's encoder of 0.64e9 weights, over 1,500 positions."""
    shape = get_model_shape("qwen2-audio-7b")
    assert shape.audio is not None
    assert shape.audio.layers.weights + shape.audio.front == pytest.approx(0.635e9, rel=0.02)
    device = get_device("A100")
    seconds = Roofline(model=shape, device=device).seconds(0, 0, 750) - device.pass_s
    attention = 32 * 1500 * 1500 * 2 * 1280
    flops = 2 * (1500 * (shape.audio.layers.weights + shape.audio.front) + attention + 750 * 1280 * 4096)
    assert seconds == pytest.approx(flops / (device.flops * device.encoding_share), rel=1e-6)
    assert shape.feature_bytes == 8192


def test_a_token_of_audio_is_worth_its_products() -> None:
    shape = get_model_shape("qwen2.5-omni-7b")
    assert shape.audio is not None
    assert shape.media.audio is not None
    assert shape.media.audio.work == audio_worth(shape.audio, shape.vision, shape.image_tokens)
    alone = msgspec.structs.replace(shape, vision=None)
    device = msgspec.structs.replace(get_device("A100"), pass_s=0.0)
    audio, vision = (Roofline(model=each, device=device).seconds(0, 0, 9990) for each in (alone, shape))
    assert audio / vision == pytest.approx(shape.media.audio.work, rel=0.02)


# ---------------------------------------------------------------- config.json


def test_rules_of_a_checkpoint() -> None:
    """Those of transformers' own configurations and of files beside them."""
    from transformers import Qwen2AudioConfig, Qwen2VLConfig, VoxtralConfig

    sized = from_config(Qwen2VLConfig().to_dict(), {"min_pixels": 3136, "max_pixels": 784_000})
    assert sized.media.video == VideoRule(group=2, least=3136, most=784_000)
    assert from_config(Qwen2VLConfig().to_dict()).media.video == VideoRule(group=2)
    heard = from_config(Qwen2AudioConfig().to_dict())
    assert (heard.media.audio, heard.image_tokens) == (QWEN2_AUDIO, 750)
    assert heard.audio == get_model_shape("qwen2-audio-7b").audio
    assert heard.vision is None
    voxtral = from_config(VoxtralConfig().to_dict())
    assert (voxtral.clip_tokens(TraceAudio(seconds=31.0)), voxtral.image_tokens) == (750, 375)


def test_a_bad_audio_configuration_is_refused() -> None:
    from transformers import Qwen2AudioConfig

    config = SimpleNamespace(**Qwen2AudioConfig().to_dict())
    config.audio_config = {**config.audio_config, "d_model": 0}
    with pytest.raises(ConfigError, match="audio model's configuration has no"):
        from_config(vars(config))
