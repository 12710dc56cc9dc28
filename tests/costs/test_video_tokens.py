"""Visual tokens of videos: those that transformers' own processors make at the sizes of published checkpoints."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trinity.costs.media_tokens import MediaRules
from trinity.costs.video_tokens import VIDEO_FAMILIES, VIDEO_RULES, video_tokens
from trinity.errors import ConfigError, UnknownName
from trinity.preprocess.checkpoint.video_processors import load_video_processor
from trinity.traces.media import TraceVideo


def made(family: str, frames: int, width: int, height: int, tmp_path: Path) -> tuple[int, int]:
    """Steps of a video, and patches of one after pooling, of tensors without content."""
    processor = load_video_processor(tmp_path, SimpleNamespace(model_type=family))
    clip = torch.empty((frames, height, width, 3), dtype=torch.uint8, device="meta")
    if family.startswith("qwen"):
        found: Any = {}
        grids = processor.patchify

        def patchify(*args: Any, **kwargs: Any) -> Any:
            patches, *grid = grids(*args, **kwargs)
            found["grid"] = grid
            return patches, *grid

        processor.patchify = patchify
        processor([clip], do_sample_frames=False, cap_pixels_per_frame=False)
        steps, rows, columns = found["grid"]
        return steps, rows * columns // processor.merge_size**2
    raise AssertionError(family)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_resized_frames_are_counted_as_the_processor_makes_them(family: str, tmp_path: Path) -> None:
    dice = random.Random(17)
    for _ in range(40):
        frames, width, height = dice.randint(2, 40), dice.randint(20, 1400), dice.randint(20, 1400)
        steps, tokens = made(family, frames, width, height, tmp_path)
        assert video_tokens(family, frames, width, height) == (tokens,) * steps, (frames, width, height)


def test_frames_of_one_size_are_counted_alike() -> None:
    assert video_tokens("internvl", 3, 640, 360) == (256, 256, 256)
    assert video_tokens("llava_next_video", 2, 640, 360) == (144, 144)
    assert video_tokens("smolvlm", 1, 640, 360) == (81,)
    # Of 27 x 27 patches one in four stays, and a learned row ends the video.
    assert video_tokens("llava_onevision", 3, 640, 360) == (196, 196, 197)


def test_equal_numbers_are_those_of_published_checkpoints() -> None:
    assert video_tokens("llava_next_video", 1, 1, 1) == ((336 // 14) ** 2 // 4,)
    assert video_tokens("internvl", 1, 1, 1) == (int((448 // 14) ** 2 * 0.5**2),)
    assert video_tokens("llava_onevision", 1, 1, 1) == (((384 // 14 + 1) // 2) ** 2 + 1,)


def test_one_rule_counts_a_trace_s_clip_and_its_groups() -> None:
    for family, rule in VIDEO_RULES.items():
        listed = video_tokens(family, 7, 640, 360)
        clip = MediaRules(video=rule).measure(TraceVideo(frames=7, width=640, height=360))
        assert tuple(clip.list_tokens()) == listed, family
        assert clip.tokens == sum(listed)


def test_what_cannot_be_counted_is_said() -> None:
    with pytest.raises(ConfigError, match="at least 1 frame, got 0"):
        video_tokens("internvl", 0, 640, 360)
    with pytest.raises(UnknownName, match="gemma3"):
        video_tokens("gemma3", 4, 640, 360)
    assert len(VIDEO_FAMILIES) == 7
