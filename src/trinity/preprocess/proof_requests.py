"""Requests of a proof and of samples of media: made here, since stages know no requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image

from trinity.preprocess.processor import ProcessedRequest, RequestProcessor
from trinity.request import Media, Request, Sampling


def process_prompt(
    processor: RequestProcessor,
    name: str,
    prompt: str | Sequence[Any],
    images: Sequence[Any],
    outputs: int,
    clips: Sequence[Any] = (),
) -> ProcessedRequest:
    """Process a prompt, raw text or a chat's messages, that asks for so many greedy tokens.

    Raises ``RequestError`` as ``RequestProcessor.process`` does.
    """
    given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"messages": list(prompt)}
    asked = Request(
        media=[*(Media("image", each) for each in images), *(Media("audio", each) for each in clips)],
        max_tokens=outputs,
        request_id=name,
        sampling=Sampling(ignore_eos=True),
        **given,
    )
    return processor.process(asked)


def process_samples(processor: RequestProcessor) -> list[ProcessedRequest]:
    """Process a request with one sample of each kind of media that a model takes, and one with a wide image.

    Raises ``RequestError`` as ``RequestProcessor.process`` does.
    """
    draw = np.random.default_rng(0)
    frames = draw.integers(0, 255, (3, 6, 8, 3), dtype=np.uint8)
    images = [Image.fromarray(frames[0]).resize(size) for size in ((80, 60), (301, 90))]
    samples = [Media("image", each) for each in images if "image" in processor.media_kinds]
    if "video" in processor.media_kinds:
        samples.append(Media("video", [Image.fromarray(each).resize((80, 60)) for each in (*frames, *frames)]))
    if "audio" in processor.media_kinds:
        rate = int(processor.readers["audio"].rate)  # type: ignore[attr-defined]
        samples.append(Media("audio", draw.standard_normal(rate).astype(np.float32)))
    return [
        processor.process(Request(f"<{each.kind}>A", media=[each], max_tokens=1, request_id=f"sample {at}"))
        for at, each in enumerate(samples)
    ]
