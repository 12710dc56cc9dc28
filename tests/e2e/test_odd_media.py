"""Odd videos and sounds, and all kinds in one prompt, are exact or rejected by name, in Python and over HTTP.

The other side is the route that transformers documents: one call of the model's own processor, then ``generate()``.
What that fails on, trinity rejects by name too; what is longer than the model's context never runs.
"""

from __future__ import annotations

import asyncio
import base64
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from support.checkpoint_files import checkpoint
from support.http_server import serve_model
from support.pipeline_options import pipeline_options
from support.recordings import oracle
from support.sounds import clip as sound
from support.stage_driver import picture
from support.video_clips import clip
from support.video_files import write_video
from trinity.errors import BadMedia, RequestError, RequestTooLarge, StageError
from trinity.pipeline import Pipeline
from trinity.preprocess.media.clips import Clip
from trinity.preprocess.media.media_markup import VIDEO_TEXT
from trinity.request import Media, Output, Request, Sampling

SETTINGS: dict[str, Any] = {"dtype": "float32", "pools": {"image": 2048, "kv": 4096}}
OUTPUTS = 6
SOON = ("qwen2_5_vl", "smolvlm")
MIXED = ("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker")  # listed types that take images and clips of sound
BEYOND = ("long", "one sample")  # rejected by name where transformers goes on: by the context, and by the least sound
FILES = ("qwen2_5_vl", "llava_onevision")


def ask(name: str, prompt: str, *media: Media) -> Request:
    greedy = Sampling(ignore_eos=True)
    return Request(prompt, media=list(media), max_tokens=OUTPUTS, sampling=greedy, request_id=name)


def video(shown: Any) -> Media:
    return Media("video", shown)


def frames(count: int, height: int = 70, width: int = 100) -> np.ndarray:
    found: np.ndarray = clip(count, count, height, width).frames
    return found


VIDEOS: dict[str, Callable[[], Request]] = {
    "one frame": lambda: ask("one frame", "<video> What?", video(Clip(frames(1), fps=2))),
    "one frame, no rate": lambda: ask("one frame, no rate", "<video> What?", video(Clip(frames(1)))),
    "no rate": lambda: ask("no rate", "<video> What?", video(Clip(frames(8)))),
    "slow": lambda: ask("slow", "<video> What?", video(Clip(frames(4), fps=0.25))),
    "fast": lambda: ask("fast", "<video> What?", video(Clip(frames(24), fps=120))),
    "odd rate": lambda: ask("odd rate", "<video> What?", video(Clip(frames(9), fps=29.97))),
    "odd count": lambda: ask("odd count", "<video> What?", video(Clip(frames(7), fps=3))),
    "thin": lambda: ask("thin", "<video> What?", video(Clip(frames(4, 7, 1500), fps=2))),
    "long": lambda: ask("long", "<video> What?", video(Clip(frames(600), fps=1))),
}
SOUNDS: dict[str, Callable[[], Request]] = {
    "all kinds": lambda: ask(
        "all kinds", "<image> and <audio>, why?", Media("image", picture(5, 80, 60)), Media("audio", sound(1))
    ),
    "a video too": lambda: ask(
        "a video too",
        "<image> <video> <audio> why?",
        Media("image", picture(5, 80, 60)),
        video(clip(1, 4)),
        Media("audio", sound(1)),
    ),
    "beyond a window": lambda: ask("beyond a window", "<audio> what?", Media("audio", sound(2, 31.5))),
    "some samples": lambda: ask("some samples", "<audio> what?", Media("audio", sound(3, 0.03))),
    "one sample": lambda: ask("one sample", "<audio> what?", Media("audio", np.zeros(1, np.float32))),
}


