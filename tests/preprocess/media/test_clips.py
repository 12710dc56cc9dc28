"""Clips in memory: what may be one, its times, and what is refused before it costs anything."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from support.video_clips import clip
from trinity.preprocess.media.clips import Clip, plain_clip, read_frames
from trinity.preprocess.media_limits import MediaLimits, MediaProblem

LIMITS = MediaLimits()


def test_every_form_of_the_same_frames_is_the_same() -> None:
    frames = clip(1, 3).frames
    forms: list[Any] = [
        frames,
        torch.from_numpy(frames),
        np.moveaxis(frames, 3, 1),
        torch.from_numpy(np.ascontiguousarray(np.moveaxis(frames, 3, 1))),
        list(frames),
        tuple(map(Image.fromarray, frames)),
        Clip(frames),
        Clip([Image.fromarray(frame) for frame in frames]),
    ]
    for form in forms:
        found = read_frames(form, LIMITS)
        assert found.pixels.dtype == np.uint8
        assert np.array_equal(found.pixels, frames)
        assert (found.fps, found.indices, found.sampled) == (None, None, False)


def test_a_rate_describes_all_frames() -> None:
    told = read_frames(Clip(clip(1, 6).frames, 4), LIMITS).metadata()
    assert told == {
        "total_num_frames": 6,
        "fps": 4.0,
        "duration": 1.5,
        "frames_indices": [0, 1, 2, 3, 4, 5],
        "width": 100,
        "height": 70,
    }
    assert read_frames(clip(1).frames, LIMITS).metadata()["fps"] is None


def test_timestamps_are_those_that_transformers_computes() -> None:
    from transformers.video_utils import VideoMetadata

    times = [0.5, 0.75, 2.0, 7.25]
    found = read_frames(Clip(clip(1, 4).frames, timestamps=times), LIMITS)
    assert found.sampled
    assert VideoMetadata(**found.metadata()).timestamps == pytest.approx(times)
    assert read_frames(Clip(clip(1, 1).frames, timestamps=[3.0]), LIMITS).indices == (3.0,)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (Clip(clip(1, 2).frames, 0.0), "fps 0.0"),
        (Clip(clip(1, 2).frames, float("nan")), "fps nan"),
        (Clip(clip(1, 2).frames, "25"), "fps '25'"),  # type: ignore[arg-type]
        (Clip(clip(1, 2).frames, timestamps=[0.0]), "1 timestamps for 2 frames"),
        (Clip(clip(1, 2).frames, timestamps=[1.0, 1.0]), "ascending"),
        (Clip(clip(1, 2).frames, timestamps=["a", "b"]), "no numbers"),  # type: ignore[list-item]
        (clip(1, 2).frames.astype(np.float32), "float32"),
        (np.zeros((2, 8, 8), np.uint8), r"shape \[2, 8, 8\]"),
        (np.zeros((2, 8, 8, 4), np.uint8), r"shape \[2, 8, 8, 4\]"),
        (np.zeros((0, 8, 8, 3), np.uint8), "has 0 frames"),
        (np.zeros((2, 0, 8, 3), np.uint8), "8 x 0 pixels"),
        ([], "has 0 frames"),
        ([clip(1).frames[0], clip(1, height=63).frames[0]], "of one size"),
        (["a.png", "b.png"], "a frame that is a str"),
        ({"frames": 1}, "is a dict"),
        (7, "is a int"),
    ],
)
def test_what_is_no_clip_is_refused_with_what_to_give(source: Any, says: str) -> None:
    with pytest.raises(MediaProblem, match=says):
        read_frames(source, LIMITS)


class Claims:
    """An array that says how large it is and cannot be read."""

    def __init__(self, *shape: int) -> None:
        self.shape, self.dtype, self.ndim = shape, np.dtype(np.uint8), len(shape)

    def __array__(self, *_: Any) -> np.ndarray:
        raise AssertionError("it was read")


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ((10**9, 64, 64, 3), "has 1000000000 frames; the limit max_video_frames"),
        ((2, 10**6, 10**6, 3), "frames of 1000000 x 1000000 pixels; the limit max_pixels"),
        ((1000, 1000, 1000, 3), "has 1000 frames of 1000 x 1000 pixels; the limit max_video_pixels"),
        ((1000, 3, 1000, 1000), "has 1000 frames of 1000 x 1000 pixels; the limit max_video_pixels"),
    ],
)
def test_a_bomb_is_refused_by_its_shape(shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(MediaProblem, match=says):
        read_frames(Claims(*shape), LIMITS)


def test_a_list_is_refused_before_its_frames_are_decoded() -> None:
    class Opened(Image.Image):
        def load(self) -> Any:
            raise AssertionError("it was decoded")

    frame = Opened()
    frame.format = "PNG"
    frame._size, frame._mode = (4000, 4000), "RGB"
    with pytest.raises(MediaProblem, match="max_video_pixels"):
        read_frames([frame] * 100, LIMITS)


def test_a_plain_clip_is_arrays_and_numbers() -> None:
    shown = [Image.fromarray(frame) for frame in clip(2, 3).frames]
    plain = plain_clip(Clip(shown, timestamps=(0.0, 0.5, 1.5)), LIMITS)
    assert type(plain.frames) is np.ndarray
    again = read_frames(plain, LIMITS)
    assert np.array_equal(again.pixels, clip(2, 3).frames)
    assert again.indices == pytest.approx((0.0, 2 / 3, 2.0))
