"""Pixels of videos without torchvision: what torchvision itself gave, and what Pillow gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from trinity.preprocess.checkpoint import torch_pixels
from trinity.preprocess.checkpoint.torch_pixels import InterpolationMode

# Of torchvision 0.28.0 with torch 2.13.0: transforms.v2.functional.resize(picture, [4, 5], interpolation=...)[1].
GIVEN = {
    "NEAREST_EXACT": [
        [91, 165, 239, 62, 136],
        [152, 226, 49, 123, 197],
        [213, 36, 110, 184, 7],
        [23, 97, 171, 245, 68],
    ],
    "BILINEAR": [
        [141, 118, 132, 119, 124],
        [134, 131, 121, 120, 133],
        [138, 136, 125, 132, 106],
        [134, 107, 119, 147, 116],
    ],
    "BICUBIC": [
        [145, 118, 128, 120, 126],
        [135, 128, 125, 118, 130],
        [132, 143, 125, 131, 106],
        [138, 102, 116, 152, 115],
    ],
}


FILTERS = [("BILINEAR", Image.Resampling.BILINEAR), ("BICUBIC", Image.Resampling.BICUBIC)]


def make_picture() -> torch.Tensor:
    return (torch.arange(3 * 9 * 11).reshape(3, 9, 11) * 37 % 251).to(torch.uint8)


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_bytes_are_resized_as_torchvision_does(name: str) -> None:
    made = torch_pixels.resize(make_picture(), [4, 5], InterpolationMode[name])
    assert made.dtype == torch.uint8
    assert made[1].tolist() == GIVEN[name]


@pytest.mark.parametrize(("name", "filter"), FILTERS)
def test_pillow_gives_the_same_within_a_rounding(name: str, filter: Image.Resampling) -> None:
    picture = torch.from_numpy(np.random.default_rng(3).integers(0, 256, (40, 56, 3), dtype=np.uint8))
    made = torch_pixels.resize(picture.permute(2, 0, 1), (23, 31), int(filter))
    theirs = np.asarray(Image.fromarray(picture.numpy()).resize((31, 23), filter), dtype=int)
    assert int(np.abs(made.permute(1, 2, 0).numpy().astype(int) - theirs).max()) <= 1
    assert torch.equal(made, torch_pixels.resize(picture.permute(2, 0, 1), (23, 31), InterpolationMode[name]))


def test_frames_are_resized_one_by_one() -> None:
    """A clip, of frames and of clips, is each frame by itself, in floats as in whole numbers."""
    for dtype in (torch.uint8, torch.int16, torch.float32, torch.float16):
        clips = torch.stack([make_picture(), make_picture().flip(-1)]).to(dtype)[None]
        made = torch_pixels.resize(clips, [5, 7], InterpolationMode.BICUBIC)
        assert made.shape == (1, 2, 3, 5, 7)
        assert made.dtype == dtype
        for frame, own in zip(clips[0], made[0], strict=True):
            assert torch.equal(torch_pixels.resize(frame, [5, 7], InterpolationMode.BICUBIC), own)


def test_a_size_of_one_number_is_the_shorter_edge() -> None:
    assert torch_pixels.resize(make_picture(), 18).shape == (3, 18, 22)
    assert torch_pixels.resize(make_picture().transpose(1, 2), [18]).shape == (3, 22, 18)
    assert torch_pixels.resize(make_picture(), [9, 11]) is not None
    assert torch.equal(torch_pixels.resize(make_picture(), [9, 11]), make_picture())
    with pytest.raises(ValueError, match="max_size"):
        torch_pixels.resize(make_picture(), [4, 5], max_size=9)


def test_a_window_beyond_the_picture_is_black_there() -> None:
    picture = make_picture()
    assert torch.equal(torch_pixels.crop(picture, 2, 3, 4, 5), picture[:, 2:6, 3:8])
    window = torch_pixels.crop(picture, -2, 9, 5, 4)
    assert window.shape == (3, 5, 4)
    assert torch.equal(window[:, 2:, :2], picture[:, :3, 9:])
    assert int(window[:, :2].sum()) == 0
    assert int(window[:, :, 2:].sum()) == 0


def test_padding_is_on_the_sides_that_are_named() -> None:
    padded = torch_pixels.pad(make_picture(), [1, 2, 3, 4], fill=7)
    assert padded.shape == (3, 15, 15)
    assert torch.equal(padded[:, 2:11, 1:12], make_picture())
    assert set(padded[:, :, 0].flatten().tolist()) == {7}
    with pytest.raises(ValueError, match="mode 'edge'"):
        torch_pixels.pad(make_picture(), [1, 1, 1, 1], padding_mode="edge")


def test_channels_are_normalised_each_by_its_own() -> None:
    floats = make_picture().float()
    made = torch_pixels.normalize(floats.clone(), [1.0, 2.0, 3.0], [4.0, 5.0, 6.0])
    for channel in range(3):
        assert torch.equal(made[channel], (floats[channel] - (channel + 1)) / (channel + 4))
    inside = floats.clone()
    assert torch_pixels.normalize(inside, [1.0, 2.0, 3.0], [4.0, 5.0, 6.0], inplace=True) is inside
    assert torch.equal(inside, made)


def test_grey_becomes_colour_and_colour_stays() -> None:
    grey = make_picture()[:1]
    assert torch.equal(torch_pixels.grayscale_to_rgb(grey), torch.cat([grey] * 3))
    assert torch_pixels.grayscale_to_rgb(make_picture()).shape == (3, 9, 11)


def test_bytes_and_floats_become_each_other() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    floats = torch_pixels.to_dtype(every, torch.float32, scale=True)
    assert float(floats.min()) == 0.0
    assert float(floats.max()) == 1.0
    assert torch.equal(torch_pixels.to_dtype(floats, torch.uint8, scale=True), every)
    assert torch.equal(torch_pixels.to_dtype(every, torch.float32), every.float())
    with pytest.raises(ValueError, match=r"int16 to torch\.uint8"):
        torch_pixels.to_dtype(every.to(torch.int16), torch.uint8, scale=True)
