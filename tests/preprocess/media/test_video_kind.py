"""Videos in a request processor: tokens, keys, limits and errors, with the models' own processors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from support.checkpoint_files import checkpoint
from support.recordings import oracle
from support.video_clips import ask, chat, clip, videos
from trinity.errors import BadMedia, RequestTooLarge
from trinity.preprocess.checkpoint import torch_pixels
from trinity.preprocess.media.clips import Clip
from trinity.preprocess.media.media_markup import VIDEO_TEXT
from trinity.preprocess.media.video_kind import VideoReader
from trinity.preprocess.media_limits import MediaLimits
from trinity.preprocess.processor import RequestProcessor
from trinity.request import Media


@cache
def processor(name: str, **limits: Any) -> RequestProcessor:
    return RequestProcessor(checkpoint(name), limits=MediaLimits(**limits))


def reader(name: str) -> VideoReader:
    found = processor(name).readers["video"]
    assert isinstance(found, VideoReader)
    return found


@pytest.mark.parametrize("name", sorted(VIDEO_TEXT))
def test_prompts_are_those_of_transformers(name: str) -> None:
    """Its ids, and its inputs of the encoder, of a prompt and of a chat; frames sampled where the processor does."""
    requests = [
        ask("raw", "Look: <video> what?", videos(clip(1, 9))),
        chat("chat", [{"type": "video"}, {"type": "text", "text": "what?"}], videos(clip(2, 7, fps=24.0))),
    ]
    for request in requests:
        made, wanted = processor(name).process(request), oracle(name).inputs(request)
        assert list(made.work.prompt) == wanted["input_ids"][0].tolist()
        pixels = "pixel_values_videos" if "pixel_values_videos" in wanted else "pixel_values"
        mine = np.concatenate([each[pixels].numpy().ravel() for each in made.inputs])
        assert np.array_equal(mine, wanted[pixels].numpy().ravel())


def test_a_rate_that_samples_leaves_frames_away() -> None:
    many = processor("smolvlm").process(ask("a", "<video>", videos(clip(1, 12, fps=2.0))))
    few = processor("smolvlm").process(ask("a", "<video>", videos(clip(1, 12, fps=4.0))))
    assert sum(span.tokens for span in many.work.media) == 2 * sum(span.tokens for span in few.work.media)


def test_times_say_that_frames_are_a_sample() -> None:
    frames = clip(1, 4).frames
    made = processor("qwen3_vl").process(ask("a", "<video>", videos(Clip(frames, timestamps=[0.0, 1.0, 10.0, 11.0]))))
    text = processor("qwen3_vl").tokenizer.decode(made.work.prompt)
    assert "<0.5 seconds>" in text
    assert "<10.5 seconds>" in text


def test_a_rate_that_is_needed_is_asked_for() -> None:
    with pytest.raises(BadMedia, match=r"give trinity.Clip\(frames, fps=...\)"):
        processor("smolvlm").process(ask("a", "<video>", [Media("video", clip(1).frames)]))


def test_a_model_without_videos_says_so() -> None:
    with pytest.raises(BadMedia, match="'llava' takes no media of kind 'video' here; it takes image"):
        processor("llava").process(ask("a", "<video>", videos(clip(1))))


def test_a_list_in_a_chat_part_is_a_clip() -> None:
    frames = list(clip(3, 4).frames)
    inside = chat("a", [{"type": "video", "video": frames}, {"type": "text", "text": "what?"}], [])
    beside = chat("a", [{"type": "video"}, {"type": "text", "text": "what?"}], videos(Clip(frames)))
    made, wanted = (processor("qwen2_vl").process(each).work for each in (inside, beside))
    assert (made.prompt, made.media) == (wanted.prompt, wanted.media)


def test_numbers_of_videos_and_markers_are_compared() -> None:
    with pytest.raises(BadMedia, match=r"1 video item\(s\) given, but the prompt has 2 <video> marker"):
        processor("qwen2_vl").process(ask("a", "<video> <video>", videos(clip(1))))
    with pytest.raises(BadMedia, match="9 videos given, but the limit max_videos is 8"):
        processor("qwen2_vl").process(ask("a", "<video>" * 9, videos(*[clip(1, 2)] * 9)))


@pytest.mark.parametrize(
    ("limits", "shown", "says"),
    [
        ({"max_video_frames": 4}, clip(1, 5), "video 1 of 1: has 5 frames; the limit max_video_frames allows 1 to 4"),
        ({"max_pixels": 6999}, clip(1, 5), "frames of 100 x 70 pixels; the limit max_pixels"),
        ({"max_video_pixels": 34999}, clip(1, 5), "the limit max_video_pixels is 34999"),
        ({"max_processed_bytes": 10000}, clip(1, 5), "the limit max_processed_bytes is 10000"),
    ],
)
def test_limits_are_named(limits: dict[str, Any], shown: Clip, says: str) -> None:
    with pytest.raises(BadMedia, match=says):
        processor("qwen2_vl", **limits).process(ask("a", "<video>", videos(shown)))


def test_what_a_processor_would_make_of_narrow_frames_is_known_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six frames of 3000 x 8 pixels become 4.0 million where the shorter edge is to be 42: nothing is resized."""
    from transformers.image_utils import SizeDict

    narrow = Clip(np.zeros((6, 8, 3000, 3), np.uint8), 2.0)
    made = RequestProcessor(checkpoint("llava_onevision"), limits=MediaLimits(max_video_pixels=1_000_000))
    made.loaded.processor.video_processor.size = SizeDict(shortest_edge=42)
    resized = list[tuple[int, ...]]()
    real = torch_pixels.resize

    def resize(image: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(image, *args, **kwargs)
        if image.device.type != "meta":
            resized.append(tuple(result.shape))
        return result

    monkeypatch.setattr(torch_pixels, "resize", resize)
    with pytest.raises(BadMedia, match=r"becomes 3969000 pixels .* the limit max_video_pixels is 1000000"):
        made.process(ask("a", "<video>", videos(narrow)))
    assert resized == []
    made.process(ask("a", "<video>", videos(clip(1))))
    assert resized, "where it is allowed, it is done"


def test_a_clip_that_is_longer_than_the_context_is_too_large() -> None:
    with pytest.raises(RequestTooLarge, match="prompt limit"):
        processor("llava_onevision").process(ask("a", "<video>", videos(clip(1, 600, 14, 20))))


def test_the_backend_is_part_of_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = reader("qwen2_vl").fingerprint
    monkeypatch.setattr("trinity.preprocess.media.video_kind.backend_name", lambda: "another one 1.0")
    assert VideoReader(processor("qwen2_vl").loaded, MediaLimits()).fingerprint != before


def test_a_clip_for_profiling_is_made() -> None:
    item = reader("qwen2_vl").make_synthetic(None)
    assert (item.kind, item.tokens > 0) == ("video", True)


def test_an_object_that_fails_harms_its_request_alone() -> None:
    class Broken:
        @property
        def shape(self) -> Any:
            raise RuntimeError("no shape today")

    with pytest.raises(BadMedia, match=r"cannot be read \(RuntimeError: no shape today\)"):
        processor("qwen2_vl").process(ask("a", "<video>", [Media("video", Broken())]))