def answer_of(architecture: str, request: Request) -> list[int] | Exception:
    """Tokens of transformers, or what it raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return oracle(architecture).generate(request)
        except Exception as error:
            return error


def compare(name: str, wanted: list[int] | Exception, found: Output | BaseException) -> str:
    """Return "exact", or "rejected" where transformers fails or the name of the case is known; raises otherwise."""
    if isinstance(found, Output):
        assert not isinstance(wanted, Exception), f"transformers fails ({wanted!r}), trinity does not"
        assert found.token_ids == wanted
        return "exact"
    assert isinstance(found, (BadMedia, RequestTooLarge, RequestError)), found
    assert not isinstance(found, StageError), found
    assert isinstance(wanted, Exception) or name in BEYOND, found
    assert 20 < len(str(found)) < 700, found
    return "rejected"


@pytest.mark.parametrize(
    "architecture", [pytest.param(each, marks=() if each in SOON else pytest.mark.slow) for each in sorted(VIDEO_TEXT)]
)
async def test_odd_videos_are_exact_or_rejected_by_name(architecture: str) -> None:
    requests = {name: make() for name, make in VIDEOS.items()}
    wanted = {name: await asyncio.to_thread(answer_of, architecture, each) for name, each in requests.items()}
    async with Pipeline(checkpoint(architecture), "EPD", **pipeline_options(SETTINGS)) as pipe:
        found = await asyncio.gather(*map(pipe.complete, requests.values()), return_exceptions=True)
    ends = dict(zip(requests, found, strict=True))
    kinds = {name: compare(name, wanted[name], end) for name, end in ends.items()}
    assert kinds["odd count"] == kinds["odd rate"] == "exact", ends
    assert list(kinds.values()).count("exact") >= 5, ends


@pytest.mark.parametrize("architecture", [pytest.param(each, marks=pytest.mark.slow) for each in MIXED])
async def test_sounds_and_all_kinds_are_exact_or_rejected_by_name(architecture: str) -> None:
    requests = {name: make() for name, make in SOUNDS.items()}
    wanted = {name: await asyncio.to_thread(answer_of, architecture, each) for name, each in requests.items()}
    async with Pipeline(checkpoint(architecture), "EPD", **pipeline_options(SETTINGS)) as pipe:
        found = await asyncio.gather(*map(pipe.complete, requests.values()), return_exceptions=True)
    ends = dict(zip(requests, found, strict=True))
    kinds = {name: compare(name, wanted[name], end) for name, end in ends.items()}
    assert kinds["all kinds"] == "exact", ends


@pytest.mark.parametrize("architecture", [pytest.param(each, marks=pytest.mark.slow) for each in FILES])
async def test_files_over_http_are_what_they_are_in_python(architecture: str) -> None:
    """A file of one frame, of an odd number of them, and one that is longer than the model's context."""
    files = {name: write_video(frames(count, 64, 96), fps=5) for name, count in (("one", 1), ("odd", 7), ("long", 300))}
    async with serve_model(architecture, "EPD", pools=SETTINGS["pools"]) as served:
        for name, data in files.items():
            request = Request(
                messages=[{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What?"}]}],
                media=[video(data)],
                max_tokens=OUTPUTS,
                sampling=Sampling(temperature=0.0),
            )
            uri = f"data:video/mp4;base64,{base64.b64encode(data).decode()}"
            content = [{"type": "video_url", "video_url": {"url": uri}}, {"type": "text", "text": "What?"}]
            try:
                here: Any = (await served.pipe.complete(request)).text
            except RequestError as error:
                here = error
            refused: openai.APIStatusError | None = None
            try:
                answer = await served.client.chat.completions.create(
                    model=architecture,
                    messages=[{"role": "user", "content": content}],  # type: ignore[list-item,misc]
                    max_tokens=OUTPUTS,
                    temperature=0,
                )
            except openai.APIStatusError as error:
                refused = error
            if refused is None:
                assert answer.choices[0].message.content == here, name
            else:
                assert refused.status_code in (400, 413)
                assert isinstance(here, RequestError), (name, refused)
