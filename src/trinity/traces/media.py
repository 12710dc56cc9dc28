"""Media of a trace's requests: images, videos and audio clips, and how those that were served become a row's."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Protocol

import msgspec

from trinity.errors.arguments import Count, Number
from trinity.traces.checks import check_content, check_count, check_fields, check_time

MOST_FRAMES = 1 << 20  # of a video
_check_frames = partial(check_count, most=MOST_FRAMES)


class TraceImage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One image of a request; fields are None where unknown.

    - ``width``, ``height`` (pixels).
    - ``tokens``: rows in the image cache.
    - ``content``: hash of the content.

    Raises ``TraceError`` for sizes that are not whole numbers of at least 0.
    """

    width: Count | None = None
    height: Count | None = None
    tokens: Count | None = None
    content: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, check_count, "width", "height", "tokens", optional=True, of="an image's ")
        check_fields(self, check_content, "content", optional=True)


class TraceVideo(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag_field="kind", tag="video"):
    """One video of a request; fields are None where unknown.

    - ``frames`` (count): that are sampled of it and shown to the model, at most ``MOST_FRAMES``.
    - ``width``, ``height`` (pixels): of a frame.
    - ``seconds`` (s): its length.
    - ``tokens``: rows in the image cache, of all frames.
    - ``items``: that were encoded by themselves, each of some frames.
    - ``content``: hash of the content.

    Raises ``TraceError`` for counts that are not whole numbers of at least 0, and for odd seconds.
    """

    frames: Count | None = None
    width: Count | None = None
    height: Count | None = None
    seconds: Number | None = None
    tokens: Count | None = None
    items: Count | None = None
    content: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, check_count, "width", "height", "tokens", optional=True, of="a video's ")
        check_fields(self, _check_frames, "frames", "items", optional=True, of="a video's ")
        check_fields(self, check_time, "seconds", optional=True)
        check_fields(self, check_content, "content", optional=True)


class TraceAudio(msgspec.Struct, frozen=True, omit_defaults=True, gc=False, tag_field="kind", tag="audio"):
    """One audio clip of a request; fields are None where unknown.

    - ``seconds`` (s): its length.
    - ``tokens``: rows in the image cache.
    - ``content``: hash of the content.

    Raises ``TraceError`` for seconds and tokens that are not numbers of at least 0.
    """

    seconds: Number | None = None
    tokens: Count | None = None
    content: str | None = None

    def __post_init__(self) -> None:
        check_fields(self, check_count, "tokens", optional=True, of="a clip's ")
        check_fields(self, check_time, "seconds", optional=True)
        check_fields(self, check_content, "content", optional=True)


TraceMedia = TraceImage | TraceVideo | TraceAudio
MEDIA_OF: dict[str, type] = {"images": TraceImage, "videos": TraceVideo, "audio": TraceAudio}  # of a row's fields


class ServedMedia(Protocol):
    """A media item that was served, as a ``MediaSpan``: pixels are 0 where there are none."""

    @property
    def kind(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def content(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def strip(self) -> int: ...


def describe_media(served: Iterable[ServedMedia]) -> dict[str, list[dict[str, Any]]]:
    """Describe what was served as the fields ``images``, ``videos`` and ``audio`` of a row, in the order of the prompt.

    Strips of an image, and items of a video, are one, named by the first. Fields of media that are not there are left
    out, but for ``images``.
    """
    found: dict[str, list[dict[str, Any]]] = {"images": []}
    for each in served:
        listed = found.setdefault({"video": "videos", "audio": "audio"}.get(each.kind, "images"), [])
        if each.strip and listed:
            listed[-1]["tokens"] += each.tokens
            listed[-1] |= {"items": listed[-1]["items"] + 1} if each.kind == "video" else {}
            continue
        fields: dict[str, Any] = {"tokens": each.tokens, "content": each.content}
        if each.kind != "audio":
            fields |= {"width": each.width or None, "height": each.height or None}
        listed.append(fields | ({"items": 1} if each.kind == "video" else {}))
    return found


def make_media(served: Iterable[ServedMedia]) -> dict[str, Any]:
    """Make the media of a ``TraceRow`` of what was served, by the names of its fields."""
    return {name: [MEDIA_OF[name](**each) for each in listed] for name, listed in describe_media(served).items()}
