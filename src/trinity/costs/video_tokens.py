"""Visual tokens of a video, group of frames by group.

Rules are those of ``media_tokens``, with the settings of the published checkpoints of each family.
"""

from __future__ import annotations

from trinity.costs.media_tokens import VideoRule
from trinity.errors import ConfigError, UnknownName

_QWEN2 = VideoRule(group=2)
VIDEO_RULES: dict[str, VideoRule] = {
    "internvl": VideoRule(tokens=256),
    "llava_next_video": VideoRule(tokens=144),
    "llava_onevision": VideoRule(tokens=196, tail=1),
    "qwen2_5_vl": _QWEN2,
    "qwen2_vl": _QWEN2,
    "qwen3_vl": VideoRule(group=2, factor=32, least=128 * 32 * 32, most=768 * 32 * 32, together=True),
    "smolvlm": VideoRule(tokens=81),
}
"""Rules by transformers' ``model_type``."""
VIDEO_FAMILIES = tuple(VIDEO_RULES)
"""Families whose videos can be counted."""


def video_tokens(family: str, frames: int, width: int, height: int) -> tuple[int, ...]:
    """List the visual tokens of each group of a video's frames, for a family of ``VIDEO_FAMILIES``.

    - ``family``: transformers' ``model_type``.
    - ``frames``: those that the processor has sampled.
    - ``width``, ``height`` (pixels): of the video.

    Raises ``UnknownName`` for another family, ``ConfigError`` for a video of no frames or of frames too narrow.
    """
    if frames < 1:
        raise ConfigError(f"a video has at least 1 frame, got {frames}")
    if family not in VIDEO_RULES:
        raise UnknownName("family with videos", family, VIDEO_FAMILIES)
    return VIDEO_RULES[family].list_tokens(frames, width, height)
