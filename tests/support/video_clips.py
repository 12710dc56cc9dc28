"""Clips that are drawn from numbers, and requests with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trinity.preprocess.media.clips import Clip
from trinity.request import Media, Request, Sampling


def clip(seed: int, frames: int = 12, height: int = 70, width: int = 100, fps: float = 3.0) -> Clip:
    """A clip of coarse squares, each frame another one."""
    squares = np.random.default_rng(seed).integers(0, 256, (frames, 7, 10, 3), dtype=np.uint8)
    return Clip(np.repeat(np.repeat(squares, height // 7, axis=1), width // 10, axis=2), fps)


def ask(name: str, prompt: str, media: Sequence[Media], outputs: int = 20) -> Request:
    greedy = Sampling(ignore_eos=True)
    return Request(prompt, media=media, max_tokens=outputs, sampling=greedy, request_id=name)


def chat(name: str, parts: Sequence[Mapping[str, Any]], media: Sequence[Media], outputs: int = 20) -> Request:
    greedy, message = Sampling(ignore_eos=True), {"role": "user", "content": list(parts)}
    return Request(messages=[message], media=media, max_tokens=outputs, sampling=greedy, request_id=name)


def videos(*clips: Clip) -> list[Media]:
    return [Media("video", each) for each in clips]
