"""Groups of frames: of whole steps, with all rows and inputs, named by what an encoder gets of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trinity.preprocess.media import frame_groups
from trinity.preprocess.media.frame_groups import cut_video, cut_videos
from trinity.preprocess.media.media_kinds import MediaItem


def item(tokens: int, meta: dict[str, Any] | None = None, kind: str = "video", **inputs: Any) -> MediaItem:
    return MediaItem(kind, "<video>", tokens, inputs, "key", meta or {}, 100, 70)


def patches(steps: int, rows: int = 40, seed: int = 0) -> dict[str, Any]:
    """Qwen-VL's inputs: patches of all steps one behind the other."""
    pixels = torch.randn(steps * rows * 4, 6, generator=torch.Generator().manual_seed(seed))
    return {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[steps, 4, rows]])}


def test_groups_have_all_patches_in_order() -> None:
    whole = item(200, {"video_grid_thw": [5, 4, 40]}, **patches(5))
    parts = cut_video(whole)
    assert [part.tokens for part in parts] == [80, 80, 40]
    assert [part.inputs["video_grid_thw"].tolist() for part in parts] == [[[2, 4, 40]], [[2, 4, 40]], [[1, 4, 40]]]
    pixels = torch.cat([part.inputs["pixel_values_videos"] for part in parts])
    assert torch.equal(pixels, whole.inputs["pixel_values_videos"])
    assert [part.strip for part in parts] == [0, 1, 2]
    assert [part.meta for part in parts] == [{"video_grid_thw": [5, 4, 40]}, {}, {}]
    assert whole.inputs["video_grid_thw"].tolist() == [[5, 4, 40]], "the whole is left as it was"


def test_a_small_clip_is_one_group() -> None:
    whole = item(30, **patches(5, 6))
    (part,) = cut_video(whole)
    assert part.inputs == whole.inputs
    assert (part.tokens, part.strip) == (30, 0)


def test_frames_along_either_axis_are_cut() -> None:
    frames = torch.arange(6 * 3 * 4, dtype=torch.float32).reshape(6, 3, 2, 2)
    first = cut_video(item(6 * 64, pixel_values=frames))
    mask = torch.ones(1, 6, 2, 2, dtype=torch.int64)
    second = cut_video(item(6 * 64, pixel_values=frames[None], pixel_attention_mask=mask))
    assert len(first) == len(second) == 6
    assert torch.equal(torch.cat([part.inputs["pixel_values"] for part in first]), frames)
    assert torch.equal(torch.cat([part.inputs["pixel_values"] for part in second], 1), frames[None])
    assert {tuple(part.inputs["pixel_attention_mask"].shape) for part in second} == {(1, 1, 2, 2)}


def test_the_last_group_has_what_stands_behind_the_frames() -> None:
    parts = cut_video(item(4 * 70 + 1, pixel_values_videos=torch.randn(1, 4, 3, 2, 2)), tail=1)
    assert [part.tokens for part in parts] == [70, 70, 70, 71]
    alone = cut_video(item(71, pixel_values_videos=torch.randn(1, 1, 3, 2, 2)), tail=1)
    assert [part.tokens for part in alone] == [71]


def test_rows_that_a_mask_leaves_away_do_not_count() -> None:
    mask = torch.ones(4, 100, dtype=torch.bool)
    mask[1:, 20:] = False
    inputs = {**patches(4, 100), "video_compression_mask": mask.flatten(), "video_merge_sizes": torch.tensor([2])}
    parts = cut_video(item(160, **inputs))
    assert [part.tokens for part in parts] == [100, 60]
    assert [len(part.inputs["video_compression_mask"]) for part in parts] == [100, 300]
    assert all(part.inputs["video_merge_sizes"].tolist() == [2] for part in parts)


def test_what_does_not_add_up_stays_whole() -> None:
    (part,) = cut_video(item(199, **patches(5)))
    assert part.tokens == 199


def test_a_group_is_named_by_its_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_groups, "_LEAST_ROWS", 1)
    whole = patches(5)
    names = [part.content for part in cut_video(item(200, **whole))]
    assert len(set(names)) == 5
    later = {
        "pixel_values_videos": whole["pixel_values_videos"][2 * 160 :],
        "video_grid_thw": torch.tensor([[3, 4, 40]]),
    }
    assert [part.content for part in cut_video(item(120, **later))] == names[2:], "an overlap shares"
    other = [part.content for part in cut_video(item(200, **patches(5, seed=1)))]
    assert not set(other) & set(names)


def test_only_videos_are_cut() -> None:
    image = item(200, kind="image", **patches(5))
    items = cut_videos([image, item(200, **patches(5)), image], 0)
    assert [each.kind for each in items] == ["image", "video", "video", "video", "image"]
    assert items[0] is image
